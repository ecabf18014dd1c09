"""Storing K/V rows: every row in its slot, to the bit, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.store_kv import store_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SINK = 4  # page 0 is slots [0, 4)


def poisoned(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def stored(rows: torch.Tensor, slots: list[int], num_slots: int) -> torch.Tensor:
    """Return a poisoned cache with the rows written one by one."""
    cache = poisoned((num_slots, *rows.shape[1:]), rows.device, rows.dtype)
    for row, slot in zip(rows, slots, strict=True):
        cache[slot] = row
    return cache


def slot_tensor(slots: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "slots"),
    [
        (1, 1, [4]),
        (2, 17, [9, 4, 8, 23, 5]),
        (3, 80, [23, 22, 21, 20]),
        (1, 64, list(range(23, 3, -1))),
        (2, 256, [7, 19]),
    ],
)
def test_rows_land_in_their_slots_and_nowhere_else(
    device: torch.device, num_heads: int, head_dim: int, slots: list[int], dtype: torch.dtype
) -> None:
    shape = (len(slots), num_heads, head_dim)
    k, v = torch.randn(shape).to(device, dtype), torch.randn(shape).to(device, dtype)
    k_cache, v_cache = (poisoned((24, *shape[1:]), device, dtype) for _ in range(2))
    store_kv(k, v, k_cache, v_cache, slot_tensor(slots, device))
    assert same_bits(k_cache, stored(k, slots, 24))
    assert same_bits(v_cache, stored(v, slots, 24))
    assert launch_counts().get("store_kv", 0) == int(use_triton(k))


def test_padding_goes_to_the_sink_and_only_there(device: torch.device) -> None:
    slots = [0, 9, 0, 6, 3, 0, 0]
    rows = torch.arange(1.0, 8.0).view(7, 1, 1).expand(7, 2, 5)
    k, v = rows.to(device), -rows.to(device)
    k_cache, v_cache = (poisoned((12, 2, 5), device, torch.float32) for _ in range(2))
    store_kv(k, v, k_cache, v_cache, slot_tensor(slots, device))
    for cache, sign in ((k_cache, 1), (v_cache, -1)):
        assert bool((cache[9] == sign * 2).all())
        assert bool((cache[6] == sign * 4).all())
        assert bool((cache[3] == sign * 5).all())
        assert set((sign * cache[0]).flatten().tolist()) <= {1.0, 3.0, 6.0, 7.0}
        untouched = [slot for slot in range(12) if slot not in slots]
        assert bool(cache[untouched].isnan().all())


def test_no_rows(device: torch.device) -> None:
    k_cache, v_cache = (poisoned((8, 2, 5), device, torch.float16) for _ in range(2))
    empty = torch.empty((0, 2, 5), dtype=torch.float16, device=device)
    store_kv(empty, empty, k_cache, v_cache, slot_tensor([], device))
    assert bool(k_cache.isnan().all()) and bool(v_cache.isnan().all())
    assert launch_counts() == {}


def test_layouts_of_the_rows(device: torch.device) -> None:
    """k and v as slices of a fused projection, with strided values, transposed, and repeated."""
    slots = [8, 4, 11]
    qkv = torch.randn(3, 5 + 12 + 12 + 1).to(device)
    spread = torch.randn(3, 2, 12).to(device)
    by_head = torch.randn(2, 3, 6).to(device)
    layouts = {
        "fused": (qkv[:, 5:17].unflatten(1, (2, 6)), qkv[:, 17:29].unflatten(1, (2, 6))),
        "strided": (spread[..., ::2], spread[..., 1::2]),
        "transposed": (by_head.transpose(0, 1), -by_head.transpose(0, 1)),
        "repeated": (spread[:1, :, :6].expand(3, 2, 6), spread[1:2, :, 6:].expand(3, 2, 6)),
        "one head wide": (spread[:, :1, ::2].expand(3, 2, 6), by_head.transpose(0, 1)),
    }
    for name, (k, v) in layouts.items():
        k_cache, v_cache = (poisoned((12, 2, 6), device, torch.float32) for _ in range(2))
        store_kv(k, v, k_cache, v_cache, slot_tensor(slots, device))
        assert same_bits(k_cache, stored(k, slots, 12)), name
        assert same_bits(v_cache, stored(v, slots, 12)), name


def test_layout_of_the_slot_mapping(device: torch.device) -> None:
    k, v = torch.randn(3, 2, 6).to(device), torch.randn(3, 2, 6).to(device)
    k_cache, v_cache = (poisoned((12, 2, 6), device, torch.float32) for _ in range(2))
    store_kv(k, v, k_cache, v_cache, slot_tensor([8, 0, 4, 0, 11, 0], device)[::2])
    assert same_bits(k_cache, stored(k, [8, 4, 11], 12))
    assert same_bits(v_cache, stored(v, [8, 4, 11], 12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_rounded_to_the_dtype_of_the_cache(
    device: torch.device, dtype: torch.dtype
) -> None:
    k, v = torch.randn(4, 2, 6).to(device), torch.randn(4, 2, 6).to(device)
    k_cache, v_cache = (poisoned((12, 2, 6), device, dtype) for _ in range(2))
    store_kv(k, v, k_cache, v_cache, slot_tensor([5, 6, 7, 10], device))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        rounding = 2**-10 if dtype == torch.float16 else 2**-7
        torch.testing.assert_close(cache[[5, 6, 7, 10]].float(), rows, rtol=rounding, atol=1e-6)


def test_slots_beyond_32_bit_addresses(device: torch.device) -> None:
    """On a GPU the last slot lies past 2^31 values; both caches are one to save memory."""
    row = 4096
    num_slots = 2**31 // row + 3 if device.type == "cuda" else 8
    cache = torch.zeros((num_slots, 2, row // 2), dtype=torch.float16, device=device)
    rows = torch.randn(2, 2, row // 2).to(device, torch.float16)
    store_kv(rows, rows, cache, cache, slot_tensor([num_slots - 1, 5], device))
    assert torch.equal(cache[-1], rows[0]) and torch.equal(cache[5], rows[1])
    assert int(cache[: SINK + 1].count_nonzero()) == 0
    assert int(cache[-2].count_nonzero()) == 0
