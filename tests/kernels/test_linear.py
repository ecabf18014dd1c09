"""Linear against a row-by-row product in float64, and the bits of a row in any company."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.linear import linear, linear_addends, sum_addends
from shared.kernels.linear_tiles import MAX_SPLIT_ROWS, num_splits, split_width
from tests.marks import first_if_interpreted

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rounding of the result; what float32 accumulation loses is in the absolute tolerance. Triton's
# interpreter truncates to bfloat16.
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b one row and one output at a time, in float64 on the CPU."""
    out = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for t, row in enumerate(x.double().cpu()):
        for n, column in enumerate(weight.double().cpu()):
            out[t, n] = (row * column).sum() + (0 if bias is None else float(bias[n]))
    return out


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=ROUNDING[out.dtype], atol=5e-5, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "width_k", "width_n"),
    [(1, 1, 1), (3, 5, 7), (8, 64, 64), (9, 65, 33), (33, 130, 70), (65, 31, 129)],
)
def test_odd_sizes_and_dtypes(
    device: torch.device, num_rows: int, width_k: int, width_n: int, dtype: torch.dtype
) -> None:
    x = torch.randn(num_rows, width_k).to(device, dtype)
    weight = torch.randn(width_n, width_k).to(device, dtype)
    bias = torch.randn(width_n).to(device, dtype)
    for some_bias in (None, bias):
        out = linear(x, weight, some_bias)
        assert out.dtype == dtype
        check(out, oracle(x, weight, some_bias))
    assert launch_counts().get("linear", 0) == 2 * int(use_triton(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_dtype_keeps_what_was_accumulated(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(5, 70).to(device, dtype)
    weight = torch.randn(20, 70).to(device, dtype)
    bias = torch.randn(20).to(device, dtype)
    out = linear(x, weight, bias, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    check(out, oracle(x, weight, bias))
    check(linear(x, weight, bias), out.double().cpu())


def test_no_rows(device: torch.device) -> None:
    weight = torch.randn(6, 4).to(device, torch.float16)
    for bias in (None, weight[:, 0]):
        out = linear(weight[:0], weight, bias, out_dtype=torch.float32)
        assert out.shape == (0, 6) and out.dtype == torch.float32
        assert linear(weight[:0], weight, bias).dtype == torch.float16
    assert launch_counts() == {}


@pytest.mark.parametrize("num_rows", [8, 11])
def test_layout_of_x_does_not_change_its_bits(device: torch.device, num_rows: int) -> None:
    dense = torch.randn(num_rows, 257).to(device)
    weight = torch.randn(10, 257).to(device)
    wide = torch.randn(num_rows, 300).to(device)
    wide[:, 1:258] = dense
    spread = torch.randn(num_rows, 514).to(device)
    spread[:, ::2] = dense
    expected = linear(dense, weight)
    check(expected, oracle(dense, weight))
    layouts = {
        "columns of a wider tensor": wide[:, 1:258],
        "every other column": spread[:, ::2],
        "transposed": dense.T.contiguous().T,
    }
    different = [
        name for name, x in layouts.items() if not torch.equal(linear(x, weight), expected)
    ]
    assert not different
    same_row = dense[3:4].expand(num_rows, -1)
    assert torch.equal(linear(same_row, weight), expected[3:4].expand(num_rows, -1))


def test_parts_of_wider_weights(device: torch.device) -> None:
    x = torch.randn(5, 20).to(device)
    weight = torch.randn(30, 50).to(device)[3:20, 7:27]
    bias = torch.randn(34).to(device)[::2]
    check(linear(x, weight, bias), oracle(x, weight, bias))


def row_counts(device: torch.device) -> list[int]:
    if IS_INTERPRETED:
        return [1, 2, 31, 32, 33, 64, 65, 200]
    return list(range(1, 201)) if device.type == "cpu" else [*range(1, 70), 96, 127, 128, 129, 200]


@pytest.mark.parametrize("dtype", first_if_interpreted(DTYPES))
def test_bits_of_a_row_do_not_depend_on_the_row_count(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(200, 133).to(device, dtype)
    weight = torch.randn(35, 133).to(device, dtype)
    bias = torch.randn(35).to(device, dtype)
    full = linear(x, weight, bias, out_dtype=torch.float32)
    for count in row_counts(device):
        first = linear(x[:count], weight, bias, out_dtype=torch.float32)
        assert torch.equal(first, full[:count]), f"first {count} rows"
        last = linear(x[-count:], weight, bias, out_dtype=torch.float32)
        assert torch.equal(last, full[-count:]), f"last {count} rows"


# numpy, which interprets the kernel, warns of inf - inf in the neighbours.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_its_place_or_neighbours(
    device: torch.device, dtype: torch.dtype
) -> None:
    num_rows, width = 200, 133
    row = torch.randn(1, width).to(device, dtype)
    weight = torch.randn(35, width).to(device, dtype)
    alone = linear(row, weight, out_dtype=torch.float32)
    places = (0, 7, 40, 130, 199) if IS_INTERPRETED else range(0, num_rows, 3)
    neighbours = [
        torch.randn(num_rows, width) * 100,
        torch.zeros(num_rows, width),
        torch.full((num_rows, width), torch.nan),
        torch.full((num_rows, width), torch.inf),
    ]
    for others in neighbours[2:] if IS_INTERPRETED else neighbours:
        x = others.to(device, dtype)
        for place in places:
            x[place] = row
        out = linear(x, weight, out_dtype=torch.float32)
        for place in places:
            assert torch.equal(out[place], alone[0]), f"row {place} of {num_rows}"


def test_bits_do_depend_on_the_row_itself(device: torch.device) -> None:
    """The comparisons above can fail: one changed value changes its row and no other."""
    x = torch.randn(9, 133).to(device)
    weight = torch.randn(35, 133).to(device)
    before = linear(x, weight)
    x[4, 132] += 0.01
    is_changed = (linear(x, weight) != before).any(dim=1)
    assert is_changed.tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("dtype", first_if_interpreted(DTYPES))
def test_split_products_add_up_to_whole_ones(device: torch.device, dtype: torch.dtype) -> None:
    """Few rows are computed split by split, many by programs that walk all splits."""
    width_k = 4 * 1024 + 130
    assert num_splits(40, width_k) == 4
    x = torch.randn(MAX_SPLIT_ROWS + 1, width_k).to(device, dtype)
    weight = (torch.randn(40, width_k) / 64).to(device, dtype)
    bias = torch.randn(40).to(device, dtype)
    full = linear(x, weight, bias, out_dtype=torch.float32)
    rows = [0, MAX_SPLIT_ROWS]
    product = x[rows].double().cpu() @ weight.double().cpu().T + bias.double().cpu()
    torch.testing.assert_close(full[rows].double().cpu(), product, rtol=1e-5, atol=1e-5)
    for count in (1, 40) if IS_INTERPRETED else (1, 2, 17, 40, 100, MAX_SPLIT_ROWS):
        few = x[:count]
        assert torch.equal(linear(few, weight, bias, out_dtype=torch.float32), full[:count])
        addends = linear_addends(few, weight)
        assert addends.shape == (4 if use_triton(x) else 1, count, 40)
        whole = linear(few, weight, out_dtype=torch.float32)
        assert torch.equal(sum_addends(addends, None, torch.float32), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_to_the_rounded_sum(device: torch.device, dtype: torch.dtype) -> None:
    addends, bias = torch.randn(3, 5, 70).to(device), torch.randn(70).to(device, dtype)
    residual = torch.randn(5, 70).to(device, dtype)
    for some_bias in (None, bias):
        want = residual + sum_addends(addends, some_bias, dtype)
        out = sum_addends(addends, some_bias, dtype, residual)
        if IS_INTERPRETED:  # which truncates to bfloat16
            torch.testing.assert_close(out, want)
        else:
            assert torch.equal(out, want)


def test_splits_cover_k_and_depend_on_the_weight_alone() -> None:
    shapes = [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (64, 64)]
    assert [num_splits(*shape) for shape in shapes] == [2, 4, 4, 1, 1, 1]
    for width_k in (1, 127, 1024, 4096, 5000, 14336, 14400):
        for splits in (1, 2, 4, 8):
            width = split_width(width_k, splits)
            assert width * splits >= width_k and width % 128 == 0
