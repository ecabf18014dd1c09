"""The product of `linear` for many rows, its tiles dealt out evenly to programs.

Shares are cut between splits of K, so that all there is to hand over is the sum of the splits so
far. Neither rows in FP8 nor weights in int4 are dealt out. Grid: (programs,).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.balanced_tiles import place_of, say_it_is_there, share_of, wait_for_it
from shared.kernels.dependent_launch import wait_for_previous
from shared.kernels.quantized import (
    add_product,
    load_block_scales,
    load_rows,
    load_weight,
    scale_sum,
)


@triton.jit(do_not_specialize=["num_rows"])
def _balanced_linear_kernel(
    x_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    scales_ptr,  # see `load_block_scales`, unread if SCALING is "none"
    bias_ptr,  # [N], unread unless HAS_BIAS
    out_ptr,  # [T, N] mutated
    handover_ptr,  # [P, 4 + BLOCK_N * BLOCK_T] f32 mutated, see `handover`
    num_rows,
    width_n,
    NUM_GROUPS: tl.constexpr,
    NUM_MEMBERS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute a member's share of all tiles, the last one first. K has NUM_SPLITS * SPLIT_BLOCKS
    blocks.
    """
    program = tl.program_id(0)
    first_t = (program % NUM_GROUPS) * BLOCK_T
    num_tiles = tl.cdiv(width_n, BLOCK_N)
    begin, end = share_of(program // NUM_GROUPS, NUM_MEMBERS, num_tiles * NUM_SPLITS)
    NUM_K: tl.constexpr = NUM_SPLITS * SPLIT_BLOCKS
    NUM_VALUES: tl.constexpr = BLOCK_N * BLOCK_T
    value = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    first = begin // NUM_SPLITS
    last = (end - 1) // NUM_SPLITS
    wait_for_previous(IS_DEPENDENT)
    for i in range(0, last - first + 1):
        tile = last - i
        first_n = tile * BLOCK_N
        n = first_n + tl.arange(0, BLOCK_N)
        begin_k = tl.maximum(begin - tile * NUM_SPLITS, 0) * SPLIT_BLOCKS
        end_k = tl.minimum(end - tile * NUM_SPLITS, NUM_SPLITS) * SPLIT_BLOCKS
        tl.assume(begin_k < end_k)
        acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        if begin_k > 0:
            word_ptr, values_ptr = place_of(handover_ptr, program - NUM_GROUPS, NUM_VALUES)
            wait_for_it(word_ptr)
            total = tl.load(values_ptr + value)
        else:
            total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for k in range(begin_k, end_k):
            weight = load_weight(weight_desc, first_n, k * BLOCK_K, DOT_DTYPE, SCALING)
            x = load_rows(x_desc, first_t, k * BLOCK_K, DOT_DTYPE, HAS_FP8_ROWS=False)
            by_output = tl.zeros((BLOCK_N,), dtype=tl.float32)
            if SCALING == "block":
                width_k = NUM_K * BLOCK_K
                by_output = load_block_scales(scales_ptr, n, k * BLOCK_K, width_n, width_k)
            acc = add_product(acc, weight, x, by_output, SCALING)
            if (k + 1) % SPLIT_BLOCKS == 0:
                total += scale_sum(acc, scales_ptr, n, width_n, SCALING)
                acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        if end_k < NUM_K:
            word_ptr, values_ptr = place_of(handover_ptr, program, NUM_VALUES)
            tl.store(values_ptr + value, total)
            say_it_is_there(word_ptr)
        else:
            t = first_t + tl.arange(0, BLOCK_T)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + n, mask=n < width_n, other=0.0).to(tl.float32)
                total += bias[:, None]
            tl.store(
                out_ptr + t.to(tl.int64)[None, :] * width_n + n[:, None],
                total.to(out_ptr.dtype.element_ty),
                mask=(t < num_rows)[None, :] & (n < width_n)[:, None],
            )
