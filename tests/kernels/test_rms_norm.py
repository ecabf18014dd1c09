"""RMS norm against a row-by-row computation in float64, and the bits of a row in any company."""

from __future__ import annotations

import math
import os

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.linear import sum_addends
from shared.kernels.rms_norm import add_rms_norm, rms_norm

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Two roundings to the dtype, before the weight and after it. Triton's interpreter truncates to
# bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the rows of [T, h] normalised one by one in Python floats."""
    rows = []
    for row in x.double().cpu().tolist():
        scale = 1 / math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
        factors = weight.double().cpu().tolist()
        rows.append([value * scale * factor for value, factor in zip(row, factors, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=TOLERANCE[out.dtype], atol=TOLERANCE[out.dtype] / 100
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (5, 7), (2, 64), (3, 100), (4, 129)])
def test_odd_sizes_and_dtypes(
    device: torch.device, num_rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(num_rows, width) * 3).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype and out.shape == x.shape
    check(out, oracle(x, weight, 1e-5))
    assert launch_counts().get("rms_norm", 0) == int(use_triton(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_beyond_the_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """60000 squared overflows float16 and 1e-6 squared vanishes in it: float32 inside."""
    rows = torch.tensor([[60000.0, -30000.0, 1.0], [1e-6, -2e-6, 3e-6], [0.0, 0.0, 0.0]])
    x = rows.to(device, dtype)
    weight = torch.tensor([1.0, 0.5, -2.0]).to(device, dtype)
    out = rms_norm(x, weight, 1e-12)
    check(out, oracle(x, weight, 1e-12))
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_eps_is_inside_the_root(device: torch.device) -> None:
    x = torch.tensor([[0.5, -0.5]]).to(device)
    weight = torch.ones(2).to(device)
    check(rms_norm(x, weight, 0.75), torch.tensor([[0.5, -0.5]], dtype=torch.float64))


def test_heads_are_rows(device: torch.device) -> None:
    x = torch.randn(3, 2, 20).to(device)
    weight = torch.randn(20).to(device)
    out = rms_norm(x, weight, 1e-6)
    assert out.shape == x.shape
    check(out.flatten(0, 1), oracle(x.flatten(0, 1), weight, 1e-6))


def test_no_rows(device: torch.device) -> None:
    weight = torch.ones(8).to(device, torch.float16)
    for shape in ((0, 8), (0, 3, 8), (3, 0, 8)):
        out = rms_norm(torch.empty(shape, dtype=torch.float16, device=device), weight, 1e-6)
        assert out.shape == shape and out.dtype == torch.float16
    assert launch_counts() == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_the_bits(device: torch.device, dtype: torch.dtype) -> None:
    dense = torch.randn(6, 100).to(device, dtype)
    weight = torch.randn(100).to(device, dtype)
    expected = rms_norm(dense, weight, 1e-6)
    fused = torch.randn(6, 260).to(device, dtype)
    fused[:, 3:103] = dense
    spread = torch.randn(6, 200).to(device, dtype)
    spread[:, ::2] = dense
    layouts = {
        "columns of a fused projection": fused[:, 3:103],
        "every other column": spread[:, ::2],
        "transposed": dense.T.contiguous().T,
    }
    different = [
        name for name, x in layouts.items() if not torch.equal(rms_norm(x, weight, 1e-6), expected)
    ]
    assert not different


# numpy, which interprets the kernel, warns of inf * 0 in the neighbours.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [12, 133, 256])
def test_bits_of_a_row_do_not_depend_on_the_batch(
    device: torch.device, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(200, width).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    full = rms_norm(x[:40] if IS_INTERPRETED else x, weight, 1e-6)
    for row in (0, 1, 5, 39) if IS_INTERPRETED else range(200):
        alone = rms_norm(x[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], full[row]), f"row {row}"
    for count in (2, 17) if IS_INTERPRETED else range(2, 200, 5):
        assert torch.equal(rms_norm(x[:count], weight, 1e-6), full[:count]), f"{count} rows"
    for poison in (torch.nan, torch.inf, 3e4):
        others = torch.full((9, width), poison).to(device, dtype)
        others[4] = x[3]
        assert torch.equal(rms_norm(others, weight, 1e-6)[4], full[3]), f"among {poison}"


def test_bits_do_depend_on_the_row_itself(device: torch.device) -> None:
    """The comparisons above can fail: one changed value changes its row and no other."""
    x = torch.randn(5, 133).to(device)
    weight = torch.ones(133).to(device)
    before = rms_norm(x, weight, 1e-6)
    x[2, 132] += 0.01
    is_changed = (rms_norm(x, weight, 1e-6) != before).any(dim=1)
    assert is_changed.tolist() == [row == 2 for row in range(5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width", "splits"), [(1, 1, 1), (5, 70, 3), (3, 129, 4)])
def test_adding_and_norming_is_adding_then_norming(
    device: torch.device, num_rows: int, width: int, splits: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(num_rows, width) * 3).to(device, dtype)
    addends = torch.randn(splits, num_rows, width).to(device)
    weight, bias = (torch.randn(width).to(device, dtype) for _ in range(2))
    for some_bias in (None, bias):
        total, normed = add_rms_norm(x, addends, some_bias, weight, 1e-5)
        assert total.dtype == normed.dtype == dtype
        expected = x + sum_addends(addends, some_bias, dtype)
        assert torch.equal(total, expected) or (IS_INTERPRETED and dtype == torch.bfloat16)
        assert torch.equal(normed, rms_norm(total, weight, 1e-5))
        check(normed, oracle(total, weight, 1e-5))
    assert launch_counts().get("add_rms_norm", 0) == 2 * int(use_triton(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_float32_scales_before_the_one_rounding(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(5, 70).to(device, dtype)
    weight = 1 + torch.randn(70).to(device)
    out = rms_norm(x, weight, 1e-5)
    expected = oracle(x, weight, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=max(TOLERANCE[dtype] / 2, 1e-6), atol=1e-6
    )
    narrow = rms_norm(x, weight.to(dtype), 1e-5)
    assert torch.equal(narrow, out) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", ["own", "float32"])
def test_a_product_may_be_normed_before_it_is_added(
    device: torch.device, dtype: torch.dtype, weight_dtype: str
) -> None:
    x = torch.randn(5, 70).to(device, dtype)
    addends, bias = torch.randn(3, 5, 70).to(device), torch.randn(70).to(device, dtype)
    norms = torch.randn(2, 70).to(device, torch.float32 if weight_dtype == "float32" else dtype)
    weight, delta_weight = norms.unbind()
    for some_bias in (None, bias):
        delta = sum_addends(addends, some_bias, dtype)
        expected = x + rms_norm(delta, delta_weight, 1e-5)
        total, normed = add_rms_norm(x, addends, some_bias, weight, 1e-5, delta_weight)
        is_exact = not (IS_INTERPRETED and dtype == torch.bfloat16)
        assert not is_exact or torch.equal(total, expected)
        torch.testing.assert_close(total, expected, rtol=2**-6, atol=2**-6)
        assert torch.equal(normed, rms_norm(total, weight, 1e-5))
        alone, again = add_rms_norm(x, addends, some_bias, None, 1e-5, delta_weight)
        assert torch.equal(alone, total) and torch.equal(again, total)
        one = slice(3, 4)
        row, _ = add_rms_norm(
            x[one], addends[:, one].contiguous(), some_bias, None, 1e-5, delta_weight
        )
        assert torch.equal(row, total[one])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_sum_do_not_depend_on_the_batch(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(40, 100).to(device, dtype)
    addends = torch.randn(2, 40, 100).to(device)
    weight = torch.randn(100).to(device, dtype)
    total, normed = add_rms_norm(x, addends, None, weight, 1e-5)
    for row in (0, 1, 17, 39):
        one = slice(row, row + 1)
        alone = add_rms_norm(x[one], addends[:, one].contiguous(), None, weight, 1e-5)
        assert torch.equal(alone[0], total[one]) and torch.equal(alone[1], normed[one])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(5, 7), (2, 64), (4, 129)])
def test_the_mean_of_a_row_may_be_taken_off_it(
    device: torch.device, num_rows: int, width: int, dtype: torch.dtype
) -> None:
    """With a weight in float32 that is a LayerNorm without a bias."""
    x = (torch.randn(num_rows, width) * 3 + 5).to(device, dtype)
    weight = torch.randn(width).to(device)
    out = rms_norm(x, weight, 1e-5, is_centered=True)
    expected = torch.nn.functional.layer_norm(
        x.double().cpu(), (width,), weight.double().cpu(), None, 1e-5
    )
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=max(TOLERANCE[dtype], 4e-6), atol=4e-6
    )
    addends = torch.randn(2, num_rows, width).to(device)
    total, normed = add_rms_norm(x, addends, None, weight, 1e-5, is_centered=True)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5, is_centered=True))
    for row in range(num_rows):
        one = slice(row, row + 1)
        assert torch.equal(rms_norm(x[one], weight, 1e-5, is_centered=True), out[one])
        alone = add_rms_norm(
            x[one], addends[:, one].contiguous(), None, weight, 1e-5, is_centered=True
        )
        assert torch.equal(alone[1], normed[one])
