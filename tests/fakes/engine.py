"""What all fake engines share: the members of an engine, a table of requests, how they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shared.errors import CoppiceError
from shared.messages import RequestFailure, WorkerInfo, WorkerLoad
from shared.peer.channel import PeerChannel, PeerChannels
from shared.rpc.status import failure_of
from tests.fakes.model import VOCAB_SIZE

NUM_PAGES = 1000


class BareEngine:
    """The members of an engine that has no channels, no device and nothing to leak."""

    has_work_in_s: float | None = None

    @property
    def counts(self) -> dict[str, float]:
        return {"coppice_retractions_total": 0.0}

    @property
    def channels(self) -> PeerChannels:
        return PeerChannels()

    def prepare(self, message: Any) -> None:
        """Nothing takes long."""

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        raise AssertionError(f"{message} over a channel that does not exist")

    def check_integrity(self) -> None:
        """There is nothing to leak."""


class FakeRequest(Protocol):
    """A request that a fake engine holds."""

    @property
    def open(self) -> Any:
        """Return the message that opened it."""


Request = TypeVar("Request", bound=FakeRequest)


@dataclass(eq=False)
class FakeEngine(BareEngine, Generic[Request]):
    """Takes messages, answers bad ones with a failure, and keeps what it has to say until `step`.

    Args:
        requests: By request_id.
        received: Every message of the front, in order.
        num_pages_taken: Pages that are not free for another reason than a request here.
        to_peer: Messages to the engine that a request's peer channel leads to, to be carried there.
    """

    requests: dict[str, Request] = field(default_factory=dict)
    received: list[Any] = field(default_factory=list)
    to_peer: list[Any] = field(default_factory=list)
    outbox: list[Any] = field(default_factory=list)
    num_steps: int = 0
    num_pages_taken: int = 0

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=len(self.requests),
            num_free_pages=self.num_free_pages,
            num_pages=NUM_PAGES,
            num_steps=self.num_steps,
        )

    def describe(self, **own: Any) -> WorkerInfo:
        """Return who a worker with this engine is: what all have in common, and its own."""
        return WorkerInfo(
            model="fake",
            tokenizer_hash="",
            vocab_size=VOCAB_SIZE,
            page_size=16,
            dtype="float32",
            device="cpu",
            load=self.load,
            **own,
        )

    @property
    def num_free_pages(self) -> int:
        """Return the free pages; a request takes one."""
        return NUM_PAGES - len(self.requests) - self.num_pages_taken

    def submit(self, message: Any) -> None:
        self.received.append(message)
        self.handle(message)

    def handle(self, message: Any) -> None:
        """Take a message, answer it with a failure if it is a bad one."""
        try:
            self.take(message)
        except CoppiceError as error:
            self.fail(message, failure_of(error, message))

    def take(self, message: Any) -> None:
        """Take a message of the front.

        Raises: CoppiceError if it is a bad one.
        """
        raise NotImplementedError

    def fail(self, message: Any, failure: RequestFailure) -> None:
        """Answer a bad message."""
        self.outbox.append(failure)

    def take_outbox(self) -> list[Any]:
        """Return what there is to say, once."""
        outbox, self.outbox = self.outbox, []
        return outbox

    def take_to_peer(self) -> list[Any]:
        """Return what there is to say over peer channels, once."""
        to_peer, self.to_peer = self.to_peer, []
        return to_peer

    def held(self, message: Any) -> Request | None:
        """Return the request of a message if it is held here in the same target_epoch."""
        request = self.requests.get(message.request_id)
        is_same = request is not None and request.open.target_epoch == message.target_epoch
        return request if is_same else None
