"""An engine in a process of its own, seen from its front.

    front (asyncio, no torch)  --[message, ...]-->  engine process: drain, submit, step
                               <--EngineReport----

When the front ends, the engine reads EOF or is killed by the kernel. When the engine ends,
`outputs` raises.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import socket
from collections.abc import AsyncIterator, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from shared.errors import ConfigError
from shared.logs import log_settings
from shared.messages import WorkerInfo
from shared.rpc.engine import EngineDiedError, EngineReport, ProgressCallback
from shared.rpc.engine_main import (
    STACKS_SIGNAL,
    BuildEngine,
    EngineProgress,
    EngineReady,
    EngineRefused,
    engine_main,
)
from shared.rpc.pipe import AsyncPipe

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0


class EngineProcess:
    """Start and talk to an engine process; create it on the loop's own thread.

    Args:
        factory: "module:function", an EngineFactory; imported in the engine process only.
        config: Picklable, passed to the factory.
        kept_fds: Descriptors (locks) that the engine process keeps open as long as it lives.
    """

    def __init__(self, factory: str, config: Any, *, kept_fds: Sequence[int] = ()) -> None:
        self._factory = factory
        self._config = config
        self._kept_fds = tuple(kept_fds)
        self._socket: socket.socket | None = None
        self._pipe: AsyncPipe | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._num_sent = 0
        self._num_received = 0
        self._has_work = False
        self._is_ready = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Return the engine's process id, once started."""
        return self._process.pid if self._process is not None else None

    @property
    def is_pending(self) -> bool:
        """Return whether the engine owes a report: it has work or messages it has not taken."""
        return self._has_work or self._num_received < self._num_sent

    def prepare(self) -> None:
        """Spawn the process: it imports what it needs and waits until `start` asks for more."""
        if self._process is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                # Spawned from this thread: the parent-death signal is tied to it.
                self._process = self._spawn(theirs)

    async def start(self, on_progress: ProgressCallback) -> WorkerInfo:
        """Spawn the engine process, unless it is prepared, and wait until it is ready.

        Raises: ConfigError if the engine refuses its configuration, EngineDiedError if it dies.
        """
        self.prepare()
        assert self._socket is not None
        self._pipe = await AsyncPipe.connect(self._socket)
        self._pipe.send(BuildEngine())
        while True:
            try:
                message = await self._pipe.receive()
            except EOFError:
                raise await self._death("while it was loading") from None
            match message:
                case EngineProgress():
                    on_progress(message.stage, message.fraction)
                case EngineRefused():
                    code = await self._exit_code()
                    if message.is_config_error:
                        raise ConfigError(message.message)
                    raise EngineDiedError(message.message, exit_code=code)
                case EngineReady():
                    self._is_ready = True
                    return message.info
                case _:
                    raise AssertionError(f"unexpected {type(message).__name__}")

    def send(self, messages: Sequence[Any]) -> None:
        """Queue messages for the engine; never blocks. Nothing happens once the engine is dead."""
        assert self._pipe is not None, "start() comes first"
        if messages:
            self._num_sent += len(messages)
            self._pipe.send(list(messages))

    async def outputs(self) -> AsyncIterator[EngineReport]:
        """Yield reports until `close` is called.

        Raises: EngineDiedError if the engine dies first.
        """
        assert self._pipe is not None, "start() comes first"
        while True:
            try:
                report: EngineReport = await self._pipe.receive()
            except EOFError:
                if self._is_closed:
                    return
                raise await self._death("") from None
            self._num_received = report.num_received
            self._has_work = report.has_work
            yield report

    def show_stacks(self) -> None:
        """Let the engine write to its log where each of its threads is, whatever it does."""
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, STACKS_SIGNAL)

    def kill(self) -> None:
        """End the engine at once, whatever it does."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the engine and wait for it; a stuck one is killed."""
        self._is_closed = True
        if self._pipe is not None:
            self._pipe.close()
        elif self._socket is not None:
            self._socket.close()
        if self._process is not None:
            if not self._is_ready:
                self._process.kill()  # it looks at the pipe only once the model is loaded
            await self._exit_code()
            atexit.unregister(self._process.kill)

    def _spawn(self, theirs: socket.socket) -> multiprocessing.process.BaseProcess:
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=engine_main,
            args=(
                self._factory,
                self._config,
                theirs,
                os.getpid(),
                log_settings(suffix="-engine"),
                _Kept(self._kept_fds),
            ),
            name="coppice-engine",
            daemon=False,
        )
        process.start()
        atexit.register(process.kill)  # before multiprocessing waits for it, which may take forever
        return process

    async def _death(self, when: str) -> EngineDiedError:
        code = await self._exit_code()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited {code}"
        return EngineDiedError(f"the engine process {how} {when}".rstrip(), exit_code=code)

    async def _exit_code(self) -> int | None:
        assert self._process is not None
        process = self._process
        await asyncio.to_thread(process.join, _JOIN_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            await asyncio.to_thread(process.join, _JOIN_TIMEOUT_S)
        return process.exitcode


class _Kept:
    """Descriptors that are duplicated into the process being spawned; arrives as a list of ints."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = tuple(fds)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_fds, tuple(DupFd(fd) for fd in self._fds)


def _receive_fds(*duplicates: Any) -> list[int]:
    return [duplicate.detach() for duplicate in duplicates]
