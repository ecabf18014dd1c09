"""The seam between a worker's front (gRPC, no torch) and its engine (torch, its own process)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shared.messages import WorkerInfo, WorkerLoad
from shared.metrics.samples import Samples
from shared.peer.channel import PeerChannel, PeerChannels


class ProgressCallback(Protocol):
    """Told by an engine's factory what it is doing while the model loads."""

    def __call__(self, stage: str, fraction: float = 0.0) -> None:
        """Say the stage in a few words and how much of it is done, 0..1."""


class Engine(Protocol):
    """What runs in the engine process; single-threaded, built by `factory(config, progress)`.

    `submit` answers a bad message through `step`'s outputs; whatever it or `step` raises otherwise
    is fatal for the worker.
    """

    @property
    def info(self) -> WorkerInfo:
        """Return identity and limits."""

    @property
    def channels(self) -> PeerChannels:
        """Return the channels to other engines."""

    @property
    def has_work(self) -> bool:
        """Return whether `step` would do anything; False = wait for a message."""

    @property
    def has_work_in_s(self) -> float | None:
        """Return after how long there is work even without a message; None = never."""

    @property
    def load(self) -> WorkerLoad:
        """Return progress and room."""

    @property
    def counts(self) -> Samples:
        """Return what was counted since the start, by the names of docs/metrics.md."""

    def prepare(self, message: Any) -> Future[Any] | None:
        """Begin, beside the steps, what takes long of a message that is not submitted yet.

        Returns: what is done before it should be submitted, whether that fails or not; None: it may
            be submitted now.
        """

    def submit(self, message: Any) -> None:
        """Take one message of shared.messages from the front."""

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        """Take one message of another engine, or PeerLost."""

    def step(self) -> list[Any]:
        """Run one batch and return what it answers."""

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for."""


EngineFactory = Callable[[Any, ProgressCallback], Engine]


def will_have_work(engine: Engine) -> bool:
    """Return whether an engine has work, now or without a message soon.

    In this order: work that begins between the two looks is seen by the second one.
    """
    return engine.has_work_in_s is not None or engine.has_work


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWritten:
    """A recording has ended.

    Args:
        problem: Why there is no file; empty: there is one.
    """

    path: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What an engine says after a step, in the middle of a long one, and when it falls idle.

    Args:
        outputs: Messages of shared.messages.
        num_received: Messages taken since the start.
        has_work: Whether another step follows without new messages.
        is_slow: Said in the middle of a step: what follows may take far longer than steps do.
        counts: What the engine counts, by name; None: as in the report before.
        profile: The recording that has just ended; None: none has.
    """

    outputs: list[Any] = field(default_factory=list)
    load: WorkerLoad
    num_received: int
    has_work: bool
    is_slow: bool = False
    counts: Samples | None = None
    profile: ProfileWritten | None = None


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """What the front asks of the engine's loop; the engine itself does not hear of it."""


@dataclass(frozen=True, slots=True)
class EnginePing(EngineOrder):
    """The front asks for a report, nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEngineLogLevel(EngineOrder):
    """The arguments of shared.logs.set_level."""

    logger: str
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordProfile(EngineOrder):
    """Record the next steps.

    Args:
        path: File to write then.
        num_steps: 0: end the recording that is under way.
    """

    path: str = ""
    num_steps: int = 0


EngineEnd = Literal["died", "hung"]
"""Why an engine is no more: it ended or was killed by others; or its front killed it."""


class EngineDiedError(RuntimeError):
    """The engine process ended or could not start; the worker must end too.

    Args:
        exit_code: Of the engine process; negative = the signal that killed it, None = unknown.
    """

    def __init__(
        self, message: str, *, exit_code: int | None = None, cause: EngineEnd = "died"
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.cause = cause


class EngineHandle(Protocol):
    """A running engine as its front sees it."""

    async def start(self, on_progress: ProgressCallback) -> WorkerInfo:
        """Wait until the engine is ready.

        Raises: ConfigError if it refuses its configuration, EngineDiedError if it dies.
        """

    def send(self, messages: Sequence[Any]) -> None:
        """Queue messages for the engine; never blocks."""

    def outputs(self) -> AsyncIterator[EngineReport]:
        """Yield reports until the engine dies: EngineDiedError, or `close`: the end."""

    @property
    def pid(self) -> int | None:
        """Return the engine's process; None: it has none of its own, or none yet."""

    @property
    def is_pending(self) -> bool:
        """Return whether the engine owes a report: it has work or messages it has not taken."""

    def show_stacks(self) -> None:
        """Let the engine write to its log where each of its threads is, whatever it does."""

    def kill(self) -> None:
        """End the engine at once, whatever it does."""

    async def close(self) -> None:
        """End the engine and wait for it."""
