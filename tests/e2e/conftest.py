"""What holds after every test: no page is held, no process is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import serving
from tests.e2e.serving import PlainOutputs, Server, running, stack_config
from tests.processes import children, wait_for


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    """After each test every worker of every running stack is alive and holds nothing.

    A stack that holds something is said once: later tests would wait for it in vain.
    """
    yield
    for server in list(serving.STARTED):
        serving.STARTED.remove(server)
        server.check_idle()
        serving.STARTED.append(server)


@pytest.fixture(scope="package", autouse=True)
def _no_process_left() -> Iterator[None]:
    """After the last test nothing that it started still runs."""
    before = children()
    yield
    wait_for(lambda: children() <= before, describe=lambda: children() - before)


@pytest.fixture(scope="package")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where tiny checkpoints are written, once."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="package")
def pair() -> Iterator[Server]:
    """Return a target and its EAGLE-3 draft, the bundled ones, for tests that leave them intact."""
    config = stack_config(target={"self_test": True}, orchestrator={"draft_timeout_ms": 1500.0})
    with running(config) as server:
        yield server


@pytest.fixture(scope="package")
def quartet() -> Iterator[Server]:
    """Return two targets and two drafts, all in use, for tests that leave them intact."""
    with running(stack_config(num_targets=2, num_drafts=2)) as server:
        for address in (*server.target_addresses, *server.draft_addresses):
            wait_for(lambda address=address: server.logged(f"{address} serves") > 0)
        yield server


@pytest.fixture(scope="session")
def plain_outputs() -> PlainOutputs:
    """Return plain outputs that are made once, whichever server is asked first."""
    return PlainOutputs()
