"""Rows that a product gates, against float64, and the bits of a row."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.linear import splits_of
from shared.kernels.linear_gated import linear_gated
from shared.kernels.swiglu import Activation

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}
NUM_LAYERS = 3


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width_k", "width_f"), [(7, 5), (130, 300), (2176, 20)])
def test_any_sizes_and_rows_that_are_parts_of_others(
    device: torch.device, width_k: int, width_f: int, dtype: torch.dtype, activation: Activation
) -> None:
    counts = (1, 2, 9) if IS_INTERPRETED else (1, 2, 40, 130, 257, 700)
    x = torch.randn(counts[-1], width_k).to(device, dtype)
    weight = (torch.randn(width_f, width_k) / width_k**0.5).to(device, dtype)
    assert (splits_of(weight) > 1) == (width_k > 2000), "both ways to multiply are tried"
    rows = torch.randn(counts[-1], NUM_LAYERS, width_f).to(device, dtype)[:, 1]
    out = linear_gated(x, weight, rows, activation)
    assert out.dtype == dtype and out.shape == rows.shape
    assert launch_counts().get("linear_gated", 0) == int(use_triton(x))
    gate = x.double().cpu() @ weight.double().cpu().T
    gated = gate * gate.sigmoid()
    if activation == "gelu_tanh":
        gated = torch.nn.functional.gelu(gate, approximate="tanh")
    scale = rows.double().cpu().abs().clamp(min=1)
    torch.testing.assert_close(
        out.double().cpu() / scale, gated * rows.double().cpu() / scale,
        rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype],
    )  # fmt: skip
    for count in counts:
        first, last = slice(None, count), slice(-count, None)
        for some in (first, last):
            got = linear_gated(x[some], weight, rows[some].clone(), activation)
            assert torch.equal(got, out[some]), count


def test_no_rows(device: torch.device) -> None:
    weight = torch.randn(6, 4).to(device)
    assert linear_gated(weight[:0], weight, torch.empty(0, 6).to(device)).shape == (0, 6)
    assert launch_counts() == {}
