"""Heads of V that are narrower than those of K: attention, what stores and multiplies them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels.fp8_cache import KVScales, to_cache
from shared.kernels.rope_store import rope_store
from shared.kernels.tree_attention import AttentionParams, attend_in_chunks
from tests.kernels.attention_cases import Batch, attention_of, exact, pack, random_block
from tests.kernels.test_rope_swiglu import rotated
from tests.marks import first_if_interpreted

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)
SCALE = 0.2
# Heads of Q and of K, values of K and of V: MiMo-V2's, and some that no block is as wide as.
WIDTHS = [(8, 1, 192, 128), (6, 2, 24, 16), (3, 3, 17, 6), (4, 2, 64, 20)]
HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "v_dim": 20}
SINKS = torch.tensor([0.5, 9.0, -2.0, -1e30, 2.5, 0.0])


def mixed(page_size: int, device: torch.device, window: int = 0, **heads: int) -> Batch:
    blocks = [
        random_block(0, 1, **heads),
        random_block(140, BUSHY, **heads),
        random_block(page_size - 1, (-1, 0, 0), **heads),
        random_block(63, 5, **heads),
        random_block(200, (-1,), **heads),
    ]
    return pack(blocks, page_size=page_size, device=device, window=window, num_padding_rows=2)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_chains_and_trees_match_the_oracle_over_poisoned_pages(
    device: torch.device, page_size: int, window: int
) -> None:
    batch = mixed(page_size, device, window, **HEADS)
    sinks = SINKS.to(device)
    out = attention_of(batch, SCALE, sinks=sinks)
    assert out.shape == (*batch.q.shape[:2], 20)
    expected = exact(batch, SCALE, sinks)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=2e-5)
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))


@pytest.mark.parametrize("dtype", first_if_interpreted(DTYPES))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "v_dim"), WIDTHS)
def test_widths_and_dtypes(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_dim: int,
    dtype: torch.dtype,
) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    heads |= {"v_dim": v_dim}
    blocks = [random_block(61, (-1, 0, 0, 2, 1), **heads), random_block(2, 4, **heads)]
    batch = pack(blocks, page_size=4, device=device, dtype=dtype)
    out = attention_of(batch, head_dim**-0.5)
    assert out.dtype == dtype
    expected = exact(batch, head_dim**-0.5)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_a_column_of_the_output_is_that_of_v(device: torch.device) -> None:
    """Whatever other columns V has."""
    wide = mixed(4, device, **HEADS | {"v_dim": 24})
    narrow = replace(wide, v_cache=wide.v_cache[..., :16].contiguous())
    torch.testing.assert_close(
        attention_of(narrow, SCALE), attention_of(wide, SCALE)[..., :16], rtol=0, atol=1e-6
    )


def test_caches_in_fp8(device: torch.device) -> None:
    batch = mixed(4, device, **HEADS)
    scales = KVScales(k=0.5, v=0.25)
    caches = {
        "k_cache": to_cache(batch.k_cache, torch.float8_e4m3fn, scales.k),
        "v_cache": to_cache(batch.v_cache, torch.float8_e4m3fn, scales.v),
    }
    stored = replace(batch, **caches)
    out = attention_of(stored, SCALE, kv_scales=scales)
    params = {"k_cache": scales.k, "v_cache": scales.v}
    read = {name: cache.float() * params[name] for name, cache in caches.items()}
    expected = exact(replace(batch, **read), SCALE)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=2e-5)


@pytest.mark.kernel_only
def test_splits_do_not_matter(device: torch.device) -> None:
    blocks = [
        random_block(1021, (-1, 0, 0, 2), **HEADS),
        random_block(1087, 3, **HEADS),
        random_block(130, (-1,), **HEADS),
    ]
    batch = pack(blocks, page_size=4, device=device)
    outputs = [
        attend_in_chunks(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.metadata,
            AttentionParams(scale=SCALE, sinks=SINKS.to(device)),
            num_splits=num_splits,
            chunk_tiles=1,
        )
        for num_splits in (0, 3)
    ]
    assert torch.equal(*outputs)
    expected = exact(batch, SCALE, SINKS.to(device))
    torch.testing.assert_close(outputs[0].double().cpu(), expected, rtol=0, atol=2e-5)


def test_bits_of_a_row_do_not_depend_on_the_others(device: torch.device) -> None:
    """A row alone, the last of a chain, and a leaf of a tree, beside others or not."""
    path = random_block(0, 131, **HEADS)

    def last_row(prefix_len: int, *, is_tree: bool, others: int) -> torch.Tensor:
        num_rows = 131 - prefix_len
        parents = tuple(range(-1, num_rows - 1)) if is_tree else None
        block = replace(path, q=path.q[prefix_len:], prefix_len=prefix_len, parents=parents)
        neighbours = [random_block(30 * i, 1 + i, **HEADS) for i in range(others)]
        batch = pack([*neighbours, block], page_size=16, device=device)
        return attention_of(batch, SCALE)[-1]

    alone = last_row(130, is_tree=False, others=0)
    assert alone.isfinite().all()
    for prefix_len, is_tree, others in ((130, True, 4), (127, True, 1), (120, False, 0)):
        assert torch.equal(last_row(prefix_len, is_tree=is_tree, others=others), alone)


@pytest.mark.parametrize("multiplier", [1.0, 0.707])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "v_dim"),
    [(4, 2, 6, 2), (8, 4, 24, 20), (3, 1, 34, 32), (4, 2, 34, 34)],
)
def test_heads_are_stored_in_their_own_widths(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_dim: int,
    is_fp8: bool,  # noqa: FBT001
    multiplier: float,
) -> None:
    dtype, slots = torch.bfloat16, torch.tensor([9, 5, 20], dtype=torch.int32).to(device)
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_dim]
    # Of 8 bits: sums and what is stored of them are exact in bfloat16.
    addends = torch.randint(-128, 128, (2, 3, sum(widths))).float().to(device) / 64
    bias = torch.randint(-8, 8, (sum(widths),)).to(device, dtype)
    angles = torch.randn(3, head_dim // 2, dtype=torch.float64) * 3
    cos, sin = torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device).chunk(2, dim=1)
    cache_dtype = torch.float8_e4m3fn if is_fp8 else dtype
    k_cache, v_cache = (
        torch.full((24, num_kv_heads, width), 7.0).to(device, cache_dtype)
        for width in (head_dim, v_dim)
    )
    got = rope_store(
        *(addends, bias, None, 1e-6, cos, sin, k_cache, v_cache, slots),
        dtype=dtype,
        v_multiplier=multiplier,
    )
    rows = (addends.sum(0) + bias).to(dtype).cpu()
    counts = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (
        part.unflatten(1, (count, -1))
        for part, count in zip(rows.split(widths, dim=1), counts, strict=True)
    )
    tolerance = 0.13 if is_fp8 else 2**-5
    torch.testing.assert_close(got.double().cpu(), rotated(q, angles), rtol=2**-6, atol=2**-5)
    stored = [cache[slots.long()].cpu().double() for cache in (k_cache, v_cache)]
    torch.testing.assert_close(stored[0], rotated(k, angles), rtol=tolerance, atol=tolerance)
    expected = (v * multiplier if multiplier != 1 else v).double()
    torch.testing.assert_close(stored[1], expected, rtol=tolerance, atol=tolerance)
    untouched = [slot for slot in range(24) if slot not in slots.tolist()]
    for cache in (k_cache, v_cache):
        assert bool((cache[untouched].float() == 7).all())
