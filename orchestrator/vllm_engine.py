"""VllmEngine beside GenerationService: gateways that speak vLLM's gRPC serve Coppice as it is.

`smg --worker-urls grpc://HOST:50051` asks for health, model and tokenizer, sends token ids and gets
token ids. A call becomes one of GenerationService, in the same process; what cannot be honoured
(grammars, media, logprobs of prompts) is refused by name. Needs `smg-grpc-proto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from coppice.v1 import generation_pb2 as pb
from orchestrator.admission import Admission
from orchestrator.pool import WorkerPool
from orchestrator.service import GenerationService
from shared.access.watched_file import WatchedFiles
from shared.config import OrchestratorConfig, served_name
from shared.errors import AbortedError, InvalidArgumentError, UnavailableError
from shared.messages import FinishInfo, FinishReason, PromptInfo, TokenDelta, TokenLogprob
from shared.messages.batches import unpack_events
from shared.rpc.auth import caller_name

_CHUNK_BYTES = 1 << 20
_MAX_OUTPUTS = 128
_TOKENIZER_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt"),
)
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.ABORTED: "abort",
}
_MEDIA = ("mm_inputs", "media_refs")
_ANY_OBJECT = '{"type": "object"}'
_REFUSED = ("prompt_logprobs", "truncate_prompt_tokens")


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The service.

    Args:
        service: Does the work.
        directory: Of the checkpoint.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        service: GenerationService,
        pool: WorkerPool,
        admission: Admission,
        directory: Path,
    ) -> None:
        self._config = config
        self._service = service
        self._pool = pool
        self._admission = admission
        self._open: dict[tuple[str, str], _Open] = {}  # by who asks and the gateway's id
        self._directory = directory
        self._archive = TokenizerArchive(directory)
        self._began_s = time.monotonic()
        self._model_config = json.loads((directory / "config.json").read_text(encoding="utf-8"))

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Stream the outputs of one prompt."""
        own = generation_request(request)
        with self._may_be_ended(request.request_id, caller_name(context)):
            await self._generate(own, request, context)

    async def _generate(self, own: pb.GenerateRequest, request: Any, context: Any) -> None:
        num_outputs = request.sampling_params.n or 1
        writing = asyncio.Lock()
        calls = [
            _Call(context, index, writing, is_streamed=request.stream)
            for index in range(num_outputs)
        ]
        if num_outputs == 1:
            await self._service.Generate(own, calls[0])  # type: ignore[arg-type]
            return
        try:
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    output = _numbered(own, call.index)
                    group.create_task(self._service.Generate(output, call))  # type: ignore[arg-type]
        except ExceptionGroup as failed:  # the others are cancelled
            raise failed.exceptions[0] from None

    async def Embed(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Say that there is no such thing."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not do that")

    FlushCache = StartProfile = StopProfile = SubscribeKvEvents = Embed

    async def Abort(self, request: Any, context: Any) -> Any:
        """End the caller's requests of this process; those that are unknown have ended."""
        for request_id in request.request_ids:
            found = self._open.get((caller_name(context), request_id))
            if found is not None:
                found.end()
        return vllm_engine_pb2.AbortResponse()

    @contextlib.contextmanager
    def _may_be_ended(self, request_id: str, caller: str) -> Iterator[None]:
        """Let `Abort` of the same caller end what runs in this block.

        Raises: AbortedError then.
        """
        task = asyncio.current_task()
        assert task is not None
        key, opened = (caller, request_id), _Open(task)
        if request_id:
            self._open.setdefault(key, opened)  # of two with one id the second is refused
        try:
            yield
        except asyncio.CancelledError:
            if not opened.is_ended:
                raise
            task.uncancel()
            raise AbortedError("the gateway has ended the request") from None
        finally:
            if self._open.get(key) is opened:
                del self._open[key]

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Say whether requests are taken."""
        is_ready = self._pool.is_ready
        message = "OK" if is_ready else "no target worker is ready"
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_ready, message=message)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Say what is served."""
        model = self._pool.model
        if model is None:
            raise UnavailableError("no target worker is ready; try again later", reason="NO_TARGET")
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=str(self._directory),
            tokenizer_path=str(self._directory),
            is_generation=True,
            max_context_length=model.max_context_len,
            max_req_input_len=model.max_context_len - 1,
            vocab_size=model.vocab_size,
            served_model_name=served_name(self._config),
            model_type=self._model_config.get("model_type", ""),
            architectures=self._model_config.get("architectures", []),
            eos_token_ids=model.eos_token_ids,
            pad_token_id=self._model_config.get("pad_token_id") or 0,
            bos_token_id=self._model_config.get("bos_token_id") or 0,
            default_sampling_params_json="{}",
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Say what runs."""
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._admission.num_requests,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=self._config.max_num_requests,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Say how busy this process is."""
        num_waiting, num_all = self._pool.num_waiting, self._admission.num_requests
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=max(0, num_all - num_waiting),
            num_waiting_reqs=num_waiting,
            num_total_reqs=num_all,
            max_running_requests=self._config.max_num_requests,
        )
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version="coppice",
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Stream the tokenizer's files as a zip; the last chunk has its hash."""
        data, digest = await asyncio.to_thread(self._archive.current)
        for start in range(0, len(data), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(data)
            yield common_pb2.GetTokenizerChunk(
                data=data[start : start + _CHUNK_BYTES], sha256=digest if is_last else ""
            )


def generation_request(request: Any) -> pb.GenerateRequest:
    """Return the request of GenerationService that a gateway's request means.

    Fields without presence have vLLM's defaults where they are 0.

    Raises: InvalidArgumentError naming what cannot be honoured.
    """
    given = request.sampling_params
    _check(request, given)
    sampling = pb.SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p or 1.0,
        min_p=given.min_p,
        top_k=given.top_k,
        repetition_penalty=given.repetition_penalty or 1.0,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=given.seed % 2**64 if given.HasField("seed") else None,
        logit_bias=dict(given.logit_bias),
    )
    stopping = pb.StoppingCriteria(
        max_new_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        min_new_tokens=given.min_tokens,
        stop_strings=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        include_stop_in_output=given.include_stop_str_in_output,
    )
    output = pb.OutputOptions(
        logprobs=given.HasField("logprobs"), top_logprobs=max(0, given.logprobs), omit_text=True
    )
    own = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=sampling,
        stopping=stopping,
        output=output,
        structured_output=_structured_output(given),
    )
    if request.WhichOneof("input") == "tokenized":
        own.token_ids.ids.extend(request.tokenized.input_ids)
    else:
        own.text = request.text
    return own


def _structured_output(given: Any) -> pb.StructuredOutput | None:
    """Return what the output must be; None: it is free."""
    match given.WhichOneof("constraint"):
        case "json_schema":
            return pb.StructuredOutput(json_schema=given.json_schema)
        case "json_object" if given.json_object:
            return pb.StructuredOutput(json_schema=_ANY_OBJECT)
        case "regex":
            return pb.StructuredOutput(regex=given.regex)
        case "grammar":
            return pb.StructuredOutput(ebnf=given.grammar)
        case "structural_tag":
            return pb.StructuredOutput(structural_tag=given.structural_tag)
        case "choice":
            return pb.StructuredOutput(choice=pb.Choices(texts=given.choice.choices))
    return None


def _numbered(request: pb.GenerateRequest, index: int) -> pb.GenerateRequest:
    """Return the request of one of several outputs: its own name, and its own seed if any."""
    output = pb.GenerateRequest()
    output.CopyFrom(request)
    if request.request_id:
        output.request_id = f"{request.request_id}-{index}"
    if request.sampling.HasField("seed"):
        output.sampling.seed = (request.sampling.seed + index) % 2**64
    return output


def _check(request: Any, given: Any) -> None:
    if given.n > _MAX_OUTPUTS:
        raise InvalidArgumentError(
            f"sampling_params.n is {given.n}, at most {_MAX_OUTPUTS} are allowed",
            field="sampling_params.n",
        )
    for name in _REFUSED:
        if given.HasField(name):
            raise _unsupported(f"sampling_params.{name}", "leave it out")
    if given.logprobs < 0:
        raise _unsupported("sampling_params.logprobs", "it is -1; ask for 20 at most")
    for name in _MEDIA:
        if request.HasField(name):
            raise _unsupported(name, "models of text only")
    if request.extra_mm_inputs:
        raise _unsupported("extra_mm_inputs", "models of text only")
    for name in ("kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise _unsupported(name, "prefill and decoding are not apart")


def _unsupported(field: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} is not supported: {why}", field=field)


@dataclass(slots=True, eq=False)
class _Open:
    """A call of Generate that runs."""

    task: asyncio.Task[Any]
    is_ended: bool = False

    def end(self) -> None:
        """Cancel it, and with it all of its outputs."""
        if not self.is_ended:
            self.is_ended = True
            self.task.cancel()


class _Call:
    """The context of one output's call: what is written to it leaves as the gateway knows it.

    Args:
        writing: Of the call that all outputs share.
        is_streamed: Tokens leave as they come, else all of them at the end.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        index: int,
        writing: asyncio.Lock,
        *,
        is_streamed: bool,
    ) -> None:
        self.index = index
        self._context = context
        self._writing = writing
        self._is_streamed = is_streamed
        self._info: PromptInfo | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: pb.GenerateResponse) -> None:
        """Pass on the events of a message."""
        for event in unpack_events(response):
            message = self._message_of(event)
            if message is not None:
                async with self._writing:
                    await self._context.write(message)

    def _message_of(self, event: PromptInfo | TokenDelta | FinishInfo) -> Any:
        if isinstance(event, PromptInfo):
            self._info = event
            return None
        if isinstance(event, FinishInfo):
            return vllm_engine_pb2.GenerateResponse(complete=self._complete(event))
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        if not self._is_streamed or not event.token_ids:
            return None
        assert self._info is not None
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=event.token_ids,
            prompt_tokens=self._info.num_prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=self._info.num_cached_tokens,
            output_logprobs=_logprobs(event.logprobs),
            index=self.index,
        )
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _complete(self, finish: FinishInfo) -> Any:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=_FINISH[finish.reason],
            prompt_tokens=finish.usage.num_prompt_tokens,
            completion_tokens=finish.usage.num_output_tokens,
            cached_tokens=finish.usage.num_cached_tokens,
            output_logprobs=_logprobs(self._logprobs),
            index=self.index,
            spec_accepted_tokens=finish.speculation.num_accepted_drafts,
            spec_draft_tokens=finish.speculation.num_draft_tokens,
        )
        if isinstance(finish.matched_stop, str):
            complete.matched_stop_str = finish.matched_stop
        elif finish.matched_stop is not None:
            complete.matched_token_id = finish.matched_stop
        return complete


def _logprobs(entries: Any) -> Any:
    if not entries:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[
            vllm_engine_pb2.TopLogProbs(
                token_ids=[token_id for token_id, _ in entry.top],
                values=[logprob for _, logprob in entry.top],
            )
            for entry in entries
        ],
    )


class TokenizerArchive:
    """The tokenizer's files as a zip, made again when they change. Any thread may ask.

    Args:
        directory: Of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: WatchedFiles[tuple[bytes, str]] | None = None
        self._lock = threading.Lock()

    def current(self) -> tuple[bytes, str]:
        """Return the zip and its SHA-256."""
        with self._lock:
            if self._files is None:  # whoever calls no such gateway makes no zip
                paths = (str(self._directory / name) for name in _TOKENIZER_FILES)
                self._files = WatchedFiles(tuple(paths), self._zip)
            return self._files.current()[0]

    def _zip(self) -> tuple[bytes, str]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in _TOKENIZER_FILES:
                if (self._directory / name).is_file():
                    archive.write(self._directory / name, name)
        data = buffer.getvalue()
        return data, hashlib.sha256(data).hexdigest()
