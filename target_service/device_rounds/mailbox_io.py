"""What the target's device takes from the mailbox and posts to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.kernels.mailbox_paths import post_paths
from shared.kernels.mailbox_trees import TakenTrees, take_trees
from shared.messages import MAX_TREE_NODES, TreeShape
from shared.peer.mailbox import Mailbox
from shared.step.staging import Fields, Staging
from target_service.phases import ExtendInput, MailboxPaths, MailboxTrees, VerifyOutput

# A tree takes a millisecond or two; one that has to wait for a prompt, ten.
PATIENCE_US = 30_000
_NOWHERE = -1


class MailboxIO:
    """The target's end of a mailbox, as kernels see it.

    Args:
        device: That the target runs on.
    """

    def __init__(self, mailbox: Mailbox, vocab_size: int, device: torch.device) -> None:
        self._mailbox = mailbox
        self._vocab_size = vocab_size
        self._device = device

    def place_trees(
        self,
        slots: Sequence[int],
        tags: Sequence[int],
        shapes: Sequence[TreeShape],
        staging: Staging,
    ) -> MailboxTrees:
        """Place slots and round tags of the trees of a step, [B] each."""
        host, device = staging.place_zeros(_fields, len(slots))
        host["slot"][:] = slots
        host["round_tag"][:] = tags
        return MailboxTrees(
            words=self._mailbox.trees,
            **device,
            num_nodes=max(shape.num_draft_tokens for shape in shapes),
            max_depth=max(shape.num_steps for shape in shapes),
        )

    @torch.inference_mode()
    def take_trees(self, trees: MailboxTrees, inputs: ExtendInput, num_rows: int) -> TakenTrees:
        """Let the device wait for trees and lay them out.

        Args:
            num_rows: Of all trees.
        Mutates: the rows of `inputs`.
        """
        attention = inputs.rows.attention
        return take_trees(
            trees.words,
            trees.slot,
            trees.round_tag,
            attention.row_indptr,
            attention.prefix_len,
            inputs.token_ids,
            inputs.position_ids,
            attention.path_len,
            attention.path_offset,
            num_trees=len(trees.slot),
            num_nodes=trees.num_nodes,
            max_depth=trees.max_depth,
            num_rows=num_rows,
            vocab_size=self._vocab_size,
            timeout_us=PATIENCE_US,
        )

    def place_paths(
        self, slots: Sequence[int], tags: Sequence[int], staging: Staging
    ) -> MailboxPaths:
        """Place slots and round tags of the paths of a step, [B] each; tag 0: not posted."""
        host, device = staging.place_zeros(_fields, len(slots))
        host["round_tag"][:] = tags
        host["slot"][:] = [slot if tag else _NOWHERE for slot, tag in zip(slots, tags, strict=True)]
        return MailboxPaths(words=self._mailbox.paths, rows=self._mailbox.rows, **device)

    @torch.inference_mode()
    def post_paths(self, paths: MailboxPaths, verified: VerifyOutput) -> None:
        """Post accepted paths and their feature rows. Mutates: the mailbox."""
        outputs, walk = verified.node_outputs, verified.walk
        post_paths(
            paths.words,
            paths.rows,
            paths.slot,
            paths.round_tag,
            walk.accept_length,
            walk.path_rows,
            outputs["token_ids"],
            outputs.get("features"),
        )

    def compile(self) -> None:
        """Launch each kernel once, for a tree that does not come and a path that goes nowhere."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        mailbox, nowhere = self._mailbox, zeros(1, dtype=torch.int32) + _NOWHERE
        take_trees(
            mailbox.trees,
            nowhere,
            nowhere,
            torch.arange(2, dtype=torch.int32, device=self._device),
            zeros(1, dtype=torch.int32),
            zeros(1),
            zeros(1),
            zeros(1, dtype=torch.int32),
            zeros(1, MAX_TREE_NODES, dtype=torch.int32),
            num_trees=1,
            num_nodes=1,
            max_depth=1,
            num_rows=1,
            vocab_size=self._vocab_size,
            timeout_us=0,
        )
        features = None
        if mailbox.rows is not None:
            features = zeros(1, mailbox.rows.shape[-1], dtype=mailbox.rows.dtype)
        post_paths(
            mailbox.paths,
            mailbox.rows,
            nowhere,
            nowhere,
            zeros(1),
            zeros(1, 1),
            zeros(1, dtype=torch.int32),
            features,
        )


def _fields(num_trees: int) -> Fields:
    return {"slot": (torch.int32, (num_trees,)), "round_tag": (torch.int32, (num_trees,))}
