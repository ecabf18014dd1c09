"""Outputs that have a format for certain: a choice, a text of a pattern, JSON of a pydantic model.

python examples/structured_output.py [ADDRESS]       needs a server: coppice up
"""

# ruff: noqa: T201
from __future__ import annotations

import sys
from enum import Enum

from pydantic import BaseModel, Field

from coppice import Client, CoppiceError


class Kind(Enum):
    """What a function is for."""

    READS = "reads"
    WRITES = "writes"
    COMPUTES = "computes"


class Function(BaseModel):
    """What the model says of a function."""

    name: str = Field(pattern=r"^[a-z_]{1,16}$")
    kind: Kind
    lines: int = Field(ge=1, le=99)


def main(address: str) -> int:
    """Ask three times; the last answer is an object of Python."""
    with Client(address) as client:
        prompt = "def read_lines(path):"
        print(client.generate(prompt, choice=[kind.value for kind in Kind]).text)
        print(client.generate(prompt, regex="[a-z]{4}-[0-9]{4}", temperature=0.8, seed=3).text)
        said = client.generate(prompt, json_schema=Function, max_new_tokens=None)
        function = Function.model_validate_json(said.text)
        print(f"{function!r} in {said.speculation.num_rounds} rounds")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"))
    except CoppiceError as error:
        sys.exit(f"{error.code.name} {error.reason}: {error.message}")
