"""The experts that a target routed the rows of tokens to, as they travel to clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from coppice.v1 import generation_pb2
from shared.errors import InvalidArgumentError
from shared.messages.codec import message
from shared.messages.fields import require_range

_AtLeastOne = Annotated[int, partial(require_range, low=1)]
_NumExperts = Annotated[int, partial(require_range, low=1, high=1 << 16)]


def expert_id_bytes(num_experts: int) -> int:
    """Return the bytes of an expert's id: 1 or 2."""
    return 1 if num_experts <= 256 else 2


def _check_size(value: RoutedExperts) -> None:
    if len(value.ids) % value.row_bytes:
        raise InvalidArgumentError(
            f"ids has {len(value.ids)} bytes, expected rows of {value.row_bytes}", field="ids"
        )


@message(generation_pb2.RoutedExperts, check=_check_size)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of the rows that tokens were sampled from; see proto RoutedExperts.

    Args:
        ids: [num_tokens, num_layers, top_k] uint8 or little-endian uint16, see `dtype`; those of a
            row and layer ascending.
        num_layers: Layers that have experts.
        top_k: Experts per row and layer.
        num_experts: Of a layer; bounds the ids.
    """

    ids: bytes
    num_layers: _AtLeastOne
    top_k: _AtLeastOne
    num_experts: _NumExperts

    @property
    def dtype(self) -> str:
        """Return how `ids` are stored: "uint8" or "uint16", little endian."""
        return "uint8" if expert_id_bytes(self.num_experts) == 1 else "uint16"

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a token's ids."""
        return self.num_layers * self.top_k * expert_id_bytes(self.num_experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (num_tokens, num_layers, top_k)."""
        return len(self.ids) // self.row_bytes, self.num_layers, self.top_k

    def part(self, begin: int, stop: int | None) -> RoutedExperts:
        """Return those of the tokens [begin, stop)."""
        last = None if stop is None else stop * self.row_bytes
        return replace(self, ids=self.ids[begin * self.row_bytes : last])

    def tolist(self) -> list[list[list[int]]]:
        """Return the ids as lists, [num_tokens][num_layers][top_k]."""
        width = expert_id_bytes(self.num_experts)
        values = [
            int.from_bytes(self.ids[at : at + width], "little")
            for at in range(0, len(self.ids), width)
        ]
        rows = [values[at : at + self.top_k] for at in range(0, len(values), self.top_k)]
        return [rows[at : at + self.num_layers] for at in range(0, len(rows), self.num_layers)]


def join_routed(parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
    """Return the ids of tokens that follow each other; None if there are none at all."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return replace(found[0], ids=b"".join([part.ids for part in found]))
