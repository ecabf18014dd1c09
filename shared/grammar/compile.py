"""Grammar -> what a matcher needs, as bytes that cross hosts."""

from __future__ import annotations

import re
import time
import zlib

import numpy as np
import xgrammar

from shared.errors import InvalidArgumentError
from shared.grammar.source import Grammar, GrammarKind

_LOCATION = re.compile(r"^\[[0-9:]+\] \S+: ", re.MULTILINE)  # before the library's own messages
_MOST_SAID = 500
# A character of a string with minLength or maxLength; control characters are no JSON.
_LENGTH_CHARACTER = re.compile(
    r'^(\S+_characters ::= \(\()\[\^\\"\\\\\\r\\n\](?=\)\)$)', re.MULTILINE
)
_JSON_CHARACTER = r"[^\0-\x1f\"\\]"
