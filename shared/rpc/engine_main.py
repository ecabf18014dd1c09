"""The engine process: import the engine, build it, then take messages and step until the pipe ends.

It ends with its front: at EOF on the pipe, and on Linux by the parent-death signal even in the
middle of a step. Exit codes: 0 = the front closed the pipe, 1 = an error (its traceback is logged).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import ConfigError
from shared.logs import LogSettings, configure_logging, note_worker_id, set_level
from shared.memory import TRIM_INTERVAL_S, return_free_memory, settle_garbage
from shared.messages import WorkerInfo, WorkerLoad
from shared.progress import heard_by
from shared.rpc.engine import (
    Engine,
    EngineFactory,
    EngineOrder,
    EngineReport,
    ProfileWritten,
    RecordProfile,
    SetEngineLogLevel,
    will_have_work,
)
from shared.rpc.held_messages import HeldMessages
from shared.rpc.pipe import BlockingPipe

logger = logging.getLogger(__name__)

# Between two rounds of a request the engine is idle for a moment, too short for a full check.
CHECK_INTERVAL_S = 1.0
REPORT_DELAY_S = 0.05
PROGRESS_DELAY_S = 0.5
COUNTS_INTERVAL_S = 0.25
# Between two looks whether what a message waits for is prepared.
HELD_POLL_S = 0.002
# Longer than a step of many requests: waking takes 0.2 ms, and an engine that fell asleep in every
# step of the other one would lose them in every round.
BUSY_POLL_US = 20_000
MIN_SPINNING_CORES = 8
# Asks an engine to write to stderr where its threads are, inside of a call of CUDA too.
STACKS_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class BuildEngine:
    """The front's first message: the engine is wanted. Until then its process only imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgress:
    """What the factory is doing."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine takes messages from now on."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRefused:
    """The factory raised.

    Args:
        is_config_error: The operator's mistake: the message is all there is to say.
    """

    message: str
    is_config_error: bool


def engine_main(
    factory: str,
    config: Any,
    sock: socket.socket,
    parent_pid: int,
    log: LogSettings,
    kept_fds: Sequence[int] = (),
) -> None:
    """Run an engine until the front goes away.

    Args:
        factory: "module:function" of an EngineFactory.
        config: Passed to the factory; `cpu_threads` is applied before.
        parent_pid: Of the front.
        kept_fds: Descriptors that stay open as long as this process lives.
    """
    die_with_parent(parent_pid)
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group: the front decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL)
    configure_logging(log)
    pipe = BlockingPipe(sock)
    try:
        engine = _build(factory, config, pipe)
        note_worker_id(engine.info.incarnation)
        settle_garbage()
        pipe.send(EngineReady(info=replace(engine.info, load=engine.load)))
        run_engine(engine, pipe, busy_poll_s=_busy_poll_s(config.busy_poll_us, engine.info.device))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.info("the front is gone, ending; %d locks released", len(kept_fds))
    except Exception:
        # At once: taking a broken device down in order may take forever. The front removes files.
        logger.exception("the engine failed, ending")
        logging.shutdown()
        os._exit(1)


def run_engine(engine: Engine, pipe: BlockingPipe, *, busy_poll_s: float = 0.0) -> None:
    """Take messages and step until the pipe ends.

    Args:
        busy_poll_s: How long to look for messages without sleeping while requests are running.
    Raises: EOFError or OSError at the end; whatever the engine raises.
    """
    loop = _EngineLoop(engine, pipe, busy_poll_s)
    with heard_by(loop.note_progress):
        while True:
            if not engine.has_work:
                loop.wait()
            loop.submit(pipe.receive())
            engine.channels.flush()
            if engine.has_work:
                loop.step()


class _EngineLoop:
    """The parts of an iteration of `run_engine`, and what the front was told last.

    Args:
        busy_poll_s: How long to look for messages without sleeping while requests are running.
    """

    def __init__(self, engine: Engine, pipe: BlockingPipe, busy_poll_s: float) -> None:
        self._engine = engine
        self._pipe = pipe
        self._busy_poll_s = busy_poll_s
        self._num_received = 0
        self._reported: tuple[WorkerLoad, int, bool] | None = None  # load, num_received, has_work
        self._next_check = self._next_report = self._next_counts = self._next_trim = 0.0
        self._profile: Any = None  # what records the steps, if they are recorded
        self._held = HeldMessages(engine.prepare)

    def submit(self, received: Sequence[Sequence[Any]]) -> None:
        """Hand over what peers have sent, then the front's messages, which may follow from it."""
        engine = self._engine
        for channel, message in engine.channels.receive():
            engine.submit_peer(channel, message)
        if self._held:
            self._submit_unless_held(self._held.released())
        for messages in received:
            self._submit_unless_held(messages)
            self._num_received += len(messages)

    def _submit_unless_held(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, EngineOrder):  # counted, which leads to a report
                self._obey(message)
            elif not self._held.takes(message):
                self._engine.submit(message)

    def _obey(self, order: EngineOrder) -> None:
        match order:
            case SetEngineLogLevel():
                set_level(order.logger, order.level)
            case RecordProfile():
                self._end_profile()
                if order.num_steps:
                    self._begin_profile(order)

    def _begin_profile(self, order: RecordProfile) -> None:
        from shared.step.profile import StepProfile  # needs torch, which not every engine has

        self.note_progress(is_slow=True)
        try:
            self._profile = StepProfile(order.path, order.num_steps)
        except RuntimeError as error:
            self._report_profile(ProfileWritten(path=order.path, problem=str(error)))

    def _end_profile(self) -> None:
        """Write what was recorded, if anything was; that may take seconds."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self.note_progress(is_slow=True)
        self._report_profile(ProfileWritten(path=profile.path, problem=profile.write()))

    def _report_profile(self, written: ProfileWritten) -> None:
        has_work = will_have_work(self._engine)
        self._report(self._engine.load, [], has_work=has_work, profile=written)

    def step(self) -> None:
        """Step the engine, and report unless nothing came of the step."""
        engine = self._engine
        outputs = engine.step()
        engine.channels.flush()
        if self._profile is not None and self._profile.note_step():
            self._end_profile()
        # A step that was only launched, or answered over a channel, is no news for a while.
        if outputs or time.monotonic() >= self._next_report:
            self._report(engine.load, outputs, has_work=will_have_work(engine))

    def note_progress(self, is_slow: bool) -> None:  # noqa: FBT001
        """Report in the middle of a long step, or before something that takes even longer."""
        if is_slow or time.monotonic() >= self._next_report + PROGRESS_DELAY_S:
            self._report(self._engine.load, [], has_work=True, is_slow=is_slow)

    def wait(self) -> None:
        """Wait until there is work, or may be; check and report an engine that has none."""
        engine, pipe = self._engine, self._pipe
        channels = engine.channels.events
        begins_in_s = engine.has_work_in_s
        if begins_in_s is not None:
            look = pipe.spin if self._busy_poll_s >= begins_in_s else pipe.poll
            look(begins_in_s, channels)
        if begins_in_s is not None or engine.has_work:  # it may have begun between two looks
            return
        load = engine.load
        if self._held:
            self._report_idle(load)
            pipe.poll(HELD_POLL_S, channels)
            return
        self._tidy(load)
        is_reported = self._report_idle(load)
        has_message = False
        if self._busy_poll_s and load.num_running:
            has_message = pipe.spin(self._busy_poll_s, channels)
        if not (is_reported or has_message):
            has_message = pipe.poll(REPORT_DELAY_S, channels)
            if not has_message:
                self._report(load, [], has_work=False)
        if not has_message:
            pipe.poll(None, channels)

    def _tidy(self, load: WorkerLoad) -> None:
        """Check that all pages are accounted for; give memory back while nobody is served."""
        is_empty = not (load.num_running or load.num_waiting)
        now = time.monotonic()
        if is_empty or now >= self._next_check:
            self._engine.check_integrity()
            self._next_check = now + CHECK_INTERVAL_S
        if is_empty and now >= self._next_trim:
            return_free_memory()
            self._next_trim = now + TRIM_INTERVAL_S

    def _report_idle(self, load: WorkerLoad) -> bool:
        """Report what may not wait; return whether the front knows all there is to say."""
        if self._reported == (load, self._num_received, False):
            return True
        # What does not change who fits can wait a little: a report wakes the front.
        is_urgent = self._reported is None or _room(self._reported[0]) != _room(load)
        if is_urgent or time.monotonic() >= self._next_report:
            self._report(load, [], has_work=False)
            return True
        return False

    def _report(
        self,
        load: WorkerLoad,
        outputs: list[Any],
        *,
        has_work: bool,
        is_slow: bool = False,
        profile: ProfileWritten | None = None,
    ) -> None:
        self._reported = (load, self._num_received, has_work)
        now = time.monotonic()
        self._next_report = now + REPORT_DELAY_S
        counts = None
        if now >= self._next_counts:  # the front asks an idle engine twice a second: none is lost
            self._next_counts = now + COUNTS_INTERVAL_S
            counts = self._engine.counts
        self._pipe.send(
            EngineReport(
                outputs=outputs,
                load=load,
                num_received=self._num_received,
                has_work=has_work,
                is_slow=is_slow,
                counts=counts,
                profile=profile,
            )
        )


def _busy_poll_s(busy_poll_us: int, device: str) -> float:
    if busy_poll_us < 0:
        has_cores = len(os.sched_getaffinity(0)) >= MIN_SPINNING_CORES
        busy_poll_us = BUSY_POLL_US if has_cores and device == "cuda" else 0
    return busy_poll_us / 1e6


def _room(load: WorkerLoad) -> tuple[int, int, int]:
    return load.num_running, load.num_waiting, load.num_free_pages


def set_thread_count(cpu_threads: int) -> int:
    """Pin the number of torch threads; before torch is imported it goes through the environment.

    Args:
        cpu_threads: 0 = half of this process's cores, 1..8: target and draft take turns on one
            machine, and threads that wait for a core cost more than they give.
    Returns: the number.
    """
    count = cpu_threads or min(8, max(1, len(os.sched_getaffinity(0)) // 2))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    return count


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent ends; does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)


def _build(factory: str, config: Any, pipe: BlockingPipe) -> Engine:
    def progress(stage: str, fraction: float = 0.0) -> None:
        pipe.send(EngineProgress(stage=stage, fraction=fraction))

    try:
        set_thread_count(config.cpu_threads)
        module, _, function = factory.partition(":")
        gc.disable()  # torch's modules are no garbage, and were a sixth of the time to look through
        create: EngineFactory = getattr(importlib.import_module(module), function)
        gc.enable()
        set_thread_count(config.cpu_threads)
        if not pipe.receive():  # BuildEngine, or the end
            logger.info("stands by as a spare engine")
            while not pipe.receive():
                pipe.poll(None, {})
        return create(config, progress)
    except EOFError:  # nobody is there to be told
        raise
    except ConfigError as error:
        pipe.send(EngineRefused(message=str(error), is_config_error=True))
        sys.exit(1)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        pipe.send(EngineRefused(message=text, is_config_error=False))
        raise
