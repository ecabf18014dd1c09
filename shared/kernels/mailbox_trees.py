"""Trees that the draft's GPU posts in a mailbox, and the target's takes out of it.

Words (mailbox_words.py) of a slot: word j is node j of the tree, its small number the node's
parent, 255 if there is no such node. The root, word 0, is not posted: the target knows it.
Grid of either kernel: (num_trees,).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton
from shared.kernels.mailbox_words import (
    NO_NODE,
    NODES,
    await_words,
    is_word,
    mailbox_words,
    mailbox_words_ref,
    tag_bits_ref,
    word_small,
    word_token,
)
from shared.kernels.page_slots import slots_in, slots_of
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTrees:
    """Trees as `accept_walk` reads them. B trees, N = nodes of the largest, L rows in all.

    Args:
        token_ids: [B, N] i64, root included; 0 where there is no node.
        parent_index: [B, N] i64, topological, root = -1; -2 where there is no node.
        position: [L] i64, absolute position of what is sampled at each row.
        seq_len: [B] i64, logical slot of each root.
    """

    token_ids: torch.Tensor
    parent_index: torch.Tensor
    position: torch.Tensor
    seq_len: torch.Tensor


def num_nodes_of(parent_index: torch.Tensor) -> torch.Tensor:
    """Return how many nodes trees have, of TakenTrees. [B] i64"""
    return (parent_index >= -1).sum(dim=1)


@triton.jit(do_not_specialize=["most_nodes"])
def _post_trees_kernel(
    trees_ptr,  # [S, NODES] i64 mutated
    packed_ptr,  # [.., 1 + 3 M] i32
    slot_ptr,  # [B] i32
    round_tag_ptr,  # [B] i32
    most_nodes,  # M
    NODES: tl.constexpr,
    NO_NODE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    tree = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + tree).to(tl.int64)
    packed_ptr += tree * (1 + 3 * most_nodes)
    node = tl.arange(0, NODES)
    num_nodes = tl.load(packed_ptr)
    is_node = (node > 0) & (node <= num_nodes) & (node <= most_nodes)
    token = tl.load(packed_ptr + node, mask=is_node, other=0)
    parent = tl.load(packed_ptr + most_nodes + node, mask=is_node, other=NO_NODE)
    word = mailbox_words(tl.load(round_tag_ptr + tree), parent, token)
    is_posted = (slot >= 0) & (num_nodes > 0) & (node > 0) & (node <= most_nodes)
    tl.store(trees_ptr + slot * NODES + node, word, mask=is_posted, cache_modifier=".wt")


def post_trees(
    trees: torch.Tensor, packed: torch.Tensor, slot: torch.Tensor, round_tag: torch.Tensor
) -> None:
    """Post grown trees of B requests; none where nothing was grown.

    Args:
        trees: [S, 64] i64, the mailbox.
        packed: [>= B, 1 + 3 M] i32, as `select_nodes` packs them; M < 64.
        slot: [B] i32; -1: nothing to post.
        round_tag: [B] i32, rounds.
    Mutates: words 1..M of `trees` at these slots.
    """
    if not use_triton(packed):
        post_trees_ref(trees, packed, slot, round_tag)
        return
    most_nodes = _most_nodes(packed)
    assert trees.shape[1] == NODES and trees.is_contiguous() and packed.is_contiguous()
    assert slot.is_contiguous() and round_tag.is_contiguous() and len(slot) <= len(packed)
    if len(slot) == 0:
        return
    count_launch("post_trees", is_single=True)
    _post_trees_kernel[(len(slot),)](
        trees,
        packed,
        slot,
        round_tag,
        most_nodes,
        NODES=NODES,
        NO_NODE=NO_NODE,
        num_warps=2,
        **dependent_launch(packed),
    )


def post_trees_ref(
    trees: torch.Tensor, packed: torch.Tensor, slot: torch.Tensor, round_tag: torch.Tensor
) -> None:
    """Do what `post_trees` does in plain torch."""
    most_nodes = _most_nodes(packed)
    num_nodes, token, parent, _ = packed[: len(slot)].split([1, *[most_nodes] * 3], dim=1)
    is_node = torch.arange(most_nodes) < num_nodes  # [B, M]
    words = mailbox_words_ref(
        round_tag[:, None], torch.where(is_node, parent, NO_NODE), torch.where(is_node, token, 0)
    )
    is_posted = (slot >= 0) & (num_nodes.squeeze(1) > 0)
    trees[slot[is_posted].long(), 1 : 1 + most_nodes] = words[is_posted]


def _most_nodes(packed: torch.Tensor) -> int:
    most_nodes = (packed.shape[1] - 1) // 3
    assert packed.shape[1] == 1 + 3 * most_nodes and most_nodes < NODES
    return most_nodes


@triton.jit(
    do_not_specialize=["most_nodes", "max_depth", "vocab_size", "timeout_us", "table_stride"]
)
def _take_trees_kernel(
    trees_ptr,  # [S, NODES] i64
    slot_ptr,  # [B] i32
    round_tag_ptr,  # [B] i32
    given_up_ptr,  # [S] i32
    req_idx_ptr,  # [B] i32
    is_behind_ptr,  # [B] i32
    newest_slot_ptr,  # [> max_reqs] i64
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    row_indptr_ptr,  # [B + 1] i32
    is_chain_ptr,  # [B] bool
    prefix_len_ptr,  # [B] i32 mutated
    slot_mapping_ptr,  # [T] i32 mutated
    token_ids_ptr,  # [T] i64 mutated
    position_ids_ptr,  # [T] i64 mutated
    path_len_ptr,  # [T] i32 mutated
    path_offset_ptr,  # [T, NODES] i32 mutated, unread and unwritten unless HAS_PATHS
    tree_token_ids_ptr,  # [B, N] i64 mutated
    parent_index_ptr,  # [B, N] i64 mutated
    position_ptr,  # [L] i64 mutated
    seq_len_ptr,  # [B] i64 mutated
    most_nodes,  # N
    max_depth,
    vocab_size,
    timeout_us,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    WAITS: tl.constexpr,
):
    tree = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + tree).to(tl.int64)
    round_tag = tl.load(round_tag_ptr + tree)
    first = tl.load(row_indptr_ptr + tree).to(tl.int64)
    num_nodes = (tl.load(row_indptr_ptr + tree + 1) - first).to(tl.int32)
    req_idx = tl.load(req_idx_ptr + tree).to(tl.int64)
    prefix_len = tl.load(prefix_len_ptr + tree).to(tl.int64)
    if tl.load(is_behind_ptr + tree) != 0:
        prefix_len = tl.load(newest_slot_ptr + req_idx)
    root_token = tl.load(token_ids_ptr + first, mask=num_nodes > 0, other=0)
    node = tl.arange(0, NODES)
    is_row = node < num_nodes

    is_wanted = (slot >= 0) & is_row & (node > 0)
    word_ptrs = trees_ptr + slot * NODES + node
    word = await_words(
        word_ptrs,
        is_wanted,
        round_tag,
        timeout_us,
        given_up_ptr + tl.maximum(slot, 0),
        round_tag,
        word_ptrs,
        0,
        HAS_GRACE=False,
        WAITS=WAITS,
    )
    token, parent = word_token(word), word_small(word)
    # What is no node is its own parent: nothing climbs from there to the root.
    is_chain = tl.load(is_chain_ptr + tree).to(tl.int32)
    is_parent = (parent < node) & ((parent == node - 1) | (is_chain == 0))
    has_peer = is_word(word, round_tag) & (token < vocab_size) & is_parent
    up = tl.where(has_peer, parent, node)

    depth = tl.zeros((NODES,), dtype=tl.int32)
    ancestor = node
    for _ in range(max_depth):
        above = tl.gather(up, ancestor, axis=0)
        depth += (above != ancestor).to(tl.int32)
        ancestor = above
    is_node = is_row & (ancestor == 0)
    depth = tl.where(is_node, depth, 0)
    token = tl.where(node == 0, root_token, tl.where(is_node, token, 0))

    tl.store(prefix_len_ptr + tree, prefix_len.to(tl.int32))
    tl.store(seq_len_ptr + tree, prefix_len)
    row = first + node
    slots = slots_of(page_table_ptr + req_idx * table_stride, prefix_len + node, PAGE_SIZE, is_row)
    tl.store(slot_mapping_ptr + row, slots.to(tl.int32), mask=is_row)
    tl.store(token_ids_ptr + row, token, mask=is_row & (node > 0))
    tl.store(position_ids_ptr + row, prefix_len + depth, mask=is_row)
    tl.store(position_ptr + row, prefix_len + depth + 1, mask=is_row)
    tl.store(path_len_ptr + row, tl.where(is_chain != 0, node, depth) + 1, mask=is_row)
    in_tree = node < most_nodes
    at = tree * most_nodes + node
    parent = tl.where(node == 0, -1, parent)
    tl.store(tree_token_ids_ptr + at, tl.where(is_row, token, 0), mask=in_tree)
    tl.store(parent_index_ptr + at, tl.where(is_node, parent, -2).to(tl.int64), mask=in_tree)

    if HAS_PATHS:
        path_ptrs = path_offset_ptr + row * NODES
        step = tl.arange(0, NODES)[None, :]
        is_past = is_row[:, None] & (step > depth[:, None])
        tl.store(path_ptrs[:, None] + step, tl.zeros((NODES, NODES), dtype=tl.int32), mask=is_past)
        ancestor = node
        for climbed in range(max_depth + 1):
            on_path = is_row & (climbed <= depth)
            tl.store(path_ptrs + depth - climbed, ancestor, mask=on_path)
            ancestor = tl.gather(up, ancestor, axis=0)


def take_trees(
    trees: torch.Tensor,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    given_up: torch.Tensor,
    is_behind: torch.Tensor,
    newest_slot: torch.Tensor,
    token_ids: torch.Tensor,
    position_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    attention: TreeAttentionMetadata,
    *,
    num_trees: int,
    num_nodes: int,
    num_rows: int,
    max_depth: int,
    vocab_size: int,
    timeout_us: int,
) -> TakenTrees:
    """Wait for trees and lay their nodes out as the first rows of a forward.

    Whatever the words say, this leaves trees that can be verified: a node is none if its word did
    not come, if its token is outside the vocabulary, if its parent is no node before it, or if it
    is too deep. Its row sees nothing of the tree, holds token 0, and no path leads there. Of a
    block that `attention` calls a chain every node is the child of the one before it, or none; the
    rows of a chain see all rows before them, and those after its end are nobody's: K and V of token
    0 are written there, which weigh nothing in the rows before, if they are finite.
    On a CPU the words are there or are not: nothing waits.

    Where the host does not know yet how far the round before went, the tree is moved to where that
    round ended: prefix, positions and slots.

    Args:
        trees: [S, 64] i64, the mailbox.
        slot: [>= B] i32; -1: no word comes.
        round_tag: [>= B] i32, rounds.
        given_up: [S] i32, of the host: the round there is not waited for any more.
        is_behind: [>= B] i32; not 0: `newest_slot` says where the root is, not `attention`.
        newest_slot: [> max_reqs] i64, logical slot of each request's newest token.
        token_ids: [T] i64, with the roots' tokens.
        position_ids: [T] i64.
        slot_mapping: [T] i32.
        attention: The first B requests are those of the trees: rows of a tree are its nodes, at
            most 64, root first; their prefix_len is the position of the root.
        num_trees: B.
        num_nodes: N, rows of the largest tree.
        num_rows: L, rows of all trees.
        max_depth: Of a node.
        timeout_us: How long to wait at most, from the start of the kernel.
    Returns: TakenTrees.
    Mutates: the first L rows of `token_ids`, `position_ids` and `slot_mapping`; of `attention`
        prefix_len, path_len and path_offset.
    """
    device = token_ids.device
    if not use_triton(token_ids):
        return take_trees_ref(
            *(trees, slot, round_tag, is_behind, newest_slot),
            *(token_ids, position_ids, slot_mapping, attention),
            num_trees=num_trees,
            num_nodes=num_nodes,
            num_rows=num_rows,
            max_depth=max_depth,
            vocab_size=vocab_size,
        )
    path_offset, page_table = attention.path_offset, attention.page_table
    has_paths = path_offset.shape[1] == NODES  # else all blocks are chains, whose paths none reads
    assert trees.shape[1] == NODES >= num_nodes and (has_paths or path_offset.shape[1] == 1)
    assert trees.is_contiguous() and path_offset.is_contiguous() and page_table.stride(1) == 1
    shape = (num_trees, num_nodes)
    taken = TakenTrees(
        token_ids=torch.empty(shape, dtype=torch.int64, device=device),
        parent_index=torch.empty(shape, dtype=torch.int64, device=device),
        position=torch.empty(num_rows, dtype=torch.int64, device=device),
        seq_len=torch.empty(num_trees, dtype=torch.int64, device=device),
    )
    if num_trees == 0:
        return taken
    count_launch("take_trees", is_single=True)
    # It waits for another GPU, so it must not begin early: kernels before it need the room.
    _take_trees_kernel[(num_trees,)](
        trees,
        slot,
        round_tag,
        given_up,
        attention.req_idx,
        is_behind,
        newest_slot,
        page_table,
        attention.row_indptr,
        attention.is_chain,
        attention.prefix_len,
        slot_mapping,
        token_ids,
        position_ids,
        attention.path_len,
        path_offset,
        taken.token_ids,
        taken.parent_index,
        taken.position,
        taken.seq_len,
        num_nodes,
        max_depth,
        vocab_size,
        timeout_us,
        page_table.stride(0),
        PAGE_SIZE=attention.page_size,
        NODES=NODES,
        HAS_PATHS=has_paths,
        WAITS=token_ids.is_cuda,
        num_warps=2,
        **LAUNCH_OPTIONS,
    )
    return taken


def take_trees_ref(
    trees: torch.Tensor,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    is_behind: torch.Tensor,
    newest_slot: torch.Tensor,
    token_ids: torch.Tensor,
    position_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    attention: TreeAttentionMetadata,
    *,
    num_trees: int,
    num_nodes: int,
    num_rows: int,
    max_depth: int,
    vocab_size: int,
) -> TakenTrees:
    """Do what `take_trees` does in plain torch, of the words that are there."""
    row_indptr, req_idx = attention.row_indptr.long(), attention.req_idx[:num_trees].long()
    first, end = row_indptr[:num_trees], row_indptr[1 : num_trees + 1]
    slot, round_tag = slot[:num_trees, None], round_tag[:num_trees, None]
    node = torch.arange(NODES).expand(num_trees, NODES)
    is_row = node < (end - first)[:, None]
    word = torch.where(slot < 0, -1, trees[slot.squeeze(1).clamp(min=0).long()])
    token, parent = word & 0xFFFFFFFF, (word >> 32) & 0xFF
    is_chain = attention.is_chain[:num_trees, None]
    is_parent = torch.where(is_chain, parent == node - 1, parent < node)
    has_peer = (word >> 40 == tag_bits_ref(round_tag)) & (token < vocab_size) & is_parent
    up = torch.where(has_peer & is_row & (node > 0), parent, node)

    ancestors = [node]
    for _ in range(max_depth):
        ancestors.append(up.gather(1, ancestors[-1]))
    is_node = is_row & (ancestors[-1] == 0)
    depth = torch.zeros_like(node)
    for below, above in zip(ancestors, ancestors[1:], strict=False):
        depth += (is_node & (above != below)).long()
    is_root = is_row & (node == 0)
    token = torch.where(is_node, token, 0)
    token[is_root] = token_ids[first[is_root[:, 0]]]
    parent = torch.where(is_node, parent, -2)
    parent[is_root] = -1
    path = torch.zeros((num_trees, NODES, NODES), dtype=torch.int32)
    for climbed, ancestor in enumerate(ancestors):
        on_path = torch.where(is_node, ancestor, node)[..., None]
        at = (depth - climbed).clamp(min=0)[..., None]  # who is at the root stays there
        path.scatter_(2, at, on_path.int())

    known = attention.prefix_len[:num_trees].long()
    prefix_len = torch.where(is_behind[:num_trees] != 0, newest_slot[req_idx], known)
    attention.prefix_len[:num_trees] = prefix_len.int()
    logical = torch.where(is_row, prefix_len[:, None] + node, 0)
    slots = slots_in(attention.page_table, req_idx[:, None], logical, attention.page_size)
    position = prefix_len[:, None] + depth
    token_ids[:num_rows] = token[is_row]
    position_ids[:num_rows] = position[is_row]
    slot_mapping[:num_rows] = slots[is_row].int()
    attention.path_len[:num_rows] = (torch.where(is_chain, node, depth)[is_row] + 1).int()
    if attention.path_offset.shape[1] == NODES:  # else all blocks are chains
        attention.path_offset[:num_rows] = path[is_row]
    return TakenTrees(
        token_ids=token[:, :num_nodes].contiguous(),
        parent_index=parent[:, :num_nodes].contiguous(),
        position=(position + 1)[is_row],
        seq_len=prefix_len,
    )
