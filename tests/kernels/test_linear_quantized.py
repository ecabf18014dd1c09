"""Products with weights in FP8 against their dequantised values, and the bits of a row."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.linear import linear, linear_addends, sum_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.linear_tiles import MAX_SPLIT_ROWS, choose_fp8_tiles, num_splits
from shared.kernels.quantized import (
    SCALE_BLOCK,
    QuantizedWeight,
    quantize,
    spread_scales,
    stack_rows,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALINGS = ["channel", "block"]


def value_of(code: int) -> float:
    """Return what a byte means in e4m3, by its definition."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 0:
        return (-1) ** sign * 2.0**-6 * (mantissa / 8)
    return (-1) ** sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)


NUMBERS = [code for code in range(256) if code & 0x7F != 0x7F]
TABLE = torch.tensor([value_of(code) for code in NUMBERS])


def weight_of(
    width_n: int, width_k: int, scaling: str, dtype: torch.dtype, device: torch.device
) -> QuantizedWeight:
    """Return a weight of all values, with scales as uneven as those of real weights."""
    generator = torch.Generator().manual_seed(width_n + width_k)
    chosen = torch.randint(0, len(NUMBERS), (width_n, width_k), generator=generator)
    codes = torch.tensor(NUMBERS, dtype=torch.uint8)[chosen]
    num_scales = 1 if scaling == "channel" else -(-width_k // SCALE_BLOCK)
    scales = torch.rand((num_scales, width_n), generator=generator) * 0.01 + 1e-4
    return QuantizedWeight(
        values=codes.view(torch.float8_e4m3fn).to(device), scales=scales.to(device), dtype=dtype
    )


def product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return x.double().cpu() @ weight.dequantized().double().cpu().T


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    size = expected.abs().max()
    torch.testing.assert_close(out.double().cpu() / size, expected / size, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_value_is_what_e4m3_defines(
    device: torch.device, dtype: torch.dtype, scaling: str
) -> None:
    codes = torch.tensor(NUMBERS, dtype=torch.uint8)
    scales = torch.tensor([[0.5], [4.0]] if scaling == "block" else [[0.5]])
    weight = QuantizedWeight(
        values=codes[None].view(torch.float8_e4m3fn).to(device),
        scales=scales.to(device),
        dtype=dtype,
    )
    every = torch.eye(len(NUMBERS)).to(device, dtype)
    out = linear(every, weight, out_dtype=torch.float32)[:, 0].cpu()
    by_k = (
        scales[:, 0].repeat_interleave(SCALE_BLOCK)[: len(NUMBERS)] if scaling == "block" else 0.5
    )
    assert torch.equal(out, TABLE * by_k)
    assert torch.equal(weight.dequantized()[0].cpu(), TABLE * by_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("num_rows", "width_k", "width_n"), [(1, 5, 3), (9, 300, 70)])
def test_products_equal_those_of_dequantised_weights(
    device: torch.device,
    num_rows: int,
    width_k: int,
    width_n: int,
    dtype: torch.dtype,
    scaling: str,
) -> None:
    x = torch.randn(num_rows, width_k).to(device, dtype)
    weight = weight_of(2 * width_n, width_k, scaling, dtype, device)
    bias = torch.randn(2 * width_n).to(device, dtype)
    expected = product(x, weight)
    check(linear(x, weight, out_dtype=torch.float32), expected)
    check(linear(x, weight, bias, out_dtype=torch.float32), expected + bias.double().cpu())
    check(sum_addends(linear_addends(x, weight), None, torch.float32), expected)
    gate, up = (expected + bias.double().cpu()).chunk(2, dim=1)
    out = linear_swiglu(x, weight, bias)
    assert out.dtype == dtype
    rounding = 2**-5 if dtype == torch.bfloat16 else 2**-8
    torch.testing.assert_close(
        out.double().cpu(), gate * gate.sigmoid() * up, rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_bits_of_a_row_do_not_depend_on_the_others(device: torch.device, scaling: str) -> None:
    dtype = torch.bfloat16
    counts = [33] if device.type == "cpu" else [2, 8, 16, 17, 33, 65, 129, 257, 700]
    width_k = 2176  # two splits of 1152 and 1024, in blocks of 128
    weight = weight_of(24, width_k, scaling, dtype, device)
    narrow = weight_of(24, 300, scaling, dtype, device)
    x = (torch.randn(max(counts), width_k) / 100).to(device, dtype)
    alone = linear(x[:1], weight, out_dtype=torch.float32)
    gated = linear_swiglu(x[:1, :300], narrow)
    for count in counts:
        assert torch.equal(linear(x[:count], weight, out_dtype=torch.float32)[:1], alone), count
        sums = sum_addends(linear_addends(x[:count], weight), None, torch.float32)
        assert torch.equal(sums[:1], alone), count
        assert torch.equal(linear_swiglu(x[:count, :300], narrow)[:1], gated), count


def test_a_row_is_quantised_to_the_nearest_values_under_the_largest_scale(
    device: torch.device,
) -> None:
    weight = torch.randn(5, 40) * torch.tensor([[1e-4], [1.0], [30.0], [0.0], [1e-30]])
    quantized = quantize(weight.to(device))
    scales = weight.abs().amax(dim=1) / 448
    scales[3] = 1.0
    assert torch.equal(quantized.scales.cpu(), scales[None])
    got = quantized.values.float().cpu()
    for row, scale, values in zip(weight, scales, got, strict=True):
        distance = (row[:, None] / scale - TABLE).abs()
        nearest = distance.min(dim=1).values
        assert torch.equal((row / scale - values).abs(), nearest)
    assert quantized.is_finite()
    assert not quantize(torch.tensor([[1.0, torch.nan]]).to(device)).is_finite()
    assert not quantize(torch.tensor([[1.0, torch.inf]]).to(device)).is_finite()


def test_rows_are_stacked_and_moved_with_their_scales(device: torch.device) -> None:
    parts = [weight_of(n, 200, "block", torch.float32, device) for n in (3, 130)]
    stacked = stack_rows(parts)
    assert isinstance(stacked, QuantizedWeight)
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(stacked.dequantized(), expected)
    turned = stacked.rearranged(lambda rows: rows.flip(0))
    assert torch.equal(turned.dequantized(), expected.flip(0))
    other = weight_of(4, 200, "channel", torch.float32, device)
    assert stack_rows([*parts, other]) is None
    assert stack_rows([other, expected]) is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1), (2, 3)])
def test_scales_of_checkpoints_are_spread_over_rows(shape: tuple[int, ...]) -> None:
    width_n, width_k = 200, 300
    stored = torch.rand(2, *shape) + 0.1
    all_spread = spread_scales(stored, (width_n, width_k))
    assert all_spread is not None
    values = torch.ones(width_n, width_k).to(torch.float8_e4m3fn)
    for scales, spread in zip(stored, all_spread, strict=True):
        got = QuantizedWeight(values=values, scales=spread, dtype=torch.float32).dequantized()
        for n, k in ((0, 0), (127, 128), (128, 127), (199, 299)):
            if shape == (2, 3):
                want = scales[n // 128, k // 128]
            else:
                want = scales.flatten()[n if scales.numel() > 1 else 0]
            assert got[n, k] == want
    assert spread_scales(torch.ones(1, 3, 2), (width_n, width_k)) is None


@pytest.mark.parametrize("width_k", [4096, 1024])
@pytest.mark.parametrize("num_rows", [129, 256, 257, 2048])
def test_two_sums_of_a_tile_fit_into_registers(num_rows: int, width_k: int) -> None:
    """A program that walks several splits has a sum of a split, and one of all."""
    shape = (1024, width_k)
    tiles = choose_fp8_tiles(num_rows, 2, shape, by_block=False)
    num_sums = 2 if num_rows > MAX_SPLIT_ROWS and num_splits(*shape) > 1 else 1
    assert num_sums * tiles.block_n * tiles.block_t <= 32 * tiles.num_warps * 128
