"""Have a GPU compile every kernel of extends and growth before the first request comes.

A kernel is compiled at its first launch, for seconds, in which every tree would come too late. So
the engine grows a few trees for requests of its own; nothing of them remains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from draft_service.engine import DraftEngine
from draft_service.pipeline import CHUNK_ROWS
from shared.device import dtype_name
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureChunk,
    SamplingParams,
    TreeShape,
)

logger = logging.getLogger(__name__)

_NUM_TOKENS = 4


def warm_up(
    engine: DraftEngine, *, shapes: Sequence[TreeShape], dtype: torch.dtype, max_num_requests: int
) -> None:
    """Grow trees, greedy and sampled, alone and together, and extend every bucket of rows: each
    makes its graph. Logs what the trees cost.

    Args:
        dtype: Of the features that will come.
        max_num_requests: That the engine can hold.
    Mutates: nothing that outlives it but the counters of the engine's load.
    """
    started = time.perf_counter()
    engine.runner.set_ready_shapes(shapes)
    for shape in shapes:
        for batch in engine.runner.batch_buckets:
            for temperature in (0.0, 1.0):
                _grow(engine, batch, shape, temperature, dtype)
    for bucket in engine.runner.row_buckets:
        parts = [min(CHUNK_ROWS, bucket - done) for done in range(0, bucket, CHUNK_ROWS)]
        if len(parts) <= max_num_requests:
            _extend(engine, parts, dtype)
    engine.source.compile(dtype)
    logger.info(
        "made %d graphs of trees and extends in %.1f s",
        len(engine.runner.graphs),
        time.perf_counter() - started,
    )
    costs = {shape: _grow(engine, 1, shape, 0.0, dtype) for shape in shapes}
    logger.info(
        "ms of a draft round by its tree: %s",
        ", ".join(f"{shape} {seconds * 1e3:.2f}" for shape, seconds in costs.items()),
    )
    engine.check_integrity()


def _grow(
    engine: DraftEngine,
    num_requests: int,
    shape: TreeShape,
    temperature: float,
    dtype: torch.dtype,
) -> float:
    """Grow a tree for each of some requests; return what that took, in seconds."""
    names = [f"warm-up {i}" for i in range(num_requests)]
    for name in names:
        _open(engine, name, _NUM_TOKENS, dtype, temperature)
        engine.submit(
            DraftRound(
                request_id=name,
                target_epoch=0,
                draft_epoch=0,
                round_idx=1,
                seq_len=_NUM_TOKENS - 1,
                token_offset=_NUM_TOKENS,
                token_ids=(),
                shape=shape,
            )
        )
    return _run(engine, names)


def _extend(engine: DraftEngine, parts: Sequence[int], dtype: torch.dtype) -> None:
    """Extend so many rows of each of some requests, in one step."""
    names = [f"warm-up {i}" for i in range(len(parts))]
    has_features = bool(engine.info.features.width)
    for name, num_rows in zip(names, parts, strict=True):
        _open(engine, name, num_rows + has_features, dtype)
    _run(engine, names)


def _open(
    engine: DraftEngine, name: str, num_tokens: int, dtype: torch.dtype, temperature: float = 0.0
) -> None:
    """Open a request with its features, if it needs any: they are of all tokens but the last."""
    width = engine.info.features.width
    engine.submit(
        DraftOpen(
            request_id=name,
            target_epoch=0,
            draft_epoch=0,
            target_address="",
            token_ids=(0,) * num_tokens,
            sampling=SamplingParams(temperature=temperature, seed=1),
        )
    )
    if width:
        num_rows = num_tokens - 1
        engine.submit(
            FeatureChunk(
                request_id=name,
                target_epoch=0,
                start=0,
                shape=(num_rows, width),
                dtype=dtype_name(dtype),
                data=bytes(num_rows * width * dtype.itemsize),
            )
        )


def _run(engine: DraftEngine, names: Sequence[str]) -> float:
    """Let the engine work, then close the requests; return what the work took, in seconds."""
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    took = time.perf_counter() - started
    for name in names:
        engine.submit(DraftClose(request_id=name, draft_epoch=0))
    while engine.has_work:
        engine.step()
    assert engine.load.num_running == 0
    return took
