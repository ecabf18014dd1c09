"""Compile what reads and writes the mailbox, before the first request comes."""

from __future__ import annotations

import torch

from shared.kernels.mailbox_paths import post_paths
from shared.kernels.mailbox_trees import take_trees
from shared.messages import MAX_TREE_NODES
from shared.peer.mailbox import Mailbox


def compile_mailbox(mailbox: Mailbox, vocab_size: int, device: torch.device) -> None:
    """Launch each kernel once, for a tree that does not come and a path that goes nowhere."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    nowhere = zeros(1, dtype=torch.int32) - 1
    take_trees(
        mailbox.trees,
        nowhere,
        nowhere,
        torch.arange(2, dtype=torch.int32, device=device),
        zeros(1, dtype=torch.int32),
        zeros(1),
        zeros(1),
        zeros(1, dtype=torch.int32),
        zeros(1, MAX_TREE_NODES, dtype=torch.int32),
        num_trees=1,
        num_nodes=1,
        max_depth=1,
        num_rows=1,
        vocab_size=vocab_size,
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
