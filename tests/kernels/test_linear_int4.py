"""Products with weights in int4 against their dequantised values, and the bits of a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.kernels.int4 import Int4Weight, pack_int4
from shared.kernels.linear import linear, linear_addends, sum_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.linear_tiles import num_splits
from shared.kernels.quantized import quantize, stack_rows
from shared.models.llama import CausalLM
from tests import checkpoints
from tests.checkpoints import Shape
from tests.int4 import write_int4
from tests.marks import first_if_interpreted
from tests.paged import PagedKV

DTYPES = first_if_interpreted([torch.bfloat16, torch.float16, torch.float32])
KINDS = [(32, True), (64, False), (128, True), (128, False)]


def weight_of(
    width_n: int,
    width_k: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_zeros: bool,
) -> tuple[Int4Weight, torch.Tensor]:
    """Return a weight of all values and zeros, and what it means, in float32 on a CPU."""
    generator = torch.Generator().manual_seed(width_n + width_k)
    values = torch.randint(0, 16, (width_n, width_k), generator=generator)
    size = (width_n, -(-width_k // group_size))
    scales = (torch.rand(size, generator=generator) * 0.01 + 1e-3).half()
    zeros = torch.randint(0, 17, size, generator=generator) if has_zeros else torch.full(size, 8)
    weight = pack_int4(
        values.to(device, torch.uint8),
        scales.to(device),
        zeros.to(device) if has_zeros else None,
        group_size,
        dtype,
    )
    group = torch.arange(width_k) // group_size
    return weight, (values - zeros[:, group]).float() * scales.float()[:, group]


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    size = expected.abs().max()
    torch.testing.assert_close(out.double().cpu() / size, expected / size, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_zeros", [True, False])
def test_every_value_less_every_zero_is_exact(
    device: torch.device, dtype: torch.dtype, *, has_zeros: bool
) -> None:
    group_size, width_k = 32, 136
    values = torch.arange(width_k).remainder(16).expand(24, -1).contiguous()
    zeros = torch.arange(24)[:, None].clamp(max=16).expand(24, 5) if has_zeros else None
    scales = torch.tensor([0.5, 2.0, 1.0, 0.25, 4.0]).expand(24, 5)
    weight = pack_int4(
        values.to(device, torch.uint8),
        scales.to(device, torch.float16),
        None if zeros is None else zeros.to(device),
        group_size,
        dtype,
    )
    group = torch.arange(width_k) // group_size
    less = 8 if zeros is None else zeros[:, group]
    expected = ((values - less) * scales[:, group]).float()
    assert torch.equal(weight.dequantized().cpu(), expected)
    every = torch.eye(width_k).to(device, dtype)
    assert torch.equal(linear(every, weight, out_dtype=torch.float32).cpu(), expected.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group_size", "has_zeros"), KINDS)
@pytest.mark.parametrize(("num_rows", "width_k", "width_n"), [(1, 40, 8), (9, 300, 72)])
def test_products_equal_those_of_dequantised_weights(
    device: torch.device,
    num_rows: int,
    width_k: int,
    width_n: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    has_zeros: bool,
) -> None:
    x = torch.randn(num_rows, width_k).to(device, dtype)
    place = (group_size, dtype, device)
    weight, meant = weight_of(2 * width_n, width_k, *place, has_zeros=has_zeros)
    assert torch.equal(weight.dequantized().cpu(), meant)
    bias = torch.randn(2 * width_n).to(device, dtype)
    expected = x.double().cpu() @ meant.double().T
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


@pytest.mark.parametrize("dtype", first_if_interpreted([torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(("group_size", "has_zeros"), KINDS)
def test_bits_of_a_row_do_not_depend_on_the_others(
    device: torch.device, group_size: int, dtype: torch.dtype, *, has_zeros: bool
) -> None:
    counts = [33] if device.type == "cpu" else [2, 8, 16, 17, 33, 65, 129, 257, 700]
    width_k = 2176  # two splits, of 1536 and 640
    place = (group_size, dtype, device)
    weight, meant = weight_of(24, width_k, *place, has_zeros=has_zeros)
    assert num_splits(*weight.shape) == 2
    narrow, _ = weight_of(48, 300, *place, has_zeros=has_zeros)
    x = (torch.randn(max(counts), width_k) / 100).to(device, dtype)
    alone = linear(x[:1], weight, out_dtype=torch.float32)
    check(alone, x[:1].double().cpu() @ meant.double().T)
    gated = linear_swiglu(x[:1, :300], narrow)
    for count in counts:
        assert torch.equal(linear(x[:count], weight, out_dtype=torch.float32)[:1], alone), count
        sums = sum_addends(linear_addends(x[:count], weight), None, torch.float32)
        assert torch.equal(sums[:1], alone), count
        assert torch.equal(linear_swiglu(x[:count, :300], narrow)[:1], gated), count


def test_splits_that_begin_past_the_last_block_add_nothing(device: torch.device) -> None:
    """Eight splits of 1,536 of 8,448 values: the last ones begin at 9,216 and 10,752."""
    width_k = 8448
    weight, meant = weight_of(8, width_k, 128, torch.float32, device, has_zeros=True)
    assert num_splits(*weight.shape) == 8
    x = torch.randn(2, width_k).to(device) / 100
    expected = x.double().cpu() @ meant.double().T
    check(linear(x, weight, out_dtype=torch.float32), expected)
    check(sum_addends(linear_addends(x, weight), None, torch.float32), expected)


def test_rows_are_stacked_and_moved_with_their_scales(device: torch.device) -> None:
    place = (64, torch.float32, device)
    parts = [weight_of(n, 200, *place, has_zeros=n > 8) for n in (8, 72)]
    stacked = stack_rows([weight for weight, _ in parts])
    assert isinstance(stacked, Int4Weight) and stacked.scaling == "zeros"
    expected = torch.cat([meant for _, meant in parts])
    assert torch.equal(stacked.dequantized().cpu(), expected)
    turned = stacked.rearranged(lambda rows: rows.flip(0))
    assert torch.equal(turned.dequantized().cpu(), expected.flip(0))
    other, _ = weight_of(8, 200, 32, torch.float32, device, has_zeros=True)
    assert stack_rows([stacked, other]) is None, "groups of other sizes"
    assert stack_rows([stacked, expected.to(device)]) is None
    assert stack_rows([quantize(expected.to(device)), stacked]) is None


def test_zeros_that_are_all_in_the_middle_take_no_memory(device: torch.device) -> None:
    values = torch.zeros(8, 64, dtype=torch.uint8, device=device)
    scales = torch.ones(8, 2, dtype=torch.float16, device=device)
    middle = torch.full((8, 2), 8, device=device)
    assert pack_int4(values, scales, middle, 32, torch.float32).scaling == "group"
    assert pack_int4(values, scales, middle + 1, 32, torch.float32).scaling == "zeros"


@pytest.mark.kernel_only
def test_a_model_has_the_logits_of_its_dequantised_weights(
    device: torch.device, tmp_path: Path
) -> None:
    shape = Shape(
        hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=24
    )
    source = checkpoints.write_llama(tmp_path / "source", shape=shape)
    logits = []
    for directory in write_int4(source, tmp_path, "awq"):
        model = CausalLM.from_checkpoint(directory, device, torch.float32)
        kv = PagedKV(model.config.kv_layout, page_size=4, device=device)
        with torch.inference_mode():
            logits.append(model.logits(model.forward(kv.chain(range(40, 46))).hidden))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
