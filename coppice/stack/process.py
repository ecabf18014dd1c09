"""One service as a child process: its log, its health, its restarts and its end.

A child is a process group of its own (a worker's engine lives in it too), so that Ctrl-C reaches
only the parent, which stops its children in order. Each child holds a pipe from the parent: when
the parent dies, whatever the way, it closes and the child ends by itself (`--exit-with-parent`).
"""

from __future__ import annotations

import collections
import contextlib
import enum
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from coppice.health import HealthProbe
from shared.rpc.health_names import process_name

LOG_TAIL_LINES = 40
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 10.0
# A process that served this long starts again at the first backoff.
STEADY_AFTER_S = 10.0
POLL_INTERVAL_S = 0.02
# Each look at a service that loads is two calls, which take a core from it.
READY_INTERVAL_S = 0.1
PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 1.5
# A child that was ready and does not answer so many probes in a row is killed.
MAX_MISSED_PROBES = 3


class ServiceState(enum.Enum):
    """Where a service of the stack stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class ServiceFailedError(RuntimeError):
    """A service ended before it was ready, or was not ready in time; the message has its log.

    Args:
        exit_code: Of the service that ended; None if it is late.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ServiceProcess:
    """A supervised child process.

    Args:
        name: Shown before each of its lines, e.g. "target-0".
        command: Program and arguments.
        address: HOST:PORT that it will listen on.
        health_address: HOST:PORT that it will answer health checks on, in plain text; "" =
            `address`.
        health_service: Full gRPC service name whose health means "ready".
        environ: Its whole environment.
        on_log: Called with (name, line) from a thread.
        on_state: Called with (name, state) from a thread.
        is_restarted: Start again, with backoff, when it ends without being asked to.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        address: str,
        health_service: str,
        environ: Mapping[str, str],
        on_log: Callable[[str, str], None],
        on_state: Callable[[str, ServiceState], None],
        is_restarted: bool,
        health_address: str = "",
    ) -> None:
        self.name = name
        self.command = list(command)
        self.address = address
        self.health_address = health_address or address
        self.environ = dict(environ)
        self.num_restarts = 0
        self._health_service = health_service
        self._on_log = on_log
        self._on_state = on_state
        self._is_restarted = is_restarted
        self._tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._state = ServiceState.STOPPED
        self._has_been_ready = False
        self._stopping = threading.Event()
        self.exit_code: int | None = None
        """Of the last child that ended by itself."""
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: threading.Thread | None = None

    @property
    def state(self) -> ServiceState:
        """Return the state as of now."""
        return self._state

    @property
    def pid(self) -> int | None:
        """Return the process id of the running child, None between two of them."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def log_tail(self) -> str:
        """Return the last lines that the service wrote."""
        return "\n".join(self._tail)

    def start(self) -> None:
        """Launch and supervise in a thread; does nothing if it is supervised already."""
        if self._supervisor is not None and self._supervisor.is_alive():
            return
        self._stopping.clear()
        self._set_state(ServiceState.STARTING)
        self._supervisor = threading.Thread(
            target=self._supervise, name=f"supervise-{self.name}", daemon=True
        )
        self._supervisor.start()

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the whole process group, as a fault would; the supervisor goes on."""
        pid = self.pid
        if pid is not None:
            _signal_group(pid, signal_number)

    def request_stop(self) -> None:
        """Ask for an orderly end and do not start again; does not wait."""
        self._stopping.set()
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def join(self, timeout_s: float) -> None:
        """Wait for the end that `request_stop` asked for; kill the group when time is up."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        supervisor.join(max(0.0, timeout_s))
        if supervisor.is_alive():
            self.kill()
            supervisor.join()
        self._supervisor = None

    def _supervise(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            ready_at = self._run_once()
            if self._stopping.is_set():
                return self._set_state(ServiceState.STOPPED)
            if not self._is_restarted or not self._has_been_ready:
                return self._set_state(ServiceState.FAILED)
            if ready_at is not None and time.monotonic() - ready_at > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._set_state(ServiceState.RESTARTING)
            self._log(f"ended; starting again in {backoff_s:g} s")
            if self._stopping.wait(backoff_s):
                return self._set_state(ServiceState.STOPPED)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            self.num_restarts += 1
            self._set_state(ServiceState.STARTING)

    def _run_once(self) -> float | None:
        """Run one child to its end. Returns: when it became ready, monotonic; None if never."""
        with subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environ,
            start_new_session=True,
        ) as process:
            self._process = process
            if self._stopping.is_set():  # asked to stop while it was being launched
                process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            reader = threading.Thread(
                target=self._read_log, args=(process.stdout,), name=f"log-{self.name}", daemon=True
            )
            reader.start()
            with HealthProbe(self.health_address) as probe:
                ready_at = self._wait_ready(process, probe)
                self._watch_health(process, probe)
            code = self.exit_code = process.wait()
            # What is left of the group, an engine whose front was killed, must not hold the GPU.
            _signal_group(process.pid, signal.SIGKILL)
            reader.join()
            if not self._stopping.is_set():
                self._log(f"process {process.pid} {_describe_exit(code)}")
        return ready_at

    def _wait_ready(self, process: subprocess.Popen[bytes], probe: HealthProbe) -> float | None:
        while process.poll() is None:
            if _answers(probe, process.pid, self._health_service):
                self._has_been_ready = True
                self._set_state(ServiceState.READY)
                return time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(READY_INTERVAL_S)
        return None

    def _watch_health(self, process: subprocess.Popen[bytes], probe: HealthProbe) -> None:
        """Wait for the end of a child that is ready; kill one that hangs."""
        num_missed = 0
        while num_missed < MAX_MISSED_PROBES:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PROBE_INTERVAL_S)
                return
            is_answer = self._stopping.is_set() or (
                probe.status(process_name(process.pid), timeout_s=PROBE_TIMEOUT_S) == "SERVING"
            )
            num_missed = 0 if is_answer else num_missed + 1
        self._log(f"process {process.pid} does not answer, killing it")
        _signal_group(process.pid, signal.SIGKILL)

    def _read_log(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._log(line.decode(errors="replace").rstrip())

    def _log(self, line: str) -> None:
        self._tail.append(line)
        self._on_log(self.name, line)

    def _set_state(self, state: ServiceState) -> None:
        self._state = state
        self._on_state(self.name, state)


def _signal_group(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal_number)


def _answers(probe: HealthProbe, pid: int, service: str) -> bool:
    """Return whether it is this child that answers, and not who had the port before; and ready."""
    return all(
        probe.status(name, timeout_s=0.2) == "SERVING" for name in (process_name(pid), service)
    )


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"
