"""Conversions of sampling and stopping parameters."""

from __future__ import annotations

from coppice.v1 import generation_pb2
from shared.errors import InvalidArgumentError
from shared.messages import types
from shared.messages.fields import require_float, require_ids, require_range

MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MIN_TEMPERATURE = 9.999999747378752e-06  # 1e-5 as the float32 of the wire
"""Below it a token is greedy: logits divided by less overflow float32 without choosing better."""


def sampling_to_proto(params: types.SamplingParams) -> generation_pb2.SamplingParams:
    """Convert sampling parameters; every field is set."""
    return generation_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        top_k=params.top_k,
        seed=params.seed,
        logit_bias=dict(params.logit_bias),
    )


def sampling_from_proto(
    message: generation_pb2.SamplingParams, *, default_seed: int = 0
) -> types.SamplingParams:
    """Convert and check sampling parameters; absent ones take their documented defaults.

    Args:
        default_seed: Used when the message has no seed.
    Raises: InvalidArgumentError naming the field that is out of its range.
    """

    def value(field: str, default: float) -> float:
        return getattr(message, field) if message.HasField(field) else default

    temperature = require_float(value("temperature", 0.0), "temperature", 0.0)
    bias = sorted(message.logit_bias.items())
    for token_id, amount in bias:
        require_range(token_id, "logit_bias", 0)
        require_float(amount, f"logit_bias[{token_id}]", -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return types.SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=require_float(value("top_p", 1.0), "top_p", 0.0, 1.0, low_open=True),
        min_p=require_float(value("min_p", 0.0), "min_p", 0.0, 1.0),
        top_k=require_range(message.top_k, "top_k", 0),
        repetition_penalty=require_float(
            value("repetition_penalty", 1.0), "repetition_penalty", 0.0, low_open=True
        ),
        presence_penalty=require_float(
            value("presence_penalty", 0.0), "presence_penalty", -MAX_PENALTY, MAX_PENALTY
        ),
        frequency_penalty=require_float(
            value("frequency_penalty", 0.0), "frequency_penalty", -MAX_PENALTY, MAX_PENALTY
        ),
        seed=message.seed if message.HasField("seed") else default_seed,
        logit_bias=tuple(bias),
    )


def stopping_to_proto(params: types.StoppingParams) -> generation_pb2.StoppingCriteria:
    """Convert what the target needs to cut a path; stop strings never reach it."""
    return generation_pb2.StoppingCriteria(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=params.stop_token_ids,
    )


def stopping_from_proto(message: generation_pb2.StoppingCriteria) -> types.StoppingParams:
    """Convert resolved stopping parameters.

    Raises: InvalidArgumentError if max_new_tokens is absent: the orchestrator resolves it.
    """
    if not message.HasField("max_new_tokens"):
        raise InvalidArgumentError(
            "max_new_tokens is absent; workers need it resolved", field="max_new_tokens"
        )
    return types.StoppingParams(
        max_new_tokens=require_range(message.max_new_tokens, "max_new_tokens", 1),
        min_new_tokens=require_range(message.min_new_tokens, "min_new_tokens", 0),
        stop_token_ids=require_ids(message.stop_token_ids, "stop_token_ids"),
    )
