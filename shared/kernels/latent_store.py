"""From the products of latent attention to its queries and its cache.

A row's latent is normed, its tail rotated, and both are stored in a page; the tails of its queries
are rotated into place.

Grid: (num_rows, 1 + groups of heads).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.linear import sum_addends_block, sum_addends_ref
from shared.kernels.rms_norm import normalise_block, rms_norm_ref
from shared.kernels.rope import apply_rope

# Query heads of one program.
_HEADS = 8


@triton.jit
def _rotate(first, second, cos, sin):
    """Return a pair turned, both f32."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["num_rows"])
def _latent_store_kernel(
    addends_ptr,  # [S, T, VALUE + 2 HALF] f32
    norm_ptr,  # [VALUE]
    q_ptr,  # [T, Hq, NOPE + 2 HALF]
    cos_ptr,  # [T, HALF] f32, rows angle_stride apart
    sin_ptr,  # [T, HALF] f32, likewise
    slot_mapping_ptr,  # [T] i32
    query_ptr,  # [T, Hq, VALUE + 2 HALF] mutated
    cache_ptr,  # [num_slots, VALUE + 2 HALF] mutated
    num_rows,
    angle_stride,
    eps,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    WIDTH: tl.constexpr = VALUE + 2 * HALF
    dtype = cache_ptr.dtype.element_ty
    pair = tl.arange(0, HALF_BLOCK)
    in_half = pair < HALF
    cos = tl.load(cos_ptr + row * angle_stride + pair, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + row * angle_stride + pair, mask=in_half, other=0.0)
    if group == 0:
        slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
        out_ptr = cache_ptr + slot * WIDTH
        split_stride = num_rows.to(tl.int64) * WIDTH
        column = tl.arange(0, VALUE_BLOCK)
        in_value = column < VALUE
        offset = row * WIDTH + column
        latent = sum_addends_block(addends_ptr, offset, split_stride, in_value, NUM_SPLITS)
        latent = latent.to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=in_value, other=0.0).to(tl.float32)
        latent = normalise_block(latent, weight, eps, VALUE, dtype)
        tl.store(out_ptr + column, latent.to(dtype), mask=in_value)
        tail = row * WIDTH + VALUE + pair
        first = sum_addends_block(addends_ptr, tail, split_stride, in_half, NUM_SPLITS)
        second = sum_addends_block(addends_ptr, tail + HALF, split_stride, in_half, NUM_SPLITS)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first, second = _rotate(first, second, cos, sin)
        tl.store(out_ptr + VALUE + pair, first.to(dtype), mask=in_half)
        tl.store(out_ptr + VALUE + HALF + pair, second.to(dtype), mask=in_half)
    else:
        head = (group - 1) * HEADS + tl.arange(0, HEADS)
        is_pair = (head < NUM_HEADS)[:, None] & in_half[None, :]
        q_head = (row * NUM_HEADS + head)[:, None]
        q_ptrs = q_ptr + q_head * (NOPE + 2 * HALF) + NOPE + pair[None, :]
        q_first = tl.load(q_ptrs, mask=is_pair, other=0.0).to(tl.float32)
        q_second = tl.load(q_ptrs + HALF, mask=is_pair, other=0.0).to(tl.float32)
        q_first, q_second = _rotate(q_first, q_second, cos[None, :], sin[None, :])
        query_ptrs = query_ptr + q_head * WIDTH + VALUE + pair[None, :]
        tl.store(query_ptrs, q_first.to(dtype), mask=is_pair)
        tl.store(query_ptrs + HALF, q_second.to(dtype), mask=is_pair)


def latent_store(
    addends: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Store the latents of the rows, and begin the queries that will meet them.

    Args:
        addends: [S, T, r + p] f32, of the product that makes latents, see `linear_addends`.
        norm: [r], weight of the latents' norm.
        eps: Of that norm.
        q: [T, Hq, n + p], dense; the last p values of each head are rotated.
        cos, sin: [T, p / 2] f32, rows of both equally far apart.
        cache: [num_slots, 1, r + p], dtype of q.
        slot_mapping: [T] i32; padding points into page 0, every other slot occurs once.
    Returns: [T, Hq, r + p], of which the last p are the rotated ones; the first r are left to be
        written.
    Mutates: rows of `cache` named by `slot_mapping`.
    """
    value_width = norm.shape[0]
    num_rows, num_heads, q_width = q.shape
    width = cache.shape[2]
    query = torch.empty((num_rows, num_heads, width), dtype=q.dtype, device=q.device)
    if not use_triton(q):
        latent_store_ref(addends, norm, eps, q, cos, sin, cache, slot_mapping, query)
        return query
    assert cache.is_contiguous() and cache.dtype == q.dtype and q.is_contiguous()
    assert addends.is_contiguous() and addends.shape[1:] == (num_rows, width)
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    assert slot_mapping.dtype == torch.int32 and slot_mapping.shape == (num_rows,)
    if num_rows == 0:
        return query
    half = (width - value_width) // 2
    count_launch("latent_store")
    _latent_store_kernel[(num_rows, 1 + triton.cdiv(num_heads, _HEADS))](
        addends,
        norm,
        q,
        cos,
        sin,
        slot_mapping,
        query,
        cache,
        num_rows,
        cos.stride(0),
        eps,
        NUM_SPLITS=len(addends),
        NUM_HEADS=num_heads,
        NOPE=q_width - 2 * half,
        VALUE=value_width,
        VALUE_BLOCK=triton.next_power_of_2(value_width),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        HEADS=_HEADS,
        num_warps=4,
        **dependent_launch(q),
    )
    return query


def latent_store_ref(
    addends: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """Do what `latent_store` does in plain torch. Mutates: `cache`, `query`."""
    value_width = norm.shape[0]
    row = sum_addends_ref(addends, None, cache.dtype)
    latent = rms_norm_ref(row[:, :value_width], norm, eps)
    tail = apply_rope(row[:, None, value_width:], cos, sin)
    stored = torch.cat([latent[:, None], tail], dim=-1)
    cache.index_copy_(0, slot_mapping.long(), stored)
    num_rotated = cache.shape[2] - value_width
    query[..., value_width:] = apply_rope(q[..., -num_rotated:], cos, sin)
