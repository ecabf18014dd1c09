"""GenerationService: check a request, run it, stream what it yields."""

from __future__ import annotations

import asyncio
import itertools
import secrets

import grpc.aio

from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from orchestrator.admission import Admission
from orchestrator.encoding import PromptEncoder
from orchestrator.outgoing import WriteTurns
from orchestrator.pairing import ModelIdentity
from orchestrator.pool import WorkerPool
from orchestrator.request_log import RequestLog, logged_end
from orchestrator.rounds import Generation
from orchestrator.shape import default_shape
from orchestrator.tokenizer import Tokenizer
from orchestrator.validation import GenerationRequest, ModelLimits, parse_request, with_prompt
from shared.config import OrchestratorConfig
from shared.errors import InvalidArgumentError, StaleStateError, UnavailableError
from shared.messages import WorkerInfo
from shared.messages.batches import pack_events


class GenerationService(pb_grpc.GenerationServiceServicer):
    """The public service.

    Args:
        tokenizer: None if the model has none: then prompts are token ids and there is no text.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        pool: WorkerPool,
        admission: Admission,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._admission = admission
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer) if tokenizer is not None else None
        self._incarnation = secrets.token_hex(4)
        self._serial = itertools.count()
        self._turns = WriteTurns()

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        """Stream the completion of one prompt."""
        with logged_end(request.request_id, context.time_remaining) as log:
            await self._generate(request, context, log)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
        log: RequestLog,
    ) -> None:
        model = self._pool.model
        if model is None:
            raise UnavailableError("no target worker is ready; try again later", reason="NO_TARGET")
        limits = ModelLimits(
            vocab_size=model.vocab_size,
            max_context_len=model.max_context_len,
            default_shape=default_shape(self._config, model.device),
        )
        parsed = parse_request(request, limits)
        log.request_id = parsed.request_id  # which may be made up
        self._check_services(parsed)
        _check_resumable(parsed, model)
        with self._admission.admit(parsed.request_id):
            prompt_ids = await self._tokenize(parsed, limits)
            generation = Generation(
                with_prompt(parsed, prompt_ids, limits),
                worker_request_id=f"{self._incarnation}.{next(self._serial)}.{parsed.request_id}",
                model=model,
                pool=self._pool,
                config=self._config,
                tokenizer=self._tokenizer,
                log=log,
                turns=self._turns,
            )
            await _stream(generation, context)

    def _check_services(self, request: GenerationRequest) -> None:
        """Refuse what this deployment cannot do."""
        if request.requires_draft and not self._config.drafts:
            raise UnavailableError(
                "speculation.mode is ON, but this server has no draft worker; use AUTO",
                reason="NO_DRAFT",
                field="speculation.mode",
            )
        if request.requires_draft and self._pool.pair_problems and not self._pool.can_speculate:
            problem = next(iter(self._pool.pair_problems.values()))
            raise UnavailableError(
                f"speculation.mode is ON, but no draft fits: {problem}",
                reason="NO_DRAFT",
                field="speculation.mode",
            )
        if self._tokenizer is None and (request.text is not None or request.stop_strings):
            raise InvalidArgumentError(
                "this model has no tokenizer.json; send token_ids and no stop strings",
                reason="NO_TOKENIZER",
                field="text" if request.text is not None else "stopping.stop_strings",
            )

    async def _tokenize(self, request: GenerationRequest, limits: ModelLimits) -> tuple[int, ...]:
        if request.text is None:
            return request.prompt_ids
        assert self._encoder is not None
        return await self._encoder.encode(request.text, max_num_tokens=limits.max_context_len)


def _check_resumable(request: GenerationRequest, model: WorkerInfo) -> None:
    """Refuse to go on after tokens that something else has computed."""
    fingerprint = ModelIdentity.of(model).fingerprint
    if request.resume_fingerprint not in ("", fingerprint):
        raise StaleStateError(
            f"resume_fingerprint is {request.resume_fingerprint!r}, what serves now is "
            f"{fingerprint!r}: weights, dtype, machine or versions have changed, and the output "
            "could not go on exactly; send the request anew, without resume_token_ids",
            reason="MODEL_CHANGED",
            field="resume_fingerprint",
        )


async def _stream(
    generation: Generation,
    context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
) -> None:
    """Write a generation's events; whatever ends this frees the workers."""
    task = asyncio.create_task(generation.run())
    try:
        while events := await generation.events.take():
            await context.write(pack_events(events))
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
