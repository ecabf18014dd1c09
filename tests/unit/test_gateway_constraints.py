"""Calls that a grammar demands are calls that the parser finds, with arguments of their schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from coppice.gateway.constraints import (
    Constraint,
    after_reasoning,
    constraint_of,
)
from coppice.gateway.errors import ApiError
from coppice.gateway.fields import ChatFields, parse_fields
from coppice.gateway.reasoning import ReasoningMarks
from coppice.gateway.tool_calls import ToolCall, tool_parser
from coppice.gateway.tool_choice import tool_constraint
from coppice.request import build_request
from orchestrator.structured_output import parse_grammar
from tests.grammar_walks import matcher_of, takes, walk

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 3}, "s": {"type": "string"}},
    "required": ["x", "s"],
}
OTHER = {"type": "object", "properties": {"tag": {"enum": ["</tool_call>", '"', "[ARGS]"]}}}
STRICT = {"name": "f", "parameters": SCHEMA, "strict": True}
LOOSE = {"name": "g", "parameters": OTHER}
BARE = {"name": "h"}
FAMILIES = [("hermes", False), ("llama3", False), ("mistral", False), ("mistral", True)]
CALLS = {
    ("hermes", False): '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    ("llama3", False): '{"name": "f", "parameters": %s}',
    ("mistral", False): '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    ("mistral", True): "[TOOL_CALLS]f[ARGS]%s",
}


def fields(*functions: dict[str, Any], **given: Any) -> ChatFields:
    tools = [{"type": "function", "function": one} for one in functions]
    messages = [{"role": "user", "content": "x"}]
    return parse_fields(ChatFields, {"model": "m", "messages": messages, "tools": tools, **given})


def constrained(
    asked: ChatFields, family: tuple[str, bool], *, wraps: ReasoningMarks | None = None
) -> dict[str, Any]:
    """Return the field of StructuredOutput that a chat becomes."""
    name, has_args_mark = family
    found = tool_constraint(asked, name, constraint_of(asked), has_args_mark=has_args_mark)
    assert found is not None
    found = after_reasoning(found, wraps, is_open=False)
    message = build_request("x", {found.keyword: found.value})  # type: ignore[misc]
    assert parse_grammar(message) is not None
    assert message.structured_output.WhichOneof("constraint") == "structural_tag"
    return {"structural_tag": message.structured_output.structural_tag}


def parsed(family: tuple[str, bool], output: str) -> tuple[str, list[ToolCall]]:
    parser = tool_parser(family[0], ["f", "g", "h"])
    found = [parser.feed(output[: len(output) // 2]), parser.feed(output[len(output) // 2 :])]
    found.append(parser.flush())
    return "".join(one.text for one in found), [call for one in found for call in one.calls]


@pytest.mark.parametrize("family", FAMILIES, ids=map(str, FAMILIES))
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_call_that_is_required_is_made(family: tuple[str, bool], *, is_parallel: bool) -> None:
    asked = fields(STRICT, LOOSE, BARE, tool_choice="required", parallel_tool_calls=is_parallel)
    counts = set()
    for seed in range(5):
        output = walk(matcher_of(**constrained(asked, family)), seed)
        if output is None:
            continue
        text, calls = parsed(family, output)
        assert not text.strip() and calls, output
        counts.add(len(calls))
        for call in calls:
            schema = {"f": SCHEMA, "g": OTHER, "h": {"maxProperties": 0}}[call.name]
            jsonschema.validate(json.loads(call.arguments), schema)
    assert counts and (counts == {1} or is_parallel)


@pytest.mark.parametrize("family", FAMILIES, ids=map(str, FAMILIES))
def test_a_function_that_is_named_is_called_once(family: tuple[str, bool]) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    asked = fields(STRICT, LOOSE, tool_choice=choice)
    output = next(
        filter(None, (walk(matcher_of(**constrained(asked, family)), i) for i in range(9)))
    )
    assert [call.name for call in parsed(family, output)[1]] == ["g"]


@pytest.mark.parametrize("family", FAMILIES, ids=map(str, FAMILIES))
def test_a_strict_function_may_be_called_and_only_right(family: tuple[str, bool]) -> None:
    constraint = constrained(fields(STRICT, LOOSE), family)

    def is_taken(text: str) -> bool:
        return takes(matcher_of(**constraint), text)

    assert is_taken("It rains.") and is_taken(CALLS[family] % '{"x": 3, "s": ""}')
    assert not is_taken(CALLS[family] % '{"x": 2, "s": ""}')
    assert not is_taken(CALLS[family] % "{}")
    anything = CALLS[family].replace('"f"', '"g"').replace("]f[", "]g[")
    assert is_taken(anything % '{"free": [1]}')


@pytest.mark.parametrize("family", FAMILIES, ids=map(str, FAMILIES))
def test_an_answer_has_its_format_unless_it_is_a_call(family: tuple[str, bool]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": OTHER, "strict": True}}
    constraint = constrained(fields(STRICT, response_format=form), family)
    for text, is_fine in [
        ('{"tag": "[ARGS]"}', True),
        (CALLS[family] % '{"x": 3, "s": ""}', True),
        ("It rains.", False),
        ('{"tag": 1}', False),
    ]:
        assert takes(matcher_of(**constraint), text) == is_fine, text


def test_what_must_be_holds_after_reasoning() -> None:
    marks = ReasoningMarks("<think>", "</think>")
    for keyword, value, output in (
        ("json_schema", {"type": "integer"}, "7"),
        ("regex", "a+", "aa"),
        ("ebnf", 'root ::= "b" "c"', "bc"),
        ("choice", ["yes", "no"], "no"),
        ("structural_tag", {"format": {"type": "const_string", "value": "k"}}, "k"),
    ):
        plain = Constraint(keyword=keyword, value=value, param="p")
        assert after_reasoning(plain, None, is_open=False) == plain
        for is_open, begin in ((False, "<think>"), (True, "")):
            found = after_reasoning(plain, marks, is_open=is_open)
            tag = json.dumps(found.value)
            assert takes(matcher_of(structural_tag=tag), f"{begin}Hm.</think>\n\n{output}")
            assert takes(matcher_of(structural_tag=tag), output) is not is_open
            assert not takes(matcher_of(structural_tag=tag), f"{begin}Hm.</think>\n\nx")


def test_tools_that_are_not_strict_leave_the_output_free() -> None:
    assert tool_constraint(fields(LOOSE), "hermes", None, has_args_mark=False) is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "z"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "regex": "a"}, "regex"),
    ],
)
def test_choices_that_cannot_be_are_refused(changes: dict[str, Any], param: str) -> None:
    asked = fields(STRICT, **changes) if "tools" not in changes else fields(tool_choice="required")
    with pytest.raises(ApiError) as caught:
        tool_constraint(asked, "hermes", constraint_of(asked), has_args_mark=False)
    assert caught.value.param == param
