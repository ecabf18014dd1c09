"""What a request asks of a target: limits, parameters, room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.losses import Losses
from orchestrator.pairing import ModelIdentity
from orchestrator.pool import Need
from orchestrator.validation import GenerationRequest
from shared.messages import StoppingParams, TargetOpen, WorkerInfo
from shared.priority import aged


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A request and the model that serves it.

    Args:
        request: With its prompt tokenized.
        worker_request_id: Its id on the workers, unique in the world.
        model: What is served; until a target is chosen, as far as validation needed to know.
        identity: The model that the request is bound to; None for a new request.
        is_awaited: No target was there when the request came: it is bound to the last one's model.
        wants_features: Whether a draft may read the target's features.
        arrived_s: When the request came, loop time.
    """

    request: GenerationRequest
    worker_request_id: str
    model: WorkerInfo
    identity: ModelIdentity | None = None
    is_awaited: bool = False
    wants_features: bool = False
    arrived_s: float = 0.0

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        worker_request_id: str,
        model: WorkerInfo,
        *,
        wants_features: bool,
        is_awaited: bool = False,
    ) -> Terms:
        """Return the terms of a request that has come now.

        Args:
            is_awaited: There is no target at present; one that serves this model is waited for.
        """
        return cls(
            request=request,
            worker_request_id=worker_request_id,
            model=model,
            # Resumed tokens bind the request to what computed them, as its own do later.
            identity=ModelIdentity.of(model) if request.resume_fingerprint or is_awaited else None,
            is_awaited=is_awaited,
            wants_features=wants_features,
            arrived_s=asyncio.get_running_loop().time(),
        )

    def on_target(self, info: WorkerInfo, *, is_first: bool) -> Terms:
        """Return the terms on a target; what the first one serves stays said, whatever follows."""
        model = info if is_first else self.model
        return replace(self, model=model, identity=ModelIdentity.of(info), is_awaited=False)

    @property
    def max_new_tokens(self) -> int:
        """Return the most output tokens: the client's limit or what the context holds."""
        room = self.model.max_context_len - len(self.request.prompt_ids)
        wanted = self.request.max_new_tokens
        return room if wanted is None else min(room, wanted)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Return the tokens that end the output: the client's and the model's."""
        eos_ids = () if self.request.ignore_eos else self.model.eos_token_ids
        return frozenset({*eos_ids, *self.request.stop_token_ids})

    def need(self, tokens: Sequence[int], losses: Losses, *, is_running: bool) -> Need:
        """Return what the next target must have.

        Args:
            tokens: Prompt and output so far.
            is_running: The request was moved, or has output already: it goes before new ones.
        """
        # A new request goes to any target that can take its prompt; the model is not chosen yet.
        whole_len = len(self.request.prompt_ids) + self.max_new_tokens
        return Need(
            request_id=self.worker_request_id,
            num_tokens=len(tokens),
            context_len=whole_len if self.identity and not self.is_awaited else len(tokens) + 1,
            priority=self.request.priority,
            session_id=self.request.session_id,
            wants_draft=self.request.shape is not None,
            is_running=is_running,
            wants_room=losses.wants_room,
            identity=self.identity,
            avoid=losses.avoid,
            needs_trial=losses.needs_trial,
            arrived_s=self.arrived_s,
            has_grammar=self.request.grammar is not None,
            wants_experts=self.request.routed_experts,
            tenant=self.request.tenant,
        )

    def target_open(
        self, tokens: Sequence[int], target_epoch: int, *, now_s: float = 0.0
    ) -> TargetOpen:
        """Return the message that has a target prefill the request.

        Args:
            tokens: Prompt and output so far.
            now_s: Loop time: to the target the request comes anew, as old as it is.
        """
        request = self.request
        return TargetOpen(
            request_id=self.worker_request_id,
            target_epoch=target_epoch,
            token_ids=tuple(tokens),
            num_prompt_tokens=len(request.prompt_ids),
            sampling=request.sampling,
            stopping=StoppingParams(
                max_new_tokens=self.max_new_tokens,
                min_new_tokens=min(request.min_new_tokens, self.max_new_tokens),
                stop_token_ids=tuple(sorted(self.stop_token_ids)),
            ),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            wants_features=self.wants_features,
            priority=aged(request.priority, max(0.0, now_s - self.arrived_s)),
            is_timed=request.is_timed,
            wants_trees=request.round_trees,
            wants_routed_experts=request.routed_experts,
            compiled_grammar=request.compiled_grammar,
            grows_forced=request.grammar is not None and request.shape is not None,
        )
