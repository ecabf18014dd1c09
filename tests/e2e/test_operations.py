"""Operate a stack of real processes: restarts of every role under load, profiles, views."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from coppice import Completion
from coppice.admin import AdminClient
from coppice.cli.main import main
from coppice.v1 import admin_pb2 as pb
from shared.errors import UnavailableError
from shared.peer.ring import RING_DIR
from tests.e2e.serving import PlainOutputs, Server
from tests.e2e.streaming import Stream, streams
from tests.processes import wait_for

pytestmark = pytest.mark.slow

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "def read_config(path):\n", "max_new_tokens": 220, "ignore_eos": True},
    {
        "prompt": "class Queue:\n",
        "max_new_tokens": 220,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 11,
    },
]
SHORT_LEN = 80
SHORT = [{**request, "max_new_tokens": SHORT_LEN} for request in REQUESTS]
"""The same, whose outputs are how those begin."""
PROFILED = ("target-0", "draft-0")


def wait_used(server: Server) -> None:
    """Wait until the orchestrator uses all four workers."""
    with AdminClient(server.admin_address) as admin:

        def are_ready() -> bool:
            try:
                workers = admin.call("ListWorkers").workers
            except UnavailableError:  # this process starts a worker: a fork may end a handshake
                return False
            return len(workers) == 4 and all(w.state == pb.WORKER_STATE_READY for w in workers)

        wait_for(are_ready)


@pytest.fixture(scope="module")
def plain(quartet: Server, plain_outputs: PlainOutputs) -> list[Completion]:
    """Return the outputs without speculation."""
    return plain_outputs.of(quartet, REQUESTS)


class Load:
    """Clients that send the same requests again and again, and compare every output.

    Args:
        copies: Clients per request.
    """

    def __init__(self, server: Server, plain: list[Completion], *, copies: int) -> None:
        self._server = server
        self._plain = plain * copies
        self._requests = REQUESTS * copies
        self.num_finished = 0
        self.num_retries = 0

    def run_while(self, act: Any) -> None:
        """Keep up the load until an act is done, and each client has finished after it."""
        thread = threading.Thread(target=act)
        with streams(self._server.address, self._requests, max_retries=100) as first:
            for stream in first:
                stream.reaches(20)
            thread.start()
            self._check(first)
        while thread.is_alive():
            with streams(self._server.address, self._requests, max_retries=100) as more:
                self._check(more)
        thread.join()

    def _check(self, running: list[Stream]) -> None:
        for stream, alone in zip(running, self._plain, strict=True):
            finish = stream.result()
            assert stream.token_ids == alone.token_ids
            self.num_finished += 1
            self.num_retries += finish.retries


def restart(server: Server, names: list[str]) -> None:
    """Have workers drain by SIGTERM and start their successors, one after the other.

    A target that stays is slow meanwhile, so that streams are midway, and leave the cores to what
    starts.
    """
    with contextlib.ExitStack() as stack:
        for name in {"target-0", "target-1"} - set(names):
            stack.enter_context(server.slowed(name, pause_s=0.1))
        for name in names:
            server.stop_service(name)
            assert not server.logged("requests still run", service=name)
            server.start_service(name)
            wait_used(server)


@pytest.mark.parametrize(
    "names",
    [
        ["target-0", "draft-0"],
        pytest.param(
            ["target-0", "target-1", "draft-0", "draft-1"] * 2, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["one of each role", "all of them, twice"],
)
def test_a_rolling_restart_under_load_loses_nothing(
    quartet: Server, plain: list[Completion], names: list[str]
) -> None:
    """What a worker holds moves before it ends: no stream breaks, no token differs."""
    before = quartet.shared_files()
    incarnations = {name: quartet.info(name).incarnation for name in names}
    wait_used(quartet)
    load = Load(quartet, plain, copies=2)
    failed: list[BaseException] = []

    def act() -> None:
        try:
            restart(quartet, names)
        except BaseException as error:
            failed.append(error)

    load.run_while(act)
    if failed:
        raise failed[0]
    assert load.num_retries > 0
    assert load.num_finished >= len(REQUESTS) * 2
    for name, incarnation in incarnations.items():
        assert quartet.info(name).incarnation != incarnation
    quartet.check_idle()
    replaced = before - quartet.shared_files()
    assert replaced
    assert not any(list(RING_DIR.glob(f"{file.name}*")) for file in replaced)


def test_drained_workers_are_empty_while_streams_go_on(
    quartet: Server, plain: list[Completion]
) -> None:
    """By hand: drain, look, undrain."""
    wait_used(quartet)
    names = ("target-1", "draft-0")
    with AdminClient(quartet.admin_address) as admin:
        with streams(quartet.address, REQUESTS * 2) as running:
            for stream in running:
                stream.reaches(20)
            for name in names:
                address = quartet.services[name].address
                assert main(["admin", "drain", address, "--wait", *at(quartet)]) == 0
                wait_for(lambda name=name: quartet.info(name).load.num_running == 0)
            for stream, alone in zip(running, plain * 2, strict=True):
                stream.result()
                assert stream.token_ids == alone.token_ids
        states = {w.address: w.state for w in admin.call("ListWorkers").workers}
        for name in names:
            address = quartet.services[name].address
            assert states[address] == pb.WORKER_STATE_DRAINING
            assert main(["admin", "undrain", address, *at(quartet)]) == 0
    wait_used(quartet)


def at(server: Server) -> list[str]:
    return ["--address", server.admin_address]


def test_a_profile_of_an_engine_shows_its_steps(
    quartet: Server, plain: list[Completion], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that Perfetto reads; the recording changes no output."""
    paths = []
    commands = [
        ["admin", "profile", quartet.services[name].address, *at(quartet)] for name in PROFILED
    ]
    for profile in commands:
        assert main([*profile, "--num-steps=5"]) == 0
        paths.append(Path(capsys.readouterr().out.partition(",")[0]))
    before = {name: quartet.info(name).load.num_steps for name in PROFILED}

    def have_stepped() -> bool:
        """Return whether the engines ran all steps of their profiles: a draft may be late."""
        with streams(quartet.address, SHORT * 2) as running:
            for stream, alone in zip(running, plain * 2, strict=True):
                stream.result()
                assert stream.token_ids == alone.token_ids[:SHORT_LEN]
        return all(quartet.info(name).load.num_steps >= before[name] + 5 for name in PROFILED)

    wait_for(have_stepped)
    for profile, path in zip(commands, paths, strict=True):
        assert main([*profile, "--stop"]) == 0
        assert str(path) == capsys.readouterr().out.strip()
        with gzip.open(path) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert any("mm" in str(name) for name in names)
        path.unlink()


def test_top_shows_workers_requests_and_rounds(
    quartet: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with streams(quartet.address, REQUESTS * 2) as running:
        for stream in running:
            stream.reaches(20)
        # Into a pipe it shows one view without being asked to.
        assert main(["top", "--interval-s=0.3", *at(quartet)]) == 0
        assert "tokens per round" in capsys.readouterr().out
        assert main(["top", "--once", "--interval-s=0.3", *at(quartet)]) == 0
        said = capsys.readouterr().out
    for address in (*quartet.target_addresses, *quartet.draft_addresses):
        assert address in said
    assert "tokens per round" in said
    assert "nan" not in said


def test_figures_configurations_and_levels_can_be_asked_for(
    quartet: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["admin", "stats", *at(quartet)]) == 0
    assert json.loads(capsys.readouterr().out)["num_processes"] == 1
    worker = f"--worker={quartet.services['target-0'].address}"
    assert main(["admin", "config", worker, *at(quartet)]) == 0
    assert "page_size = 16" in capsys.readouterr().out
    level = ["admin", "log-level", "debug", "--logger=target_service.made_up", worker]
    assert main([*level, *at(quartet)]) == 0
    assert main(["admin", "workers", *at(quartet)]) == 0
    assert "ready" in capsys.readouterr().out
