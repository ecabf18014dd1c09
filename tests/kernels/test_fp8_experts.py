"""Experts in FP8: their products against float64, the bits of rows, and the memory they take."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels.expert_choice import ChosenExperts
from shared.kernels.expert_products import apply_experts
from shared.kernels.expert_products_cpu import ExpertWeights, apply_experts_cpu, hold_experts
from shared.kernels.fp8_experts import QuantizedExperts, pack_fp8
from shared.kernels.products_cpu import CpuProducts
from shared.kernels.quantized import QuantizedWeight, quantize, spread_scales
from tests.marks import first_if_interpreted

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = first_if_interpreted([torch.float32, torch.float16, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
NUM_EXPERTS = 9
# K, F, N: blocks that are not whole, and fewer outputs than a tile has.
WIDTHS = [(320, 136, 72), (128, 256, 200)]


def random_experts(
    width_n: int, width_k: int, scaling: str, dtype: torch.dtype, device: torch.device
) -> list[QuantizedWeight]:
    """Return a weight of each expert; scales of neighbouring blocks differ by powers of two."""
    weights = []
    for _ in range(NUM_EXPERTS):
        matrix = torch.randn(width_n, width_k) / width_k**0.5
        if scaling == "channel":
            weight = quantize(matrix.to(device, dtype))
        else:
            blocks = [-(-width // 128) for width in (width_n, width_k)]
            scales = 2.0 ** torch.randint(-3, 4, blocks) * (1 + torch.rand(blocks)) / 64
            spread = spread_scales(scales[None], matrix.shape)
            assert spread is not None
            values = (
                matrix
                / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:width_n, :width_k]
            )
            weight = QuantizedWeight(
                values=values.clamp(-448, 448).to(torch.float8_e4m3fn).to(device),
                scales=spread[0].to(device),
                dtype=dtype,
            )
        # One block of K is no more than a scale per output.
        assert weight.scaling == (scaling if width_k > 128 else "channel")
        weights.append(weight)
    return weights


class Layer:
    """Weights of experts, held as a worker holds them."""

    def __init__(
        self, widths: tuple[int, int, int], scaling: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        width_k, width_f, self.width_n = widths
        self.stored = [
            random_experts(2 * width_f, width_k, scaling, dtype, device),
            random_experts(self.width_n, width_f, scaling, dtype, device),
        ]
        products = CpuProducts()
        self.held: list[ExpertWeights] = [
            hold_experts(products, iter(one), NUM_EXPERTS) for one in self.stored
        ]

    def apply(self, x: torch.Tensor, ids: list[list[int]]) -> torch.Tensor:
        """Return addends; memory that they leave unwritten is NaN."""
        chosen = choose(ids, x.device)
        out = torch.full((len(ids[0]), len(x), self.width_n), torch.nan, device=x.device)
        apply_experts(x, *self.held, chosen, out)
        return out

    def expert_of(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return what an expert makes of one row, in float64."""
        gate_up, down = (one[expert].dequantized().double().cpu() for one in self.stored)
        gate, up = (gate_up @ x.double().cpu()).chunk(2)
        return down @ (gate * gate.sigmoid() * up)


def choose(ids: list[list[int]], device: torch.device) -> ChosenExperts:
    weights = torch.rand((len(ids), len(ids[0])), generator=torch.Generator().manual_seed(5))
    return ChosenExperts(
        ids=torch.tensor(ids, dtype=torch.int32, device=device), weights=weights.to(device)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", ["block", "channel"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_products_are_those_of_a_reference(
    device: torch.device, dtype: torch.dtype, scaling: str, widths: tuple[int, int, int]
) -> None:
    layer = Layer(widths, scaling, dtype, device)
    ids = [[0, 3], [3, 8], [1, 3], [0, 7], [NUM_EXPERTS] * 2]
    x = torch.randn(len(ids), widths[0]).to(device, dtype)
    got = layer.apply(x, ids)
    shares = choose(ids, device).weights
    for row, chosen in enumerate(ids):
        for slot, expert in enumerate(chosen):
            want = torch.zeros(widths[2], dtype=torch.float64)
            if expert < NUM_EXPERTS:
                want = layer.expert_of(expert, x[row]) * float(shares[row, slot])
            scale = max(1.0, float(want.abs().max()))
            torch.testing.assert_close(
                got[slot, row].double().cpu() / scale,
                want / scale,
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )


@pytest.mark.parametrize("dtype", first_if_interpreted([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("scaling", ["block", "channel"])
def test_bits_of_a_row_do_not_depend_on_the_others(
    device: torch.device, dtype: torch.dtype, scaling: str
) -> None:
    """Alone, among many, all on one expert, on experts of their own, in any order, padded."""
    layer = Layer((200, 136, 24), scaling, dtype, device)
    num_rows, own = 33 if IS_INTERPRETED else 300, [2, 5]
    x = torch.randn(num_rows, 200).to(device, dtype)
    alone = layer.apply(x[:1], [own])
    assert alone.isfinite().all() and (alone != 0).any()
    crowds = {
        "one expert": [own] * num_rows,
        "some": [sorted(torch.randperm(NUM_EXPERTS)[:2].tolist()) for _ in range(num_rows)],
        "disjoint": [[0, 1]] * num_rows,
        "padded": [[NUM_EXPERTS] * 2] * num_rows,
    }
    for name, ids in crowds.items():
        full = layer.apply(x, [own, *ids[1:]])
        assert torch.equal(full[:, :1], alone), name
        assert (full[:, 1:] == 0).all() == (name == "padded")


@pytest.mark.kernel_only
@pytest.mark.parametrize("scaling", ["block", "channel"])
def test_they_stay_fp8(device: torch.device, scaling: str) -> None:
    """A byte per value, and a thirty-second of it for scales at most; half of bfloat16."""
    layer = Layer((256, 128, 128), scaling, torch.bfloat16, device)
    for held, stored in zip(layer.held, layer.stored, strict=True):
        assert isinstance(held, QuantizedExperts)
        assert held.shape == (NUM_EXPERTS, *stored[0].shape)
        size = held.values.numel()
        taken = size * held.values.element_size() + held.scales.numel() * 4
        assert size < taken <= size * 33 / 32
        for expert, weight in enumerate(stored):
            assert torch.equal(held[expert].dequantized(), weight.dequantized())


def test_a_cpu_that_holds_them_packed_dequantises_expert_by_expert() -> None:
    cpu = torch.device("cpu")
    stored = [
        random_experts(*shape, "block", torch.float32, cpu) for shape in ((96, 140), (24, 48))
    ]
    packed = [pack_fp8(one) for one in stored]
    dense = [torch.stack([weight.dequantized() for weight in one]) for one in stored]
    x, chosen = torch.randn(3, 140), choose([[0, 3], [3, 8], [NUM_EXPERTS] * 2], cpu)
    outs = [torch.full((2, 3, 24), torch.nan) for _ in range(2)]
    apply_experts_cpu(x, packed[0], packed[1], chosen, outs[0])
    apply_experts_cpu(x, dense[0], dense[1], chosen, outs[1])
    assert torch.equal(*outs)
