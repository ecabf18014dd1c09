"""Make the graphs of a runner and time its forwards, before requests come, on rows of nobody."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from shared.step.packing import (
    NO_BLOCKS,
    RowBlocks,
    captures_few_rows,
    pack_rows,
    padded_blocks,
)
from target_service.batch import extend_fields
from target_service.phases import TOKEN_IS_KNOWN, ExtendInput
from target_service.runner import TargetRunner
from target_service.step_costs import StepCosts
from target_service.tree_source import TreeSource
from target_service.verify_input import build_padding

logger = logging.getLogger(__name__)

_NUM_TIMED = 3
_SURE_S = 0.05  # what takes so long is not timed again


def capture_forwards(runner: TargetRunner, progress: Callable[[str, float], None]) -> None:
    """Make the graphs of every row count; logs what that took.

    Mutates: the sink page.
    """
    started = time.perf_counter()
    counts = runner.row_counts
    # The largest first: the others fit into its memory.
    for done, bucket in enumerate(reversed(counts)):
        progress(f"capturing graphs: {bucket} rows", done / len(counts))
        extended = runner.extend(_padding(runner, bucket))
        if captures_few_rows(bucket, runner.pool, runner.few_rows):
            extended = runner.extend(_padding(runner, bucket, few_rows=runner.few_rows))
        runner.project(extended, bucket)
    took_s = time.perf_counter() - started
    logger.info("made graphs of %d to %d rows in %.1f s", counts[0], counts[-1], took_s)


def capture_verifies(
    runner: TargetRunner, source: TreeSource, progress: Callable[[str, float], None]
) -> None:
    """Make the graphs of what follows a forward; logs what that took."""
    started = time.perf_counter()
    counts = runner.row_counts
    for done, bucket in enumerate(reversed(counts)):
        progress(f"capturing graphs: {bucket} sampled rows", done / len(counts))
        for has_filters in (False, True):
            inputs = build_padding(
                bucket, runner.pool, runner.verify_staging, source, has_filters=has_filters
            )
            runner.verify(inputs, runner.padded, source.post_paths)
    logger.info("made graphs of what is sampled in %.1f s", time.perf_counter() - started)
    if runner.pool.device.type == "cuda":
        torch.cuda.empty_cache()  # of what was computed once before its capture


def measure_costs(runner: TargetRunner, sizes: Sequence[int] | None = None) -> StepCosts:
    """Time a forward of every row count, the fastest of up to three. Mutates: the sink page.

    All are timed before one is timed again: whatever else the machine does for a moment is not in
    all three. Rows are padding, but for a model with experts, which compute none: its rows are
    tokens.

    Args:
        sizes: Rows of the forwards instead, as far as steps have so many.
    """
    counts = runner.row_counts
    sizes = [size for size in sizes or counts if size <= counts[-1]]
    least, spent_s = [math.inf] * len(sizes), [0.0] * len(sizes)
    for _ in range(_NUM_TIMED):
        for i, size in enumerate(sizes):
            if spent_s[i] < _SURE_S:
                seconds = _time_forward(runner, size)
                least[i] = min(least[i], seconds)
                spent_s[i] += seconds
    return StepCosts(sizes, least)


def _time_forward(runner: TargetRunner, num_rows: int) -> float:
    """Return the seconds of a forward; on a GPU by its own clock, one forward behind another, so
    that the host has all the time of the first to launch the second.
    """
    blocks = _tokens(runner, num_rows) if runner.model.config.experts else NO_BLOCKS
    inputs = _padding(runner, num_rows, blocks)
    if runner.pool.device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        runner.extend(inputs)
        began.record()
        runner.extend(inputs)
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3
    started = time.perf_counter()
    runner.extend(inputs)
    return time.perf_counter() - started


def _tokens(runner: TargetRunner, num_rows: int) -> RowBlocks:
    """Return rows that count as tokens of requests, and whose KV goes to the sink.

    They have all positions, for first tokens look alike to a router; what they attend to is what
    the sink holds.
    """
    pool = runner.pool
    most = pool.page_table.shape[1] * pool.page_size
    lens = [min(most, num_rows - start) for start in range(0, num_rows, most)]
    lens = lens[: padded_blocks(num_rows, pool)]
    zeros = [0] * len(lens)
    return RowBlocks(req_idx=zeros, prefix_len=zeros, num_rows=lens, writes_kv=[False] * len(lens))


def _padding(
    runner: TargetRunner, bucket: int, blocks: RowBlocks = NO_BLOCKS, *, few_rows: int = 0
) -> ExtendInput:
    """Return rows that belong to no request, those of `blocks` with tokens of all kinds.

    Args:
        few_rows: See `pack_rows`.
    """
    staging = runner.extend_staging
    staging.begin()
    host, device = staging.place_zeros(extend_fields, bucket)
    host["root_idx"].fill(TOKEN_IS_KNOWN)
    num_rows = sum(blocks.num_rows)
    vocabulary = np.arange(num_rows) * runner.model.config.vocab_size
    host["token_ids"][:num_rows] = vocabulary // max(num_rows, 1)
    rows = pack_rows(
        blocks,
        runner.pool,
        window=runner.window,
        staging=staging,
        num_rows=bucket,
        few_rows=few_rows,
    )
    staging.flush()
    return ExtendInput(**device, rows=rows, bucket=bucket, wants_experts=False)
