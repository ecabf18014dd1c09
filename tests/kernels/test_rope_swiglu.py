"""The elementwise ops: rotary embedding as complex rotation, the gated activation as a sigmoid."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from shared.kernels.rope import apply_rope
from shared.kernels.swiglu import swiglu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=TOLERANCE[out.dtype], atol=TOLERANCE[out.dtype]
    )


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return x with every pair (i, i + d/2) turned by its row's angle, one pair at a time."""
    out = torch.empty(x.shape, dtype=torch.float64)
    half = x.shape[2] // 2
    for t, row in enumerate(x.double().cpu().tolist()):
        for h, head in enumerate(row):
            for i in range(half):
                pair = complex(head[i], head[i + half]) * cmath.rect(1, float(angles[t, i]))
                out[t, h, i], out[t, h, i + half] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 6), (5, 3, 64), (2, 1, 80)])
def test_rope_turns_pairs(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(device, dtype)
    angles = torch.randn(shape[0], shape[2] // 2, dtype=torch.float64) * 3
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    out = apply_rope(x, cos, sin)
    assert out.dtype == dtype and out.shape == x.shape
    check(out, rotated(x, angles))


def test_rope_of_a_fused_projection_and_of_nothing(device: torch.device) -> None:
    angles = torch.randn(4, 5, dtype=torch.float64)
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    fused = torch.randn(4, 77).to(device)
    heads = fused[:, 3:33].unflatten(1, (3, 10))
    check(apply_rope(heads, cos, sin), rotated(heads, angles))
    assert torch.equal(apply_rope(heads, cos, sin), apply_rope(heads.contiguous(), cos, sin))
    assert apply_rope(heads[:0], cos[:0], sin[:0]).shape == (0, 3, 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_bits_of_a_row_do_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(60, 3, 18).to(device, dtype)
    angles = torch.randn(60, 9)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    full = apply_rope(x, cos, sin)
    for row in range(60):
        one = slice(row, row + 1)
        assert torch.equal(apply_rope(x[one], cos[one], sin[one]), full[one])
        assert torch.equal(apply_rope(x[:row], cos[:row], sin[:row]), full[:row])


def gated(gate: float, up: float) -> float:
    """Return gate * sigmoid(gate) * up without overflow."""
    decay = math.exp(-abs(gate))
    return gate * (1 if gate > 0 else decay) / (1 + decay) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 129)])
def test_swiglu_is_gate_times_sigmoid_times_up(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gate = (torch.randn(shape) * 4).to(device, dtype)
    up = torch.randn(shape).to(device, dtype)
    out = swiglu(gate, up)
    assert out.dtype == dtype
    values = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    expected = torch.tensor([gated(*pair) for pair in values], dtype=torch.float64)
    check(out, expected.view(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_large_gates(device: torch.device, dtype: torch.dtype) -> None:
    """exp(-x) overflows float32 below -88: the result is 0, never NaN."""
    gates = [-60000.0, -1000.0, -89.0, -88.0, 0.0, 88.0, 1000.0, 60000.0]
    gate = torch.tensor(gates).to(device, dtype)
    out = swiglu(gate, torch.full_like(gate, 0.5))
    check(out, torch.tensor([gated(g, 0.5) for g in gate.tolist()], dtype=torch.float64))


def test_gelu_is_that_of_torch(device: torch.device) -> None:
    gate = torch.linspace(-12, 12, 1001).to(device)
    out = swiglu(gate, torch.full_like(gate, 2.0), "gelu_tanh")
    expected = 2 * torch.nn.functional.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(swiglu(gate[:13], torch.full_like(gate[:13], 2.0), "gelu_tanh"), out[:13])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_bits_of_a_row_do_not_depend_on_the_batch_or_the_layout(
    device: torch.device, dtype: torch.dtype
) -> None:
    fused = (torch.randn(200, 2 * 37) * 4).to(device, dtype)
    gate, up = fused.chunk(2, dim=-1)
    full = swiglu(gate.contiguous(), up.contiguous())
    assert torch.equal(swiglu(gate, up), full)
    for row in range(200):
        one = slice(row, row + 1)
        assert torch.equal(swiglu(gate[one], up[one]), full[one])
    for count in range(0, 200, 7):
        assert torch.equal(swiglu(gate[:count], up[:count]), full[:count])
        dense = gate[-count:].contiguous(), up[-count:].contiguous()
        assert torch.equal(swiglu(*dense), full[-count:])
