"""Several layers of multi-token prediction, by position: layer k computes row p of every p.

Row p of layer k reads token p + 1 + k and row p of layer k - 1, or the feature at p. There are as
many rows as features. The newest row of layer k says what follows k drafted tokens. Past the last
layer it is fed its own rows, one by one.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tests.reference.causal_lm import DenseOutput
from tests.reference.drafts import Row


class OneLayer(Protocol):
    """The reference of drafts with one layer, which knows how to run any."""

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]: ...

    def layer(
        self, index: int, tokens: list[int], positions: list[int], vectors: torch.Tensor
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ReferenceMTPLayers:
    """A ReferenceDraft; what `hidden` returns is one value longer than a feature, by which guessed
    rows are known."""

    def __init__(self, layers: OneLayer, num_layers: int) -> None:
        self._layers = layers
        self._num_layers = num_layers

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]:
        return self._layers.true_rows(token_ids, target)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._layers.logits(hidden[:-1])

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        tokens = [row.token_id for row in rows]
        vectors = [row.recurrent for row in rows if row.recurrent is not None]
        width = min(map(len, vectors))
        x = torch.stack([vector for vector in vectors if len(vector) == width])
        num_true, num_guessed = len(x), len(rows) - len(x)
        last = min(num_guessed, self._num_layers - 1)
        for index in range(last):
            x = self._run(index, tokens, x)
        while True:
            newest = self._run(last, tokens, x)[-1]
            if len(x) == num_true + num_guessed - last:
                return torch.cat([newest, newest.new_ones(1)])
            x = torch.cat([x, newest[None]])

    def _run(self, index: int, tokens: list[int], vectors: torch.Tensor) -> torch.Tensor:
        read = tokens[index : index + len(vectors)]
        return self._layers.layer(index, read, list(range(len(read))), vectors[: len(read)])
