"""Keep trees to what the grammars of their requests allow, depth by depth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shared.kernels.token_mask import apply_token_masks
from shared.kernels.tree_beams import Beams

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher


BUDGET_S = 0.004
"""Of the masks of one tree: beams that are left then get no children."""


class GrowthMasks:
    """Masks for one growth of trees.

    Args:
        matchers: Of the requests, each where its root is.
        num_places: B, of the requests and of padding.
        vocab_size: Of the target.
    """

    def __init__(
        self, matchers: Sequence[OutputMatcher], *, num_places: int, vocab_size: int
    ) -> None:
        self._matchers = matchers
        self._num_places = num_places
        self._num_words = -(-vocab_size // 32)
        self._left_s = [BUDGET_S] * len(matchers)
        self._paths: list[list[int]] = [[] for _ in range(num_places)]  # of the last forward's rows

    def apply(self, logits: torch.Tensor, beams: Beams | None, target_ids: torch.Tensor) -> None:
        """Forbid what may not follow; waits for the device.

        Args:
            logits: [B, V] of the roots, or [B * K, V] of the beams.
            beams: None: these are the roots.
            target_ids: [V] of the draft's ids.
        Mutates: `logits`.
        """
        if beams is not None:
            parents, tokens = beams.parent_row.tolist(), beams.token_ids.tolist()
            self._paths = [
                [*self._paths[parent], token] for parent, token in zip(parents, tokens, strict=True)
            ]
        rows_per_tree = len(self._paths) // self._num_places
        num_rows = len(self._matchers) * rows_per_tree
        masks = torch.empty(num_rows, self._num_words, dtype=torch.int32)
        for row, path in enumerate(self._paths[:num_rows]):
            self.fill(row // rows_per_tree, masks[row : row + 1], path)
        rows = torch.arange(num_rows, device=logits.device)
        apply_token_masks(logits, rows, masks.to(logits.device), target_ids)

    def fill(self, tree: int, mask: torch.Tensor, path: Sequence[int]) -> None:
        """Say what may follow a path of a tree, unless its time is up.

        Args:
            mask: [1, ceil(V / 32)] i32 on the host.
        Mutates: `mask`.
        """
        if self._left_s[tree] < 0:
            mask.numpy().fill(0)
            return
        began_s = time.perf_counter()
        self._matchers[tree].fill_mask_after(mask, path)
        self._left_s[tree] -= time.perf_counter() - began_s
