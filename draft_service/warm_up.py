"""Have a GPU compile every kernel of extends and growth before the first request comes.

A kernel is compiled at its first launch, for seconds, in which every tree would come too late. So
the engine grows a few trees for requests that nobody made; nothing of them remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_service.engine import DraftEngine
from shared.device import dtype_name
from shared.types import (
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureChunk,
    SamplingParams,
    TreeShape,
)

_PROMPT = (0, 1, 2, 3)


def warm_up(
    engine: DraftEngine, *, shapes: Sequence[TreeShape], dtype: torch.dtype, max_num_requests: int
) -> None:
    """Grow trees, greedy and sampled, alone and together: each makes its graph.

    Args:
        dtype: Of the features that will come.
        max_num_requests: That the engine can hold.
    Mutates: nothing that outlives it but the counters of the engine's load.
    """
    for shape in shapes:
        for batch in batch_sizes(max_num_requests):
            for temperature in (0.0, 1.0):
                names = [f"warm-up {i}" for i in range(min(batch, max_num_requests))]
                _grow(engine, names, shape, temperature, dtype)
    engine.check_integrity()


def batch_sizes(max_num_requests: int) -> list[int]:
    """Return the batch sizes that growth is padded to: powers of 2."""
    return [1 << power for power in range((max_num_requests - 1).bit_length() + 1)]


def _grow(
    engine: DraftEngine, names: list[str], shape: TreeShape, temperature: float, dtype: torch.dtype
) -> None:
    width = engine.info.features.width
    for name in names:
        engine.submit(
            DraftOpen(
                request_id=name,
                target_epoch=0,
                draft_epoch=0,
                target_address="",
                token_ids=_PROMPT,
                sampling=SamplingParams(temperature=temperature, seed=1),
            )
        )
        if width:
            num_rows = len(_PROMPT) - 1
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
        engine.submit(
            DraftRound(
                request_id=name,
                target_epoch=0,
                draft_epoch=0,
                round_idx=1,
                seq_len=len(_PROMPT) - 1,
                token_offset=len(_PROMPT),
                token_ids=(),
                shape=shape,
            )
        )
    while engine.has_work:
        engine.step()
    for name in names:
        engine.submit(DraftClose(request_id=name, draft_epoch=0))
    while engine.has_work:
        engine.step()
    assert engine.load.num_running == 0
