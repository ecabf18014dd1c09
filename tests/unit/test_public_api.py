"""What users import and write: it is exported, it is typed, and the README's example is whole."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from mypy import api as mypy

import coppice

ROOT = Path(__file__).resolve().parents[2]

# Every event has a text: whoever only prints needs not tell them apart.
PRINTING = """
from coppice import AsyncClient, Client, RequestOptions

options: RequestOptions = {"max_new_tokens": 8, "temperature": 0.5}
with Client() as client:
    for e in client.stream("x", **options):
        print(e.text)
        length: int = len(e.text)
    said: str = client.generate("x", json_schema={"type": "object"}, max_new_tokens=None).text


async def main() -> None:
    async with AsyncClient() as client:
        async for e in client.stream("x", **options):
            print(e.text)
"""
WRONG = """
from coppice import Client

with Client() as client:
    for e in client.stream("x"):
        print(e.texts)
    client.stream("x", max_new_token=3)
"""


def readme_example() -> str:
    """Return the Python of the README."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert isinstance(code, str)
    return code


def check(code: str) -> tuple[str, int]:
    """Type-check a user's program strictly; return what was said and the exit code."""
    arguments = ["--strict", "--follow-imports=silent", "--config-file=", "-c", code]
    said, problems, exit_code = mypy.run(arguments)
    assert not problems
    return said, exit_code


@pytest.mark.slow
@pytest.mark.parametrize("code", [PRINTING, readme_example()], ids=["printing", "README"])
def test_a_users_program_type_checks(code: str) -> None:
    assert check(code) == ("Success: no issues found in 1 source file\n", 0)


@pytest.mark.slow
def test_a_wrong_program_does_not() -> None:
    said, exit_code = check(WRONG)
    assert exit_code == 1
    assert '"texts"' in said and '"max_new_token"' in said


def test_every_name_that_is_promised_is_there() -> None:
    for name in coppice.__all__:
        assert getattr(coppice, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = coppice.nothing


def test_every_error_that_a_client_may_see_can_be_imported() -> None:
    document = (ROOT / "docs" / "errors.md").read_text()
    seen = document.split("## What a client may see")[1].split("\n## ")[0]
    codes = set(re.findall(r"^\| ([A-Z_]+) \|", seen, re.MULTILINE))
    assert "FAILED_PRECONDITION" in codes
    exported = [getattr(coppice, name) for name in coppice.__all__ if name.endswith("Error")]
    assert codes <= {error.code.name for error in exported}


def test_the_version_has_one_source() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in document["project"]
    assert document["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "coppice.__version__"}
    assert f"## {coppice.__version__}" in (ROOT / "CHANGELOG.md").read_text()
