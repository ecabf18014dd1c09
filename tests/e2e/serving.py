"""Stacks of real processes for tests: start, look inside, harm, and check that nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice import Client, Completion
from coppice.health import HealthProbe
from coppice.stack import ServiceState, Stack, StackConfig
from coppice.stack import stack as stack_module
from coppice.stack.process import ServiceProcess
from coppice.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, tree_pb2
from shared.access.caller import Caller
from shared.config import DraftConfig, OrchestratorConfig, TargetConfig, read_secret
from shared.config.loader import to_arguments
from shared.peer.ring import RING_DIR
from shared.peer.shared_files import mailbox_name
from shared.rpc.health_names import DRAFT_SERVICE, SPECULATION_SERVICE, TARGET_SERVICE
from tests.processes import is_alive, is_spawned, members_of, oldest, wait_for
from tests.scrape import free_ports

READY_TIMEOUT_S = 300.0
# What a worker still holds a moment after its last request has ended is a leak.
FREE_TIMEOUT_S = 60.0
LOG_TIMEOUT_S = 60.0
STARTED: list[Server] = []
"""Servers that run now; the fixtures check them after each test, until one is found wanting."""


class Server(Stack):
    """A stack, what its services wrote, and how busy its workers are."""

    pairing_timeout_s = READY_TIMEOUT_S

    def __init__(self, config: StackConfig) -> None:
        self.log: list[str] = []
        super().__init__(config, on_log=lambda name, line: self.log.append(f"{name}: {line}"))

    def logged(self, text: str, *, service: str = "") -> int:
        """Return how many lines of a service (default: of any) hold this text."""
        return sum(text in line and line.startswith(service) for line in list(self.log))

    def wait_logged(self, text: str, *, service: str = "") -> None:
        """Wait until a line of a service holds this text: what is logged comes through a pipe."""
        wait_for(lambda: self.logged(text, service=service) > 0, LOG_TIMEOUT_S, lambda: text)

    def _wait_speculating(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack_module, "PAIRING_TIMEOUT_S", self.pairing_timeout_s)
            super()._wait_speculating()

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to every process of a service, as a fault would."""
        self.services[name].kill(signal_number)

    def stop_service(self, name: str) -> None:
        """End one service in order; it stays down until `start_service`."""
        self.services[name].request_stop()
        self.services[name].join(self.config.stop_budget_s)

    def start_service(self, name: str) -> None:
        """Start a service that was stopped or has failed, and wait until it is ready."""
        self.services[name].start()
        self.wait_ready(name, timeout_s=self.config.start_timeout_s)

    @property
    def admin_address(self) -> str:
        """Return HOST:PORT where the orchestrator serves operators."""
        command = self.services["orchestrator"].command
        port = next(arg.partition("=")[2] for arg in command if arg.startswith("--admin-port="))
        return f"127.0.0.1:{port}"

    @property
    def caller(self) -> Caller:
        """Return what the workers are to be shown."""
        return Caller(secret=read_secret(self.config.orchestrator, self.environ))

    def info(self, name: str) -> tree_pb2.WorkerInfo:
        """Ask a worker who it is and how busy."""
        address = self.services[name].address
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            if name.startswith("target"):
                target = target_pb2_grpc.TargetServiceStub(channel)
                shown = self.caller.metadata(f"/{TARGET_SERVICE}/GetInfo")
                asked = target_pb2.TargetServiceGetInfoRequest()
                return target.GetInfo(asked, timeout=20, metadata=shown).info
            draft = draft_pb2_grpc.DraftServiceStub(channel)
            shown = self.caller.metadata(f"/{DRAFT_SERVICE}/GetInfo")
            asked_draft = draft_pb2.DraftServiceGetInfoRequest()
            return draft.GetInfo(asked_draft, timeout=20, metadata=shown).info

    @property
    def workers(self) -> list[str]:
        """Return the names of all workers that are meant to run."""
        return [
            name
            for name, service in self.services.items()
            if name not in ("orchestrator", "gateway") and service.state is not ServiceState.STOPPED
        ]

    def wait_paired(self) -> None:
        """Wait until everything that is meant to run is ready, and a draft fits a target."""
        names = [n for n, s in self.services.items() if s.state is not ServiceState.STOPPED]
        self.wait_ready(*names, timeout_s=READY_TIMEOUT_S)
        if self.config.num_drafts:
            with HealthProbe(self.address) as probe:
                wait_for(lambda: probe.status(SPECULATION_SERVICE) == "SERVING", READY_TIMEOUT_S)

    def check_idle(self) -> None:
        """Check that no worker holds a page or a request, once the last ones have left."""
        self.wait_ready(*self.workers, timeout_s=READY_TIMEOUT_S)
        for name in self.workers:

            def is_free(name: str = name) -> bool:
                try:
                    load = self.info(name).load
                except grpc.RpcError:  # a spare engine that has taken over still loads
                    return False
                is_empty = load.num_running == load.num_waiting == 0
                return is_empty and load.num_free_pages == load.num_pages > 0

            wait_for(is_free, FREE_TIMEOUT_S, lambda name=name: f"{name}: {self.info(name)}")

    def shared_files(self) -> set[Path]:
        """Return the files in shared memory that its targets have now."""
        targets = [name for name in self.workers if name.startswith("target")]
        infos = [
            self.info(name) for name in targets if self.services[name].state is ServiceState.READY
        ]
        sockets = [info.peer_socket for info in infos if info.peer_socket]
        return {
            RING_DIR / name
            for name in (
                *(info.feature_ring for info in infos if info.feature_ring),
                *sockets,
                *map(mailbox_name, sockets),  # of targets on a GPU
            )
        }

    def processes(self) -> set[int]:
        """Return every process of the services, engines included."""
        return members_of({service.pid for service in self.services.values() if service.pid})

    def engine(self, name: str) -> int:
        """Return the process that runs the model of a worker."""
        front = self.services[name].pid
        assert front is not None
        return oldest(filter(is_spawned, members_of({front}) - {front}))

    def num_engines_lost(self, name: str) -> int:
        """Return how often the engine of a worker was replaced, with its front or without."""
        taken_over = self.logged("a spare one takes over", service=name)
        return self.services[name].num_restarts + taken_over

    def has_spare(self, name: str) -> bool:
        """Return whether a spare engine stands by for the engine that serves now."""
        news = ("ready address=", "stands by as a spare engine")
        lines = (line for line in reversed(list(self.log)) if line.startswith(name))
        last = next((line for line in lines if any(text in line for text in news)), "")
        return news[1] in last

    @contextlib.contextmanager
    def slowed(self, name: str, *, pause_s: float = 1.0) -> Iterator[None]:
        """Let the engine of a worker run for 20 ms between pauses, as long as the block takes.

        It goes on, so that nobody takes it for hung.
        """
        engine = self.engine(name)
        is_over = threading.Event()

        def slow_down() -> None:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                while not is_over.is_set():
                    os.kill(engine, signal.SIGSTOP)
                    is_over.wait(pause_s)
                    os.kill(engine, signal.SIGCONT)
                    is_over.wait(0.02)

        thread = threading.Thread(target=slow_down)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


@contextlib.contextmanager
def running(config: StackConfig) -> Iterator[Server]:
    """Run a stack for the length of the block; no process outlives it, and no file of its."""
    server = Server(config)
    with server:
        STARTED.append(server)
        try:
            yield server
            files = server.shared_files()
        finally:
            with contextlib.suppress(ValueError):  # it was found to hold something
                STARTED.remove(server)
            processes = server.processes()
    wait_for(lambda: not any(is_alive(pid) for pid in processes))
    assert not any(file.exists() for file in files), files


@contextlib.contextmanager
def orchestrator_process(server: Server, **fields: Any) -> Iterator[ServiceProcess]:
    """Run one more orchestrator, like that of a server but for some fields of its configuration."""
    port = free_ports(1)
    config = replace(server.config.orchestrator, port=port, **fields)
    process = ServiceProcess(
        "extra",
        [sys.executable, "-m", "coppice", "serve", "orchestrator", *to_arguments(config)],
        address=f"127.0.0.1:{port}",
        health_service=SPECULATION_SERVICE,
        environ=server.environ,
        on_log=lambda name, line: server.log.append(f"{name}: {line}"),
        on_state=lambda *_: None,
        is_restarted=False,
    )
    process.start()
    try:
        wait_for(lambda: process.state is ServiceState.READY, READY_TIMEOUT_S, process.log_tail)
        yield process
    finally:
        process.request_stop()
        process.join(30.0)


def stack_config(
    *,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    orchestrator: dict[str, Any] | None = None,
    **stack: Any,
) -> StackConfig:
    """Return a configuration for one core: bundled models, and a draft that is never late.

    An engine that dies has no successor that waits: its worker starts again. Nor does a process
    wait for grammars. Targets do not prove at every start that they are exact on this machine:
    those of `pair` do, and those that `coppice up` starts.
    """
    common = {"device": "cpu", "cpu_threads": 1, "spare_after_s": 0.0}
    config = StackConfig(
        orchestrator=OrchestratorConfig(
            **{
                "host": "127.0.0.1",
                "port": 0,
                "draft_timeout_ms": 60_000.0,
                "draft_open_timeout_ms": 60_000.0,
                "step_timeout_s": 120.0,
                "grammar_after_s": 0.0,
                **(orchestrator or {}),
            }
        ),
        target=TargetConfig(**{**common, "self_test": False, **(target or {})}),
        draft=DraftConfig(**{**common, **(draft or {})}),
        start_timeout_s=READY_TIMEOUT_S,
    )
    return replace(config, **stack)


def checkpoint_config(
    target_dir: Path, draft_dir: Path, algorithm: str, **parts: Any
) -> StackConfig:
    """Return the configuration for a pair of checkpoints; `parts` as in `stack_config`."""
    target, draft = str(target_dir), str(draft_dir)
    given = {
        "target": {"model": target, "draft_model": draft, "algorithm": algorithm},
        "draft": {"model": draft, "target_model": target, "algorithm": algorithm},
        "orchestrator": {"model": target},
    }
    for name, fields in given.items():
        parts[name] = {**fields, **parts.get(name, {})}
    return stack_config(**parts)


def generate_all(address: str, requests: list[dict[str, Any]]) -> list[Completion]:
    """Send requests all at once; return their completions in order."""
    with Client(address) as client, ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: client.generate(**request), requests))


def generate_plain(address: str, requests: list[dict[str, Any]]) -> list[Completion]:
    """Send requests all at once, without speculation; return their completions in order."""
    return generate_all(address, [{**request, "speculation": False} for request in requests])


def generate_alone(address: str, requests: list[dict[str, Any]]) -> list[Completion]:
    """Send requests one after the other, without speculation; return their completions."""
    with Client(address) as client:
        return [client.generate(**{**request, "speculation": False}) for request in requests]


class PlainOutputs:
    """Plain runs, each made once: a target's output depends on nothing but the request.

    Those of one question run at once, which takes half of the time; what is alone in its batch is
    compared to them in test_exactness.py and, for every shape of batch, on engines.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Completion] = {}

    def of(
        self, server: Server, requests: list[dict[str, Any]], *, alone: bool = False
    ) -> list[Completion]:
        """Return what the server's target says without speculation; ask it what is not known.

        Args:
            alone: One after the other, nobody else in any batch.
        """
        keys = [(str(alone), *self._key(server, request)) for request in requests]
        missing = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if key not in self._known
        }
        generate = generate_alone if alone else generate_plain
        made = generate(server.address, list(missing.values())) if missing else []
        self._known.update(zip(missing, made, strict=True))
        return [self._known[key] for key in keys]

    def _key(self, server: Server, request: dict[str, Any]) -> tuple[str, ...]:
        """Name model, prompt, sampling and stops; not the tree, which must not matter."""
        target = server.config.target
        tree = {"speculation", "num_steps", "topk", "num_draft_tokens", "round_times"}
        asked = sorted((name, repr(value)) for name, value in request.items() if name not in tree)
        return (target.model, target.dtype, *(f"{name}={value}" for name, value in asked))
