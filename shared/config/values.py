"""A configuration as text, for operators; what is secret stays out."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(r"secret|token|password|credential")


def shown_values(config: Any) -> dict[str, str]:
    """Return every field of a configuration dataclass as text.

    A text whose name speaks of a secret is hidden, unless it names the file where the secret is.
    """
    return {
        spec.name: HIDDEN if _is_secret(spec.name, value) else str(value)
        for spec in fields(config)
        for value in [getattr(config, spec.name)]
    }


def _is_secret(name: str, value: Any) -> bool:
    is_text = isinstance(value, str) and bool(value)
    return is_text and bool(_SECRET.search(name)) and not name.endswith(("_file", "_dir"))
