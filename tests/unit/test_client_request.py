"""What the client says of a request before it sends it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coppice import Client
from coppice.credentials import Credentials
from coppice.request import build_request
from shared.access.tokens import bearer
from shared.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (None, {}, "give either a prompt or token_ids"),
        ("a", {"token_ids": [1]}, "give either a prompt or token_ids"),
        ([1, 2], {}, "a prompt is a str; ids are token_ids=[..]"),
        (b"a", {}, "a prompt is a str; ids are token_ids=[..]"),
    ],
)
def test_a_prompt_is_text_or_ids(prompt: Any, options: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(says)) as caught:
        build_request(prompt, options)
    assert caught.value.field == "prompt"
    assert build_request("a", {}).text == "a"
    assert list(build_request(None, {"token_ids": [1, 2]}).token_ids.ids) == [1, 2]


def test_white_space_around_a_token_is_left_out() -> None:
    """As of a file that was read whole."""
    assert bearer(" a-token\r\n") == bearer("a-token") == (("authorization", "Bearer a-token"),)
    assert bearer("\n") == bearer("") == ()


@pytest.mark.parametrize("token", ["one\ntwo", "tökén", "a\x00b", "a\tb"])
def test_a_token_that_no_metadata_holds_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="printable ASCII") as caught:
        Client("127.0.0.1:1", token=token)
    assert caught.value.field == "token" and token not in str(caught.value)
    with pytest.raises(InvalidArgumentError):
        _ = Credentials(token=token).metadata


@pytest.mark.parametrize("value", ["on", 2, [True]])
def test_speculation_is_one_of_three(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be None, True or False") as caught:
        build_request("a", {"speculation": value})
    assert caught.value.field == "speculation"


WHOLE = "a whole number of -2^31 to 2^31 - 1"


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("seed", -5, "sampling.seed", "is -5, expected a whole number of 0 to 2^64 - 1"),
        ("seed", 10**22, "sampling.seed", "expected a whole number of 0 to 2^64 - 1"),
        ("max_new_tokens", 2.5, "stopping.max_new_tokens", f"is 2.5, expected {WHOLE}"),
        ("priority", 2**31, "priority", f"is 2147483648, expected {WHOLE}"),
        ("temperature", 10**400, "sampling.temperature", "expected a number"),
        ("top_p", "x", "sampling.top_p", "is 'x', expected a number"),
        ("logit_bias", [1], "sampling.logit_bias", "is [1], expected several, each a token id"),
        ("stop_token_ids", 3, "stopping.stop_token_ids", f"is 3, expected several, each {WHOLE}"),
        ("stop_strings", "abc", "stopping.stop_strings", "is 'abc', expected a list of texts"),
        ("stop_strings", [3], "stopping.stop_strings", "expected several, each a text"),
        ("ignore_eos", "x", "stopping.ignore_eos", "is 'x', expected True or False"),
        ("topk", 2**40, "speculation.topk", f"expected {WHOLE}"),
        ("top_logprobs", 1.5, "output.top_logprobs", f"is 1.5, expected {WHOLE}"),
        ("request_id", 3, "request_id", "is 3, expected a text"),
        ("resume_token_ids", ["a"], "resume_token_ids", f"expected several, each {WHOLE}"),
    ],
)
def test_what_no_request_holds_is_refused_with_its_field_and_range(
    name: Any, value: Any, field: str, expected: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(expected)) as caught:
        build_request("a", {name: value})
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{name} is ")


def test_a_prompt_that_no_request_holds_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="expected a text that UTF-8 can hold") as caught:
        build_request("\ud800", {})
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidArgumentError, match="expected several") as caught:
        build_request(None, {"token_ids": [2**31] * 10**4})
    assert caught.value.field == "token_ids" and len(caught.value.message) < 200
