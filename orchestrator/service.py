"""GenerationService: check a request, run it, stream what it yields; say what is served."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import replace
from typing import Any

import grpc.aio

from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from orchestrator.accept_watch import AcceptWatch
from orchestrator.admission import Admission, Place
from orchestrator.encoding import PromptEncoder
from orchestrator.grammars import Grammars
from orchestrator.metrics import RequestEnd, RequestMetrics
from orchestrator.model_card import ModelCard
from orchestrator.outgoing import WriteTurns
from orchestrator.pairing import ModelIdentity
from orchestrator.pool import WorkerPool
from orchestrator.readers import Readers
from orchestrator.request_log import RequestLog, logged_end
from orchestrator.rounds import Generation
from orchestrator.running import Held, Running
from orchestrator.shape import default_shape
from orchestrator.tenants import Tenants
from orchestrator.timed_loop import idle_clock
from orchestrator.tokenizer import Tokenizer
from orchestrator.tracing import RequestTrace, Tracing
from orchestrator.validation import (
    GenerationRequest,
    ModelLimits,
    check_vocabulary,
    parse_request,
    with_prompt,
)
from shared.config import OrchestratorConfig
from shared.errors import InvalidArgumentError, StaleStateError, UnavailableError
from shared.messages import FinishInfo, WorkerInfo
from shared.messages.batches import pack_events
from shared.request_ids import worker_request_id
from shared.rpc.auth import caller_name

_LARGE_BYTES = 4096  # of a grammar, from which on it takes milliseconds to check


class GenerationService(pb_grpc.GenerationServiceServicer):
    """The public service.

    Args:
        tokenizer: None if the model has none: then prompts are token ids and there is no text.
        card: What clients are told of the model.
        grammars: Compiles those of outputs.
    Raises: ConfigError if the configuration cannot work.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        pool: WorkerPool,
        admission: Admission,
        tokenizer: Tokenizer | None,
        card: ModelCard,
        grammars: Grammars,
    ) -> None:
        self._config = config
        self._pool = pool
        self._admission = admission
        self._tokenizer = tokenizer
        self._card = card
        self._grammars = grammars
        self._encoder = PromptEncoder(tokenizer) if tokenizer is not None else None
        self._incarnation = secrets.token_hex(4)
        self._serial = itertools.count()
        self._turns = WriteTurns(idle_s=idle_clock())
        self.metrics = RequestMetrics()
        self._acceptance = AcceptWatch(config.expected_accept_length)
        self.running = Running()
        self.tracing = Tracing(config.otlp_endpoint, sample_rate=config.trace_sample_rate)
        self._tenants = Tenants(config.max_priority)
        self._readers = Readers(
            self._turns,
            timeout_s=config.read_timeout_s,
            lifetime_s=config.stream_lifetime_s,
            max_unread_bytes=config.max_unread_mb << 20,
            is_crowded=lambda: admission.is_crowded or pool.num_waiting > 0,
        )

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        """Stream the completion of one prompt."""
        trace = self.tracing.begin(context.invocation_metadata())

        def on_end(end: RequestEnd) -> None:
            self.metrics.note_end(end)
            if end.speculation is not None:
                self._acceptance.note(end.speculation)
            trace.end(end)

        with logged_end(request.request_id, context.time_remaining, on_end) as log:
            log.tenant = caller_name(context)
            log.trace_id = trace.trace_id
            await self._generate(request, context, log, trace)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
        log: RequestLog,
        trace: RequestTrace,
    ) -> None:
        model, is_awaited = self._served(), self._pool.model is None
        limits = ModelLimits(
            vocab_size=model.vocab_size,
            max_context_len=model.max_context_len,
            default_shape=default_shape(self._config, model.device),
        )
        if request.structured_output.ByteSize() > _LARGE_BYTES:  # others are answered meanwhile
            parsed = await asyncio.to_thread(parse_request, request, limits)
        else:
            parsed = parse_request(request, limits)
        log.request_id = parsed.request_id  # which may be made up
        self._check_services(parsed, model)
        _check_resumable(parsed, model)
        parsed = self._tenants.own(parsed, log.tenant)
        with self._admission.admit(
            parsed.request_id, tenant=parsed.tenant, comes_again=parsed.num_refusals > 0
        ) as place:
            prompt_ids = await self._tokenize(parsed, limits)
            if parsed.grammar is not None:
                compiled = await self._grammars.compile(parsed.grammar, model)
                parsed = replace(parsed, compiled_grammar=compiled)
            ready = replace(with_prompt(parsed, prompt_ids, limits), is_traced=trace.is_sampled)
            log.is_admitted = True
            generation = Generation(
                ready,
                worker_request_id=worker_request_id(
                    *(self._incarnation, next(self._serial), parsed.request_id),
                    trace_id=trace.trace_id,
                ),
                model=model,
                is_awaited=is_awaited,
                pool=self._pool,
                config=self._config,
                tokenizer=self._tokenizer,
                log=log,
                turns=self._turns,
                metrics=self.metrics,
            )
            trace.watch(parsed.request_id, generation.reply)
            task = asyncio.create_task(generation.run())
            task.add_done_callback(lambda _: place.release())
            with self.running.holds(parsed.request_id, generation, task) as held:
                await _stream(held, context, place, self._readers, log)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        """Say what is served."""
        model = self._served()
        card = pb.ModelCard(
            name=self._card.name,
            model_fingerprint=ModelIdentity.of(model).fingerprint,
            max_context_len=model.max_context_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_tokenizer=self._tokenizer is not None,
            chat_templates=self._card.chat_templates,
            special_tokens=self._card.special_tokens,
            can_speculate=self._pool.can_speculate,
            started_s=self._card.started_s,
        )
        return pb.ListModelsResponse(models=[card])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Return the token ids of a text."""
        model, encoder = self._served(), self._encoder
        if encoder is None:
            raise _no_tokenizer("text")
        adds_special = request.add_special_tokens or not request.HasField("add_special_tokens")
        ids = await encoder.encode(
            request.text, max_num_tokens=model.max_context_len, adds_special=adds_special
        )
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids, and the bytes of each."""
        model, encoder, ids = self._served(), self._encoder, request.token_ids
        if encoder is None:
            raise _no_tokenizer("token_ids")
        if len(ids) > model.max_context_len:
            raise InvalidArgumentError(
                f"token_ids holds {len(ids)} ids, at most {model.max_context_len} are allowed: as "
                "many as the context",
                field="token_ids",
            )
        check_vocabulary(ids, model.vocab_size, field="token_ids")
        text, token_bytes = await encoder.spell(ids, skips_special=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=text, token_bytes=token_bytes)

    def _served(self) -> WorkerInfo:
        """Return what is served, or was until just now.

        Raises: UnavailableError if no target is ready, nor was one lately.
        """
        model = self._pool.model or self._pool.lost_model(self._config.step_timeout_s)
        if model is None:
            raise UnavailableError("no target worker is ready; try again later", reason="NO_TARGET")
        return model

    def _check_services(self, request: GenerationRequest, model: WorkerInfo) -> None:
        """Refuse what this deployment cannot do."""
        if request.grammar is not None and not model.has_grammars:
            raise InvalidArgumentError(
                "this model has no tokenizer.json or no stop token, so that its output cannot be "
                "constrained; leave structured_output out",
                reason="NO_TOKENIZER",
                field="structured_output",
            )
        if request.routed_experts and not model.num_experts:
            raise InvalidArgumentError(
                "this model has no experts that tokens could be routed to; leave "
                "output.routed_experts out",
                reason="NO_EXPERTS",
                field="output.routed_experts",
            )
        if request.requires_draft:
            self._require_draft()
        if self._tokenizer is None and (request.text is not None or request.stop_strings):
            raise _no_tokenizer("text" if request.text is not None else "stopping.stop_strings")

    def _require_draft(self) -> None:
        """Raise UnavailableError if there is no draft, or none that fits."""
        problems = self._pool.pairs.problems
        if not self._config.drafts:
            problem = "this server has no draft worker; use AUTO"
        elif problems and not self._pool.can_speculate:
            problem = f"no draft fits: {next(iter(problems.values()))}"
        else:
            return
        raise UnavailableError(
            f"speculation.mode is ON, but {problem}", reason="NO_DRAFT", field="speculation.mode"
        )

    async def _tokenize(self, request: GenerationRequest, limits: ModelLimits) -> tuple[int, ...]:
        if request.text is None:
            return request.prompt_ids
        assert self._encoder is not None
        return await self._encoder.encode(
            request.text,
            max_num_tokens=limits.max_context_len,
            adds_special=request.adds_special,
        )


def _no_tokenizer(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "this model has no tokenizer.json; send token_ids and no stop strings",
        reason="NO_TOKENIZER",
        field=field,
    )


def _check_resumable(request: GenerationRequest, model: WorkerInfo) -> None:
    """Refuse to go on after tokens that something else has computed."""
    fingerprint = ModelIdentity.of(model).fingerprint
    if request.resume_fingerprint not in ("", fingerprint):
        raise StaleStateError(
            f"resume_fingerprint is {request.resume_fingerprint!r}, what serves now is "
            f"{fingerprint!r}: weights, dtype, quantization, dtype of the KV cache, machine or "
            "versions have changed, and the output could not go on exactly; send the request anew, "
            "without resume_token_ids",
            reason="MODEL_CHANGED",
            field="resume_fingerprint",
        )


async def _stream(
    held: Held,
    context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    place: Place,
    readers: Readers,
    log: RequestLog,
) -> None:
    """Write what a request generates; whatever ends this frees the workers."""
    outgoing, task = held.generation.events, held.task
    try:
        async with readers.watched(outgoing, place) as reader:
            held.reader = reader
            while events := await outgoing.take():
                log.is_finish_sent = isinstance(events[-1], FinishInfo)
                reader.begin_write()
                await context.write(pack_events(events))
                reader.end_write()
            await task
    finally:
        task.cancel()
        outgoing.discard()
        await asyncio.gather(task, return_exceptions=True)
