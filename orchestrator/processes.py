"""Several orchestrator processes on one port: the kernel spreads connections over them.

    parent       holds the port, starts the processes, starts again one that dies; serves nothing
    process      a whole orchestrator: sessions to all workers, admission, health

The processes share the limits of requests admitted at once, and how many of them each has at which
worker. The health that one of them tells is its own. Requests of one connection are served by one
process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from types import FrameType

from orchestrator.siblings import MAX_WORKERS, SharedLoads, Siblings, shared_words
from shared.config import OrchestratorConfig, admin_port
from shared.errors import EXIT_CONFIG, ConfigError
from shared.logs import LogSettings, configure_logging, log_settings
from shared.rpc.engine_main import die_with_parent

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 10.0
# A process that served this long starts again at the first backoff.
STEADY_AFTER_S = 10.0
_STOP_SLACK_S = 5.0

Serve = Callable[[OrchestratorConfig, Siblings], int]
"""(config, the processes) -> exit code; runs in a process of its own."""


def run_processes(config: OrchestratorConfig, serve: Serve) -> int:
    """Run `config.workers` orchestrators until SIGTERM or SIGINT.

    Args:
        serve: Picklable; serves with the port that it is given.
    Returns: exit code: 0 after an orderly end, 2 for a configuration that cannot work.
    Raises: ConfigError if the port cannot be listened on.
    """
    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(reserve_port(config.host, config.port))
        config = replace(config, port=reserved.getsockname()[1])
        if (admin := reserve_admin_port(config)) is not None:
            config = replace(config, admin_port=stack.enter_context(admin).getsockname()[1])
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="coppice-"))
        return _Supervisor(config, serve, directory).run()


def reserve_admin_port(config: OrchestratorConfig) -> socket.socket | None:
    """Return a socket that holds the operators' port; None: they are not served.

    Raises: ConfigError if somebody else has the port that was asked for.
    """
    if config.admin_port < 0:
        return None
    try:
        return reserve_port(config.admin_host, admin_port(config))
    except ConfigError:
        if config.admin_port:
            raise
        return reserve_port(config.admin_host, 0)


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port for processes that share it, and takes no connection.

    Raises: ConfigError if somebody else has the port.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if port:
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # alone: fails if it is taken
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "is the port taken? choose another one, or 0 for any"
        ) from None
    return reserved


class _Supervisor:
    """Starts the processes, starts dead ones again, ends them in order."""

    def __init__(self, config: OrchestratorConfig, serve: Serve, directory: str) -> None:
        self._config = config
        self._serve = serve
        counts = shared_words(config.workers)
        holders = shared_words(config.workers * config.max_num_requests)
        workers, loads = (shared_words(config.workers * MAX_WORKERS) for _ in range(2))
        self._slots = [
            _Slot(
                Siblings(
                    parent_pid=os.getpid(),
                    index=index,
                    counts=counts,
                    holders=holders,
                    loads=SharedLoads(index=index, workers=workers, counts=loads),
                    directory=directory,
                ),
                config,
                serve,
            )
            for index in range(config.workers)
        ]
        self._is_stopping = False

    def run(self) -> int:
        """Supervise until asked to stop, or a process refuses its configuration."""
        waker, woken = socket.socketpair()
        waker.settimeout(0)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        logger.info("%d processes share port %d", len(self._slots), self._config.port)
        try:
            while not self._is_stopping:
                for slot in self._slots:
                    if slot.has_refused:
                        return EXIT_CONFIG
                    slot.keep_running()
                sentinels = [slot.sentinel for slot in self._slots if slot.sentinel is not None]
                due_s = min((slot.due_s for slot in self._slots), default=None)
                multiprocessing.connection.wait([woken, *sentinels], timeout=due_s)
            return 0
        finally:
            self._stop()
            signal.set_wakeup_fd(-1)
            waker.close()
            woken.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        if number == signal.SIGINT:  # a second one ends everything at once
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _stop(self) -> None:
        """Let all processes drain; kill those that take longer than they may."""
        for slot in self._slots:
            slot.terminate()
        deadline = time.monotonic() + self._config.drain_timeout_s + _STOP_SLACK_S
        try:
            for slot in self._slots:
                slot.join(deadline - time.monotonic())
        finally:
            for slot in self._slots:
                slot.kill()


class _Slot:
    """One of the processes, and those that follow it when it dies."""

    def __init__(self, siblings: Siblings, config: OrchestratorConfig, serve: Serve) -> None:
        self._siblings = siblings
        self._arguments = (config, serve, self._siblings, log_settings())
        self._process: SpawnProcess | None = None
        self._started_at = self._due_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def sentinel(self) -> int | None:
        """Return what to wait on for the end of the process; None while there is none."""
        return self._process.sentinel if self._process is not None else None

    @property
    def due_s(self) -> float:
        """Return after how long to look here again, seconds."""
        if self._process is not None:
            return MAX_BACKOFF_S
        return max(0.0, self._due_at - time.monotonic())

    @property
    def has_refused(self) -> bool:
        """Return whether the process ended because its configuration cannot work."""
        return self._process is not None and self._process.exitcode == EXIT_CONFIG

    def keep_running(self) -> None:
        """Start the process, if it is time; note that it has ended."""
        now = time.monotonic()
        process = self._process
        if process is not None and process.exitcode is not None:
            if now - self._started_at > STEADY_AFTER_S:
                self._backoff_s = FIRST_BACKOFF_S
            logger.error(
                "process %d (pid %s) ended with %d; starting again in %g s",
                *(self._siblings.index, process.pid, process.exitcode, self._backoff_s),
            )
            self._siblings.forget()  # its requests ended with it
            self._due_at, self._process = now + self._backoff_s, None
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        if self._process is None and now >= self._due_at:
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=_child_main, args=self._arguments)
            self._process.start()
            self._started_at = now

    def terminate(self) -> None:
        """Ask the process to drain and end."""
        if self._process is not None and self._process.exitcode is None:
            self._process.terminate()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the process."""
        if self._process is not None:
            self._process.join(max(0.0, timeout_s))

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self._process is not None and self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _child_main(
    config: OrchestratorConfig, serve: Serve, siblings: Siblings, log: LogSettings
) -> None:
    """Run one orchestrator; it ends with its parent."""
    die_with_parent(siblings.parent_pid)
    configure_logging(log)
    sys.exit(serve(config, siblings))
