"""Engine factories for real engine processes: named by "tests.fakes.factories:<function>"."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from shared.config import TargetConfig, WorkerConfig
from shared.errors import CheckpointError
from shared.messages import WorkerInfo, WorkerLoad
from shared.peer.ring import FeatureRing
from shared.progress import note_progress
from shared.rpc.engine import ProgressCallback
from tests.fakes.draft import FakeDraft
from tests.fakes.engine import BareEngine
from tests.fakes.target import FakeTarget

MODULE = __name__


def create_target(config: WorkerConfig, progress: ProgressCallback) -> FakeTarget:
    progress("reading weights", 0.25)
    progress("warming up", 0.75)
    return FakeTarget(incarnation=f"pid-{os.getpid()}")


def create_draft(config: WorkerConfig, progress: ProgressCallback) -> FakeDraft:
    return FakeDraft(incarnation=f"pid-{os.getpid()}")


def create_slowly(config: WorkerConfig, progress: ProgressCallback) -> FakeTarget:
    """Take a minute to load; leave the process id where a test finds it."""
    progress(f"pid {os.getpid()}", 0.1)
    time.sleep(60)
    return FakeTarget()


def create_ring_slowly(config: WorkerConfig, progress: ProgressCallback) -> FakeTarget:
    """Make a ring in shared memory, say its name, and take a minute for the rest."""
    ring = FeatureRing(1)
    progress(ring.name, 0.1)
    time.sleep(60)
    return FakeTarget(ring=ring)


def refuse(config: TargetConfig, progress: ProgressCallback) -> FakeTarget:
    raise CheckpointError(f"{config.model}: tensor lm_head.weight is missing")


def fail(config: WorkerConfig, progress: ProgressCallback) -> FakeTarget:
    raise RuntimeError("CUDA error: out of memory")


def die_while_loading(config: WorkerConfig, progress: ProgressCallback) -> FakeTarget:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


class Fragile(FakeTarget):
    """A target whose device fails when it sees the request "crash"."""

    def step(self) -> list[Any]:
        if "crash" in self.requests:
            raise RuntimeError("device-side assert")
        return super().step()


def create_fragile(config: WorkerConfig, progress: ProgressCallback) -> Fragile:
    return Fragile()


class Hanging(FakeTarget):
    """A target whose device never ends a step."""

    def step(self) -> list[Any]:
        time.sleep(600)
        return super().step()


def create_hanging(config: WorkerConfig, progress: ProgressCallback) -> Hanging:
    return Hanging()


class Plodding(FakeTarget):
    """A target whose steps take 13 s each, and say that they go on, as the layers of a model do."""

    def step(self) -> list[Any]:
        for _ in range(130):
            note_progress()
            time.sleep(0.1)
        return super().step()


def create_plodding(config: WorkerConfig, progress: ProgressCallback) -> Plodding:
    return Plodding()


@dataclass(eq=False)
class Echo(BareEngine):
    """An engine that answers every message with itself; strings are orders.

    "sleep <s>": step for so long. "plod <s>": likewise, and say so as the layers of a model do.
    "compile <s>": say that it may take long, then step for so long. "raise": fail in a step.
    "hold": start a thread that never ends, as a broken device may. "exit": end the process.
    "env <name>": answer with the variable. "modules": answer with what is imported.
    "break": let check_integrity raise. "ignore": no answer, no work.
    """

    info: WorkerInfo = field(default_factory=lambda: FakeTarget().info)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    queue: list[Any] = field(default_factory=list)
    is_broken: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.queue)

    def submit(self, message: Any) -> None:
        if message != "ignore":
            self.queue.append(message)

    def step(self) -> list[Any]:
        queue, self.queue = self.queue, []
        return [self._answer(message) for message in queue]

    def check_integrity(self) -> None:
        if self.is_broken:
            raise AssertionError("page 7 is owned twice")

    def _answer(self, message: Any) -> Any:
        match message.split() if isinstance(message, str) else ():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["plod", seconds]:
                for _ in range(round(float(seconds) / 0.01)):
                    note_progress()
                    time.sleep(0.01)
            case ["compile", seconds]:
                note_progress(is_slow=True)
                time.sleep(float(seconds))
            case ["hold"]:
                threading.Thread(target=time.sleep, args=(600,)).start()
            case ["raise"]:
                raise RuntimeError("device-side assert")
            case ["exit"]:
                sys.exit(7)
            case ["env", name]:
                return os.environ.get(name)
            case ["modules"]:
                return sorted(sys.modules)
            case ["break"]:
                self.is_broken = True
        return message


def create_echo(config: WorkerConfig, progress: ProgressCallback) -> Echo:
    return Echo()


def factory(name: str) -> str:
    """Return the "module:function" of a factory of this module."""
    return f"{MODULE}:{name}"
