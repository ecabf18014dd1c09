"""Products of 129 to 192 rows have the bits of those of any other number of rows."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.dispatch import launch_counts
from shared.kernels.linear import linear, linear_addends, splits_of
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.linear_two_tiles import (
    MOST_ROWS,
    fits_two_tiles,
    linear_swiglu_two_tiles,
    linear_two_tiles,
)
from shared.kernels.swiglu import Activation
from tests.marks import first_if_interpreted

pytestmark = pytest.mark.kernel_only

HALVES = [torch.bfloat16, torch.float16]
COUNTS = [1, 64, 128, 129, 191, MOST_ROWS]


def operands(
    device: torch.device, dtype: torch.dtype, width_n: int, width_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 200 rows, a weight and its bias."""
    weight = torch.randn(width_n, width_k) / width_k**0.5
    shape = (torch.randn(200, width_k), weight, torch.randn(width_n))
    x, weight, bias = (tensor.to(device, dtype) for tensor in shape)
    return x, weight, bias


@pytest.mark.parametrize("dtype", first_if_interpreted(HALVES))
@pytest.mark.parametrize(("width_n", "width_k"), [(35, 133), (130, 64), (40, 4 * 1024 + 130)])
def test_a_product_has_the_bits_of_one_of_other_rows(
    device: torch.device, width_n: int, width_k: int, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(device, dtype, width_n, width_k)
    splits = splits_of(weight)
    for num_rows in COUNTS:
        few = x[:num_rows]
        # Each row by a kernel for few rows.
        parts = few.split(40)
        if splits > 1:
            expected = torch.cat([linear_addends(part, weight) for part in parts], dim=1)
            out = torch.full_like(expected, torch.nan)
            linear_two_tiles(few, weight, None, out, splits=splits)
        else:
            expected = torch.cat([linear(part, weight, bias) for part in parts])
            out = torch.full_like(expected, torch.nan)
            linear_two_tiles(few, weight, bias, out, splits=1)
        assert torch.equal(out, expected), f"{num_rows} rows"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", first_if_interpreted(HALVES))
@pytest.mark.parametrize(("width_f", "width_k"), [(5, 7), (130, 300)])
def test_two_products_have_the_bits_of_those_of_other_rows(
    device: torch.device, width_f: int, width_k: int, dtype: torch.dtype, activation: Activation
) -> None:
    x, weight, bias = operands(device, dtype, 2 * width_f, width_k)
    for some_bias in (None, bias):
        for num_rows in COUNTS:
            few = x[:num_rows]
            parts = [linear_swiglu(part, weight, some_bias, activation) for part in few.split(40)]
            out = torch.full_like(few[:, :1].expand(-1, width_f), torch.nan).contiguous()
            linear_swiglu_two_tiles(few, weight, some_bias, out, activation)
            assert torch.equal(out, torch.cat(parts)), f"{num_rows} rows"


def test_they_are_used_for_rows_that_leave_much_of_a_tile_of_256_empty() -> None:
    counts = [
        count for count in range(300) if fits_two_tiles(torch.empty(count, 1, dtype=HALVES[0]))
    ]
    assert counts == list(range(129, 193))
    assert not fits_two_tiles(torch.empty(150, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_large_products_on_a_gpu(device: torch.device) -> None:
    """The shapes of a Llama 8B, by the ways that choose a kernel; what it is called by says which
    one ran.
    """
    for width_n, width_k in ((6144, 4096), (4096, 14336), (128256, 4096)):
        x, weight, _ = operands(device, torch.bfloat16, width_n, width_k)
        full = torch.cat([linear(part, weight) for part in x.split(64)])
        for num_rows in (129, 160, 192):
            assert torch.equal(linear(x[:num_rows], weight), full[:num_rows])
    x, weight, _ = operands(device, torch.bfloat16, 28672, 4096)
    full = torch.cat([linear_swiglu(part, weight) for part in x.split(64)])
    for num_rows in (129, 160, 192):
        assert torch.equal(linear_swiglu(x[:num_rows], weight), full[:num_rows])
    assert launch_counts()["linear_swiglu"] == 4 + 3
