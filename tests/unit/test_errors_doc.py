"""docs/errors.md lists every reason in the code, with its code, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shared import errors
from shared.errors import CoppiceError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coppice", "orchestrator", "draft_service", "target_service", "shared")
REASON = re.compile(r"[A-Z]+(_[A-Z]+)*")


def documented() -> dict[str, str]:
    """Return reason -> code of the tables."""
    rows = {}
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`"):
            reason = cells[1].strip("`")
            assert reason not in rows, f"{reason} is listed twice"
            rows[reason] = cells[0]
    return rows


def strings_of(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """Yield the strings that an expression may be: constants, names of constants, either branch."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in names:
        yield names[node.id]
    elif isinstance(node, ast.IfExp):
        yield from strings_of(node.body, names)
        yield from strings_of(node.orelse, names)


def reasons_in_code() -> set[str]:
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "_pb2" in path.name:
                continue
            tree = ast.parse(path.read_text())
            assigned = [
                (target.id, node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            ]
            names = {
                name: value.value
                for name, value in assigned
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
            said = [value for name, value in assigned if name in ("reason", "default_reason")]
            said += [
                keyword.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                for keyword in node.keywords
                if keyword.arg == "reason"
            ]
            for value in said:
                found |= {text for text in strings_of(value, names) if REASON.fullmatch(text)}
    return found


def test_every_reason_is_documented_and_exists() -> None:
    assert reasons_in_code() == set(documented())


def error_classes() -> list[type[CoppiceError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, CoppiceError)
    ]


def test_default_reasons_stand_beside_their_code() -> None:
    rows = documented()
    assert len(error_classes()) > 6
    for error_class in error_classes():
        assert rows[error_class.default_reason] == error_class.code.name


def test_the_hierarchy_in_the_docstring_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    for error_class in error_classes():
        if error_class is not CoppiceError:
            pattern = rf"── {error_class.__name__} +{error_class.code.name} "
            assert re.search(pattern, errors.__doc__), error_class
