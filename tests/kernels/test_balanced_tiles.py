"""Products whose tiles are dealt out to programs have the bits of a program per tile."""

from __future__ import annotations

import pytest
import torch

from shared.kernels import linear as linear_module
from shared.kernels.balanced_tiles import Deal, deal_tiles, handover
from shared.kernels.dispatch import use_triton
from shared.kernels.linear_swiglu import multiply_swiglu
from shared.kernels.linear_tiles import (
    INTERPRETED_TILES,
    MAX_SPLIT_ROWS,
    SQUARE_FP8_TILES,
    SQUARE_TILES,
    Tiles,
    choose_deal,
    choose_tiles,
    num_splits,
    num_tiles,
    split_width,
)
from shared.kernels.quantized import QuantizedWeight, quantize
from shared.kernels.swiglu import Activation
from tests.marks import EXHAUSTIVE, IS_INTERPRETED, first_if_interpreted

# Rows of three tiles and of five, the last of each not whole; likewise columns.
NUM_ROWS, WIDTH_N = (70, 300) if IS_INTERPRETED else (300, 1100)
NUM_MEMBERS = [1, 2, 3, 4, 5]
DTYPES = first_if_interpreted([torch.bfloat16, torch.float16])


@pytest.fixture
def tiles(device: torch.device) -> Tiles:
    if not use_triton(torch.empty(0, device=device)):
        pytest.skip("a CPU has no tiles that programs share")
    return INTERPRETED_TILES if IS_INTERPRETED else SQUARE_TILES


def deals(tiles: Tiles, width_n: int) -> list[Deal]:
    num_groups, num_tiles_n = num_tiles(tiles, NUM_ROWS, width_n)
    assert num_tiles_n >= max(NUM_MEMBERS)
    found = [deal_tiles(num_groups, num_tiles_n, num_groups * count) for count in NUM_MEMBERS]
    return [deal for deal in found if deal]


@pytest.mark.parametrize(
    "width_k",
    [
        pytest.param(64, id="1 split"),
        pytest.param(2048, id="2 splits"),
        pytest.param(4096, id="4 splits", marks=[EXHAUSTIVE] if IS_INTERPRETED else []),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_dealt_out_has_the_same_bits(
    device: torch.device, tiles: Tiles, dtype: torch.dtype, width_k: int
) -> None:
    x = torch.randn(NUM_ROWS, width_k).to(device, dtype)
    weight = (torch.randn(WIDTH_N, width_k) / width_k**0.5).to(device, dtype)
    bias = torch.randn(WIDTH_N).to(device, dtype)
    if width_k == 64:  # one whole split of two blocks
        x, weight = torch.cat((x, x), dim=1), torch.cat((weight, weight), dim=1)
    splits = num_splits(*weight.shape)
    assert splits == max(1, width_k // 1024) and split_width(weight.shape[1], splits) % 64 == 0
    want, out = torch.empty(2, NUM_ROWS, WIDTH_N, dtype=dtype, device=device)
    linear_module.multiply(x, weight, bias, want, tiles, None)
    for deal in deals(tiles, WIDTH_N):
        for _ in range(1 if IS_INTERPRETED else 3):  # what is handed over is taken once
            out.fill_(float("nan"))
            linear_module.multiply(x, weight, bias, out, tiles, deal)
            assert torch.equal(out, want), deal
        places = handover(x.device, deal, tiles.block_n * tiles.block_t)
        assert not places[:, 0].any(), "somebody waits for ever the next time"


@pytest.mark.parametrize("num_scales", [1, 16], ids=["channel", "block"])
def test_a_product_in_fp8_dealt_out_has_the_same_bits(
    device: torch.device, tiles: Tiles, num_scales: int
) -> None:
    num_rows, width_n = (33, 190) if IS_INTERPRETED else (NUM_ROWS, WIDTH_N)
    dtype, width_k, tiles = torch.bfloat16, 2048, tiles if IS_INTERPRETED else SQUARE_FP8_TILES
    x = torch.randn(num_rows, width_k).to(device, dtype)
    values = quantize((torch.randn(width_n, width_k)).to(device, dtype)).values
    scales = torch.rand(num_scales, width_n).to(device)
    weight = QuantizedWeight(values=values, scales=scales, dtype=dtype)
    want, out = torch.empty(2, num_rows, width_n, dtype=dtype, device=device)
    linear_module.multiply(x, weight, None, want, tiles, None)
    counts = num_tiles(tiles, num_rows, width_n)
    deal = deal_tiles(*counts, 2 * counts[0])  # three tiles for two members, or more
    assert deal is not None and counts[1] % 2
    linear_module.multiply(x, weight, None, out, tiles, deal)
    assert torch.equal(out, want)
    assert not handover(x.device, deal, tiles.block_n * tiles.block_t)[:, 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width_k", "activation"), [(200, "gelu_tanh"), (512, "silu")])
def test_a_gated_product_dealt_out_has_the_same_bits(
    device: torch.device,
    tiles: Tiles,
    dtype: torch.dtype,
    width_k: int,
    activation: Activation,
) -> None:
    x = torch.randn(NUM_ROWS, width_k).to(device, dtype)
    weight = (torch.randn(2 * WIDTH_N, width_k) / width_k**0.5).to(device, dtype)
    bias = torch.randn(2 * WIDTH_N).to(device, dtype)
    want, out = torch.empty(2, NUM_ROWS, WIDTH_N, dtype=dtype, device=device)
    multiply_swiglu(x, weight, bias, want, tiles, None, activation)
    for deal in deals(tiles, WIDTH_N):
        for _ in range(1 if IS_INTERPRETED else 3):
            out.fill_(float("nan"))
            multiply_swiglu(x, weight, bias, out, tiles, deal, activation)
            assert torch.equal(out, want), deal
        places = handover(x.device, deal, 2 * tiles.block_n * tiles.block_t)
        assert not places[:, 0].any(), "somebody waits for ever the next time"


def test_what_is_dealt_out_is_what_would_leave_a_gpu_idle() -> None:
    """Of an 8B's products: 160 tiles would take two turns, 256 fill two as it is."""
    assert choose_deal(640, 4096, 14336) == Deal(num_groups=5, num_members=26)
    assert choose_deal(1024, 4096, 14336) is None
    assert choose_deal(MAX_SPLIT_ROWS, 4096, 14336) is None
    assert choose_deal(640, 4096, 14336 + 8) is None, "splits are not whole"
    assert choose_tiles(640, 2, 4096) != SQUARE_TILES, "whole tiles would be wide"
    assert deal_tiles(3, 32, 132) is None, "fewer tiles than members"
    assert deal_tiles(200, 1000, 132) is None, "fewer programs than tiles of rows"
