"""The first half of a gated MLP against two products in float64, and the bits of a row."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.linear import linear
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.swiglu import Activation, swiglu
from tests.marks import first_if_interpreted

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "width_k", "width_f"), [(1, 1, 1), (3, 5, 7), (8, 64, 64), (33, 130, 70)]
)
def test_odd_sizes_and_dtypes(
    device: torch.device, num_rows: int, width_k: int, width_f: int, dtype: torch.dtype
) -> None:
    x = torch.randn(num_rows, width_k).to(device, dtype)
    weight = (torch.randn(2 * width_f, width_k) / width_k**0.5).to(device, dtype)
    bias = torch.randn(2 * width_f).to(device, dtype)
    for some_bias in (None, bias):
        out = linear_swiglu(x, weight, some_bias)
        assert out.dtype == dtype and out.shape == (num_rows, width_f)
        product = x.double().cpu() @ weight.double().cpu().T
        if some_bias is not None:
            product += some_bias.double().cpu()
        gate, up = product.chunk(2, dim=1)
        torch.testing.assert_close(
            out.double().cpu(), gate * torch.sigmoid(gate) * up,
            rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype],
        )  # fmt: skip
    assert launch_counts().get("linear_swiglu", 0) == 2 * int(use_triton(x))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", first_if_interpreted([torch.bfloat16, torch.float16]))
def test_few_outputs_of_a_long_input(
    device: torch.device, dtype: torch.dtype, activation: Activation
) -> None:
    """The products are made in splits of K, which a kernel of its own adds up and gates."""
    width_k, width_f = 2176, 20
    counts = (1, 2, 40) if IS_INTERPRETED else (1, 2, 40, 130, 257, 700)
    x = torch.randn(counts[-1], width_k).to(device, dtype)
    weight = (torch.randn(2 * width_f, width_k) / width_k**0.5).to(device, dtype)
    bias = torch.randn(2 * width_f).to(device, dtype)
    out = linear_swiglu(x, weight, bias, activation)
    assert (launch_counts().get("swiglu_addends", 0) > 0) == use_triton(x)
    product = x.double().cpu() @ weight.double().cpu().T + bias.double().cpu()
    gate, up = product.chunk(2, dim=1)
    gated = gate * gate.sigmoid()
    if activation == "gelu_tanh":
        gated = torch.nn.functional.gelu(gate, approximate="tanh")
    scale = up.abs().clamp(min=1)
    torch.testing.assert_close(
        out.double().cpu() / scale, gated * up / scale,
        rtol=8 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype],
    )  # fmt: skip
    for count in counts:
        assert torch.equal(linear_swiglu(x[:count], weight, bias, activation), out[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_the_gate(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(9, 70).to(device, dtype)
    weight = (torch.randn(74, 70) / 8).to(device, dtype)
    out = linear_swiglu(x, weight, None, "gelu_tanh")
    gate, up = (x.double().cpu() @ weight.double().cpu().T).chunk(2, dim=1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    scale = up.abs().clamp(min=1)
    torch.testing.assert_close(
        out.double().cpu() / scale, expected / scale,
        rtol=8 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype],
    )  # fmt: skip
    for count in (1, 2, 8):
        assert torch.equal(linear_swiglu(x[:count], weight, None, "gelu_tanh"), out[:count])


# numpy, which interprets the kernel, warns of exp's overflow to infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_gelu_of_large_gates_gives_no_nan(device: torch.device) -> None:
    x = torch.tensor([[1.0], [-1.0]]).to(device)
    weight = torch.tensor([[1000.0], [9.0], [0.5], [0.5]]).to(device)
    out = linear_swiglu(x, weight, None, "gelu_tanh").cpu()
    torch.testing.assert_close(out, torch.tensor([[500.0, 4.5], [0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_linear_then_swiglu(device: torch.device, dtype: torch.dtype) -> None:
    """exp of the two may differ in the last bit."""
    x, weight = torch.randn(9, 96).to(device, dtype), torch.randn(80, 96).to(device, dtype)
    gate, up = linear(x, weight).chunk(2, dim=1)
    rounding = 2**-9 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(
        linear_swiglu(x, weight), swiglu(gate, up), rtol=rounding, atol=rounding
    )


# numpy, which interprets the kernel, warns of exp's overflow to infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_large_gates_give_no_nan(device: torch.device) -> None:
    x = torch.tensor([[1.0], [-1.0]]).to(device)
    weight = torch.tensor([[1000.0], [89.0], [0.5], [0.5]]).to(device)
    out = linear_swiglu(x, weight).cpu()
    torch.testing.assert_close(out, torch.tensor([[500.0, 44.5], [0.0, 0.0]]))


def test_no_rows(device: torch.device) -> None:
    weight = torch.randn(6, 4).to(device)
    assert linear_swiglu(weight[:0], weight).shape == (0, 3)
    assert launch_counts() == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_row_count(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(300, 133).to(device, dtype)
    weight = torch.randn(70, 133).to(device, dtype)
    full = linear_swiglu(x, weight)
    counts = [1, 33, 65] if IS_INTERPRETED else [1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 299]
    for count in counts:
        assert torch.equal(linear_swiglu(x[:count], weight), full[:count]), f"first {count} rows"
        assert torch.equal(linear_swiglu(x[-count:], weight), full[-count:]), f"last {count} rows"
