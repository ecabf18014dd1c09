"""Compile what reads and writes the mailbox, before the first request comes."""

from __future__ import annotations

import torch

from shared.kernels.mailbox_paths import post_paths
from shared.kernels.mailbox_trees import num_nodes_of, take_trees
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES
from shared.peer.mailbox import Mailbox


def compile_mailbox(mailbox: Mailbox, pool: KVPool, vocab_size: int) -> None:
    """Launch each kernel once, for a tree that does not come and a path that goes nowhere.

    Also what else a step does with a tree that it has taken: it is launched behind a stream that
    waits, and to load a kernel then would be to wait for the stream.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=pool.device)

    nowhere, is_known = [zeros(1, dtype=torch.int32) + value for value in (-1, 0)]
    attention = TreeAttentionMetadata(
        page_table=pool.page_table,
        req_idx=zeros(1, dtype=torch.int32),
        prefix_len=zeros(1, dtype=torch.int32),
        row_indptr=torch.arange(2, dtype=torch.int32, device=pool.device),
        path_len=zeros(1, dtype=torch.int32),
        path_offset=zeros(1, MAX_TREE_NODES, dtype=torch.int32),
        is_chain=zeros(1, dtype=torch.bool),
        page_size=pool.page_size,
    )
    taken = take_trees(
        mailbox.trees,
        nowhere,
        nowhere,
        zeros(mailbox.num_slots, dtype=torch.int32),
        is_known,
        zeros(1),
        zeros(1),
        zeros(1),
        zeros(1, dtype=torch.int32),
        attention,
        num_trees=1,
        num_nodes=1,
        max_depth=1,
        num_rows=1,
        vocab_size=vocab_size,
        timeout_us=0,
    )
    num_nodes_of(taken.parent_index)
    zeros(3, 3)[:2, :2] = zeros(2, 2)
    rows = features = None
    if mailbox.rows is not None:
        rows = zeros(1) + mailbox.rows.data_ptr()
        features = zeros(1, mailbox.rows.shape[-1], dtype=mailbox.rows.dtype)
    post_paths(
        mailbox.paths,
        rows,
        nowhere,
        nowhere,
        zeros(1),
        zeros(1, 1),
        zeros(1, dtype=torch.int32),
        features,
    )
