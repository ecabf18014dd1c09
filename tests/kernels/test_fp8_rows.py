"""Rows in FP8: their bytes, their products with weights in FP8, and the bits of a row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from shared.kernels import linear_tiles
from shared.kernels.expert_products import apply_experts
from shared.kernels.fp8_experts import pack_fp8
from shared.kernels.fp8_rows import becomes_fp8, quantize_rows, quantize_rows_ref
from shared.kernels.linear import linear, linear_addends, splits_of, sum_addends
from shared.kernels.linear_swiglu import choose_fp8_row_tiles as linear_swiglu_tiles
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.linear_tiles import choose_fp8_row_tiles, num_splits, split_width
from shared.kernels.quantized import SCALE_BLOCK, QuantizedWeight, stack_rows
from shared.step.buckets import buckets_up_to
from tests.kernels.test_fp8_experts import NUM_EXPERTS, choose, random_experts
from tests.kernels.test_linear_quantized import SCALINGS, weight_of
from tests.marks import first_if_interpreted

pytestmark = pytest.mark.kernel_only

DTYPES = [torch.float16, torch.bfloat16]


def with_fp8_rows(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, has_fp8_rows=True)


def dequantized(x: torch.Tensor) -> torch.Tensor:
    """Return what rows mean once they are in FP8, in float64."""
    fp8 = quantize_rows_ref(x.cpu())
    return fp8.values.view(torch.float8_e4m3fn).double() * fp8.scales.double()[:, None]


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with float64: tensor cores add the products of FP8 with some 14 bits."""
    size = expected.abs().max()
    tolerance = 1e-3 if out.is_cuda else 2e-6
    torch.testing.assert_close(out.double().cpu() / size, expected / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (3, 128), (4, 1100), (2, 2304)])
def test_rows_have_the_bytes_and_scales_of_the_reference(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape) * torch.logspace(-6, 4, shape[0])[:, None]
    x[-1, : shape[1] // 2] = 0
    x[0] *= float(shape[0] > 2)
    x = x.to(device, dtype)
    fp8, want = quantize_rows(x), quantize_rows_ref(x.cpu())
    assert fp8.rows is x
    assert torch.equal(fp8.scales.cpu(), want.scales)
    assert torch.equal(fp8.values.view(torch.uint8).cpu(), want.values)
    # The largest value is the largest of e4m3.
    largest = fp8.values.view(torch.float8_e4m3fn).float().abs().amax(dim=1)
    is_zero = x.abs().amax(dim=1) == 0
    assert torch.equal(largest.cpu(), torch.where(is_zero.cpu(), 0.0, 448.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_becomes_the_nearest_one(device: torch.device, dtype: torch.dtype) -> None:
    """.. ties to even, among subnormals of e4m3 too, and zeros keep their signs."""
    bits = torch.arange(1 << 15, dtype=torch.int16)
    sizes = bits.view(dtype)
    sizes = sizes[sizes <= 448]  # beside 448, a row has a scale of 1
    x = torch.cat([sizes, -sizes, torch.tensor([448.0], dtype=dtype)])[None].to(device)
    fp8 = quantize_rows(x)
    assert fp8.scales.item() == 1
    want = x.cpu().float().to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(fp8.values.view(torch.uint8).cpu(), want)


def test_rows_in_other_layouts_have_the_same_bytes(device: torch.device) -> None:
    wide = torch.randn(3, 70).to(device, torch.bfloat16)
    for x in (wide[:, 3:40], wide[:, ::2], wide.T):
        fp8, want = quantize_rows(x), quantize_rows(x.clone(memory_format=torch.contiguous_format))
        assert torch.equal(fp8.values.view(torch.uint8), want.values.view(torch.uint8))
        assert torch.equal(fp8.scales, want.scales)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(device: torch.device, number: float, scaling: str) -> None:
    """.. in its row, and nothing of another row changes."""
    weight = with_fp8_rows(weight_of(16, 300, scaling, torch.bfloat16, device))
    x = torch.randn(3, 300).to(device, torch.bfloat16)
    before = linear(x, weight)
    x[1, 7] = number
    after = linear(x, weight)
    assert after[1].isnan().all()
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("num_rows", "width_k", "width_n"), [(1, 16, 3), (9, 300, 70)])
def test_products_are_those_of_quantised_rows(
    device: torch.device,
    num_rows: int,
    width_k: int,
    width_n: int,
    dtype: torch.dtype,
    scaling: str,
) -> None:
    x = torch.randn(num_rows, width_k).to(device, dtype)
    weight = with_fp8_rows(weight_of(2 * width_n, width_k, scaling, dtype, device))
    bias = torch.randn(2 * width_n).to(device, dtype)
    expected = dequantized(x) @ weight.dequantized().double().cpu().T
    check(linear(x, weight, out_dtype=torch.float32), expected)
    check(linear(x, weight, bias, out_dtype=torch.float32), expected + bias.double().cpu())
    check(sum_addends(linear_addends(x, weight), None, torch.float32), expected)
    gate, up = (expected + bias.double().cpu()).chunk(2, dim=1)
    want = gate * gate.sigmoid() * up
    out = linear_swiglu(x, weight, bias).double().cpu()
    torch.testing.assert_close(out / want.abs().max(), want / want.abs().max(), rtol=0, atol=0.02)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(128256, 4096), (262144, 8192), (32003, 2048), (300, 64)])
def test_graphs_of_a_vocabulary_compile_all_that_rows_of_any_number_launch(
    shape: tuple[int, int], scaling: str
) -> None:
    """Logits of a few rows are asked for outside of graphs while requests are served."""

    def tiles(num_rows: int) -> linear_tiles.Tiles:
        return choose_fp8_row_tiles(num_rows, shape, by_block=scaling == "block")

    counts = buckets_up_to(2048)
    assert {tiles(num_rows) for num_rows in range(1, 2049)} == {tiles(count) for count in counts}


def test_rows_of_32_bits_stay_as_they_are(device: torch.device) -> None:
    x = torch.randn(3, 300, device=device)
    weight = with_fp8_rows(weight_of(24, 300, "block", torch.float32, device))
    assert not becomes_fp8(x, weight) and becomes_fp8(x.bfloat16(), weight)
    assert torch.equal(linear(x, weight), linear(x, replace(weight, has_fp8_rows=False)))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_bits_of_a_row_do_not_depend_on_the_others(device: torch.device, scaling: str) -> None:
    dtype = torch.bfloat16
    counts = [33] if device.type == "cpu" else [2, 8, 16, 17, 33, 65, 129, 257, 700]
    width_k = 2176  # two splits of 1152 and 1024, in blocks of 128
    weight = with_fp8_rows(weight_of(24, width_k, scaling, dtype, device))
    narrow = with_fp8_rows(weight_of(24, 304, scaling, dtype, device))
    x = (torch.randn(max(counts), width_k) / 100).to(device, dtype)
    alone = linear(x[:1], weight, out_dtype=torch.float32)
    gated = linear_swiglu(x[:1, :304], narrow), linear_swiglu(x[:1], weight)
    for count in counts:
        assert torch.equal(linear(x[:count], weight, out_dtype=torch.float32)[:1], alone), count
        sums = sum_addends(linear_addends(x[:count], weight), None, torch.float32)
        assert torch.equal(sums[:1], alone), count
        assert torch.equal(linear_swiglu(x[:count, :304], narrow)[:1], gated[0]), count
        assert torch.equal(linear_swiglu(x[:count], weight)[:1], gated[1]), count


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("num_rows", "width_k"),
    [(2, 320), *first_if_interpreted([(40, 320), (200, 384), (700, 384)])],
)
def test_experts_multiply_rows_in_fp8(
    device: torch.device, scaling: str, num_rows: int, width_k: int
) -> None:
    """Products are close, and a row has the bits that it has alone."""
    width_f, width_n = 144, 72
    dtype = torch.bfloat16
    stored = [
        [with_fp8_rows(one) for one in random_experts(*shape, scaling, dtype, device)]
        for shape in ((2 * width_f, width_k), (width_n, width_f))
    ]
    gate_up, down = (pack_fp8(one) for one in stored)
    x = torch.randn(num_rows, width_k).to(device, dtype)
    ids = [[row % NUM_EXPERTS, (3 * row + 1) % NUM_EXPERTS] for row in range(num_rows)]
    chosen = choose(ids, device)
    out = torch.full((2, num_rows, width_n), torch.nan, device=device)
    apply_experts(x, gate_up, down, chosen, out)
    for row in (0, num_rows - 1):
        alone = torch.full((2, 1, width_n), torch.nan, device=device)
        own = replace(chosen, ids=chosen.ids[row, None], weights=chosen.weights[row, None])
        apply_experts(x[row, None], gate_up, down, own, alone)
        assert torch.equal(alone[:, 0], out[:, row])
        for slot, expert in enumerate(ids[row]):
            both = gate_up[expert].dequantized().double().cpu() @ dequantized(x[row, None])[0]
            gate, up = both.chunk(2)
            inner = (gate * gate.sigmoid() * up).to(dtype)[None]
            want = down[expert].dequantized().double().cpu() @ dequantized(inner)[0]
            want *= float(chosen.weights[row, slot])
            error = (out[slot, row].double().cpu() - want).norm() / want.norm()
            assert error < 0.05  # what differs in the last bit may become the next value of e4m3


def test_weights_of_which_some_have_rows_in_fp8_are_not_stacked(device: torch.device) -> None:
    one, other = (weight_of(n, 200, "block", torch.bfloat16, device) for n in (3, 130))
    assert stack_rows([one, with_fp8_rows(other)]) is None
    stacked = stack_rows([with_fp8_rows(one), with_fp8_rows(other)])
    assert isinstance(stacked, QuantizedWeight) and stacked.has_fp8_rows


# N, K, splits of a weight whose rows are in FP8, and of one whose rows are not.
SPLITS = [(6144, 4096, 4, 2), (4096, 14336, 4, 4), (7168, 16384, 4, 2), (7168, 2048, 4, 2)]
SPLITS += [(1536, 7168, 8, 4), (28672, 4096, 1, 1)]


@pytest.mark.parametrize(("width_n", "width_k", "splits", "plain_splits"), SPLITS)
def test_half_the_bytes_are_loaded_by_more_programs(
    width_n: int, width_k: int, splits: int, plain_splits: int
) -> None:
    values = torch.empty((width_n, width_k), dtype=torch.float8_e4m3fn, device="meta")
    weight = QuantizedWeight(values=values, scales=torch.ones(1, width_n), dtype=torch.bfloat16)
    assert splits_of(weight) == splits_of(values) == plain_splits
    assert splits_of(with_fp8_rows(weight)) == splits


@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 700])
@pytest.mark.parametrize(("width_k", "splits"), [(7168, 8), (4096, 4), (300, 1)])
def test_no_tile_is_longer_than_what_it_is_to_hold(
    num_rows: int, width_k: int, splits: int
) -> None:
    """A block with a scale of its own; and a split, unless it is all of K."""
    shape = (1536 if splits == 8 else 4096, width_k)
    assert num_splits(*shape, has_fp8_rows=True) == splits
    split_k = split_width(width_k, splits)
    for by_block in (False, True):
        tiles = linear_tiles.choose_fp8_row_tiles(num_rows, shape, by_block=by_block)
        assert splits == 1 or split_k % tiles.block_k == 0
        assert not by_block or tiles.block_k == SCALE_BLOCK
    tiles = linear_swiglu_tiles(num_rows, by_block=True)
    assert tiles.block_k == SCALE_BLOCK


@pytest.mark.parametrize(("num_rows", "stages"), [(1, 3), (16, 3), (17, 4), (32, 4)])
def test_long_tiles_of_few_rows_leave_room_for_three_programs(num_rows: int, stages: int) -> None:
    """.. and blocks with scales of their own keep what they have."""
    block_t = 16 if num_rows <= 16 else 32
    for shape in ((6144, 4096), (4096, 4096), (4096, 14336)):
        tiles = linear_tiles.choose_fp8_row_tiles(num_rows, shape, by_block=False)
        assert tiles == (64, block_t, 256, 4, stages)
        by_block = linear_tiles.choose_fp8_row_tiles(num_rows, shape, by_block=True)
        assert by_block == (64, block_t, SCALE_BLOCK, 4, stages)
