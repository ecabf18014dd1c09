"""Every bad input is refused by the name of its field; defaults are resolved once, here."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coppice.v1 import generation_pb2 as pb
from orchestrator.shape import default_shape
from orchestrator.validation import ModelLimits, parse_request, with_prompt
from shared.config import OrchestratorConfig
from shared.errors import InvalidArgumentError
from shared.messages import TreeShape

LIMITS = ModelLimits(
    vocab_size=100,
    max_context_len=16,
    default_shape=TreeShape(num_steps=4, topk=2, num_draft_tokens=8),
)


def request(**fields: Any) -> pb.GenerateRequest:
    """Return a good request with some fields replaced."""
    if "text" not in fields:
        fields.setdefault("token_ids", pb.TokenIds(ids=[1, 2, 3]))
    return pb.GenerateRequest(**fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return request(stopping=pb.StoppingCriteria(**fields))


def speculation(**fields: Any) -> pb.GenerateRequest:
    return request(speculation=pb.SpeculationOptions(**fields))


def output(**fields: Any) -> pb.GenerateRequest:
    return request(output=pb.OutputOptions(**fields))


BAD = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (request(text=""), "text"),
    "empty ids": (request(token_ids=pb.TokenIds()), "token_ids"),
    "id too large": (request(token_ids=pb.TokenIds(ids=[1, 100])), "token_ids"),
    "id negative": (request(token_ids=pb.TokenIds(ids=[-1])), "token_ids"),
    "temperature negative": (sampling(temperature=-0.1), "sampling.temperature"),
    "temperature NaN": (sampling(temperature=math.nan), "sampling.temperature"),
    "temperature infinite": (sampling(temperature=math.inf), "sampling.temperature"),
    "top_p zero": (sampling(top_p=0.0), "sampling.top_p"),
    "top_p above 1": (sampling(top_p=1.01), "sampling.top_p"),
    "top_p NaN": (sampling(top_p=math.nan), "sampling.top_p"),
    "min_p negative": (sampling(min_p=-0.1), "sampling.min_p"),
    "min_p above 1": (sampling(min_p=1.5), "sampling.min_p"),
    "top_k negative": (sampling(top_k=-1), "sampling.top_k"),
    "repetition_penalty 0": (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    "presence_penalty": (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    "frequency_penalty": (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    "penalty NaN": (sampling(frequency_penalty=math.nan), "sampling.frequency_penalty"),
    "bias id": (sampling(logit_bias={100: 1.0}), "sampling.logit_bias"),
    "bias id negative": (sampling(logit_bias={-1: 1.0}), "sampling.logit_bias"),
    "bias value": (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]"),
    "bias NaN": (sampling(logit_bias={7: math.nan}), "sampling.logit_bias[7]"),
    "max_new_tokens 0": (stopping(max_new_tokens=0), "stopping.max_new_tokens"),
    "min_new_tokens negative": (stopping(min_new_tokens=-1), "stopping.min_new_tokens"),
    "min above max": (stopping(max_new_tokens=2, min_new_tokens=3), "stopping.min_new_tokens"),
    "17 stop strings": (stopping(stop_strings=["x"] * 17), "stopping.stop_strings"),
    "empty stop string": (stopping(stop_strings=["ok", ""]), "stopping.stop_strings"),
    "long stop string": (stopping(stop_strings=["x" * 257]), "stopping.stop_strings"),
    "stop id": (stopping(stop_token_ids=[100]), "stopping.stop_token_ids"),
    "stop id negative": (stopping(stop_token_ids=[-5]), "stopping.stop_token_ids"),
    "unknown mode": (speculation(mode=9), "speculation.mode"),
    "num_steps 0": (speculation(num_steps=0), "speculation.num_steps"),
    "num_steps 17": (speculation(num_steps=17), "speculation.num_steps"),
    "topk 0": (speculation(topk=0), "speculation.topk"),
    "topk 17": (speculation(topk=17), "speculation.topk"),
    "one node": (speculation(num_draft_tokens=1), "speculation.num_draft_tokens"),
    "65 nodes": (
        speculation(num_steps=5, topk=8, num_draft_tokens=65),
        "speculation.num_draft_tokens",
    ),
    "impossible tree": (
        speculation(num_steps=3, topk=1, num_draft_tokens=5),
        "speculation.num_draft_tokens",
    ),
    "impossible tree, though off": (
        speculation(mode=pb.SPECULATION_MODE_OFF, num_steps=3, topk=1, num_draft_tokens=5),
        "speculation.num_draft_tokens",
    ),
    "21 alternatives": (output(logprobs=True, top_logprobs=21), "output.top_logprobs"),
    "alternatives negative": (output(logprobs=True, top_logprobs=-1), "output.top_logprobs"),
    "alternatives alone": (output(top_logprobs=2), "output.top_logprobs"),
    "long request_id": (request(request_id="x" * 129), "request_id"),
    "unprintable request_id": (request(request_id="a\nb"), "request_id"),
    "long session_id": (request(session_id="x" * 129), "session_id"),
    "resume id": (request(resume_token_ids=pb.TokenIds(ids=[100])), "resume_token_ids"),
    "resume too long": (
        request(
            resume_token_ids=pb.TokenIds(ids=[1, 2, 3]),
            stopping=pb.StoppingCriteria(max_new_tokens=2),
        ),
        "resume_token_ids",
    ),
}


@pytest.mark.parametrize(("message", "field"), BAD.values(), ids=BAD.keys())
def test_bad_input_names_its_field(message: pb.GenerateRequest, field: str) -> None:
    """The message says what was wrong in so many words, too."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse_request(message, LIMITS)
    assert caught.value.field == field
    assert field.split(".")[-1].split("[")[0] in caught.value.message.replace(" ", "_")


def test_a_prompt_must_leave_room_for_a_token() -> None:
    """15 tokens fit into a context of 16, 16 do not."""
    for field, message in (
        ("token_ids", request(token_ids=pb.TokenIds(ids=[1]))),
        ("text", request(text="x")),
    ):
        parsed = parse_request(message, LIMITS)
        assert with_prompt(parsed, [1] * 15, LIMITS).prompt_ids == (1,) * 15
        with pytest.raises(InvalidArgumentError) as caught:
            with_prompt(parsed, [1] * 16, LIMITS)
        assert (caught.value.field, caught.value.reason) == (field, "PROMPT_TOO_LONG")


def test_text_that_gives_no_token_is_refused() -> None:
    """A tokenizer without special tokens may drop everything."""
    with pytest.raises(InvalidArgumentError) as caught:
        with_prompt(parse_request(request(text="\u200b"), LIMITS), [], LIMITS)
    assert caught.value.field == "text"


def test_resumed_output_may_fill_the_context_but_not_more() -> None:
    """16 tokens in all may be there already: then nothing is left to do."""
    message = request(resume_token_ids=pb.TokenIds(ids=[4] * 10))
    parsed = parse_request(message, LIMITS)
    assert with_prompt(parsed, [1] * 6, LIMITS).resume_ids == (4,) * 10
    with pytest.raises(InvalidArgumentError) as caught:
        with_prompt(parsed, [1] * 7, LIMITS)
    assert caught.value.field == "resume_token_ids"


def test_defaults_are_resolved() -> None:
    """Greedy, a seed of the server's, speculation with the default tree."""
    parsed = parse_request(request(), LIMITS)
    assert parsed.sampling.temperature == 0.0
    assert parsed.sampling.top_p == 1.0
    assert parsed.shape == LIMITS.default_shape
    assert parsed.max_new_tokens is None
    assert parsed.request_id
    other = parse_request(request(), LIMITS)
    assert other.request_id != parsed.request_id
    assert other.sampling.seed != parsed.sampling.seed
    assert 0 <= parsed.sampling.seed < 2**53


def test_every_field_is_taken_over() -> None:
    """What the client says is what is served."""
    parsed = parse_request(
        request(
            request_id="mine",
            text="hello",
            sampling=pb.SamplingParams(
                temperature=0.5, top_p=0.75, min_p=0.25, top_k=3, seed=2**64 - 1, logit_bias={5: -1}
            ),
            stopping=pb.StoppingCriteria(
                max_new_tokens=9,
                min_new_tokens=2,
                stop_strings=["a", "b"],
                stop_token_ids=[4],
                ignore_eos=True,
                include_stop_in_output=True,
            ),
            speculation=pb.SpeculationOptions(
                mode=pb.SPECULATION_MODE_ON, num_steps=3, topk=3, num_draft_tokens=9
            ),
            output=pb.OutputOptions(logprobs=True, top_logprobs=2, omit_text=True),
            priority=-3,
            session_id="session",
            resume_token_ids=pb.TokenIds(ids=[7]),
        ),
        LIMITS,
    )
    assert (parsed.request_id, parsed.text, parsed.prompt_ids) == ("mine", "hello", ())
    assert (parsed.sampling.temperature, parsed.sampling.top_k) == (0.5, 3)
    assert parsed.sampling.seed == 2**64 - 1
    assert parsed.sampling.logit_bias == ((5, -1.0),)
    assert (parsed.max_new_tokens, parsed.min_new_tokens) == (9, 2)
    assert (parsed.stop_strings, parsed.stop_token_ids) == (("a", "b"), (4,))
    assert parsed.ignore_eos and parsed.include_stop_in_output and parsed.requires_draft
    assert parsed.shape == TreeShape(num_steps=3, topk=3, num_draft_tokens=9)
    assert (parsed.logprobs, parsed.top_logprobs) == (True, 2)
    assert parsed.omit_text and not parsed.omit_token_ids
    assert (parsed.priority, parsed.session_id, parsed.resume_ids) == (-3, "session", (7,))


def test_speculation_off_has_no_tree() -> None:
    """A tree of one node is what a root-only round verifies."""
    parsed = parse_request(speculation(mode=pb.SPECULATION_MODE_OFF), LIMITS)
    assert parsed.shape is None


def test_the_default_size_gives_way_to_an_explicit_shape() -> None:
    """A chain of 4 has 5 nodes, so the default of 8 cannot hold."""
    parsed = parse_request(speculation(topk=1), LIMITS)
    assert parsed.shape == TreeShape(num_steps=4, topk=1, num_draft_tokens=5)


@pytest.mark.parametrize(
    ("config", "device", "shape"),
    [
        (OrchestratorConfig(), "cpu", "6/2/8"),
        (OrchestratorConfig(), "cuda:0", "9/8/40"),
        (OrchestratorConfig(num_steps=6), "cuda:1", "6/8/40"),
        (OrchestratorConfig(topk=1), "cpu", "6/1/7"),
        (OrchestratorConfig(num_steps=3, topk=4, num_draft_tokens=20), "cpu", "3/4/20"),
    ],
)
def test_the_default_tree_depends_on_the_targets_device(
    config: OrchestratorConfig, device: str, shape: str
) -> None:
    """What is not configured is chosen, and always such that it can grow."""
    assert str(default_shape(config, device)) == shape


@pytest.mark.parametrize(("temperature", "resolved"), [(1e-38, 0.0), (9e-6, 0.0), (1e-4, 1e-4)])
def test_a_temperature_that_would_overflow_is_greedy(temperature: float, resolved: float) -> None:
    parsed = parse_request(sampling(temperature=temperature), LIMITS)
    assert parsed.sampling.temperature == pytest.approx(resolved)
    assert parse_request(sampling(temperature=1e-5), LIMITS).sampling.temperature > 0
