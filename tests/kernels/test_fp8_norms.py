"""Rows in FP8 of kernels that norm: bytes of a norm, then `quantize_rows`; and their readers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from shared.kernels.dispatch import launch_counts, reset_launch_counts, use_triton
from shared.kernels.expert_products import apply_experts
from shared.kernels.fp8_experts import pack_fp8
from shared.kernels.fp8_rows import (
    Fp8Rows,
    quantize_rows,
    quantize_rows_ref,
    row_operand,
    wants_fp8_rows,
)
from shared.kernels.head_input import head_input, head_input_fp8
from shared.kernels.linear import linear, linear_addends, sum_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from tests.kernels.test_fp8_experts import NUM_EXPERTS, choose, random_experts
from tests.kernels.test_fp8_rows import DTYPES, with_fp8_rows
from tests.kernels.test_linear_quantized import SCALINGS, weight_of

WIDTHS = [1, 5, 70, 129, 1100, 4096]
EPS = 1e-5
# Kernels are interpreted by numpy, which warns of what rows of no numbers do.
IGNORED = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def odd_rows(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return rows of zeros, of tiny, usual and large values, and rows that are no numbers."""
    x = torch.randn(7, width) * torch.tensor([0, 1e-6, 1, 5e3, 1, 1, 1])[:, None]
    for row, number in enumerate((math.nan, math.inf, -math.inf), 4):
        x[row, width // 2] = number
    return x.to(device, dtype)


def check(fp8: Fp8Rows, rows: torch.Tensor) -> None:
    """Compare with rows that are quantised by themselves, bit for bit but for what NaN it is."""
    assert fp8.rows.dtype == rows.dtype and fp8.scales.dtype == torch.float32
    torch.testing.assert_close(fp8.rows, rows, rtol=0, atol=0, equal_nan=True)
    want = quantize_rows_ref(rows.cpu())
    assert torch.equal(fp8.values.view(torch.uint8).cpu(), want.values)
    torch.testing.assert_close(fp8.scales.cpu(), want.scales, rtol=0, atol=0, equal_nan=True)
    if use_triton(rows):
        alone = quantize_rows(rows)
        assert alone.values.dtype == fp8.values.dtype
        assert torch.equal(fp8.values.view(torch.uint8), alone.values.view(torch.uint8))


@IGNORED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_norm(device: torch.device, width: int, dtype: torch.dtype) -> None:
    x = odd_rows(width, dtype, device)
    for weight in (torch.randn(width).to(device, dtype), 1 + torch.randn(width).to(device)):
        rows = rms_norm(x, weight, EPS)
        assert rows[4:].isnan().any(dim=1).all() and rows[:4].isfinite().all()
        check(rms_norm_fp8(x, weight, EPS), rows)
    centered = rms_norm(x, weight, EPS, is_centered=True)
    check(rms_norm_fp8(x, weight, EPS, is_centered=True), centered)
    assert rms_norm_fp8(x[:0], weight, EPS).values.shape == (0, width)
    assert launch_counts().get("rms_norm", 0) == 6 * int(use_triton(x))


@IGNORED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_normed", [True, False])
def test_rows_of_a_norm_of_a_sum(
    device: torch.device, width: int, dtype: torch.dtype, *, is_normed: bool
) -> None:
    x = odd_rows(width, dtype, device)
    addends = torch.randn(3, len(x), width).to(device)
    addends[:, 0] = 0
    one, other, bias = (torch.randn(width).to(device, dtype) for _ in range(3))
    weight = one if is_normed else None
    for some_bias, delta_weight in ((None, None), (bias, None), (bias, other), (None, other)):
        want = add_rms_norm(x, addends, some_bias, weight, EPS, delta_weight)
        total, fp8 = add_rms_norm_fp8(x, addends, some_bias, weight, EPS, delta_weight)
        torch.testing.assert_close(total, want[0], rtol=0, atol=0, equal_nan=True)
        check(fp8, want[1])
        assert (fp8.rows is total) == (weight is None)
    total, fp8 = add_rms_norm_fp8(x[:0], addends[:, :0], None, weight, EPS)
    assert total.shape == fp8.values.shape == (0, width)


@IGNORED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_heads_input_have_one_scale(
    device: torch.device, width: int, dtype: torch.dtype
) -> None:
    """.. whichever half is larger, or holds no number."""
    table, hidden = (odd_rows(width, dtype, device) for _ in range(2))
    norms = (torch.randn(width).to(device, dtype), torch.randn(width).to(device, dtype))
    ids = torch.tensor([2, 0, 1, 3, 3, 2, 6]).to(device)
    for scale in (1, 40):
        args = (ids, table, hidden, (norms[0] * scale, norms[1]), EPS)
        check(head_input_fp8(*args), head_input(*args))
    no_rows = head_input_fp8(ids[:0], table, hidden[:0], norms, EPS)
    assert no_rows.values.shape == (0, 2 * width)


def fp8_of_others(x: torch.Tensor) -> Fp8Rows:
    """Return rows beside the FP8 of twice as large ones."""
    return replace(quantize_rows(2 * x), rows=x)


@pytest.mark.kernel_only
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("width_k", [304, 2176])
def test_products_read_the_fp8_that_is_there(
    device: torch.device, scaling: str, width_k: int
) -> None:
    dtype = torch.bfloat16
    x = (torch.randn(5, width_k) / 100).to(device, dtype)
    weight = with_fp8_rows(weight_of(48, width_k, scaling, dtype, device))
    assert wants_fp8_rows(weight)
    fp8, doubled = quantize_rows(x), fp8_of_others(x)
    reset_launch_counts()
    got = (
        linear(fp8, weight),
        sum_addends(linear_addends(fp8, weight), None, torch.float32),
        linear_swiglu(fp8, weight),
        linear(doubled, weight, out_dtype=torch.float32),
    )
    assert "quantize_rows" not in launch_counts()
    assert torch.equal(got[0], linear(x, weight))
    assert torch.equal(got[1], sum_addends(linear_addends(x, weight), None, torch.float32))
    assert torch.equal(got[2], linear_swiglu(x, weight))
    assert torch.equal(got[3], 2 * linear(x, weight, out_dtype=torch.float32))
    assert launch_counts()["quantize_rows"] == 4


@pytest.mark.kernel_only
def test_weights_that_want_no_fp8_read_the_rows(device: torch.device) -> None:
    dtype = torch.bfloat16
    x = torch.randn(5, 300).to(device, dtype)
    fp8 = fp8_of_others(x)
    quantized = weight_of(48, 300, "block", dtype, device)
    dense = quantized.dequantized().to(dtype)
    reset_launch_counts()
    for weight in (quantized, dense):
        assert not wants_fp8_rows(weight)
        assert row_operand(fp8, weight).values is x
        assert torch.equal(linear(fp8, weight), linear(x, weight))
        assert torch.equal(linear_addends(fp8, weight), linear_addends(x, weight))
        assert torch.equal(linear_swiglu(fp8, weight), linear_swiglu(x, weight))
    assert "quantize_rows" not in launch_counts()


def test_no_fp8_is_wanted_of_rows_of_32_bits(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = with_fp8_rows(weight_of(24, 300, "block", dtype, device))
        is_wanted = dtype == torch.bfloat16 and use_triton(weight.values)
        assert wants_fp8_rows(weight) == is_wanted


@pytest.mark.kernel_only
@pytest.mark.parametrize("num_rows", [2, 40])
def test_experts_read_the_fp8_that_is_there(device: torch.device, num_rows: int) -> None:
    width_k, width_f, width_n, dtype = 320, 48, 40, torch.bfloat16
    plain, down = (
        pack_fp8(random_experts(*shape, "block", dtype, device))
        for shape in ((2 * width_f, width_k), (width_n, width_f))
    )
    gate_up = replace(plain, has_fp8_rows=True)
    x = torch.randn(num_rows, width_k).to(device, dtype)
    chosen = choose(
        [[row % NUM_EXPERTS, (row + 1) % NUM_EXPERTS] for row in range(num_rows)], device
    )

    def product(rows: torch.Tensor | Fp8Rows, weight: object = gate_up) -> torch.Tensor:
        out = torch.full((2, num_rows, width_n), torch.nan, device=device)
        apply_experts(rows, weight, down, chosen, out)
        return out

    reset_launch_counts()
    got, others = product(quantize_rows(x)), product(fp8_of_others(x))
    assert launch_counts()["quantize_rows"] == 2
    want = product(x)
    assert torch.equal(got, want) and not torch.equal(others, want)
    assert torch.equal(product(fp8_of_others(x), plain), product(x, plain))
