"""What the client says of a prompt before it sends a request."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coppice.request import build_request
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
