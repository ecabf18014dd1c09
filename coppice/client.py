"""Clients of a Coppice server, blocking and asyncio, with typed results.

A stream that breaks because a server goes away is resumed: the request is sent again with the
tokens received so far and the same seed, and goes on exactly after them, whichever server answers.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import grpc
import grpc.aio
from tenacity import AsyncRetrying, Retrying

from coppice.model import ServedModel, TokenText
from coppice.request import (
    RequestOptions,
    build_request,
    detokenize_request,
    tokenize_request,
)
from coppice.retries import Retries
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.access.tls import Tls
from shared.access.tokens import bearer
from shared.errors import (
    CoppiceError,
    InternalError,
    StaleStateError,
    StatusCode,
    UnavailableError,
)
from shared.messages import (
    FinishInfo,
    FinishReason,
    GenerateEvent,
    PromptInfo,
    RoutedExperts,
    SpeculationStats,
    Timings,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from shared.messages.batches import unpack_events
from shared.messages.routed_experts import join_routed
from shared.rpc.channel import open_blocking_channel, open_channel
from shared.rpc.status import CLIENT_PORT, from_rpc_error

DEFAULT_ADDRESS = "localhost:50051"
_MAX_RETRIES = 5


class DeadlineExceededError(CoppiceError, TimeoutError):
    """The request took longer than `timeout_s`."""

    code = StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledError(CoppiceError):
    """The request was cancelled."""

    code = StatusCode.CANCELLED
    default_reason = "CANCELLED"


def _error_of(call: grpc.Call, timeout_s: float | None) -> CoppiceError:
    """Return the typed error of a failed question."""
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        took = "in time" if timeout_s is None else f"in timeout_s = {timeout_s:g}"
        return DeadlineExceededError(f"the server has not answered {took}")
    return from_rpc_error(call, port=CLIENT_PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole output.

    Args:
        text: Without the stop string, unless asked for.
        logprobs: One per token if asked for, else empty.
        routed_experts: A row per token, if asked for and unless there is no token; else None.
        matched_stop: The stop string or stop token id that ended it, if one did.
        seed: Sending the same request with it gives the same output.
        retries: Times that the server moved or rebuilt the request.
    """

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None
    usage: Usage
    speculation: SpeculationStats
    timings: Timings
    seed: int
    retries: int
    routed_experts: RoutedExperts | None = None


class _Connection:
    """What both clients have: a channel to a server, and what is said with each call."""

    _open_channel: Callable[..., Any]

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = _MAX_RETRIES,
        token: str = "",
        tls: Tls | None = None,
    ) -> None:
        """Open the connection; it is made with the first call.

        Args:
            address: HOST:PORT of the orchestrator.
            max_retries: How often in a row, without a token, a request is sent again when the
                server is UNAVAILABLE; one that was being served is sent again for
                `coppice.retries.RESUME_BUDGET_S`, if that is longer. A server without room is asked
                again when it says; 0: nothing is sent again.
            token: What the server knows this client by; "" if it asks for none.
            tls: None: plain text. `Tls()`: the certificate comes from an authority that gRPC
                trusts.
        Raises: ConfigError if files of `tls` cannot be read, InvalidArgumentError for a token with
            characters that no token has.
        """
        self._metadata = bearer(token)
        self._channel = self._open_channel(address, tls=tls)
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._max_retries = max_retries
        self._is_closed = threading.Event()  # shared with copies, as the channel is
        self._retry_options: dict[str, Any] = {}

    def _require_open(self) -> None:
        """Raise CancelledError once the client is closed; gRPC's own errors are of two kinds."""
        if self._is_closed.is_set():
            raise CancelledError("this client is closed; open another one")

    def _transcript(self, prompt: str | None, options: RequestOptions) -> _Transcript:
        return _Transcript(prompt, options, self._max_retries, **self._retry_options)


class Client(_Connection):
    """A blocking client; threads may share it."""

    _open_channel = staticmethod(open_blocking_channel)

    def generate(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Completion:
        """Return the completion of a prompt.

        Raises: CoppiceError with `code`, `reason` and, if one is to blame, `field`.
        """
        transcript = self._transcript(prompt, options)
        for _ in self._stream(transcript):
            pass
        return transcript.completion()

    def stream(
        self, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[GenerateEvent, None, None]:
        """Yield PromptInfo, then TokenDelta as they come, then FinishInfo.

        Closing the iterator cancels the request.

        Raises: CoppiceError with `code`, `reason` and, if one is to blame, `field`.
        """
        return self._stream(self._transcript(prompt, options))

    def models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """Return what the server serves. Raises: CoppiceError."""
        reply = self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return tuple(map(ServedModel.of, reply.models))

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a text, by the target's tokenizer. Raises: CoppiceError."""
        request = tokenize_request(text, add_special_tokens=add_special_tokens)
        reply = self._call(self._stub.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> TokenText:
        """Return the text of token ids, and the bytes of each. Raises: CoppiceError."""
        request = detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        reply = self._call(self._stub.Detokenize, request, timeout_s)
        return TokenText.of(reply)

    def close(self) -> None:
        """Close the connection; running requests, and later ones, are cancelled."""
        self._is_closed.set()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        self._require_open()
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(cast(grpc.Call, error), timeout_s) from None

    def _stream(self, transcript: _Transcript) -> Generator[GenerateEvent, None, None]:
        for attempt in Retrying(**transcript.retries.policy):
            with attempt:
                self._require_open()
                request, timeout_s = transcript.next_attempt()
                call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
                try:
                    for response in call:
                        yield from transcript.take(response)
                except grpc.RpcError as error:
                    if not transcript.is_finished:
                        is_closed = self._is_closed.is_set()
                        raise transcript.error_of(error, is_closed=is_closed) from None
                finally:
                    call.cancel()
                transcript.check_finished()


class AsyncClient(_Connection):
    """An asyncio client; tasks of one event loop may share it."""

    _open_channel = staticmethod(open_channel)

    async def generate(
        self, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Return the completion of a prompt.

        Raises: CoppiceError with `code`, `reason` and, if one is to blame, `field`.
        """
        transcript = self._transcript(prompt, options)
        async for _ in self._stream(transcript):
            pass
        return transcript.completion()

    def stream(
        self, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield PromptInfo, then TokenDelta as they come, then FinishInfo.

        Closing the iterator cancels the request.

        Raises: CoppiceError with `code`, `reason` and, if one is to blame, `field`.
        """
        return self._stream(self._transcript(prompt, options))

    async def models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """Return what the server serves. Raises: CoppiceError."""
        reply = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return tuple(map(ServedModel.of, reply.models))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a text, by the target's tokenizer. Raises: CoppiceError."""
        request = tokenize_request(text, add_special_tokens=add_special_tokens)
        reply = await self._call(self._stub.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> TokenText:
        """Return the text of token ids, and the bytes of each. Raises: CoppiceError."""
        request = detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        reply = await self._call(self._stub.Detokenize, request, timeout_s)
        return TokenText.of(reply)

    def on_behalf_of(
        self, metadata: Sequence[tuple[str, str]], *, num_refusals: int = 0
    ) -> AsyncClient:
        """Return a client of the same connection for somebody else's request.

        A refusal for want of room is theirs to hear: it is not sent again.

        Args:
            metadata: Of every call, such as their `authorization`.
            num_refusals: How often they were refused before.
        """
        other = copy.copy(self)
        other._metadata = tuple(metadata)
        other._retry_options = {"waits_for_room": False, "num_refusals": num_refusals}
        return other

    async def close(self) -> None:
        """Close the connection; running requests, and later ones, are cancelled."""
        self._is_closed.set()
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        self._require_open()
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(cast(grpc.Call, error), timeout_s) from None

    async def _stream(self, transcript: _Transcript) -> AsyncGenerator[GenerateEvent, None]:
        async for attempt in AsyncRetrying(**transcript.retries.policy):
            with attempt:
                self._require_open()
                request, timeout_s = transcript.next_attempt()
                call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
                try:
                    async for response in call:
                        for event in transcript.take(response):
                            yield event
                except grpc.RpcError as error:
                    if not transcript.is_finished:
                        is_closed = self._is_closed.is_set()
                        raise transcript.error_of(error, is_closed=is_closed) from None
                finally:
                    call.cancel()
                transcript.check_finished()


class _Transcript:
    """What a request has received so far, over all attempts; enough to go on."""

    def __init__(
        self,
        prompt: str | None,
        options: RequestOptions,
        max_retries: int,
        **retry_options: Any,
    ) -> None:
        self._request = build_request(prompt, options)
        self._timeout_s = timeout_s = options.get("timeout_s")
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.retries = Retries(max_retries, self._deadline, **retry_options)
        self._num_resumed = len(self._request.resume_token_ids.ids)
        self._num_attempts = 0
        self._info: PromptInfo | None = None
        self._finish: FinishInfo | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._routed: list[RoutedExperts | None] = []

    def next_attempt(self) -> tuple[pb.GenerateRequest, float | None]:
        """Return the request, going on after what was received, and the time left.

        Raises: DeadlineExceededError if there is none; gRPC would answer a call without time as it
            comes.
        """
        self._num_attempts += 1
        self._request.num_refusals = self.retries.num_refusals
        if self._info is not None:
            self._request.sampling.seed = self._info.seed
            del self._request.resume_token_ids.ids[self._num_resumed :]
            self._request.resume_token_ids.ids.extend(self._token_ids)
            if self._token_ids:
                self._request.resume_fingerprint = self._info.model_fingerprint
        if self._deadline is None:
            return self._request, None
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._late()
        return self._request, left_s

    def take(self, response: pb.GenerateResponse) -> Iterator[GenerateEvent]:
        """Note the events of a message; yield them unless the user has them already."""
        for event in unpack_events(response):
            known = self._note(event)
            if known is not None:
                yield known

    def _note(self, event: GenerateEvent) -> GenerateEvent | None:
        match event:
            case PromptInfo():
                if self._info is not None:
                    self._check_resumed(event)
                    return None
                self._info = event
                self.retries.note_progress()
            case TokenDelta():
                self.retries.note_progress()
                self._token_ids += event.token_ids
                self._text.append(event.text)
                self._logprobs += event.logprobs
                self._routed.append(event.routed_experts)
            case FinishInfo():
                usage = dataclasses.replace(event.usage, num_output_tokens=len(self._token_ids))
                event = self._finish = dataclasses.replace(event, usage=usage)
        return event

    def _check_resumed(self, info: PromptInfo) -> None:
        """Raise if what goes on is not what began; without a token so far, it begins anew."""
        assert self._info is not None
        before, now = self._info.model_fingerprint, info.model_fingerprint
        if self._token_ids and before and now != before:
            raise StaleStateError(
                f"model_fingerprint is {now!r} after {before!r}: the server was replaced by one "
                "that computes otherwise, so the output cannot go on exactly; send the request "
                "anew",
                reason="MODEL_CHANGED",
                field="model_fingerprint",
            )
        self._info = dataclasses.replace(self._info, model=info.model, model_fingerprint=now)

    @property
    def is_finished(self) -> bool:
        """Return whether the output is whole: however the call ends then does not matter."""
        return self._finish is not None

    def check_finished(self) -> None:
        """Raise unless the server has said how the output ended."""
        if not self.is_finished:
            raise InternalError("the server ended the stream without FinishInfo")

    def error_of(self, error: grpc.RpcError, *, is_closed: bool) -> CoppiceError:
        """Return the typed error of a failed call.

        Args:
            is_closed: The client is; else it is a server that stops who cancels calls.
        """
        call = cast(grpc.Call, error)  # an error of a call has the call's status
        known = from_rpc_error(call, port=CLIENT_PORT)
        match call.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return self._late()
            case grpc.StatusCode.CANCELLED if is_closed:
                return CancelledError(known.message)
            case grpc.StatusCode.CANCELLED:
                return UnavailableError(f"the server ended the call: {known.message}")
        if known.reason == "DUPLICATE_REQUEST_ID" and self._num_attempts > 1:
            return UnavailableError("the server still holds the broken stream", reason="RESUMING")
        return known

    def _late(self) -> DeadlineExceededError:
        took = "" if self._timeout_s is None else f"; timeout_s is {self._timeout_s:g}"
        return DeadlineExceededError(
            f"the deadline passed after {len(self._token_ids)} new tokens{took}"
        )

    def completion(self) -> Completion:
        """Return the whole output."""
        assert self._info is not None and self._finish is not None
        return Completion(
            request_id=self._info.request_id,
            model=self._info.model,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self._finish.reason,
            matched_stop=self._finish.matched_stop,
            usage=self._finish.usage,
            speculation=self._finish.speculation,
            timings=self._finish.timings,
            seed=self._info.seed,
            retries=self._finish.retries,
            routed_experts=join_routed(self._routed),
        )
