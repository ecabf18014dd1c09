"""Make a CPU's vector functions give the same bits from the first call on."""

from __future__ import annotations

from functools import cache

import torch

_FUNCTIONS = (
    *(torch.exp, torch.expm1, torch.log, torch.log1p),
    *(torch.cos, torch.sin, torch.sqrt, torch.rsqrt),
)


@cache
def settle_vector_math() -> None:
    """Call every vector function once on one thread.

    MKL resolves exp, log and their like at the first call. When that is a parallel one, the threads
    race: in 1.5% of processes (2 threads, torch 2.13) half of the first exp came out with errors
    of 2e-5, and every later one right.
    """
    for dtype in (torch.float32, torch.float64):
        x = torch.full((64,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(x)
        torch.log_softmax(x, dim=0)
