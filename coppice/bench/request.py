"""One request as its client saw it, over a client that does little else than note times.

The clock is the monotonic one, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coppice.credentials import NO_CREDENTIALS, Credentials
from coppice.v1 import generation_pb2 as pb
from shared.errors import InternalError
from shared.messages import FinishInfo, PromptInfo
from shared.messages.batches import unpack_events
from shared.rpc.channel import open_channel
from shared.rpc.status import CLIENT_PORT, from_rpc_error

_GENERATE = "/coppice.v1.GenerationService/Generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """A request that was served to its end; times in seconds from sending it.

    Args:
        arrivals: (time, tokens) of every delta that held tokens.
        elapsed_s: Until the stream ended.
        sent_s: When it was sent, by the monotonic clock.
    """

    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    elapsed_s: float
    finish: FinishInfo
    info: PromptInfo | None = None
    sent_s: float = 0.0

    @property
    def time_to_first_token_s(self) -> float:
        """Return when the first token arrived."""
        return self.arrivals[0][0] if self.arrivals else self.elapsed_s

    @property
    def time_to_last_token_s(self) -> float:
        """Return when the last token arrived."""
        return self.arrivals[-1][0] if self.arrivals else self.elapsed_s

    @property
    def time_per_output_token_s(self) -> float:
        """Return the time from the first delta to the last, per token after the first one."""
        decoding_s = self.time_to_last_token_s - self.time_to_first_token_s
        return decoding_s / max(1, len(self.token_ids) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between one delta and the next."""
        times = [at for at, _ in self.arrivals]
        return [after - before for before, after in itertools.pairwise(times)]


class TimedClient:
    """An asyncio client with a connection of its own; a request that fails is not sent again.

    Args:
        address: HOST:PORT of the orchestrator.
    """

    def __init__(self, address: str, *, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._metadata = credentials.metadata
        self._channel = open_channel(address, tls=credentials.tls)
        self._generate: Any = self._channel.unary_stream(
            _GENERATE, response_deserializer=pb.GenerateResponse.FromString
        )

    async def run(self, request: bytes) -> RequestResult:
        """Stream one request to its end.

        Args:
            request: A GenerateRequest, serialized.
        Raises: CoppiceError.
        """
        token_ids: list[int] = []
        arrivals: list[tuple[float, int]] = []
        others: list[pb.GenerateResponse] = []
        sent_s = time.monotonic()
        call = self._generate(request, metadata=self._metadata)
        try:
            async for response in call:
                now = time.monotonic()
                if not response.HasField("delta"):
                    others.append(response)
                elif new := response.delta.token_ids:
                    token_ids.extend(new)
                    arrivals.append((now - sent_s, len(new)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, port=CLIENT_PORT) from None
        finally:
            call.cancel()
        elapsed_s = time.monotonic() - sent_s
        events = {type(event): event for message in others for event in unpack_events(message)}
        finish, info = events.get(FinishInfo), events.get(PromptInfo)
        if not isinstance(finish, FinishInfo):
            raise InternalError("the server ended the stream without FinishInfo")
        return RequestResult(
            token_ids=tuple(token_ids),
            arrivals=tuple(arrivals),
            elapsed_s=elapsed_s,
            finish=finish,
            info=info if isinstance(info, PromptInfo) else None,
            sent_s=sent_s,
        )

    async def __aenter__(self) -> TimedClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


async def run_in_turn(
    client: TimedClient, requests: Sequence[bytes], concurrency: int
) -> list[RequestResult]:
    """Run requests, so many at a time: the next one begins when one has ended.

    Raises: CoppiceError of the first request that fails.
    """
    results: dict[int, RequestResult] = {}
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for index, request in waiting:
            results[index] = await client.run(request)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [results[index] for index in range(len(requests))]
