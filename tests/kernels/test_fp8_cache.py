"""K and V in FP8: the bytes that are stored, and attention over them, with explicit rounding as the
judge; interpreted, on a GPU, and by the references.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.fp8_cache import KVScales
from shared.kernels.rope_store import rope_store
from shared.kernels.tree_attention import AttentionParams, tree_attention, tree_attention_ref
from tests.kernels.attention_cases import Batch, pack, random_block

FP8 = torch.float8_e4m3fn
SCALES = KVScales(k=0.375, v=1.75)
# Of all finite values of e4m3, ascending in magnitude; its place is a value's byte.
MAGNITUDES = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the nearest values of e4m3, of two as near the even one; NaN stays."""
    distance = (values.double().abs().clamp(max=448)[..., None] - MAGNITUDES).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    code = nearest.int().argmax(-1)
    code += (nearest.sum(-1) > 1) & (code % 2 == 1)
    code = torch.where(values.isnan(), 0x7F, code)
    return (code + 0x80 * torch.signbit(values)).to(torch.uint8)


def tricky_values() -> torch.Tensor:
    """Return e4m3's values, what lies halfway between two of them, and the neighbours of that in
    float32, of both signs; infinities, NaN, and what is smaller or larger than all. [n] f32."""
    middle = ((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).float()
    values = [MAGNITUDES.float(), middle]
    values += [middle.nextafter(torch.tensor(limit)) for limit in (0.0, 1e9)]
    values.append(torch.tensor([1e-42, 1e-12, 448.1, 463.9, 464, 480, 1e30, torch.inf]))
    positive = torch.cat(values)
    return torch.cat([positive, -positive, torch.tensor([torch.nan])])


def store(
    rows: torch.Tensor, device: torch.device, dtype: torch.dtype, scales: KVScales
) -> tuple[torch.Tensor, ...]:
    """Store rows [T, 3 d] of q, k and v, unrotated; return q, and both caches' rows, on the CPU."""
    num_rows, head_dim = len(rows), rows.shape[1] // 3
    shape = (num_rows + 3, 1, head_dim)
    caches = [torch.full(shape, torch.nan, device=device).to(FP8) for _ in range(2)]
    angles = torch.ones(num_rows, head_dim, device=device)
    angles[:, head_dim // 2 :] = 0
    cos, sin = angles.chunk(2, dim=1)
    slots = torch.arange(num_rows, dtype=torch.int32).flip(0).to(device) + 2
    q = rope_store(
        rows[None].to(device), None, None, 0.0, cos, sin, *caches, slots, dtype=dtype, scales=scales
    )
    for cache in caches:
        assert bool((cache.view(torch.uint8)[[0, 1, -1]] == 0x7F).all()), "another slot was written"
    return q.cpu(), *(cache.view(torch.uint8)[slots.long(), 0].cpu() for cache in caches)


def test_stored_bytes_are_the_nearest_of_every_value(device: torch.device) -> None:
    values = tricky_values()
    values = torch.cat([values, values.new_zeros(-len(values) % 64)]).view(-1, 64)
    rows = torch.cat([torch.ones_like(values), torch.ones_like(values), values], dim=1)
    _, _, stored = store(rows, device, torch.float32, KVScales())
    assert torch.equal(stored, rounded(values))
    assert launch_counts().get("rope_store", 0) == int(use_triton(rows.to(device)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_and_v_are_divided_by_their_scales_after_they_have_the_dtype(
    device: torch.device, dtype: torch.dtype
) -> None:
    rows = (torch.randn(5, 3 * 18) * 30).to(dtype).float()
    q, k, v = store(rows, device, dtype, SCALES)
    for part, stored, scale in zip(rows.split(18, dim=1)[1:], (k, v), (0.375, 1.75), strict=True):
        factor = torch.tensor(1 / scale, dtype=torch.float32)
        assert torch.equal(stored, rounded(part * factor))
    assert q.dtype == dtype and torch.equal(q[:, 0].float(), rows[:, :18])


def in_fp8(batch: Batch) -> Batch:
    """Return a batch with its caches in FP8."""
    return replace(batch, k_cache=batch.k_cache.to(FP8), v_cache=batch.v_cache.to(FP8))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(0, 0.0, False), (40, 0.0, True), (0, 3.0, False)]
)
def test_attention_is_that_of_dequantised_caches(
    device: torch.device, page_size: int, window: int, softcap: float, *, has_sinks: bool
) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24}
    blocks = [random_block(70, (-1, 0, 0, 1, 2), **heads), random_block(3, 4, **heads)]
    batch = in_fp8(pack(blocks, page_size=page_size, device=device, window=window))
    sinks = torch.randn(4, device=device) if has_sinks else None
    params = AttentionParams(scale=0.3, sinks=sinks, softcap=softcap, kv_scales=SCALES)
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.metadata, params)
    out = tree_attention(*arguments)
    k, v = batch.k_cache.float() * SCALES.k, batch.v_cache.float() * SCALES.v
    expected = tree_attention_ref(batch.q, k, v, batch.metadata, params)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    quantised = tree_attention_ref(*arguments)
    torch.testing.assert_close(quantised, expected, rtol=1e-6, atol=1e-6)
