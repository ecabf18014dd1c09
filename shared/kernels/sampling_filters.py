"""Find what top-k, top-p and min-p leave of a row, without sorting the vocabulary.

Three kernels narrow each filtered row down to a short list, a fourth (in sampling.py) searches it:

    tabulate   (row, chunk)  number and mass of the tokens above each of LANES levels
    choose     (row,)        the highest level above which everything lies that may be kept
    list       (row, chunk)  keys of the tokens above that level, in ascending order of id

A key orders tokens by (logit, lower id). Mass is probability relative to the row's largest logit,
in fixed point: sums do not depend on their order, so a sort (the reference) and this search keep
exactly the same tokens. Rows without filters leave every kernel at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch
from shared.kernels.order_key import order_key

# Levels below the largest logit at which tokens are counted; the last one is -inf.
LANES = 32
# Longest list of a row. Rows that keep more tokens search the whole vocabulary: slower, not wrong.
CAPACITY = 16384
# Tokens compared with every level at once: one per thread.
_STEP = 128


@triton.jit
def load_scaled(logits_ptr, row, column, width, temperature):
    """Return a block of a row's logits / T; NaN and columns past the end are -inf, -0 is +0."""
    x = tl.load(logits_ptr + row * width + column, mask=column < width, other=-float("inf"))
    return scaled_by(x, temperature)


@triton.jit
def scaled_by(x, temperature):
    """Return logits / T; NaN is -inf, -0 is +0."""
    x = tl.div_rn(tl.where(x == x, x, -float("inf")), temperature)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def mass_of(x, largest):
    """Return exp(x - largest) in fixed point, i64; `largest` itself has 2^40.

    2^23 tokens cannot overflow 63 bits.
    """
    is_largest = x == largest  # infinity less infinity is not a number
    wide = tl.where(is_largest, 0.0, x.to(tl.float64))
    difference = wide - tl.where(is_largest, 0.0, largest.to(tl.float64))
    return (tl.exp(difference) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def least_mass_of(min_p):
    """Return the mass that min-p asks for."""
    return (min_p.to(tl.float64) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def needed_mass(top_p, total):
    """Return ceil(top_p * total), at least 1."""
    target = top_p.to(tl.float64) * total.to(tl.float64)
    needed = target.to(tl.int64)
    needed += (needed.to(tl.float64) < target).to(tl.int64)
    return tl.maximum(needed, 1)


@triton.jit
def load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row):
    """Return (top_k, top_p, min_p) of a row."""
    return tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, width):
    """Return whether a row's filters can drop anything."""
    has_top_k = (top_k > 0) & (top_k < width)
    return (temperature > 0.0) & (has_top_k | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def largest_of(chunk_value_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return a row's largest logit / T."""
    chunk = tl.arange(0, CHUNKS)
    in_row = chunk < NUM_CHUNKS
    value = tl.load(chunk_value_ptr + row * NUM_CHUNKS + chunk, mask=in_row, other=-float("inf"))
    return tl.max(value, axis=0)


@triton.jit
def _levels(largest, LANES: tl.constexpr):
    """Return [LANES] f32, descending: fine steps where probabilities live, wide ones below.

    Distances: 0.75, 1.5, ... 15 nats, then by growing steps to 168, then everything.
    """
    lane = tl.arange(0, LANES).to(tl.float32)
    below = tl.maximum(lane - 19.0, 0.0)
    level = largest - (0.75 * (lane + 1.0) + 1.2 * below * below)
    return tl.where(lane == LANES - 1, -float("inf"), level)


@triton.jit
def _tabulate_kernel(
    logits_ptr,  # [R, V] f32
    temperature_ptr,  # [R] f32
    top_k_ptr,  # [R] i32
    top_p_ptr,  # [R] f32
    min_p_ptr,  # [R] f32
    chunk_value_ptr,  # [R, C] f32
    count_ptr,  # [R, C, LANES] i32 mutated
    mass_ptr,  # [R, C, LANES] i64 mutated
    width,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row)
    if is_filtered(temperature, top_k, top_p, min_p, width):
        largest = largest_of(chunk_value_ptr, row, NUM_CHUNKS, CHUNKS)
        level = _levels(largest, LANES)
        count = tl.zeros((LANES, STEP), dtype=tl.int32)
        mass = tl.zeros((LANES, STEP), dtype=tl.int64)
        for start in range(0, BLOCK, STEP):
            column = chunk * BLOCK + start + tl.arange(0, STEP)
            x = load_scaled(logits_ptr, row, column, width, temperature)
            is_above = (x[None, :] >= level[:, None]) & (column < width)[None, :]
            count += is_above.to(tl.int32)
            mass += tl.where(is_above, mass_of(x, largest)[None, :], 0)
        out = (row * NUM_CHUNKS + chunk) * LANES + tl.arange(0, LANES)
        tl.store(count_ptr + out, tl.sum(count, axis=1))
        tl.store(mass_ptr + out, tl.sum(mass, axis=1))


@triton.jit
def _choose_kernel(
    temperature_ptr,  # [R] f32
    top_k_ptr,  # [R] i32
    top_p_ptr,  # [R] f32
    min_p_ptr,  # [R] f32
    chunk_value_ptr,  # [R, C] f32
    count_ptr,  # [R, C, LANES] i32
    mass_ptr,  # [R, C, LANES] i64
    level_ptr,  # [R] f32 mutated
    total_mass_ptr,  # [R] i64 mutated
    num_listed_ptr,  # [R] i32 mutated
    offset_ptr,  # [R, C] i32 mutated
    width,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row)
    if is_filtered(temperature, top_k, top_p, min_p, width):
        largest = largest_of(chunk_value_ptr, row, NUM_CHUNKS, CHUNKS)
        level = _levels(largest, LANES)
        lane = tl.arange(0, LANES)
        chunk = tl.arange(0, CHUNKS)
        cell = (row * NUM_CHUNKS + chunk[:, None]) * LANES + lane[None, :]
        in_row = (chunk < NUM_CHUNKS)[:, None]
        counts = tl.load(count_ptr + cell, mask=in_row, other=0)
        count = tl.sum(counts, axis=0)
        mass = tl.sum(tl.load(mass_ptr + cell, mask=in_row, other=0), axis=0)
        total = tl.max(mass, axis=0)
        # top-p looks at what top-k leaves, so top-k alone decides where there is one.
        is_enough = mass_of(level, largest) < least_mass_of(min_p)
        if top_p < 1.0:
            is_enough = mass >= needed_mass(top_p, total)
        if (top_k > 0) & (top_k < width):
            is_enough = count >= top_k
        chosen = tl.min(tl.where(is_enough, lane, LANES - 1), axis=0)
        is_chosen = lane == chosen
        tl.store(level_ptr + row, tl.max(tl.where(is_chosen, level, -float("inf")), axis=0))
        tl.store(total_mass_ptr + row, total)
        listed = tl.sum(tl.where(is_chosen[None, :], counts, 0), axis=1)
        tl.store(num_listed_ptr + row, tl.sum(listed, axis=0))
        before = tl.cumsum(listed, axis=0) - listed
        tl.store(offset_ptr + row * NUM_CHUNKS + chunk, before, mask=chunk < NUM_CHUNKS)


@triton.jit
def _list_kernel(
    logits_ptr,  # [R, V] f32
    temperature_ptr,  # [R] f32
    top_k_ptr,  # [R] i32
    top_p_ptr,  # [R] f32
    min_p_ptr,  # [R] f32
    level_ptr,  # [R] f32
    num_listed_ptr,  # [R] i32
    offset_ptr,  # [R, C] i32
    key_ptr,  # [R, CAPACITY] i64 mutated
    width,
    NUM_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row)
    if is_filtered(temperature, top_k, top_p, min_p, width):
        if tl.load(num_listed_ptr + row) <= CAPACITY:
            column = chunk * BLOCK + tl.arange(0, BLOCK)
            x = load_scaled(logits_ptr, row, column, width, temperature)
            is_listed = (x >= tl.load(level_ptr + row)) & (column < width)
            place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
            place += tl.load(offset_ptr + row * NUM_CHUNKS + chunk)
            tl.store(key_ptr + row * CAPACITY + place, order_key(x, column), mask=is_listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """The tokens of each filtered row among which are all that its filters keep.

    Args:
        keys: [R, CAPACITY] i64, ascending by id; rows with more than CAPACITY have none.
        num_listed: [R] i32.
        level: [R] f32. Every logit / T from here on is listed.
        total_mass: [R] i64, of the whole row.
    """

    keys: torch.Tensor
    num_listed: torch.Tensor
    level: torch.Tensor
    total_mass: torch.Tensor


def shortlist(
    logits: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    chunk_value: torch.Tensor,
    *,
    block: int,
) -> Shortlist:
    """List what the filters of each row may keep.

    Args:
        logits: [R, V] f32.
        parameters: temperature, top_k, top_p and min_p, [R] each.
        chunk_value: [R, C] f32, largest logit / T of each chunk of `block` columns.
    """
    num_rows, width = logits.shape
    num_chunks = chunk_value.shape[1]
    device = logits.device
    count = torch.empty((num_rows, num_chunks, LANES), dtype=torch.int32, device=device)
    mass = torch.empty((num_rows, num_chunks, LANES), dtype=torch.int64, device=device)
    offset = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    out = Shortlist(
        keys=torch.empty((num_rows, min(CAPACITY, width)), dtype=torch.int64, device=device),
        num_listed=torch.empty(num_rows, dtype=torch.int32, device=device),
        level=torch.empty(num_rows, dtype=torch.float32, device=device),
        total_mass=torch.empty(num_rows, dtype=torch.int64, device=device),
    )
    capacity = out.keys.shape[1]
    chunks = triton.next_power_of_2(num_chunks)
    grid = (num_rows, num_chunks)
    count_launch("sampling_filters")
    _tabulate_kernel[grid](
        logits,
        *parameters,
        chunk_value,
        count,
        mass,
        width,
        NUM_CHUNKS=num_chunks,
        CHUNKS=chunks,
        BLOCK=block,
        STEP=min(_STEP, block),
        LANES=LANES,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    _choose_kernel[(num_rows,)](
        *parameters,
        chunk_value,
        count,
        mass,
        out.level,
        out.total_mass,
        out.num_listed,
        offset,
        width,
        NUM_CHUNKS=num_chunks,
        CHUNKS=chunks,
        LANES=LANES,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    _list_kernel[grid](
        logits,
        *parameters,
        out.level,
        out.num_listed,
        offset,
        out.keys,
        width,
        NUM_CHUNKS=num_chunks,
        CAPACITY=capacity,
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return out
