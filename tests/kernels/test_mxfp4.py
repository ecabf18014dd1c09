"""Experts in MXFP4: their values, and the bits of products by weights that stay 4 bits wide."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels import expert_tiles
from shared.kernels.expert_choice import ChosenExperts
from shared.kernels.expert_products import apply_experts
from shared.kernels.expert_products_cpu import ExpertForm, ExpertWeights
from shared.kernels.linear_tiles import INTERPRETED_TILES
from shared.kernels.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4, has_numbers, pack_mxfp4

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUM_EXPERTS = 5
Stored = tuple[torch.Tensor, torch.Tensor]


def random_weights(
    width_n: int, width_k: int, seed: int, scales: tuple[int, int] = (117, 124)
) -> Stored:
    """Return blocks [E, N, K / 2] and scales [E, N, K / 32] in a range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_EXPERTS, width_n, width_k // 2)
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    shape = (NUM_EXPERTS, width_n, width_k // MXFP4_BLOCK)
    return values, torch.randint(*scales, shape, generator=generator, dtype=torch.uint8)


def test_every_value_by_every_scale() -> None:
    values = (torch.arange(16, dtype=torch.uint8) * 0x10 + torch.arange(16).flip(0)).to(torch.uint8)
    scales = torch.arange(253, dtype=torch.uint8)
    got = dequantize_mxfp4(values.expand(253, 16), scales[:, None])
    signed = [*VALUES, *(-value for value in VALUES)]
    for scale in (0, 1, 126, 127, 128, 252):
        want = [signed[i] * 2.0 ** (scale - 127) for high in range(16) for i in (15 - high, high)]
        assert got[scale].tolist() == want
    assert got.isfinite().all() and has_numbers(scales)
    for scale in (253, 255):
        assert not has_numbers(torch.tensor([120, scale], dtype=torch.uint8))


def apply(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, ids: list[list[int]]):
    """Return the addends of rows; biases, limits and weights are the same at every call."""
    generator = torch.Generator().manual_seed(3)
    device, dtype = x.device, x.dtype
    form = ExpertForm(
        gate_up_bias=torch.randn(gate_up.shape[:2], generator=generator).to(device, dtype),
        down_bias=torch.randn(down.shape[:2], generator=generator).to(device, dtype),
        limit=7.0,
        alpha=1.702,
    )
    weights = torch.rand((len(ids), len(ids[0])), generator=generator).to(device)
    chosen = ChosenExperts(ids=torch.tensor(ids, dtype=torch.int32, device=device), weights=weights)
    out = torch.full((len(ids[0]), len(x), down.shape[1]), torch.nan, device=device)
    apply_experts(x, gate_up, down, chosen, out, form)
    return out


@pytest.mark.kernel_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_direct", [True, False])
def test_bits_are_those_of_dequantised_weights(
    device: torch.device,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_direct: bool,
) -> None:
    """K is no whole number of blocks of words, and N none of tiles; rows alone and among others."""
    # What interprets a kernel sums by tiles, so that these must be as long as a part is.
    tiles = INTERPRETED_TILES._replace(block_k=MXFP4_BLOCK)
    monkeypatch.setattr(expert_tiles, "INTERPRETED_TILES", tiles)
    stored = [random_weights(192, 160, seed=1), random_weights(160, 96, seed=2)]
    dense = [dequantize_mxfp4(*one).to(device, dtype) for one in stored]
    packed = [
        pack_mxfp4(zip(*(part.to(device) for part in one), strict=True), NUM_EXPERTS, dtype)
        for one in stored
    ]
    assert [one.shape for one in packed] == [one.shape for one in dense]
    ids = [[3]] if is_direct else [[0, 3], [3, 4], [1, 3], [0, 4], [NUM_EXPERTS] * 2]
    x = torch.randn(len(ids), 160).to(device, dtype)
    got, want = apply(x, *packed, ids), apply(x, *dense, ids)
    assert torch.equal(got, want)
    assert got.isfinite().all() and got[:, 0].ne(0).all()
    alone = apply(x[:1], *packed, ids[:1])
    assert torch.equal(got[:, :1], alone)


@pytest.mark.kernel_only
@pytest.mark.parametrize("dtype", [torch.float32] if IS_INTERPRETED else DTYPES[::2])
@pytest.mark.parametrize(("scales", "factor"), [((0, 28), 2.0**100), ((60, 130), 1.0)])
def test_all_scales_are_read(
    device: torch.device, dtype: torch.dtype, scales: tuple[int, int], factor: float
) -> None:
    """Unit rows show every weight, however small; the least are subnormal."""
    stored = random_weights(192, 128, 4, scales)
    packed = pack_mxfp4(zip(*(part.to(device) for part in stored), strict=True), NUM_EXPERTS, dtype)
    dense = dequantize_mxfp4(*stored).to(device, dtype)
    down = torch.eye(192, 96).expand(NUM_EXPERTS, -1, -1).contiguous().to(device, dtype)
    ids = [[expert] for expert in range(NUM_EXPERTS)] * 4
    x = (torch.eye(128)[:20] * factor).to(device, dtype)
    assert torch.equal(apply(x, packed, down, ids), apply(x, dense, down, ids))
