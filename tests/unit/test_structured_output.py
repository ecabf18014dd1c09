"""What a request may ask of its output: each kind is written down; what cannot be is refused."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from coppice.request import build_request
from coppice.v1 import generation_pb2 as pb
from orchestrator.json_schema import FORMATS, KEYWORDS
from orchestrator.structured_output import MAX_SOURCE_BYTES, parse_grammar
from shared.errors import InvalidArgumentError
from shared.grammar.source import GrammarKind
from tests.grammar_walks import matcher_of, takes, walk

STRING = {"type": "string"}


def parse(**constraint: Any) -> tuple[GrammarKind, str]:
    """Return what becomes of a field of StructuredOutput."""
    request = pb.GenerateRequest(structured_output=pb.StructuredOutput(**constraint))
    grammar = parse_grammar(request)
    assert grammar is not None
    return grammar.kind, grammar.source


def refusal(**constraint: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(**constraint)
    (name,) = constraint
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"structured_output.{name}")
    return caught.value


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1),
    seed=st.integers(0, 9),
)
def test_a_choice_is_one_of_its_texts(texts: list[str], seed: int) -> None:
    matcher = matcher_of(choice=pb.Choices(texts=texts))
    assert walk(matcher, seed) in (None, *texts)


@given(text=st.text(max_size=40) | st.binary(max_size=40).map(repr))
def test_any_text_is_a_grammar_or_refused(text: str) -> None:
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        try:
            kind, source = parse(**{name: text})
        except (InvalidArgumentError, ValueError) as error:  # half a surrogate fits no message
            assert str(error)
        else:
            assert str(kind) and source


def test_nothing_said_is_free_and_an_empty_message_is_not() -> None:
    assert parse_grammar(pb.GenerateRequest()) is None
    with pytest.raises(InvalidArgumentError, match="says nothing"):
        parse_grammar(pb.GenerateRequest(structured_output=pb.StructuredOutput()))


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        ({"regex": ""}, "is empty"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, "at most"),
        ({"choice": pb.Choices()}, "name at least one"),
        ({"choice": pb.Choices(texts=["a", ""])}, "an empty text"),
        ({"json_schema": "{"}, "is not JSON"),
        ({"json_schema": "[]"}, "no JSON object"),
        ({"json_schema": '{"const": NaN}'}, "NaN is no number"),
        ({"json_schema": '{"const": "\\ud800"}'}, "is not JSON"),
        ({"json_schema": nested(10_000)}, "too deeply|deeper than"),
        ({"json_schema": nested(101)}, "deeper than 100"),
        ({"structural_tag": '{"a":' * 9000 + "1" + "}" * 9000}, "too deeply"),
        ({"structural_tag": '{"format": {"type": "regex", "pattern": "a$b"}}'}, "\\$ stands"),
        ({"regex": "a^b"}, "\\^ stands inside"),
        ({"regex": "(?i)a"}, "sets flags"),
        ({"regex": "a*+a"}, "without giving back"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_grammar_is_refused(constraint: dict[str, Any], problem: str) -> None:
    assert refusal(**constraint)
    with pytest.raises(InvalidArgumentError, match=problem):
        parse(**constraint)


@pytest.mark.parametrize("name", ["ignore_eos", "min_new_tokens"])
def test_the_grammar_says_where_the_output_ends(name: str) -> None:
    request = build_request("x", {"regex": "a", name: 1})  # type: ignore[misc]
    with pytest.raises(InvalidArgumentError) as caught:
        parse_grammar(request)
    assert caught.value.field == f"stopping.{name}"


# Schemas that xgrammar compiles and does not follow, or whose output would be no JSON.
HALFWAY: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "contains": STRING}, "#/contains"),
    ({"not": STRING}, "#/not"),
    ({"if": STRING, "then": {"minLength": 2}}, "#/if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "#/dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties"),
    ({"type": "number", "multipleOf": 0.5}, "#/multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "#/multipleOf"),
    ({"minimum": 3}, "#/minimum needs a type"),
    ({"required": ["a"]}, "#/required needs a type"),
    ({"properties": {"a": {"items": {"nullable": True}}}}, "#/properties/a/items/nullable"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b' is not in properties"),
    ({"allOf": [STRING, {"type": "null"}]}, "#/allOf"),
    ({"anyOf": [STRING], "minLength": 3}, "#/minLength is not followed beside anyOf"),
    ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {}}}, "#/minimum is not followed beside"),
    ({"$ref": "https://example.org/schema"}, "nowhere in the schema"),
    ({"$ref": "#/$defs/a", "$defs": {}}, "nowhere in the schema"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
    ({"oneOf": [STRING, {"const": "a"}]}, "#/oneOf"),
    ({"oneOf": [{}, {}]}, "#/oneOf"),
    ({"enum": ["a", 1], "type": "string"}, "#/enum"),
    ({"const": 2**63 + 1}, "64-bit"),
    ({"type": []}, "names no type"),
    ({"type": "any"}, "'any' is no type"),
    ({**STRING, "pattern": "^(?=.*a)b"}, "looks around"),
    ({**STRING, "pattern": "^a$|b^c"}, "stands inside"),
    ({**STRING, "pattern": 'a"b'}, "JSON writes with a backslash"),
    ({**STRING, "pattern": r"a\\b"}, "JSON writes with a backslash"),
    ({**STRING, "pattern": r"[\n]"}, "JSON writes with a backslash"),
    ({**STRING, "pattern": "a", "maxLength": 3}, "#/maxLength"),
    ({**STRING, "format": "date", "minLength": 3}, "#/minLength"),
    ({**STRING, "format": "json-pointer"}, "#/format"),
    ({**STRING, "maxLength": 2.5}, "#/maxLength"),
    ({"type": "object", "additionalProperties": True, "minProperties": 2}, "#/minProperties"),
    ({"type": "object", "patternProperties": {"a": {}}, "properties": {"a": {}}}, "#/pattern"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "one pattern"),
    ({"type": "object", "propertyNames": STRING, "additionalProperties": STRING}, "#/propertyN"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "problem"), HALFWAY, ids=range(len(HALFWAY)))
def test_a_schema_that_would_be_followed_halfway_is_refused_by_name(
    schema: Any, problem: str
) -> None:
    error = refusal(json_schema=json.dumps(schema))
    assert problem in error.message and error.reason == "INVALID_GRAMMAR"
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    assert problem in refusal(structural_tag=json.dumps(tag)).message


@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        ({"type": "object"}, ['{"a": [1, null]}', "{}"], ["[]", '{"a":1}']),
        ({**STRING, "maxLength": 2}, ['"ab"', '"🌲"'], ['"abc"', '"\t"', '"\x01"']),
        ({**STRING, "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
        ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-3", "11"], ["12", "-4"]),
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": STRING},
            ['{"a": 1, "b": "x"}', '{"b": "x"}'],
            ['{"a": 1, "\\u0061": "x"}', '{"a": "x"}', '{"b": 1}'],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {},
             "$defs": {
                 kind: {"type": "object", "required": ["kind"], "title": "x",
                        "properties": {"kind": {"const": kind, "type": "string"}}}
                 for kind in "ab"}},
            ['{"kind": "a"}', '{"kind": "b"}'],
            ['{"kind": "c"}', "{}"],
        ),
        (
            {"$defs": {"list": {"anyOf": [{"type": "null"}, {"type": "array",
             "items": {"$ref": "#/$defs/list"}}]}}, "$ref": "#/$defs/list"},
            ["[[], null]"],
            ["[1]"],
        ),
        ({"type": "integer", "minLength": 9, "x-order": 3, "format": "int32"}, ["7"], ['"a"']),
    ],
)  # fmt: skip
def test_a_schema_is_followed(schema: Any, fine: list[str], wrong: list[str]) -> None:
    for text, is_fine in [*((t, True) for t in fine), *((t, False) for t in wrong)]:
        matcher = matcher_of(json_schema=json.dumps(schema))
        assert takes(matcher, text) == is_fine, text


class Cat(BaseModel):
    """A pet of few words."""

    kind: Literal["cat"]
    born: datetime.date | None = None


class Dog(BaseModel):
    """A pet with friends."""

    kind: Literal["dog"]
    friends: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(max_length=2)
    tag: tuple[int, str]
    notes: dict[str, float] = {}


def test_models_of_pydantic_are_followed() -> None:
    schema = json.dumps(Dog.model_json_schema())
    outputs = [walk(matcher_of(json_schema=schema), seed) for seed in range(6)]
    assert all(Dog.model_validate_json(output) for output in outputs if output)
    assert any(outputs)


def test_the_document_has_every_keyword_and_format() -> None:
    from tests.unit.test_gateway_fields import ROOT

    text = (ROOT / "docs" / "structured-output.md").read_text()
    for name in {*FORMATS, *(word for words in KEYWORDS.values() for word in words)}:
        assert f"`{name}`" in text, name


HOSTILE = [
    {"ebnf": 'root ::= root "a"'},
    {"json_schema": '{"$ref": "#"}'},
    {"json_schema": '{"enum": []}'},
    {"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'},
]


@pytest.mark.parametrize("constraint", HOSTILE, ids=range(len(HOSTILE)))
def test_what_no_output_can_have_is_refused(constraint: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        matcher_of(**constraint)
    assert caught.value.message
