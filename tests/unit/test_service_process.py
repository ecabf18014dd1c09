"""Supervision of a child process: readiness, restart, orderly end, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coppice.health import HealthProbe
from coppice.stack import process as process_module
from coppice.stack.process import (
    PROBE_INTERVAL_S,
    PROBE_TIMEOUT_S,
    ServiceProcess,
    ServiceState,
)
from tests.processes import is_alive, wait_for
from tests.scrape import free_ports

# A service with a child in its group, as a worker has an engine. It writes the child's pid.
SERVICE = textwrap.dedent(
    """
    import os, signal, subprocess, sys, threading
    from concurrent.futures import ThreadPoolExecutor
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    port, mode = sys.argv[1:3]
    print("hello from", os.getpid(), flush=True)
    if mode == "fail":
        sys.exit("bad checkpoint")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    if mode != "impostor":
        servicer.set(f"process/{os.getpid()}", health_pb2.HealthCheckResponse.SERVING)
    if mode != "never":
        servicer.set("some.Service", health_pb2.HealthCheckResponse.SERVING)
    ended = threading.Event()
    if mode != "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended.wait()
    child.kill()
    child.wait()
    print("goodbye", flush=True)
    """
)

MakeService = Callable[..., ServiceProcess]


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[MakeService]:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    made: list[ServiceProcess] = []

    def make(mode: str, *, is_restarted: bool = True) -> ServiceProcess:
        port = free_ports(1)
        service = ServiceProcess(
            "fake-0",
            [sys.executable, str(script), str(port), mode],
            address=f"127.0.0.1:{port}",
            health_service="some.Service",
            environ=dict(os.environ),
            on_log=lambda name, line: None,
            on_state=lambda name, state: None,
            is_restarted=is_restarted,
        )
        made.append(service)
        return service

    yield make
    for service in made:
        service.request_stop()
        service.join(0.0)


def child_pid(service: ServiceProcess) -> int:
    """Return the child of its last process, once its line has been read."""
    started = f"hello from {service.pid}\nchild "
    wait_for(lambda: started in service.log_tail())
    return int(service.log_tail().rpartition(started)[2].split()[0])


def test_it_becomes_ready_and_ends_in_order(make_service: MakeService) -> None:
    service = make_service("normal")
    assert service.state is ServiceState.STOPPED
    service.start()
    wait_for(lambda: service.state is ServiceState.READY)
    pid, child = service.pid, child_pid(service)
    assert pid is not None
    service.request_stop()
    service.join(180.0)
    assert service.state is ServiceState.STOPPED
    assert service.log_tail().endswith("goodbye")
    assert not is_alive(pid) and not is_alive(child)


def test_a_killed_service_starts_again(make_service: MakeService) -> None:
    service = make_service("normal")
    service.start()
    wait_for(lambda: service.state is ServiceState.READY)
    pid = service.pid
    assert pid is not None
    service.kill()
    wait_for(lambda: service.num_restarts == 1 and service.state is ServiceState.READY)
    assert service.pid not in (None, pid)
    assert "was ended by SIGKILL" in service.log_tail()


def test_a_service_that_does_not_answer_is_killed_and_starts_again(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "PROBE_INTERVAL_S", 0.2)
    service = make_service("normal")
    service.start()
    wait_for(lambda: service.state is ServiceState.READY)
    pid, child = service.pid, child_pid(service)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: service.num_restarts >= 1 and service.state is ServiceState.READY)
    assert f"process {pid} does not answer, killing it" in service.log_tail()
    assert not is_alive(child)


def test_a_service_that_answers_late_for_a_while_is_left_alone(make_service: MakeService) -> None:
    service = make_service("normal")
    service.start()
    wait_for(lambda: service.state is ServiceState.READY)
    pid = service.pid
    assert pid is not None
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PROBE_TIMEOUT_S)
        os.kill(pid, signal.SIGCONT)
        time.sleep(PROBE_INTERVAL_S + PROBE_TIMEOUT_S)  # it is asked, and answers
    assert (service.pid, service.num_restarts) == (pid, 0)


def test_an_engine_whose_front_was_killed_does_not_survive(make_service: MakeService) -> None:
    service = make_service("normal", is_restarted=False)
    service.start()
    wait_for(lambda: service.state is ServiceState.READY)
    child = child_pid(service)
    assert service.pid is not None and is_alive(child)
    os.kill(service.pid, signal.SIGKILL)
    wait_for(lambda: service.state is ServiceState.FAILED)
    wait_for(lambda: not is_alive(child))


def test_a_service_that_cannot_start_is_not_tried_again(make_service: MakeService) -> None:
    service = make_service("fail")
    service.start()
    wait_for(lambda: service.state is ServiceState.FAILED)
    assert "bad checkpoint" in service.log_tail()
    assert "exited with code 1" in service.log_tail()
    assert service.num_restarts == 0


def test_a_stubborn_service_is_killed(make_service: MakeService) -> None:
    service = make_service("stubborn")
    service.start()
    wait_for(lambda: service.state is ServiceState.READY)
    pid = service.pid
    assert pid is not None
    service.request_stop()
    service.join(0.3)
    assert service.state is ServiceState.STOPPED
    assert not is_alive(pid)


def test_it_can_be_stopped_before_it_is_ready_and_started_again(make_service: MakeService) -> None:
    service = make_service("never")
    service.start()
    wait_for(lambda: "child" in service.log_tail())
    assert service.state is ServiceState.STARTING
    service.request_stop()
    service.join(180.0)
    assert service.state is ServiceState.STOPPED
    service.start()
    wait_for(lambda: service.pid is not None)
    assert service.state is ServiceState.STARTING


def test_another_server_on_its_port_does_not_count_as_ready(make_service: MakeService) -> None:
    service = make_service("impostor")
    service.start()
    with HealthProbe(service.address) as probe:
        wait_for(lambda: probe.status("some.Service") == "SERVING")
    wait_for(lambda: "child" in service.log_tail())
    time.sleep(0.5)  # many looks
    assert service.state is ServiceState.STARTING


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    """`serve --exit-with-parent` ends when the pipe on its standard input closes."""
    code = (
        "import time\n"
        "from coppice.cli import serve\n"
        "import threading\n"
        "threading.Thread(target=serve._end_with_stdin, daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(180) == -signal.SIGTERM
