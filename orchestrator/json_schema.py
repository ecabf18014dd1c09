"""JSON schemas that are followed as they are, keyword by keyword; all others are refused here.

xgrammar takes most schemas and leaves out what it cannot apply. What would be left out is refused
by its place and name; some schemas are written in another way, with the same meaning.
docs/structured-output.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.oneof import are_apart
from orchestrator.patterns import problem_of, without
from shared.errors import InvalidArgumentError

_MAX_DEPTH = 100
_MAX_NAMES_CHARS = 2000
_MAX_MULTIPLE = 100
ANNOTATIONS = frozenset(
    "$comment $schema $id title description default example examples deprecated readOnly writeOnly "
    "discriminator contentEncoding contentMediaType".split()
)
FORMATS = frozenset("date time date-time duration ipv4 ipv6 hostname uuid email uri".split())
HINTS = frozenset("password binary path file-path directory-path int32 int64 float double".split())
_NUMBER = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf format".split())
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        "properties required additionalProperties patternProperties propertyNames minProperties "
        "maxProperties".split()
    ),
    "array": frozenset("items prefixItems minItems maxItems".split()),
    "string": frozenset("minLength maxLength pattern format".split()),
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# Keywords of an object that are not followed beside another one: (keyword, other).
_NOT_BESIDE = (
    ("patternProperties", "properties"),
    ("patternProperties", "additionalProperties"),
    ("propertyNames", "properties"),
    ("propertyNames", "additionalProperties"),
    ("propertyNames", "patternProperties"),
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_ALL = frozenset({"type", *FORMS, *_DEFINITIONS}).union(*KEYWORDS.values())


def follow(schema: Any, field: str) -> None:
    """Write a schema so that xgrammar follows it exactly.

    Args:
        schema: As of `json.loads`.
        field: Of the request, to blame.
    Mutates: `schema`; it means the same afterwards, or accepts less.
    Raises: InvalidArgumentError that names the first keyword that cannot be followed.
    """
    _Schemas(schema, field).follow(schema, "#", 0)


class _Schemas:
    """The schemas inside of one, which may refer to each other."""

    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field
        self._seen: dict[int, Any] = {}  # also keeps what has an id

    def follow(self, schema: Any, at: str, depth: int) -> None:
        """Write a schema anew, and all below it; once."""
        if isinstance(schema, bool) or id(schema) in self._seen:
            return
        if not isinstance(schema, dict):
            raise self._error(at, "is no schema; it must be an object, true or false")
        if depth > _MAX_DEPTH:
            raise self._error(at, f"lies deeper than {_MAX_DEPTH} levels; make it flatter")
        self._seen[id(schema)] = schema
        self._check_keywords(schema, at)
        for name in _DEFINITIONS & schema.keys():
            self._follow_all(schema[name], f"{at}/{name}", depth)
        form = next((name for name in FORMS if name in schema), None)
        if form is not None:
            self._follow_form(form, schema, at, depth)
        else:
            self._follow_typed(schema, at, depth)

    def _check_keywords(self, schema: dict[str, Any], at: str) -> None:
        """Take annotations out; refuse what is no keyword."""
        for name in [name for name in schema if name in ANNOTATIONS or name.startswith("x-")]:
            del schema[name]
        for name in schema:
            if name not in _ALL:
                raise self._error(f"{at}/{name}", "is not followed; leave it out")

    def _follow_form(self, form: str, schema: dict[str, Any], at: str, depth: int) -> None:
        """Follow a schema whose meaning one keyword has, beside which xgrammar applies no other."""
        fine = {form, *_DEFINITIONS} | ({"type"} if form in ("const", "enum") else set())
        for other in schema.keys() - fine:
            raise self._error(
                f"{at}/{other}", f"is not followed beside {form}; say it in one schema"
            )
        value, here = schema[form], f"{at}/{form}"
        if form == "$ref":
            self.follow(self._target(value, here), str(value), depth + 1)
        elif form in ("const", "enum"):
            self._check_values([value] if form == "const" else value, schema, here)
        else:
            self._follow_several(form, value, here, depth)
            if form == "oneOf":
                schema["anyOf"] = schema.pop("oneOf")

    def _follow_several(self, form: str, schemas: Any, here: str, depth: int) -> None:
        """Follow the schemas of allOf, anyOf or oneOf."""
        if not isinstance(schemas, list) or not schemas:
            raise self._error(here, "must be a list of schemas")
        if form == "allOf" and len(schemas) > 1:
            raise self._error(here, "is followed for one schema only; merge them")
        if form == "oneOf" and not are_apart([self._resolved(one) for one in schemas]):
            raise self._error(
                here,
                "has schemas that may both be true of one value, as far as can be told; give "
                "them different types, or a required property with different constants; or "
                "use anyOf",
            )
        for index, one in enumerate(schemas):
            self.follow(one, f"{here}/{index}", depth + 1)

    def _follow_typed(self, schema: dict[str, Any], at: str, depth: int) -> None:
        types = self._types(schema, at)
        given = schema.keys() - _DEFINITIONS - {"type"}
        if types:
            wanted = frozenset[str]().union(*(KEYWORDS[name] for name in types))
            for name in given - wanted:  # about other types
                del schema[name]
        elif given:
            name = min(given)
            raise self._error(f"{at}/{name}", "needs a type beside it")
        if "string" in types:
            self._check_string(schema, at)
        if types & {"number", "integer"}:
            self._check_number(schema, types, at)
        if "array" in types:
            self._follow_array(schema, at, depth)
        if "object" in types:
            self._follow_object(schema, at, depth)

    def _types(self, schema: dict[str, Any], at: str) -> set[str]:
        """Return the types that a schema names, or those that its keywords are about."""
        given = schema.get("type", [])
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._error(f"{at}/type", "must be the name of a type, or a list of names")
        if unknown := set(names) - KEYWORDS.keys():
            raise self._error(f"{at}/type", f"{min(unknown)!r} is no type of JSON")
        if "type" in schema:
            if not names:
                raise self._error(f"{at}/type", "names no type")
            return set(names)
        for name in ("object", "array"):  # as xgrammar reads them, which accepts less
            if {"properties", "additionalProperties", "items", "prefixItems"} & (
                schema.keys() & KEYWORDS[name]
            ):
                schema["type"] = name
                return {name}
        return set()

    def _check_values(self, values: Any, schema: dict[str, Any], at: str) -> None:
        if not isinstance(values, list) or not values:
            raise self._error(at, "must be a list of values")
        types = self._types(schema, at.rpartition("/")[0])
        for value in values:
            if types and not types & _types_of(value):
                raise self._error(at, f"{json.dumps(value)[:80]} is not of the type beside it")
            if any(not _is_exact(number) for number in _numbers_in(value)):
                raise self._error(at, "has an integer that is no 64-bit number; write it as text")

    def _check_string(self, schema: dict[str, Any], at: str) -> None:
        for name in ("minLength", "maxLength"):
            self._check_count(schema, name, at)
            for other in ("pattern", "format"):
                if name in schema and other in schema:
                    raise self._error(f"{at}/{name}", f"is not followed beside {other}")
        if "pattern" in schema:
            if "format" in schema:
                raise self._error(f"{at}/pattern", "is not followed beside format")
            self.check_pattern(schema["pattern"], f"{at}/pattern")
        if schema.get("format") in HINTS:
            del schema["format"]
        name = schema.get("format", "date")
        if name not in FORMATS:
            raise self._error(
                f"{at}/format",
                f"{name!r} is not followed; {', '.join(sorted(FORMATS))} are; or use pattern",
            )

    def check_pattern(self, pattern: Any, at: str) -> None:
        """Raises: InvalidArgumentError if it would be taken for something else."""
        if not isinstance(pattern, str):
            raise self._error(at, "must be a text")
        if problem := problem_of(pattern, is_in_json=True):
            raise self._error(at, f"cannot be followed: {problem}")

    def _check_number(self, schema: dict[str, Any], types: set[str], at: str) -> None:
        if "string" not in types:
            schema.pop("format", None)
        multiple = schema.get("multipleOf")
        if multiple is None:
            return
        bounds = _NUMBER & schema.keys() - {"multipleOf", "format"}
        if "number" in types or bounds or type(multiple) is not int:
            raise self._error(
                f"{at}/multipleOf", "is followed for integers without bounds only; leave it out"
            )
        if not 0 < multiple <= _MAX_MULTIPLE:
            raise self._error(f"{at}/multipleOf", f"must be 1 to {_MAX_MULTIPLE}")

    def _follow_array(self, schema: dict[str, Any], at: str, depth: int) -> None:
        for name in ("minItems", "maxItems"):
            self._check_count(schema, name, at)
        if "items" in schema:
            self.follow(schema["items"], f"{at}/items", depth + 1)
        items = schema.get("prefixItems", [])
        if not isinstance(items, list):
            raise self._error(f"{at}/prefixItems", "must be a list of schemas")
        for index, item in enumerate(items):
            self.follow(item, f"{at}/prefixItems/{index}", depth + 1)

    def _follow_object(self, schema: dict[str, Any], at: str, depth: int) -> None:
        for name in ("minProperties", "maxProperties"):
            self._check_count(schema, name, at)
        for name in ("properties", "patternProperties"):
            if name in schema:
                self._follow_all(schema[name], f"{at}/{name}", depth)
        keys = schema.get("propertyNames")
        if isinstance(keys, dict) and not keys.keys() & set(FORMS):
            keys.setdefault("type", "string")
        for name in ("additionalProperties", "propertyNames"):
            if name in schema:
                self.follow(schema[name], f"{at}/{name}", depth + 1)
        names = schema.get("properties", {})
        self._check_required(schema.get("required", []), names, f"{at}/required")
        has_others = schema.get("additionalProperties", False) is not False
        for pattern in schema.get("patternProperties", ()):
            self.check_pattern(pattern, f"{at}/patternProperties")
        self._check_others(schema, at, has_others=has_others)
        if names and has_others:
            if sum(map(len, names)) > _MAX_NAMES_CHARS:
                raise self._error(
                    f"{at}/additionalProperties", "is followed for fewer names beside it only"
                )
            schema["propertyNames"] = {"pattern": without(names)}

    def _check_required(self, required: Any, names: dict[str, Any], at: str) -> None:
        if not isinstance(required, list):
            raise self._error(at, "must be a list of names")
        for name in required:
            if not isinstance(name, str) or name not in names:
                raise self._error(at, f"{str(name)[:80]!r} is not in properties; add it there")

    def _check_others(self, schema: dict[str, Any], at: str, *, has_others: bool) -> None:
        """Refuse what says something about names that may be any, or about some in two ways."""
        patterns = schema.get("patternProperties", {})
        is_free = has_others or patterns or "propertyNames" in schema
        if is_free and schema.get("minProperties"):
            raise self._error(
                f"{at}/minProperties", "is followed for named properties only: names may repeat"
            )
        for name, other in _NOT_BESIDE:
            if name in schema and schema.get(other):
                raise self._error(f"{at}/{name}", f"is not followed beside {other}")
        if "propertyNames" in schema and schema.get("additionalProperties") is False:
            raise self._error(f"{at}/propertyNames", "is about names that may not be there")
        if len(patterns) > 1:
            raise self._error(f"{at}/patternProperties", "is followed for one pattern only")

    def _follow_all(self, schemas: Any, at: str, depth: int) -> None:
        if not isinstance(schemas, dict):
            raise self._error(at, "must be an object of schemas")
        for name, schema in schemas.items():
            self.follow(schema, f"{at}/{name}", depth + 1)

    def _target(self, ref: Any, at: str) -> Any:
        """Return the schema that a $ref names. Raises: InvalidArgumentError if there is none."""
        head, *parts = ref.split("/") if isinstance(ref, str) else ["?"]
        found = self._root
        for part in parts:
            found = found.get(part) if isinstance(found, dict) else None
        if head != "#" or not isinstance(found, dict | bool):
            raise self._error(at, f"{ref!r} is nowhere in the schema; write it as #/$defs/NAME")
        return found

    def _resolved(self, schema: Any) -> Any:
        """Return what a schema that is nothing but references ends in."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], "$ref")
        return schema

    def _check_count(self, schema: dict[str, Any], name: str, at: str) -> None:
        value = schema.get(name, 0)
        if type(value) is not int or value < 0:
            raise self._error(f"{at}/{name}", "must be a number of 0 or more")

    def _error(self, at: str, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._field}: {at[:200]} {problem}", reason="INVALID_GRAMMAR", field=self._field
        )


def _types_of(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
    return {"object"}


def _numbers_in(value: Any) -> Iterable[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif isinstance(value, int | float):
        yield value


def _is_exact(number: float) -> bool:
    """Return whether xgrammar writes a number as it is."""
    return not isinstance(number, int) or -(2**63) <= number < 2**63
