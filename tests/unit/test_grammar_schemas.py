"""What schemas promise: each output that a grammar lets through is JSON that jsonschema accepts.

Schemas are drawn at random, outputs are walks over the tokens that may follow.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.json_schema import FORMATS
from shared.errors import InvalidArgumentError
from tests.grammar_walks import matcher_of, walk
from tests.marks import EXHAUSTIVE

NAMES = st.sampled_from(["a", "ab", "b-c", 'q"', "é", "", "x\ny"])
COUNTS = st.integers(0, 4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**6) | st.text("aé\"\\/\n🌲", max_size=3)
    | st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)  # fmt: skip
PATTERNS = st.sampled_from(
    ["^a+$", "b", "^[^x]{2,4}$", r"\d{3}-\w*", "(?:é|ü)+|^z$", "^.?[ -~]$", r"[^\"\\a]+", "a|"]
)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def both(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with the fields of several."""
    return st.tuples(*parts).map(lambda found: {k: v for part in found for k, v in part.items()})


def typed(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of a type."""
    return both(st.just({"type": name}), optional(**fields))


BOUND = st.integers(-300, 300) | st.floats(-50, 50, width=16)
NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    name: BOUND for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
}
LEAVES = st.one_of(
    st.just({}),
    st.sampled_from(["null", "boolean"]).map(lambda name: {"type": name}),
    typed("string", minLength=COUNTS, maxLength=COUNTS),
    typed("string", pattern=PATTERNS),
    st.sampled_from(sorted(FORMATS)).map(lambda name: {"type": "string", "format": name}),
    typed("integer", **NUMBERS),
    typed("integer", multipleOf=st.integers(1, 12)),
    typed("number", **NUMBERS),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    typed("string").map(lambda one: {**one, "type": ["string", "integer"], "minimum": 3}),
    st.just({"$ref": "#/$defs/d"}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of objects."""
    named = st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda names: optional(
            required=st.lists(st.sampled_from(sorted(names)), unique=True)
            if names
            else st.just([]),
            additionalProperties=st.booleans() | inner,
            minProperties=COUNTS,
            maxProperties=COUNTS,
        ).map(lambda rest: {"type": "object", "properties": names, **rest})
    )
    return named | typed(
        "object",
        additionalProperties=st.booleans() | inner,
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
        propertyNames=PATTERNS.map(lambda pattern: {"pattern": pattern})
        | st.just({"enum": ["a", "b"]}) | st.just({"minLength": 2}),
        minProperties=COUNTS,
        maxProperties=COUNTS,
    )  # fmt: skip


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of arrays."""
    items = st.lists(inner, max_size=2)
    return typed(
        "array", items=st.booleans() | inner, prefixItems=items, minItems=COUNTS, maxItems=COUNTS
    )


def choices(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of others."""
    several = st.lists(inner, min_size=1, max_size=3)
    kind = st.sampled_from(["anyOf", "oneOf", "allOf"])
    return st.tuples(kind, several).map(lambda pair: {pair[0]: pair[1]})


def _outer(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return objects(inner) | arrays(inner) | choices(inner)


SCHEMAS = both(
    _outer(st.recursive(LEAVES, _outer, max_leaves=4)),
    st.recursive(LEAVES, _outer, max_leaves=2).map(lambda one: {"$defs": {"d": one}}),
)


def check(schema: dict[str, Any], seed: int) -> None:
    """Walk through a schema's grammar; what comes out has the schema."""
    try:
        matcher = matcher_of(json_schema=json.dumps(schema))
    except InvalidArgumentError as error:
        assert error.reason == "INVALID_GRAMMAR" and error.message
        return
    output = walk(matcher, seed)
    if output is not None:
        value = json.loads(output)
        with contextlib.suppress(RecursionError):  # a schema that is nothing but itself
            jsonschema.Draft202012Validator(schema).validate(value)


SLOW_TO_DRAW: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=60, **SLOW_TO_DRAW)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_what_a_grammar_lets_through_has_the_schema(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


@EXHAUSTIVE
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, **SLOW_TO_DRAW)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6))
def test_what_a_grammar_lets_through_has_the_schema_of_thousands(
    schema: dict[str, Any], seed: int
) -> None:
    check(schema, seed)
