"""From the QKV product to attention: every value where it belongs, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.rms_norm import rms_norm_ref
from shared.kernels.rope_store import rope_queries, rope_store
from tests.kernels.test_rope_swiglu import rotated
from tests.marks import first_if_interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Triton's interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-5}
SINK = 4  # page 0 is slots [0, 4)


class Case:
    """A QKV product and the caches that its rows go to.

    Args:
        slots: Of the rows.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        slots: list[int],
        *,
        splits: int = 1,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 6,
        num_slots: int = 24,
    ) -> None:
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.dtype = dtype
        num_rows, width = len(slots), (num_heads + 2 * num_kv_heads) * head_dim
        self.addends = torch.randn(splits, num_rows, width).to(device)
        self.angles = torch.randn(num_rows, head_dim // 2, dtype=torch.float64) * 3
        table = torch.cat([self.angles.cos(), self.angles.sin()], dim=1).float().to(device)
        self.cos, self.sin = table.chunk(2, dim=1)
        self.slots = torch.tensor(slots, dtype=torch.int32).to(device)
        shape = (num_slots, num_kv_heads, head_dim)
        self.k, self.v = (
            torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)
        )

    def run(
        self,
        bias: torch.Tensor | None = None,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        has_v_norm: bool = False,
    ) -> torch.Tensor:
        return rope_store(
            *(self.addends, bias, norms, 1e-6, self.cos, self.sin, self.k, self.v, self.slots),
            has_v_norm=has_v_norm,
        )

    def rows(self, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return the rows' q, k and v as the product alone gives them, [T, H, d] on the CPU."""
        num_heads, num_kv_heads, head_dim = self.shape
        total = self.addends.double().cpu().sum(0)
        if bias is not None:
            total = total + bias.double().cpu()
        heads = total.to(self.dtype).unflatten(-1, (-1, head_dim))
        return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def stored(self, cache: torch.Tensor) -> torch.Tensor:
        return cache[self.slots.long()].cpu()


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("shape", "slots"),
    [((1, 1, 2), [4]), ((2, 2, 18), [9, 4, 8, 23, 5]), ((6, 3, 80), [23, 22]), ((4, 1, 64), [7])],
)
def test_heads_are_added_up_rotated_and_stored(
    device: torch.device,
    shape: tuple[int, int, int],
    slots: list[int],
    splits: int,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    case = Case(
        device, dtype, slots, splits=splits, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )  # fmt: skip
    bias = torch.randn(case.addends.shape[2]).to(device, dtype)
    for some_bias in (None, bias):
        out = case.run(some_bias)
        q, k, v = case.rows(some_bias)
        check(out, rotated(q, case.angles))
        check(case.stored(case.k), rotated(k, case.angles))
        check(case.stored(case.v), v.double())
    untouched = [slot for slot in range(24) if slot not in slots]
    for cache in (case.k, case.v):
        assert bool(cache[untouched].isnan().all())
    assert launch_counts().get("rope_store", 0) == 2 * int(use_triton(case.k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_come_before_the_rotation(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(device, dtype, [9, 5, 20], head_dim=34)
    q_norm, k_norm = (torch.randn(34).to(device, dtype) for _ in range(2))
    out = case.run(norms=(q_norm, k_norm))
    q, k, v = case.rows()
    check(out, rotated(rms_norm_ref(q, q_norm.cpu(), 1e-6), case.angles))
    check(case.stored(case.k), rotated(rms_norm_ref(k, k_norm.cpu(), 1e-6), case.angles))
    check(case.stored(case.v), v.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_in_float32_scale_before_the_one_rounding(
    device: torch.device, dtype: torch.dtype
) -> None:
    case = Case(device, dtype, [9, 5, 20], head_dim=34)
    q_norm, k_norm = (1 + torch.randn(34).to(device) for _ in range(2))
    out = case.run(norms=(q_norm, k_norm))
    q, k, _ = case.rows()
    check(out, rotated(rms_norm_ref(q, q_norm.cpu(), 1e-6), case.angles))
    check(case.stored(case.k), rotated(rms_norm_ref(k, k_norm.cpu(), 1e-6), case.angles))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_normed_without_a_weight(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(device, dtype, [9, 5, 20], head_dim=34)
    norms = (1 + torch.randn(34).to(device), 1 + torch.randn(34).to(device))
    case.run(norms=norms, has_v_norm=True)
    _, k, v = case.rows()
    check(case.stored(case.k), rotated(rms_norm_ref(k, norms[1].cpu(), 1e-6), case.angles))
    check(case.stored(case.v), rms_norm_ref(v, torch.ones(34), 1e-6).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 34), (3, 6), (1, 80)])
def test_queries_alone_are_what_they_are_beside_k_and_v(
    device: torch.device, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(device, dtype, [9, 5, 20], splits=2, num_heads=num_heads, head_dim=head_dim,
                num_kv_heads=1)  # fmt: skip
    norm = 1 + torch.randn(head_dim).to(device)
    bias = torch.randn(case.addends.shape[2]).to(device, dtype)
    addends = case.addends[:, :, : num_heads * head_dim].contiguous()
    for some_bias in (None, bias):
        want = case.run(some_bias, (norm, norm))
        own_bias = None if some_bias is None else some_bias[: num_heads * head_dim]
        got = rope_queries(addends, own_bias, norm, 1e-6, case.cos, case.sin, dtype=dtype)
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert launch_counts().get("rope_store", 0) == 4 * int(use_triton(case.k))


def test_padding_goes_to_the_sink_and_only_there(device: torch.device) -> None:
    slots = [0, 9, 0, 6, 5, 0, 0]
    case = Case(device, torch.float32, slots)
    case.run()
    for cache in (case.k, case.v):
        untouched = [slot for slot in range(1, 24) if slot not in slots]
        assert bool(cache[untouched].isnan().all())
        assert not bool(cache[[9, 6, 5]].isnan().any())


def test_no_rows(device: torch.device) -> None:
    case = Case(device, torch.float16, [])
    assert case.run().shape == (0, 4, 6)
    assert bool(case.k.isnan().all()) and bool(case.v.isnan().all())
    assert launch_counts() == {}


@pytest.mark.parametrize("dtype", first_if_interpreted(DTYPES))
def test_bits_of_a_row_do_not_depend_on_the_batch(device: torch.device, dtype: torch.dtype) -> None:
    whole = Case(device, dtype, list(range(4, 24)), splits=2, head_dim=20)
    norms = (torch.randn(20).to(device, dtype), torch.randn(20).to(device, dtype))
    q = whole.run(norms=norms)
    for row in range(0, 20, 3):
        alone = Case(device, dtype, [4 + row], head_dim=20)
        one = slice(row, row + 1)
        alone.addends = whole.addends[:, one].contiguous()
        alone.cos, alone.sin = whole.cos[one].contiguous(), whole.sin[one].contiguous()
        assert same_bits(alone.run(norms=norms), q[one])
        assert same_bits(alone.k[4 + row], whole.k[4 + row])
        assert same_bits(alone.v[4 + row], whole.v[4 + row])


def test_slots_beyond_32_bit_addresses(device: torch.device) -> None:
    """On a GPU the last slot lies past 2^31 values."""
    head_dim = 256
    num_slots = 2**31 // (8 * head_dim) + 3 if device.type == "cuda" else 8
    case = Case(
        device, torch.float16, [num_slots - 1, 5], num_heads=8, num_kv_heads=8, head_dim=head_dim,
        num_slots=num_slots,
    )  # fmt: skip
    case.run()
    check(case.stored(case.v), case.rows()[2].double())
    assert bool(case.v[-2].isnan().all()) and bool(case.v[: SINK + 1].isnan().all())
