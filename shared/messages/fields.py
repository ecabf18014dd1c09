"""Rules of message fields; each failure is an InvalidArgumentError that names the field.

A rule is a callable (value, field) -> value. `Annotated[type, rule]` puts a rule on a dataclass
field: `codec` applies the rule to what it reads from the wire, and trusts what it writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

from shared.errors import InvalidArgumentError

MAX_REQUEST_ID_LEN = 256


def require_request_id(value: str, field: str = "request_id") -> str:
    """Return a request id that is neither empty nor absurdly long."""
    if not value:
        raise InvalidArgumentError(
            f"{field} is empty; every message names its request", field=field
        )
    if len(value) > MAX_REQUEST_ID_LEN:
        raise InvalidArgumentError(
            f"{field} has {len(value)} characters, at most {MAX_REQUEST_ID_LEN} are allowed",
            field=field,
        )
    return value


def require_text(value: str, field: str) -> str:
    """Return a text that is not empty."""
    if not value:
        raise InvalidArgumentError(f"{field} is empty", field=field)
    return value


def require_range(value: int, field: str, low: int, high: int | None = None) -> int:
    """Return an integer in [low, high]; `high` None = unbounded."""
    if value < low or (high is not None and value > high):
        wanted = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidArgumentError(f"{field} is {value}, must be {wanted}", field=field)
    return value


def require_float(
    value: float, field: str, low: float, high: float = math.inf, *, low_open: bool = False
) -> float:
    """Return a finite number in [low, high], or in (low, high] if `low_open`."""
    above = value > low if low_open else value >= low
    if not (math.isfinite(value) and above and value <= high):
        bracket = "(" if low_open else "["
        wanted = (
            f"in {bracket}{low:g}, {high:g}]"
            if math.isfinite(high)
            else (f"finite and {'>' if low_open else '>='} {low:g}")
        )
        raise InvalidArgumentError(f"{field} is {value}, must be {wanted}", field=field)
    return value


def require_ids(values: Sequence[int], field: str, *, at_least: int = 0) -> tuple[int, ...]:
    """Return token ids as a tuple; whether they are in the vocabulary is the engine's to check."""
    ids = tuple(values)
    if len(ids) < at_least:
        raise InvalidArgumentError(
            f"{field} has {len(ids)} entries, at least {at_least} needed", field=field
        )
    if ids and min(ids) < 0:
        raise InvalidArgumentError(f"{field} holds {min(ids)}, ids are >= 0", field=field)
    return ids


NOT_NEGATIVE = partial(require_range, low=0)

RequestId = Annotated[str, require_request_id]
Text = Annotated[str, require_text]
Count = Annotated[int, NOT_NEGATIVE]
Ids = Annotated[tuple[int, ...], require_ids]
SomeIds = Annotated[tuple[int, ...], partial(require_ids, at_least=1)]


def put_within(parent: str, error: InvalidArgumentError) -> None:
    """Put the parent's name before the field that an error names."""
    error.field = f"{parent}.{error.field}" if error.field else parent


def require_same_lengths(
    *columns: Sequence[Any],
    at_least: int = 0,
    error: type[InvalidArgumentError] = InvalidArgumentError,
) -> None:
    """Raise unless the columns of a message over requests have as many entries each."""
    lengths = [*map(len, columns)]
    if len(set(lengths)) > 1 or lengths[0] < at_least:
        raise error(
            f"the arrays have {lengths} entries, expected as many in each", field="request_ids"
        )


def split_column(values: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the values of each request, of which it has so many."""
    whole = tuple(values)
    stops = accumulate(counts)
    return [whole[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


class Within:
    """Prefixes the field of any InvalidArgumentError raised inside with its parent's name."""

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, error_type: object, error: object, *_: object) -> None:
        """Put the parent's name before the field's."""
        if isinstance(error, InvalidArgumentError):
            put_within(self._parent, error)
