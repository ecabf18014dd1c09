"""Build a step's tensors from its plan; host side, over all requests at once.

What the forward needs comes first; the rest is built while the device computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from shared.buckets import bucket_of
from shared.kv.pool import KVPool
from shared.packing import RowBlocks, pack_rows
from shared.staging import Staging
from shared.tree import tree_paths
from target_service.phases import ExtendInput, VerifyInput
from target_service.request import TargetRequest
from target_service.scheduler import PrefillWork, ReplayWork, StepPlan

if TYPE_CHECKING:
    from target_service.sampler import Sampler  # which reads the trees of a step

_ROOT_ONLY = (-1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrees:
    """The requests whose next tokens a step decides: B trees of L nodes in all, tree by tree.

    Args:
        requests: [B].
        req_idx: [B] i64, rows of the page table.
        seq_len: [B] i64, logical slot of each root.
        num_nodes: [B] i64, roots included.
        first_node: [B] i64, node of the step that each root is.
        tree: [L] i64, which tree each node belongs to.
        token_ids: [L] i64, roots included.
        parent_index: [L] i64 within the own tree, root = -1.
        depth: [L] i32.
        path: [L, D] i32, nodes of the step from the root to each node; 0 past it.
    """

    requests: Sequence[TargetRequest]
    req_idx: NDArray[np.int64]
    seq_len: NDArray[np.int64]
    num_nodes: NDArray[np.int64]
    first_node: NDArray[np.int64]
    tree: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    parent_index: NDArray[np.int64]
    depth: NDArray[np.int32]
    path: NDArray[np.int32]

    @property
    def are_chains(self) -> bool:
        """Return whether every accepted path is contiguous, so that no KV can move."""
        return bool((self.depth == np.arange(len(self.tree)) - self.first_node[self.tree]).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRows:
    """Rows of consecutive tokens of one request: a prefill chunk or a replay."""

    work: PrefillWork | ReplayWork
    first_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step, packed.

    Args:
        trees: None when nothing is sampled.
        logit_rows: [L] rows of the extend that are sampled; None: the first L.
    """

    extend: ExtendInput
    trees: SampledTrees | None
    chains: Sequence[ChainRows]
    num_rows: int
    logit_rows: Sequence[int] | None


def build_batch(
    plan: StepPlan,
    pool: KVPool,
    staging: Staging,
    *,
    window: int,
    pads_rows: bool,
) -> StepBatch:
    """Pack trees, prefill chunks and replays into one forward, and start to bring it over.

    Args:
        pads_rows: Pad the rows of a step without prefills and replays up to a bucket.
    """
    # The rows of trees come first, and the nodes of the step are these rows. After them come the
    # last tokens of prompts, each of them a tree of one node.
    works: list[PrefillWork | ReplayWork] = [*plan.prefills, *plan.replays]
    endings = [work.request for work in plan.prefills if work.is_last]
    trees = _gather_trees(plan.verifies, endings)
    num_verified = len(plan.verifies)
    num_nodes = 0 if trees is None else len(trees.token_ids) - len(endings)
    num_rows = num_nodes + sum(work.stop - work.start for work in works)
    bucket = bucket_of(num_rows) if pads_rows and not works else None
    total = bucket or num_rows

    staging.begin()
    host, device = staging.place(
        token_ids=(torch.int64, (total,)), position_ids=(torch.int64, (total,))
    )
    token_ids, position_ids = host["token_ids"], host["position_ids"]
    token_ids[num_rows:] = 0
    position_ids[num_rows:] = 0
    depth = path = None
    columns: list[tuple[int, int, int]] = []  # req_idx, prefix_len, num_rows
    if trees is not None and num_nodes:
        depth = trees.depth[:num_nodes]
        tree = trees.tree[:num_nodes]
        token_ids[:num_nodes] = trees.token_ids[:num_nodes]
        np.add(trees.seq_len[tree], depth, out=position_ids[:num_nodes])
        first = trees.first_node[tree].astype(np.int32)
        path = np.maximum(trees.path[:num_nodes] - first[:, None], 0)
    chains: list[ChainRows] = []
    row = num_nodes
    logit_rows = list(range(num_nodes)) if works else []
    for work in works:
        stop = row + work.stop - work.start
        token_ids[row:stop] = work.request.tokens[work.start : work.stop]
        position_ids[row:stop] = np.arange(work.start, work.stop)
        columns.append((work.request.req_idx, work.start, stop - row))
        chains.append(ChainRows(work=work, first_row=row))
        row = stop
        if isinstance(work, PrefillWork) and work.is_last:
            logit_rows.append(row - 1)
    blocks = np.array(columns, dtype=np.int64).reshape(-1, 3)
    writes_kv = None
    if plan.replays:
        writes_kv = np.arange(num_verified + len(works)) < num_verified + len(plan.prefills)
    if trees is not None and num_verified:
        of_trees = np.stack([trees.req_idx, trees.seq_len, trees.num_nodes], axis=1)
        blocks = np.concatenate([of_trees[:num_verified], blocks])
    rows = RowBlocks(
        req_idx=blocks[:, 0],
        prefix_len=blocks[:, 1],
        num_rows=blocks[:, 2],
        depth=depth,
        path=path,
        writes_kv=writes_kv,
    )
    extend = ExtendInput(
        token_ids=device["token_ids"],
        position_ids=device["position_ids"],
        rows=pack_rows(rows, pool, window=window, staging=staging, num_rows=bucket),
        bucket=bucket,
    )
    staging.flush()
    return StepBatch(
        extend=extend,
        trees=trees,
        chains=chains,
        num_rows=num_rows,
        logit_rows=logit_rows if works else None,
    )


def _gather_trees(
    verified: Sequence[TargetRequest], endings: Sequence[TargetRequest]
) -> SampledTrees | None:
    """Lay out the trees of a step.

    Args:
        verified: Requests with a round to run.
        endings: Requests whose last token of the prompt is among the rows.
    """
    requests = [*verified, *endings]
    if not requests:
        return None
    tokens: list[Sequence[int]] = []
    parents: list[Sequence[int]] = []
    for request in verified:
        sent = request.queued.tree if request.queued else None
        if sent is None:
            # A root that is still being computed is named by the row where the device keeps it.
            tokens.append((-1 - request.req_idx if request.num_in_flight else request.tokens[-1],))
            parents.append(_ROOT_ONLY)
        else:
            tokens.append(sent.token_ids)
            parents.append(sent.parent_index)
    for request in endings:
        tokens.append(request.tokens[-1:])
        parents.append(_ROOT_ONLY)
    seq_len = [request.next_seq_len for request in verified]
    seq_len += [len(request.tokens) - 1 for request in endings]
    num_nodes = np.array([len(ids) for ids in tokens], dtype=np.int64)
    first_node = np.cumsum(num_nodes) - num_nodes
    tree = np.repeat(np.arange(len(tokens)), num_nodes)
    parent_index = np.fromiter(chain.from_iterable(parents), dtype=np.int64, count=len(tree))
    depth, path = tree_paths(np.where(parent_index < 0, -1, parent_index + first_node[tree]))
    return SampledTrees(
        requests=requests,
        req_idx=np.array([request.req_idx for request in requests], dtype=np.int64),
        seq_len=np.array(seq_len, dtype=np.int64),
        num_nodes=num_nodes,
        first_node=first_node,
        tree=tree,
        token_ids=np.fromiter(chain.from_iterable(tokens), dtype=np.int64, count=len(tree)),
        parent_index=parent_index,
        depth=depth,
        path=path,
    )


def build_verify(
    trees: SampledTrees, logit_rows: Sequence[int] | None, staging: Staging, sampler: Sampler
) -> VerifyInput:
    """Lay out how the trees of a step are sampled and walked, and start to bring it over.

    Args:
        logit_rows: [L] rows of the extend; None: the first L.
    """
    staging.begin()
    num_trees, count = len(trees.requests), len(trees.token_ids)
    square = (num_trees, int(trees.num_nodes.max()))
    host, device = staging.place(
        req_idx=(torch.int64, (num_trees,)),
        seq_len=(torch.int64, (num_trees,)),
        node_rows=(torch.int64, square),
        token_ids=(torch.int64, square),
        parent_index=(torch.int64, square),
        position=(torch.int64, (count,)),
    )
    host["req_idx"][:] = trees.req_idx
    host["seq_len"][:] = trees.seq_len
    at = (trees.tree, np.arange(count) - trees.first_node[trees.tree])
    for name, padding, values in (
        ("node_rows", 0, np.arange(count)),
        ("token_ids", 0, trees.token_ids),
        ("parent_index", -2, trees.parent_index),
    ):
        host[name].fill(padding)
        host[name][at] = values
    np.add(trees.seq_len[trees.tree] + 1, trees.depth, out=host["position"])
    wants_logprobs = [request.open.logprobs for request in trees.requests]
    logprob_rows = None
    if any(wants_logprobs):
        logprob_rows = staging.add(np.flatnonzero(np.array(wants_logprobs)[trees.tree]))
    inputs = VerifyInput(
        sampling=sampler.prepare(trees, staging),
        req_idx=device["req_idx"],
        seq_len=device["seq_len"],
        num_logit_rows=count,
        logit_rows=None if logit_rows is None else staging.add(np.array(logit_rows)),
        node_rows=device["node_rows"],
        token_ids=device["token_ids"],
        parent_index=device["parent_index"],
        position=device["position"],
        max_depth=trees.path.shape[1] - 1,
        may_move_kv=not trees.are_chains,
        logprob_rows=logprob_rows,
        num_top_logprobs=max(
            (r.open.top_logprobs for r in trees.requests if r.open.logprobs), default=0
        ),
        wants_features=any(request.features is not None for request in trees.requests),
    )
    staging.flush()
    return inputs
