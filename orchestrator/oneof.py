"""Schemas of which at most one is true of any value: what oneOf needs to mean what anyOf does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any


def are_apart(schemas: Sequence[Any]) -> bool:
    """Return whether it can be told that no value has two of these schemas.

    They differ in their types, in their constants, or in the constants of a required property.
    """
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    if any(_are_disjoint([tell(schema) for schema in schemas]) for tell in (_kinds, _constants)):
        return True
    names = [set(_constants_of_properties(schema)) for schema in schemas]
    common = set.intersection(*names)
    return any(
        _are_disjoint([_constants_of_properties(schema)[name] for schema in schemas])
        for name in common
    )


def _are_disjoint(sets: Sequence[frozenset[Hashable]]) -> bool:
    """Return whether no two sets share anything; an empty one may hold all."""
    counts = Counter(item for one in sets for item in one)
    return all(sets) and all(count == 1 for count in counts.values())


def _kinds(schema: dict[str, Any]) -> frozenset[Hashable]:
    """Return the types of JSON that a schema accepts; empty: any."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return frozenset()
    return frozenset("number" if name == "integer" else name for name in names)


def _constants(schema: Any) -> frozenset[Hashable]:
    """Return the values that a schema accepts; empty: more than can be told."""
    if not isinstance(schema, dict):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return frozenset(map(_key, values)) if isinstance(values, list) else frozenset()


def _constants_of_properties(schema: dict[str, Any]) -> dict[str, frozenset[Hashable]]:
    """Return the constants of required properties of an object."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, dict):
        return {}
    if not isinstance(required, list):
        return {}
    found = {name: _constants(properties.get(name)) for name in required if isinstance(name, str)}
    return {name: values for name, values in found.items() if values}


def _key(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)
