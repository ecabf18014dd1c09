"""Tool calls and reasoning out of text that comes in any pieces; nothing written is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.gateway.chat_template import ChatTemplate
from coppice.gateway.reasoning import ReasoningMarks, ReasoningSplitter, reasoning_marks
from coppice.gateway.tool_calls import (
    ToolCall,
    needs_special_tokens,
    tool_format,
    tool_parser,
)
from tests.chat_templates import FAMILIES

F1 = '{"name": "f", "arguments": {"x": [1, "ü <tool_call>"]}}'
F2 = '{"name": "g", "parameters": {}}'
# Format, output; then text and calls (name, arguments) that are in it.
OUTPUTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "plain < text <tool", "plain < text <tool", []),
    (
        "hermes",
        f"Let me look.\n<tool_call>\n{F1}\n</tool_call>\n<tool_call>{F2}</tool_call>\n",
        "Let me look.\n",
        [("f", {"x": [1, "ü <tool_call>"]}), ("g", {})],
    ),
    ("hermes", f"<tool_call>{F2}", "", [("g", {})]),
    ("hermes", "<tool_call>{broken</tool_call> x", "<tool_call>{broken</tool_call> x", []),
    (
        "hermes",
        '<tool_call>{"name": "who"}</tool_call>',
        '<tool_call>{"name": "who"}</tool_call>',
        [],
    ),
    ("hermes", "<tool_call>{", "<tool_call>{", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        [],
    ),  # noqa: E501
    ("hermes", f"<tool_call>{F2}</tool_call>\n\nDone.", "\n\nDone.", [("g", {})]),
    ("llama3", F2, "", [("g", {})]),
    ("llama3", f"<|python_tag|>{F1}; {F2}", "", [("f", {"x": [1, "ü <tool_call>"]}), ("g", {})]),
    ("llama3", "It is {sunny}.", "It is {sunny}.", []),
    ("llama3", '{"a": 1}', '{"a": 1}', []),
    ("llama3", f"{F2} and more", f"{F2} and more", []),
    ("llama3", "{", "{", []),
    ("llama3", "", "", []),
    ("mistral", "plain [TOOL", "plain [TOOL", []),
    (
        "mistral",
        f"So: [TOOL_CALLS] [{F1}, {F2}]",
        "So: ",
        [("f", {"x": [1, "ü <tool_call>"]}), ("g", {})],
    ),  # noqa: E501
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS]who[ARGS]{"a": 1}', '[TOOL_CALLS]who[ARGS]{"a": 1}', []),
    ("none", F1, F1, []),
]


FORMATS = {
    "hermes": "<tool_call>{}</tool_call>",
    "llama3": "{}",
    "mistral": "[TOOL_CALLS][{}]",
}


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def parsed(name: str, parts: Sequence[str]) -> tuple[str, list[ToolCall]]:
    parser = tool_parser(name, ["f", "g"])
    found = [*map(parser.feed, parts), parser.flush()]
    return "".join(one.text for one in found), [call for one in found for call in one.calls]


@given(
    output=st.sampled_from(OUTPUTS), cuts=st.lists(st.integers(0, 120), max_size=130, unique=True)
)
def test_calls_are_found_however_the_text_is_cut(
    output: tuple[str, str, str, list[tuple[str, Any]]], cuts: list[int]
) -> None:
    name, text, expected_text, expected_calls = output
    found_text, calls = parsed(name, pieces(text, cuts))
    assert found_text == expected_text
    assert [(call.name, json.loads(call.arguments)) for call in calls] == expected_calls
    assert len({call.call_id for call in calls}) == len(calls)
    assert all(len(call.call_id) == 9 and call.call_id.isalnum() for call in calls)


@given(
    name=st.sampled_from(["hermes", "llama3", "mistral", "none"]),
    parts=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", "<", "[", "x", "\n", ";", '"']
        )
        | st.text(max_size=3),
        max_size=12,
    ),
)
def test_text_without_a_call_comes_out_as_it_is(name: str, parts: list[str]) -> None:
    assert parsed(name, parts) == ("".join(parts), [])


@given(
    name=st.sampled_from(["hermes", "mistral"]),
    text=st.text(alphabet="ab<>[]TOLC_t \n", max_size=30),
)
def test_no_more_is_held_back_than_may_begin_a_call(name: str, text: str) -> None:
    parser = tool_parser(name, [])
    mark = "<tool_call>" if name == "hermes" else "[TOOL_CALLS]"
    said = "".join(parser.feed(char).text for char in text)
    assert text.startswith(said) and len(text) - len(said) < len(mark)


@given(
    name=st.sampled_from(["hermes", "llama3", "mistral"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=4,
    ).filter(lambda value: value not in ("f", "g")),
)
def test_a_call_of_a_name_that_is_none_is_text(name: str, value: Any) -> None:
    call = json.dumps({"name": value, "arguments": {}})
    text = FORMATS[name].format(call)
    assert parsed(name, [text]) == (text, [])


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_arguments_that_are_no_json_are_text(name: str, number: str) -> None:
    text = FORMATS[name].format('{"name": "f", "arguments": {"x": ' + number + "}}")
    assert parsed(name, [text]) == (text, [])


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_half_a_pair_of_surrogates_is_no_text_to_send(name: str) -> None:
    text = FORMATS[name].format('{"name": "f", "arguments": {"x": "\\ud800"}}')
    _, (call,) = parsed(name, [text])
    assert call.arguments.encode() and json.loads(call.arguments) == {"x": "\ud800"}


def test_deep_nesting_is_text() -> None:
    deep = "[" * 100_000
    assert parsed("mistral", [f"[TOOL_CALLS]{deep}"]) == (f"[TOOL_CALLS]{deep}", [])
    assert parsed("llama3", ["{" + deep]) == ("{" + deep, [])


@pytest.mark.parametrize(
    ("family", "name"),
    [("headers", "llama3"), ("chatml", "hermes"), ("brackets", "mistral"), ("turns", "none")],
)
def test_a_template_tells_the_format(family: str, name: str) -> None:
    template = ChatTemplate({"default": FAMILIES[family]}, {})
    assert tool_format("auto", template) == name
    assert tool_format("mistral", template) == "mistral"
    assert needs_special_tokens(name) == (name in ("llama3", "mistral"))


# --- reasoning -----------------------------------------------------------------------------------

THINK = ReasoningMarks("<think>", "</think>")
# Begins open, output; then reasoning and answer.
THOUGHTS = [
    (False, "no marks at all", "", "no marks at all"),
    (False, "<think>why</think>\n\nso", "why", "so"),
    (False, "\n<think>\nwhy\n</think>so", "\nwhy\n", "so"),
    (True, "why</think>\n\nso\n", "why", "so\n"),
    (True, "never ends", "never ends", ""),
    (True, "</think>", "", ""),
    (True, "why </thi", "why </thi", ""),
    (False, "<thi", "", "<thi"),
    (False, "x<think>y</think>", "", "x<think>y</think>"),
    (False, "", "", ""),
    (True, "a</think>b</think>c", "a", "b</think>c"),
]


@given(
    thought=st.sampled_from(THOUGHTS), cuts=st.lists(st.integers(0, 40), max_size=41, unique=True)
)
def test_reasoning_is_split_however_the_text_is_cut(
    thought: tuple[bool, str, str, str], cuts: list[int]
) -> None:
    is_open, text, reasoning, answer = thought
    splitter = ReasoningSplitter(THINK, is_open=is_open)
    found = [*map(splitter.feed, pieces(text, cuts)), splitter.flush()]
    assert "".join(first for first, _ in found) == reasoning
    assert "".join(second for _, second in found) == answer


def test_a_prompt_may_end_inside_of_reasoning() -> None:
    assert THINK.is_open_in("<|Assistant|><think>\n")
    assert not THINK.is_open_in("<think>\n\n</think>\n\n")
    assert not THINK.is_open_in("a<think>b</think>c")


def test_what_a_message_says_of_marks_opens_nothing() -> None:
    asked = "user: what is <think>?\nassistant:\n"
    assert not THINK.is_open_in(asked)
    assert THINK.is_open_in(asked + "<think>\n")
    for said, is_open in (
        ("\n<think>Well, ", True),
        ("<think>Well, </think>", False),
        ("The mark <think>", False),
        ("Well, ", False),
    ):
        assert THINK.is_open_in(asked + said, continued=said) == is_open
    assert THINK.is_open_in(asked + "<think>Well, ", continued="Well, ")


@pytest.mark.parametrize(
    ("family", "begin"), [("chatml", "<think>"), ("thinking", "<think>"), ("headers", None)]
)
def test_a_template_tells_the_marks(family: str, begin: str | None) -> None:
    marks = reasoning_marks("auto", ChatTemplate({"default": FAMILIES[family]}, {}))
    assert (marks and marks.begin) == begin
    template = ChatTemplate({"default": "x"}, {})
    assert reasoning_marks("none", template) is None
    brackets = reasoning_marks("bracket", template)
    assert brackets is not None and brackets.is_special and not THINK.is_special
