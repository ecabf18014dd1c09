"""Build a step's tensors from its plan; host side, vectorised per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.buckets import bucket_of
from shared.kv.pool import KVPool
from shared.packing import RowBlock, pack_rows
from shared.staging import Staging
from shared.tree import tree_paths
from target_service.phases import ExtendInput, VerifyInput
from target_service.request import TargetRequest
from target_service.scheduler import PrefillWork, ReplayWork, StepPlan

if TYPE_CHECKING:
    from target_service.sampler import Sampler  # which reads the trees of a step

ROOT_ONLY = np.array([-1], dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTree:
    """A request whose next tokens this step decides.

    Args:
        first_row: Row of the extend that holds node 0.
        token_ids: [N] i64, root included.
        parent_index: [N] i32, root = -1.
        depth: [N] i32.
        seq_len: Logical slot of node 0.
    """

    request: TargetRequest
    first_row: int
    token_ids: NDArray[np.int64]
    parent_index: NDArray[np.int32]
    depth: NDArray[np.int32]
    seq_len: int

    @property
    def is_chain(self) -> bool:
        """Return whether every accepted path is contiguous, so that no KV can move."""
        return bool((self.parent_index == np.arange(-1, len(self.parent_index) - 1)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRows:
    """Rows of consecutive tokens of one request: a prefill chunk or a replay."""

    work: PrefillWork | ReplayWork
    first_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step, packed."""

    extend: ExtendInput
    verify: VerifyInput | None
    trees: Sequence[SampledTree]
    chains: Sequence[ChainRows]
    num_rows: int


def build_batch(
    plan: StepPlan,
    pool: KVPool,
    staging: Staging,
    sampler: Sampler,
    *,
    window: int,
    pads_rows: bool,
) -> StepBatch:
    """Pack trees, prefill chunks and replays into one forward.

    Args:
        pads_rows: Pad the rows of a step without prefills and replays up to a bucket.
    """
    staging.begin()
    blocks: list[RowBlock] = []
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    trees: list[SampledTree] = []
    chains: list[ChainRows] = []
    row = 0
    for request in plan.verifies:
        sent = request.queued.tree if request.queued else None
        # A root that is still being computed is named by the row where the device keeps it.
        root = -1 - request.req_idx if request.num_in_flight else request.tokens[-1]
        ids = np.array(sent.token_ids if sent else (root,), dtype=np.int64)
        seq_len = request.next_seq_len
        parents = np.array(sent.parent_index, dtype=np.int32) if sent else ROOT_ONLY
        depth, path = tree_paths(parents)
        tree = SampledTree(
            request=request,
            first_row=row,
            token_ids=ids,
            parent_index=parents,
            depth=depth,
            seq_len=seq_len,
        )
        blocks.append(
            RowBlock(
                req_idx=request.req_idx,
                prefix_len=seq_len,
                num_rows=len(ids),
                first_slot=seq_len,
                depth=None if tree.is_chain else depth,
                path=None if tree.is_chain else path,
            )
        )
        tokens.append(ids)
        positions.append(seq_len + depth.astype(np.int64))
        trees.append(tree)
        row += len(ids)
    works: list[PrefillWork | ReplayWork] = [*plan.prefills, *plan.replays]
    for work in works:
        request = work.request
        ids = np.array(request.tokens[work.start : work.stop], dtype=np.int64)
        blocks.append(
            RowBlock(
                req_idx=request.req_idx,
                prefix_len=work.start,
                num_rows=len(ids),
                first_slot=work.start,
                writes_kv=isinstance(work, PrefillWork),
            )
        )
        tokens.append(ids)
        positions.append(np.arange(work.start, work.stop, dtype=np.int64))
        chains.append(ChainRows(work=work, first_row=row))
        row += len(ids)
        if isinstance(work, PrefillWork) and work.is_last:
            trees.append(
                SampledTree(
                    request=request,
                    first_row=row - 1,
                    token_ids=ids[-1:],
                    parent_index=ROOT_ONLY,
                    depth=np.zeros(1, dtype=np.int32),
                    seq_len=work.stop - 1,
                )
            )
    bucket = bucket_of(row) if pads_rows and not works else None
    padding = 0 if bucket is None else bucket - row
    extend = ExtendInput(
        token_ids=staging.add(np.pad(np.concatenate(tokens), (0, padding))),
        position_ids=staging.add(np.pad(np.concatenate(positions), (0, padding))),
        rows=pack_rows(blocks, pool, window=window, staging=staging, num_rows=bucket),
        bucket=bucket,
    )
    verify = _build_verify(trees, staging, sampler) if trees else None
    staging.flush()
    return StepBatch(extend=extend, verify=verify, trees=trees, chains=chains, num_rows=row)


def _build_verify(trees: Sequence[SampledTree], staging: Staging, sampler: Sampler) -> VerifyInput:
    width = max(len(tree.token_ids) for tree in trees)
    node_rows = np.zeros((len(trees), width), dtype=np.int64)
    token_ids = np.zeros((len(trees), width), dtype=np.int64)
    parent_index = np.full((len(trees), width), -2, dtype=np.int64)
    logit_rows, position, logprob_rows = [], [], []
    row = num_top = 0
    for i, tree in enumerate(trees):
        count = len(tree.token_ids)
        node_rows[i, :count] = np.arange(row, row + count)
        token_ids[i, :count] = tree.token_ids
        parent_index[i, :count] = tree.parent_index
        logit_rows.append(np.arange(tree.first_row, tree.first_row + count, dtype=np.int64))
        position.append(tree.seq_len + 1 + tree.depth.astype(np.int64))
        if tree.request.open.logprobs:
            logprob_rows.append(np.arange(row, row + count, dtype=np.int64))
            num_top = max(num_top, tree.request.open.top_logprobs)
        row += count
    return VerifyInput(
        sampling=sampler.prepare(trees, staging),
        req_idx=staging.add(np.array([tree.request.req_idx for tree in trees], dtype=np.int64)),
        seq_len=staging.add(np.array([tree.seq_len for tree in trees], dtype=np.int64)),
        logit_rows=staging.add(np.concatenate(logit_rows)),
        node_rows=staging.add(node_rows),
        token_ids=staging.add(token_ids),
        parent_index=staging.add(parent_index),
        position=staging.add(np.concatenate(position)),
        max_depth=max(int(tree.depth.max()) for tree in trees),
        logprob_rows=staging.add(np.concatenate(logprob_rows)) if logprob_rows else None,
        num_top_logprobs=num_top,
    )
