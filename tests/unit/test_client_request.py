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
