"""A grammar as it is written. Torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GrammarKind(enum.IntEnum):
    """How a grammar is written."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3
    STRUCTURAL_TAG = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must be, from its first token to the one that ends it.

    Args:
        source: Of the kind's notation: the text of a JSON schema, of a regular expression, of an
            EBNF whose first rule is `root`, or of a structural tag.
    """

    kind: GrammarKind
    source: str
