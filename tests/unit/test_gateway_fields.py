"""Fields of requests: the document has each, as honoured or as refused; none is ignored."""

from __future__ import annotations

import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from coppice.client import DeadlineExceededError
from coppice.gateway.errors import ApiError, api_error
from coppice.gateway.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
    parse_fields,
)
from coppice.request import RequestOptions, build_request
from shared.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

ROOT = Path(__file__).resolve().parents[2]
KINDS: dict[str, Any] = {"C": CompletionFields, "M": ChatFields}
LEAST: dict[str, dict[str, Any]] = {
    "C": {"model": "m", "prompt": "x"},
    "M": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
}
# Another value than the default of each field that is no choice of few.
OTHER: dict[str, Any] = {
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 3,
    "stop": ["x"],
    "logit_bias": {"1": 2},
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "speculation": "off",
    "resume_token_ids": [1],
    "resume_fingerprint": "f",
    "priority": 1,
    "session_id": "s",
    "timeout_s": 5.0,
    "return_trees": True,
    "return_routed_experts": True,
}


def documented() -> dict[str, dict[str, set[str]]]:
    """Return the fields of the tables, honoured and refused, by endpoint."""
    text = (ROOT / "docs" / "http.md").read_text()
    honoured, refused = text.partition("\nRefused, unless")[::2]
    found: dict[str, dict[str, set[str]]] = {}
    for name, part in (("honoured", honoured), ("refused", refused)):
        rows = re.findall(r"^\| (`[^|]+) \| ([CM ]+) \|(.*)\|$", part, re.MULTILINE)
        found[name] = {"C": set(), "M": set()}
        for names, kinds, meaning in rows:
            for field in re.findall(r"`(\w+)`", names):
                own = re.search(rf"`{field}` is of ([CM])\b", meaning)
                for kind in (own[1] if own else kinds).split():
                    found[name][kind].add(field)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_has_every_field(kind: str) -> None:
    rows = documented()
    assert rows["honoured"][kind] == set(KINDS[kind].model_fields)
    assert rows["refused"][kind] == set(KINDS[kind].refused)


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_refused_is_named_and_its_harmless_values_are_not(kind: str) -> None:
    for name, (harmless, _) in KINDS[kind].refused.items():
        for value in (*harmless, None):
            parse_fields(KINDS[kind], {**LEAST[kind], name: value})
        with pytest.raises(ApiError) as caught:
            parse_fields(KINDS[kind], {**LEAST[kind], name: {"x": 1}})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("kind", KINDS)
def test_nulls_are_as_if_they_were_not_there(kind: str) -> None:
    nulls = {name: None for name in KINDS[kind].model_fields if name not in LEAST[kind]}
    plain = parse_fields(KINDS[kind], LEAST[kind])
    assert parse_fields(KINDS[kind], {**nulls, **LEAST[kind]}) == plain
    defaults = {"temperature": 1.0, "top_p": 1.0, "n": 1, "stream": False, "seed": None}
    assert {name: getattr(plain, name) for name in defaults} == defaults
    assert plain.options(choice=0)["temperature"] == 1.0


@pytest.mark.parametrize("name", OTHER)
def test_a_field_reaches_the_orchestrator(name: str) -> None:
    """But those that the gateway itself answers: how, and how many."""
    plain = parse_fields(CompletionFields, LEAST["C"])
    other = parse_fields(CompletionFields, {**LEAST["C"], name: OTHER[name]})
    before, after = (build_request("x", fields.options(choice=0)) for fields in (plain, other))
    if name in ("stream", "timeout_s"):
        assert before == after
        assert name == "stream" or other.options(choice=0)["timeout_s"] == 5.0
    else:
        assert before != after


def test_options_are_keywords_of_the_client() -> None:
    for fields in (
        parse_fields(CompletionFields, LEAST["C"]),
        parse_fields(ChatFields, LEAST["M"]),
    ):
        assert fields.options(choice=0).keys() <= RequestOptions.__annotations__.keys()


def test_seeds_of_several_outputs_follow_each_other() -> None:
    for seed, expected in ((5, [5, 6]), (-1, [2**64 - 1, 0]), (2**64 - 1, [2**64 - 1, 0])):
        fields = parse_fields(CompletionFields, {**LEAST["C"], "seed": seed, "n": 2})
        assert [fields.options(choice=i)["seed"] for i in range(2)] == expected


@pytest.mark.parametrize(
    ("kind", "changes", "param"),
    [
        ("C", {"model": None}, "model"),
        ("C", {"prompt": None}, "prompt"),
        ("C", {"n": 0}, "n"),
        ("C", {"n": "1"}, "n"),
        ("C", {"temperature": "hot"}, "temperature"),
        ("C", {"temperature": True}, "temperature"),
        ("C", {"max_tokens": 1.5}, "max_tokens"),
        ("C", {"stop": [1]}, "stop[0]"),
        ("C", {"stop": 1}, "stop"),
        ("C", {"logit_bias": []}, "logit_bias"),
        ("C", {"seed": 2**64}, "seed"),
        ("C", {"speculation": "maybe"}, "speculation.mode"),
        ("C", {"speculation": {"depth": 3}}, "speculation.depth"),
        (
            "C",
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ("C", {"messages": []}, "messages"),
        ("M", {"messages": []}, "messages"),
        ("M", {"messages": ["x"]}, "messages[0]"),
        ("M", {"prompt": "x"}, "prompt"),
        ("M", {"tools": [{"type": "custom"}]}, "tools[0].type"),
        (
            "M",
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name",
        ),
        ("M", {"logprobs": 3}, "logprobs"),
    ],
)
def test_what_cannot_be_is_named(kind: str, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_fields(KINDS[kind], {**LEAST[kind], **changes})
    assert caught.value.param == param and caught.value.status == 400


def test_prompts_come_in_four_kinds() -> None:
    for prompt, expected in (
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        fields = parse_fields(CompletionFields, {"model": "m", "prompt": prompt})
        assert fields.prompts == expected
    for prompt in ([], [[]], ["x", 1], [True], 3, {}, [["x"]], [1.0]):
        fields = parse_fields(CompletionFields, {"model": "m", "prompt": prompt})
        with pytest.raises(ApiError) as caught:
            _ = fields.prompts
        assert caught.value.param == "prompt"


def test_limits_of_a_chat_must_agree() -> None:
    def limit(**fields: int) -> int | None:
        return parse_fields(ChatFields, {**LEAST["M"], **fields}).max_new_tokens

    assert limit() is None
    assert limit(max_tokens=3) == limit(max_completion_tokens=3) == 3
    assert limit(max_tokens=3, max_completion_tokens=3) == 3
    with pytest.raises(ApiError):
        limit(max_tokens=3, max_completion_tokens=4)


def test_other_endpoints_know_their_fields_too() -> None:
    for kind in (TokenizeFields, DetokenizeFields):
        with pytest.raises(ApiError) as caught:
            parse_fields(kind, {"tokens": [1], "prompt": "x", "colour": 1})  # type: ignore[type-var]
        assert caught.value.code == "unknown_parameter"
    with pytest.raises(ApiError):
        parse_fields(DetokenizeFields, [])


def test_errors_say_when_to_come_again_or_not_to() -> None:
    again = api_error(ResourceExhaustedError("full", retry_after_s=0.25))
    assert again.status == 429 and again.headers == {"retry-after": "1", "retry-after-ms": "250"}
    never = api_error(
        ResourceExhaustedError("too big", reason="KV_POOL_EXHAUSTED", retry_after_s=0)
    )
    assert never.status == 429 and never.headers == {"x-should-retry": "false"}
    large = api_error(ResourceExhaustedError("x", reason="MESSAGE_TOO_LARGE", retry_after_s=0))
    assert large.status == 413
    assert api_error(UnavailableError("x", reason="NO_DRAFT")).headers["x-should-retry"] == "false"
    assert not api_error(UnavailableError("x", reason="NO_TARGET")).headers
    late = api_error(DeadlineExceededError("the request's own timeout_s has passed"))
    assert late.status == 504 and late.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("field", "message", "param", "said"),
    [
        ("stopping.max_new_tokens", "stopping.max_new_tokens is 0", "max_tokens", None),
        ("stopping.stop_strings", "stop_strings[0] has 300 characters", "stop", "stop[0] has 300"),
        ("speculation.num_steps", "num_steps is 30", "speculation.num_steps", None),
        ("speculation.mode", "speculation.mode is ON, but", "speculation.mode", None),
        ("sampling.temperature", "temperature is -1", "temperature", None),
        ("text", "text is empty; send a prompt", "prompt", None),
        ("text", "the text is long", "prompt", "the text is long"),
        (
            "stopping.min_new_tokens",
            "min_new_tokens is 5, must be at most max_new_tokens = 3",
            "min_tokens",
            "min_tokens is 5, must be at most max_tokens = 3",
        ),
    ],
)
def test_errors_have_the_names_of_the_requests_fields(
    field: str, message: str, param: str, said: str | None
) -> None:
    error = api_error(InvalidArgumentError(message, field=field))
    assert error.param == param and error.message.startswith(said or f"{param} is "), error.message


MANY = 300_000


@pytest.mark.parametrize(
    ("kind", "changes", "param"),
    [
        (CompletionFields, {"stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        (CompletionFields, {"resume_token_ids": [1, *["a"] * MANY]}, "resume_token_ids[1]"),
        (CompletionFields, {"stop": [1] * MANY}, "stop[0]"),
        (CompletionFields, {"logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
        (CompletionFields, {f"x{i}": 1 for i in range(MANY)}, "x0"),
        (CompletionFields, {"speculation": {f"x{i}": 1 for i in range(MANY)}}, "speculation.x0"),
        (CompletionFields, {"x" * MANY: 1}, "x" * 100 + "..."),
        (ChatFields, {"messages": ["x"] * MANY}, "messages[0]"),
        (ChatFields, {"messages": [{"role": "user"}] * MANY}, "messages"),
        (ChatFields, {"tools": ["x"] * MANY}, "tools[0]"),
        (TokenizeFields, {"messages": ["x"] * MANY}, "messages[0]"),
        (DetokenizeFields, {"tokens": ["x"] * MANY}, "tokens[0]"),
    ],
)
def test_a_body_that_is_wrong_everywhere_has_one_error(
    kind: Any, changes: dict[str, Any], param: str
) -> None:
    """An error for each wrong item would be some hundred MB here."""
    least = {CompletionFields: LEAST["C"], ChatFields: LEAST["M"]}.get(kind, {})
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            parse_fields(kind, {**least, **changes})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == param and len(caught.value.message) < 500
    assert peak_bytes < 64 << 20


@pytest.mark.parametrize("name", ["temperature", "timeout_s", "min_p"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400])
def test_numbers_are_finite(name: str, value: float) -> None:
    with pytest.raises(ApiError) as caught:
        parse_fields(CompletionFields, {**LEAST["C"], name: value})
    assert caught.value.param == name


def test_what_is_logged_has_a_length() -> None:
    for name in ("user", "request_id", "session_id"):
        with pytest.raises(ApiError) as caught:
            parse_fields(CompletionFields, {**LEAST["C"], name: "x" * 2000})
        assert caught.value.param == name
