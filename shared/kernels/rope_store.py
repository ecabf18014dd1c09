"""From the QKV product to attention: add up, norm q and k, rotate them, store k and v in pages.

Heads of V may have other widths than those of Q and K, dv values, and may be multiplied.
Of layers without K and V of their own the product is that of Q alone.
Grid: (num_rows, groups of heads).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.fp8_cache import UNSCALED, KVScales, as_bytes, is_fp8, to_cache, to_e4m3
from shared.kernels.linear import sum_addends_block, sum_addends_ref
from shared.kernels.rms_norm import rms_norm_ref
from shared.kernels.rope import apply_rope

# Heads of one program.
_MOST_HEADS = 8


@triton.jit
def _store_halves(ptrs, first, second, in_half, half):
    """Store both halves of heads; `ptrs` are those of the first."""
    tl.store(ptrs, first, mask=in_half)
    tl.store(ptrs + half, second, mask=in_half)


@triton.jit
def _scaled_values(first, second, eps, multiplier, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr):
    """Return both halves of heads of V normed without a weight, or multiplied, or as they are."""
    if HAS_NORM:
        square_sum = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = 1.0 / tl.sqrt(square_sum / WIDTH + eps)[:, None]
        first, second = first * scale, second * scale
    if multiplier is not None:
        first, second = first * multiplier, second * multiplier
    return first, second


@triton.jit(do_not_specialize=["num_rows"])
def _rope_store_kernel(
    addends_ptr,  # [S, T, (Hq + Hkv) * d + Hkv * dv] f32; [S, T, Hq * d] unless HAS_KV
    bias_ptr,  # likewise, a row of them, unread unless HAS_BIAS
    q_norm_ptr,  # [d], unread unless HAS_NORM
    k_norm_ptr,  # [d], unread unless HAS_NORM
    cos_ptr,  # [T, d / 2] f32, rows angle_stride apart
    sin_ptr,  # [T, d / 2] f32, likewise
    slot_mapping_ptr,  # [T] i32, unread unless HAS_KV
    q_ptr,  # [T, Hq, d] mutated
    k_cache_ptr,  # [num_slots, Hkv, d] mutated if HAS_KV; of FP8 u8
    v_cache_ptr,  # [num_slots, Hkv, dv] mutated if HAS_KV; of FP8 u8
    num_rows,
    angle_stride,
    eps,
    k_factor,  # 1 / scale of K in FP8, else None
    v_factor,  # likewise
    v_multiplier,  # of V, else None
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_V_NORM: tl.constexpr,
    HAS_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    V_HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    NUM_QK_HEADS: tl.constexpr = NUM_HEADS + NUM_KV_HEADS * HAS_KV
    WIDTH: tl.constexpr = NUM_QK_HEADS * HEAD_DIM + 2 * NUM_KV_HEADS * V_HALF * HAS_KV
    head = first_head + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    half = HALF
    column = head * HEAD_DIM + pair
    if V_HALF != HALF:
        is_v = first_head >= NUM_QK_HEADS
        half = tl.where(is_v, V_HALF, HALF)
        column -= tl.where(is_v, (head - NUM_QK_HEADS) * (2 * (HALF - V_HALF)), 0)
    in_half = (pair < half) & (head >= 0)
    split_stride = num_rows.to(tl.int64) * WIDTH
    offset = row * WIDTH + column
    first = sum_addends_block(addends_ptr, offset, split_stride, in_half, NUM_SPLITS)
    second = sum_addends_block(addends_ptr, offset + half, split_stride, in_half, NUM_SPLITS)
    if HAS_BIAS:
        first += tl.load(bias_ptr + column, mask=in_half, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + column + half, mask=in_half, other=0.0).to(tl.float32)
    dtype = q_ptr.dtype.element_ty
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if first_head < NUM_HEADS + NUM_KV_HEADS:
        if HAS_NORM:
            norm_ptr = q_norm_ptr
            if first_head >= NUM_HEADS:
                norm_ptr = k_norm_ptr
            square_sum = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            scale = 1.0 / tl.sqrt(square_sum / HEAD_DIM + eps)[:, None]
            first_weight = tl.load(norm_ptr + pair, mask=in_half, other=0.0).to(tl.float32)
            second_weight = tl.load(norm_ptr + HALF + pair, mask=in_half, other=0.0).to(tl.float32)
            inner = q_norm_ptr.dtype.element_ty
            first = ((first * scale).to(inner).to(tl.float32) * first_weight).to(dtype)
            second = ((second * scale).to(inner).to(tl.float32) * second_weight).to(dtype)
            first, second = first.to(tl.float32), second.to(tl.float32)
        cos = tl.load(cos_ptr + row * angle_stride + pair, mask=in_half, other=0.0)
        sin = tl.load(sin_ptr + row * angle_stride + pair, mask=in_half, other=0.0)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    else:
        first, second = _scaled_values(first, second, eps, v_multiplier, HAS_V_NORM, 2 * V_HALF)
    first, second = first.to(dtype), second.to(dtype)
    if k_factor is not None:
        if first_head < NUM_HEADS:
            q_ptrs = q_ptr + (row * NUM_HEADS + head) * HEAD_DIM + pair
            _store_halves(q_ptrs, first, second, in_half, half)
        else:
            slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
            head_offset = slot * NUM_KV_HEADS + (head - NUM_HEADS) % NUM_KV_HEADS
            cache_ptr, factor = k_cache_ptr, k_factor
            if first_head >= NUM_HEADS + NUM_KV_HEADS:
                cache_ptr, factor = v_cache_ptr, v_factor
            cache_ptrs = cache_ptr + head_offset * (2 * half) + pair
            k_or_v_first = to_e4m3(first.to(tl.float32) * factor)
            k_or_v_second = to_e4m3(second.to(tl.float32) * factor)
            _store_halves(cache_ptrs, k_or_v_first, k_or_v_second, in_half, half)
    else:
        if first_head < NUM_HEADS:
            out_ptr = q_ptr
            head_offset = row * NUM_HEADS + head
        else:
            slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
            out_ptr = k_cache_ptr
            if first_head >= NUM_HEADS + NUM_KV_HEADS:
                out_ptr = v_cache_ptr
            head_offset = slot * NUM_KV_HEADS + (head - NUM_HEADS) % NUM_KV_HEADS
        _store_halves(out_ptr + head_offset * (2 * half) + pair, first, second, in_half, half)


def rope_store(
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = UNSCALED,
    has_v_norm: bool = False,
    v_multiplier: float = 1.0,
) -> torch.Tensor:
    """Finish the projections of a layer: store K and V of the rows, return their queries.

    Args:
        addends: [S, T, (Hq + Hkv) * d + Hkv * dv] f32, of the QKV product, see `linear_addends`.
        bias: [(Hq + Hkv) * d + Hkv * dv] or None.
        norms: Weights [d] of the norms of q and k heads, see `rms_norm`; None: there are none.
        eps: Of those norms.
        cos, sin: [T, d / 2] f32, rows of both equally far apart.
        k_cache: [num_slots, Hkv, d], the dtype of the model, or FP8 (e4m3).
        v_cache: [num_slots, Hkv, dv], likewise; dv may be less than d.
        slot_mapping: [T] i32; padding points into page 0, every other slot occurs once.
        dtype: Of the model; None: that of the caches.
        scales: Of caches in FP8.
        has_v_norm: Heads of V are normed as well, without a weight.
        v_multiplier: What V is multiplied by, last.
    Returns: q [T, Hq, d], rotated, in the dtype of the model.
    Mutates: rows of `k_cache` and `v_cache` named by `slot_mapping`.
    """
    if not use_triton(addends):
        return rope_store_ref(
            *(addends, bias, norms, eps, cos, sin, k_cache, v_cache, slot_mapping),
            dtype=dtype,
            scales=scales,
            has_v_norm=has_v_norm,
            v_multiplier=v_multiplier,
        )
    dtype = dtype or k_cache.dtype
    _check(addends, cos, sin, k_cache, v_cache, slot_mapping, dtype)
    _, num_kv_heads, head_dim = k_cache.shape
    num_rows, width = addends.shape[1:]
    v_dim = v_cache.shape[2]
    num_heads = (width - num_kv_heads * v_dim) // head_dim - num_kv_heads
    q = torch.empty((num_rows, num_heads, head_dim), dtype=dtype, device=addends.device)
    if num_rows == 0:
        return q
    q_norm, k_norm = (cos, cos) if norms is None else norms
    half = head_dim // 2
    # Of one kind each: a power of 2 that divides the heads of q and those of k.
    heads = math.gcd(num_heads, num_kv_heads, _MOST_HEADS)
    count_launch("rope_store")
    _rope_store_kernel[(num_rows, (num_heads + 2 * num_kv_heads) // heads)](
        addends,
        addends if bias is None else bias,
        q_norm,
        k_norm,
        cos,
        sin,
        slot_mapping,
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        num_rows,
        cos.stride(0),
        eps,
        1 / scales.k if is_fp8(k_cache) else None,
        1 / scales.v if is_fp8(v_cache) else None,
        None if v_multiplier == 1 else v_multiplier,
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        HAS_V_NORM=has_v_norm,
        HAS_KV=True,
        NUM_SPLITS=len(addends),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        V_HALF=v_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(half),
        HEADS=heads,
        num_warps=max(1, heads // 2),
        **dependent_launch(addends),
    )
    return q


def rope_queries(
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do what `rope_store` does for a layer without K and V of its own.

    Args:
        addends: [S, T, Hq * d] f32, of the product of Q.
        bias: [Hq * d] or None.
        norm: [d], weight of the norm of q heads.
        dtype: Of the model.
    Returns: q [T, Hq, d], rotated.
    """
    head_dim = 2 * cos.shape[1]
    if not use_triton(addends):
        q = sum_addends_ref(addends, bias, dtype).unflatten(-1, (-1, head_dim))
        return apply_rope(rms_norm_ref(q, norm, eps), cos, sin)
    assert addends.is_contiguous() and addends.dtype == torch.float32
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    num_rows, num_heads = addends.shape[1], addends.shape[2] // head_dim
    q = torch.empty((num_rows, num_heads, head_dim), dtype=dtype, device=addends.device)
    if num_rows == 0:
        return q
    heads = math.gcd(num_heads, _MOST_HEADS)
    count_launch("rope_store")
    _rope_store_kernel[(num_rows, num_heads // heads)](
        addends,
        addends if bias is None else bias,
        norm,
        norm,
        cos,
        sin,
        addends,
        q,
        q,
        q,
        num_rows,
        cos.stride(0),
        eps,
        None,
        None,
        None,
        HAS_BIAS=bias is not None,
        HAS_NORM=True,
        HAS_V_NORM=False,
        HAS_KV=False,
        NUM_SPLITS=len(addends),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=1,
        HALF=head_dim // 2,
        V_HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=heads,
        num_warps=max(1, heads // 2),
        **dependent_launch(addends),
    )
    return q


def _check(
    addends: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Check what the kernel takes for granted."""
    assert addends.is_contiguous() and addends.dtype == torch.float32
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.shape[:2] == v_cache.shape[:2] and v_cache.shape[2] <= k_cache.shape[2]
    assert k_cache.dtype == v_cache.dtype and (is_fp8(k_cache) or k_cache.dtype == dtype)
    assert slot_mapping.dtype == torch.int32 and slot_mapping.shape == (addends.shape[1],)


def rope_store_ref(
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = UNSCALED,
    has_v_norm: bool = False,
    v_multiplier: float = 1.0,
) -> torch.Tensor:
    """Do what `rope_store` does in plain torch."""
    _, num_kv_heads, head_dim = k_cache.shape
    v_dim = v_cache.shape[2]
    dtype = dtype or k_cache.dtype
    qkv = sum_addends_ref(addends, bias, dtype)
    v_width = num_kv_heads * v_dim
    qk, v = qkv.split([qkv.shape[1] - v_width, v_width], dim=1)
    qk, v = qk.unflatten(1, (-1, head_dim)), v.unflatten(1, (-1, v_dim))  # [T, H, d or dv]
    num_heads = qk.shape[1] - num_kv_heads
    if norms is not None:
        q, k = qk.split([num_heads, num_kv_heads], dim=1)
        qk = torch.cat((rms_norm_ref(q, norms[0], eps), rms_norm_ref(k, norms[1], eps)), dim=1)
    if has_v_norm:
        v = rms_norm_ref(v, torch.ones(v_dim, device=v.device), eps)
    if v_multiplier != 1:
        v = v * v_multiplier
    q, k = apply_rope(qk, cos, sin).split([num_heads, num_kv_heads], dim=1)
    slots = slot_mapping.long()
    as_bytes(k_cache).index_copy_(0, slots, as_bytes(to_cache(k, k_cache.dtype, scales.k)))
    as_bytes(v_cache).index_copy_(0, slots, as_bytes(to_cache(v, v_cache.dtype, scales.v)))
    return q.contiguous()
