"""What a client chooses of sampling and stopping, resolved. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from coppice.v1 import generation_pb2
from shared.messages.codec import message
from shared.messages.fields import Count, Ids, require_float, require_range

MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MIN_TEMPERATURE = 9.999999747378752e-06  # 1e-5 as the float32 of the wire
"""Below it a token is greedy: logits divided by less overflow float32 without choosing better."""

Positive = Annotated[float, partial(require_float, low=0.0, low_open=True)]
Penalty = Annotated[float, partial(require_float, low=-MAX_PENALTY, high=MAX_PENALTY)]


def _require_temperature(value: float, field: str) -> float:
    temperature = require_float(value, field, 0.0)
    return temperature if temperature >= MIN_TEMPERATURE else 0.0


def _require_bias(
    entries: tuple[tuple[int, float], ...], field: str
) -> tuple[tuple[int, float], ...]:
    for token_id, amount in entries:
        require_range(token_id, field, 0)
        require_float(amount, f"{field}[{token_id}]", -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return entries


@message(generation_pb2.SamplingParams)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Resolved sampling parameters; every "off" value is the default.

    Args:
        temperature: 0 = greedy.
        top_k: 0 = off.
        seed: Unsigned 64-bit.
        logit_bias: (token id, value) pairs, ascending ids.
    """

    temperature: Annotated[float, _require_temperature] = 0.0
    top_p: Annotated[float, partial(require_float, low=0.0, high=1.0, low_open=True)] = 1.0
    min_p: Annotated[float, partial(require_float, low=0.0, high=1.0)] = 0.0
    top_k: Count = 0
    repetition_penalty: Positive = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: int = 0
    logit_bias: Annotated[tuple[tuple[int, float], ...], _require_bias] = ()

    @property
    def has_penalties(self) -> bool:
        """Return whether logits depend on the tokens of the node's own path."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@message(
    generation_pb2.StoppingCriteria,
    ignored=("stop_strings", "ignore_eos", "include_stop_in_output"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """What the target needs to cut a path inside the commit; stop strings are the orchestrator's.

    Args:
        max_new_tokens: Output tokens in all, tokens of earlier epochs included.
        stop_token_ids: EOS ids (unless ignored) and the request's own.
    """

    max_new_tokens: Annotated[int, partial(require_range, low=1)]
    min_new_tokens: Count = 0
    stop_token_ids: Ids = ()
