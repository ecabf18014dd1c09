"""The orchestrators behind the gateway: what each serves, and which one takes a request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tenacity import AsyncRetrying

from coppice.client import AsyncClient, DeadlineExceededError
from coppice.gateway.chat_template import ChatTemplate
from coppice.gateway.errors import bad_request, model_not_found
from coppice.model import ServedModel
from coppice.retries import Retries
from shared.access.tls import Tls
from shared.errors import CoppiceError, UnavailableError
from shared.rpc.channel import open_channel
from shared.rpc.health_names import ORCHESTRATOR_SERVICE

logger = logging.getLogger(__name__)

MODELS_FRESH_S = 10.0
_HEALTH_INTERVAL_S = 1.0
QUESTION_TIMEOUT_S = 60.0
"""For a client's question about texts and tokens; a long text takes tens of seconds."""
_ASK_TIMEOUT_S = 5.0
_LEARN_TIMEOUT_S = 15.0  # longer than an orchestrator that hangs is left to live
_MAX_RETRIES = 5
_MAX_MODELS_RETRIES = 2
_MAX_TOKENS_KNOWN = 1 << 20
_MAX_CALLERS_KNOWN = 4096

Metadata = tuple[tuple[str, str], ...]


class TokenTexts:
    """The bytes of tokens of one model, asked for when they are first needed."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    async def learn(self, token_ids: Iterator[int], client: AsyncClient) -> None:
        """Ask for those that are not known, again if the orchestrator is just away or late.

        Raises: CoppiceError.
        """
        missing = sorted({token_id for token_id in token_ids if token_id not in self._known})
        if not missing:
            return
        if len(self._known) + len(missing) > _MAX_TOKENS_KNOWN:
            self._known.clear()
        retries = Retries(_MAX_RETRIES, None)
        retries.note_progress()  # the orchestrator has sent the ids: it is given time to come back
        async for attempt in AsyncRetrying(**retries.policy):
            with attempt, _late_as_away():
                found = await client.detokenize(missing, timeout_s=_LEARN_TIMEOUT_S)
                self._known.update(zip(missing, found.token_bytes, strict=True))

    def __getitem__(self, token_id: int) -> bytes:
        return self._known[token_id]


@dataclass(eq=False, kw_only=True)
class Model:
    """A model of an orchestrator, and what is made of it once."""

    card: ServedModel
    tokens: TokenTexts = field(default_factory=TokenTexts)

    def __post_init__(self) -> None:
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate | None:
        """Return its chat templates; None: it has none.

        Raises: TemplateError if one cannot be read.
        """
        if self._template is None and self.card.chat_templates:
            self._template = ChatTemplate(self.card.chat_templates, self.card.special_tokens)
        return self._template


class Upstream:
    """An orchestrator.

    Args:
        address: HOST:PORT.
        tls: None: plain text.
        num_connections: Each stays with one of its processes.
    """

    def __init__(self, address: str, *, tls: Tls | None, num_connections: int) -> None:
        self.address = address
        self.models: dict[str, Model] = {}
        self.is_ready = False
        self.was_asked = False
        """Whether `is_ready` is known."""
        self.num_running = 0
        """Requests of this gateway there."""
        self._clients = [AsyncClient(address, tls=tls) for _ in range(num_connections)]
        self._turn = itertools.cycle(self._clients)
        self._channel = open_channel(address, tls=tls)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        # By who asks: what one may see is not shown to others.
        self._fresh_until: dict[bytes, float] = {}
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def client(self, metadata: Metadata, *, num_refusals: int = 0) -> AsyncClient:
        """Return a client for one request of somebody's."""
        return next(self._turn).on_behalf_of(metadata, num_refusals=num_refusals)

    def knows_models(self, metadata: Metadata) -> bool:
        """Return whether who asks has been told a moment ago what is served."""
        fresh_until = self._fresh_until.get(_caller_key(metadata), 0.0)
        return asyncio.get_running_loop().time() < fresh_until

    async def learn_models(self, metadata: Metadata) -> None:
        """Ask what is served, unless it was asked a moment ago. Raises: CoppiceError."""
        if self.knows_models(metadata):
            return
        key = _caller_key(metadata)
        asking = self._asking.setdefault(key, asyncio.Lock())
        async with asking:
            if self.knows_models(metadata):
                return
            with _late_as_away():
                cards = await self.client(metadata).models(timeout_s=_ASK_TIMEOUT_S)
            self.models = {card.name: self._known(card) or Model(card=card) for card in cards}
            self._note_fresh(key)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request for the length of a block."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    async def follow_health(self) -> None:
        """Keep `is_ready` as the orchestrator says it."""
        while True:
            problem = await self._ask_health()
            is_ready = not problem
            if is_ready != self.is_ready or not self.was_asked:
                said = f"not ready: {problem}" if problem else "ready"
                logger.info("%s is %s", self.address, said)
                self._fresh_until.clear()
            self.is_ready, self.was_asked = is_ready, True
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(self._channel.close(), *(client.close() for client in self._clients))

    def _note_fresh(self, key: bytes) -> None:
        now_s = asyncio.get_running_loop().time()
        if len(self._fresh_until) >= _MAX_CALLERS_KNOWN:
            self._fresh_until.clear()
        self._fresh_until[key] = now_s + MODELS_FRESH_S

    def _known(self, card: ServedModel) -> Model | None:
        model = self.models.get(card.name)
        return model if model is not None and model.card == card else None

    async def _ask_health(self) -> str:
        """Return why the orchestrator takes no requests; "": it does."""
        request = health_pb2.HealthCheckRequest(service=ORCHESTRATOR_SERVICE)
        try:
            reply = await self._health.Check(request, timeout=_ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        return "" if status == "SERVING" else f"it is {status}"


class Upstreams:
    """All orchestrators.

    Args:
        addresses: HOST:PORT of each, at least one.
    """

    def __init__(self, addresses: Sequence[str], *, tls: Tls | None, num_connections: int) -> None:
        self._all = [
            Upstream(address, tls=tls, num_connections=num_connections) for address in addresses
        ]
        self._turns: Counter[str] = Counter()

    @property
    def is_ready(self) -> bool:
        """Return whether one of them takes requests.

        Not before each was asked once: a model of one not yet heard of would not be found.
        """
        is_known = all(upstream.was_asked for upstream in self._all)
        return is_known and any(upstream.is_ready for upstream in self._all)

    async def follow_health(self) -> None:
        """Keep up with the health of all of them."""
        await asyncio.gather(*(upstream.follow_health() for upstream in self._all))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(upstream.close() for upstream in self._all))

    async def models(self, metadata: Metadata) -> list[Model]:
        """Return what is served, each name once.

        Raises: CoppiceError if none of the orchestrators says it.
        """
        await self._learn(metadata)
        found: dict[str, Model] = {}
        for upstream in self._all:
            found = {**upstream.models, **found}
        return list(found.values())

    async def find(
        self, name: str | None, metadata: Metadata, *, session_id: str = ""
    ) -> tuple[Upstream, Model]:
        """Return who takes a request: of those that serve the model, the one with the fewest.

        Args:
            name: Of the model; None: the only one.
            session_id: Requests of one go to the same orchestrator as long as the same are ready.
        Raises: ApiError if nobody serves it or it has to be named, CoppiceError if no orchestrator
            answers.
        """
        await self._learn(metadata)
        if name is None:
            name = self._only_name()
        those = [upstream for upstream in self._all if name in upstream.models]
        if not those:
            raise model_not_found(name)
        ready = _ready_of(those)
        if session_id:
            chosen = ready[zlib.crc32(session_id.encode()) % len(ready)]
        else:
            turn = self._turns[name] % len(ready)  # of those with equally many, each in turn
            self._turns[name] += 1
            chosen = min(ready[turn:] + ready[:turn], key=lambda upstream: upstream.num_running)
        return chosen, chosen.models[name]

    def _only_name(self) -> str:
        names = {name for upstream in self._all for name in upstream.models}
        if len(names) != 1:
            raise bad_request(
                "missing required parameter: model; it may be left out where one is served, and "
                f"here are {len(names)}: GET /v1/models lists them",
                param="model",
                code="missing_required_parameter",
            )
        return next(iter(names))

    async def _learn(self, metadata: Metadata) -> None:
        """Know the models of some orchestrator; ask again if all are just away or late.

        Raises: CoppiceError if none of them says anything.
        """
        if all(upstream.knows_models(metadata) for upstream in _ready_of(self._all)):
            return
        async for attempt in AsyncRetrying(**Retries(_MAX_MODELS_RETRIES, None).policy):
            with attempt:
                await self._ask_models(metadata)

    async def _ask_models(self, metadata: Metadata) -> None:
        """Ask those that are ready, or all if none is: who is away holds nobody up.

        Raises: CoppiceError if none of them says anything.
        """
        asked = _ready_of(self._all)
        answers = await asyncio.gather(
            *(upstream.learn_models(metadata) for upstream in asked), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, CoppiceError):
                raise error
        if len(errors) == len(asked):
            others = [error for error in errors if not isinstance(error, UnavailableError)]
            raise (others or errors)[0]


def _ready_of(upstreams: list[Upstream]) -> list[Upstream]:
    """Return those that are ready, or all if none is."""
    return [upstream for upstream in upstreams if upstream.is_ready] or upstreams


@contextlib.contextmanager
def _late_as_away() -> Iterator[None]:
    """Have a question that was not answered in time be asked again, as if nobody were there."""
    try:
        yield
    except DeadlineExceededError as error:
        raise UnavailableError(error.message) from None


def _caller_key(metadata: Metadata) -> bytes:
    """Return what tells callers apart, without their tokens."""
    return hashlib.sha256(dict(metadata).get("authorization", "").encode()).digest()
