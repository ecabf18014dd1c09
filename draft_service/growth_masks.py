"""Keep trees to what the grammars of their requests allow, depth by depth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shared.grammar.threads import MatcherThreads
from shared.kernels.tree_beams import Beams

if TYPE_CHECKING:
    from draft_service.growth import Growth
    from shared.grammar.matcher import OutputMatcher


BUDGET_S = 0.004
"""Of the masks of one tree: beams that are left then get no children."""


class GrowthMasks:
    """Masks for one growth of trees.

    Args:
        matchers: Of the requests, each where its root is.
        num_places: B, of the requests and of padding.
        threads: To be used again for the next growth.
    """

    def __init__(
        self,
        matchers: Sequence[OutputMatcher],
        *,
        num_places: int,
        threads: MatcherThreads | None = None,
    ) -> None:
        self._matchers = matchers
        self._threads = threads or MatcherThreads()
        self._num_places = num_places
        self._left_s = [BUDGET_S] * len(matchers)
        self._paths: list[list[int]] = [[] for _ in range(num_places)]  # of the last forward's rows

    def fill_in(self, masks: torch.Tensor, beams: Beams | None) -> None:
        """Say which children the roots or beams may have; waits for the device.

        Args:
            masks: [rows, ceil(V / 32)] i32 on the host.
            beams: None: these are the roots.
        Mutates: `masks`, but for rows of padding.
        """
        if beams is not None:
            parents, tokens = beams.parent_row.tolist(), beams.token_ids.tolist()
            self._paths = [
                [*self._paths[parent], token] for parent, token in zip(parents, tokens, strict=True)
            ]
        rows_per_tree = len(self._paths) // self._num_places

        def fill_tree(tree: int) -> None:
            for row in range(tree * rows_per_tree, (tree + 1) * rows_per_tree):
                self.fill(tree, masks[row : row + 1], self._paths[row])

        for _ in self._threads.map(fill_tree, range(len(self._matchers))):
            pass

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


class MaskBuffers:
    """Where masks lie on the device: those of so many rows at the same place every time.

    Numbers of rows share memory up to the next power of two: there are as many as batches and
    shapes that clients choose.

    Args:
        vocab_size: Of the target.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // 32)
        self._device = device
        # By the most rows: on the host, on the device.
        self._of_rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def filled(self, masks: GrowthMasks, growth: Growth) -> torch.Tensor:
        """Return the masks of the roots or beams of a growth, [rows, ceil(V / 32)] i32, valid until
        the next masks; waits for the device.
        """
        num_rows = len(growth.logits)
        most_rows = 1 << (num_rows - 1).bit_length()
        if most_rows not in self._of_rows:
            self._of_rows[most_rows] = self._allocate(most_rows)
        on_host, on_device = [rows[:num_rows] for rows in self._of_rows[most_rows]]
        # Whoever read them last has been waited for: for the beams that it left, or for the trees.
        masks.fill_in(on_host, growth.beams)
        if on_device.device != on_host.device:
            on_device.copy_(on_host, non_blocking=True)
        return on_device

    def _allocate(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, is_cpu = (num_rows, self._num_words), self._device.type == "cpu"
        on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=not is_cpu)
        return on_host, on_host if is_cpu else torch.zeros_like(on_host, device=self._device)
