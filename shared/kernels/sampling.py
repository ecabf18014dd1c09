"""Choose a token per row: temperature, top-k, top-p, min-p, then argmax of logit + Gumbel noise.

Two kernels: the best token of each chunk of the vocabulary, on the grid (num_rows, num_chunks),
then the best of a row's chunks, on (num_rows,). Noise is dear, a bound of it is not: the first
kernel ranks by logit + bound, the second computes the noise of the best of each chunk, and of the
rest of a chunk only if the bound leaves it a chance. Between them, and only if some row has
filters, run those of sampling_filters.py; the last kernel then searches what they have listed.
Nothing is sorted, and no row's result depends on the other rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.gumbel import gumbel_block, gumbel_bound_block, gumbel_noise_ref
from shared.kernels.order_key import key_index, key_value, order_key
from shared.kernels.sampling_filters import (
    LANES,
    Shortlist,
    is_filtered,
    largest_of,
    least_mass_of,
    load_filters,
    load_scaled,
    mass_of,
    needed_mass,
    scaled_by,
    shortlist,
)
from shared.kernels.vector_math import settle_vector_math

# The largest probability of a row, in fixed point: 2^40.
_MASS_ONE = 2.0**40

# Columns of one program of the first kernel.
BLOCK = 1024
# Listed keys compared with LANES candidates at once: one per thread of the last kernel.
STEP = 256


@triton.jit
def _best_of_chunk_kernel(
    logits_ptr,  # [R, V] f32
    temperature_ptr,  # [R] f32
    top_k_ptr,  # [R] i32
    top_p_ptr,  # [R] f32
    min_p_ptr,  # [R] f32
    seed_ptr,  # [R] i64
    position_ptr,  # [R] i64
    value_ptr,  # [R, C] f32 mutated: largest logit / T, plus the bound of its noise if it has any
    id_ptr,  # [R, C] i32 mutated: its column
    second_ptr,  # [R, C] f32 mutated: the largest of the other columns
    is_broken_ptr,  # [R, C] u8 mutated: 1 where some logit is NaN or infinite
    width,
    HAS_FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits_ptr + row * width + column, mask=column < width, other=0.0)
    is_broken = tl.max((tl.abs(raw) < float("inf")).to(tl.int32) ^ 1, axis=0)
    tl.store(is_broken_ptr + row * num_chunks + chunk, is_broken.to(tl.uint8))
    x = scaled_by(raw, tl.where(temperature > 0.0, temperature, 1.0))
    x = tl.where(column < width, x, -float("inf"))
    is_noisy = temperature > 0.0
    if HAS_FILTERS:  # filtered rows get noise where it is known what they keep
        top_k, top_p, min_p = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row)
        is_noisy = is_noisy & (not is_filtered(temperature, top_k, top_p, min_p, width))
    if is_noisy:
        x += gumbel_bound_block(tl.load(seed_ptr + row), tl.load(position_ptr + row), column)
    best = tl.max(x, axis=0)
    best_id = tl.min(tl.where(x == best, column, 0x7FFFFFFF), axis=0)
    tl.store(value_ptr + row * num_chunks + chunk, best)
    tl.store(id_ptr + row * num_chunks + chunk, best_id.to(tl.int32))
    if is_noisy:
        second = tl.max(tl.where(column == best_id, -float("inf"), x), axis=0)
        tl.store(second_ptr + row * num_chunks + chunk, second)


@triton.jit
def _load_keys(row_keys, start, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """Return STEP keys of a row's list, or of the row where it has none; -inf past the end.

    Args:
        row_keys: (logits_ptr, key_ptr, row, num_keys, is_list, width, temperature).
    """
    logits_ptr, key_ptr, row, num_keys, is_list, width, temperature = row_keys
    index = (start + tl.arange(0, STEP)).to(tl.int64)
    if is_list:
        nothing = order_key(tl.full((), -float("inf"), dtype=tl.float32), index * 0)
        keys = tl.load(key_ptr + row * CAPACITY + index, mask=index < num_keys, other=nothing)
    else:
        keys = order_key(load_scaled(logits_ptr, row, index, width, temperature), index)
    return keys


@triton.jit
def _weight_from(
    row_keys,
    largest,
    least,
    CAPACITY: tl.constexpr,
    STEP: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    """Return the number, or the mass, of a row's keys that are at least each `least`.

    Args:
        row_keys: As `_load_keys` has them.
        least: [LANES] i64.
    """
    num_keys = row_keys[3]
    weight = tl.zeros((least.shape[0], STEP), dtype=tl.int64)
    for start in range(0, num_keys, STEP):
        key = _load_keys(row_keys, start, CAPACITY, STEP)
        in_keys = start + tl.arange(0, STEP) < num_keys
        is_counted = (key[None, :] >= least[:, None]) & in_keys[None, :]
        if IS_MASS:
            mass = mass_of(key_value(key), largest)
            weight += tl.where(is_counted, mass[None, :], 0)
        else:
            weight += is_counted.to(tl.int64)
    return tl.sum(weight, axis=1)


@triton.jit
def _largest_key(
    row_keys,
    largest,
    needed,
    low,
    CAPACITY: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    """Return the largest key such that the keys from it on weigh `needed`; from `low` on do."""
    high = order_key(largest, tl.zeros_like(low)) + 1  # from here on nothing is left
    lane = tl.arange(0, LANES).to(tl.int64)
    while low + 1 < high:
        stride = tl.maximum((high - low) // LANES, 1)
        weight = _weight_from(row_keys, largest, low + lane * stride, CAPACITY, STEP, IS_MASS)
        # Lane 0 is `low` itself; weights fall from lane to lane.
        last = tl.sum((weight >= needed).to(tl.int64), axis=0) - 1
        next_high = low + (last + 1) * stride
        high = tl.where(last == LANES - 1, high, tl.minimum(high, next_high))
        low = low + last * stride
    return low


@triton.jit
def _filtered_token(
    logits_ptr,
    key_ptr,
    row,
    num_listed,
    level,
    total_mass,
    largest,
    width,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    CAPACITY: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the token with the largest noisy logit among those that the filters keep, i64."""
    is_list = num_listed <= CAPACITY
    num_keys = tl.where(is_list, num_listed, width)
    row_keys = (logits_ptr, key_ptr, row, num_keys, is_list, width, temperature)
    least = order_key(level, tl.full((), 0x7FFFFFFF, dtype=tl.int64))
    if (top_k > 0) & (top_k < width):
        needed = top_k.to(tl.int64)
        least = _largest_key(row_keys, largest, needed, least, CAPACITY, STEP, LANES, IS_MASS=False)
        if top_p < 1.0:
            lowest = least + tl.zeros((1,), dtype=tl.int64)
            mass = _weight_from(row_keys, largest, lowest, CAPACITY, STEP, IS_MASS=True)
            total_mass = tl.sum(mass, axis=0)
    if top_p < 1.0:
        needed = needed_mass(top_p, total_mass)
        least = _largest_key(row_keys, largest, needed, least, CAPACITY, STEP, LANES, IS_MASS=True)
    least_mass = least_mass_of(min_p)
    best = tl.full((STEP,), -float("inf"), dtype=tl.float32)
    best_id = tl.zeros((STEP,), dtype=tl.int64)
    for start in range(0, num_keys, STEP):
        key = _load_keys(row_keys, start, CAPACITY, STEP)
        x = key_value(key)
        column = key_index(key)
        is_kept = (key >= least) & (mass_of(x, largest) >= least_mass)
        is_kept = is_kept & (start + tl.arange(0, STEP) < num_keys)
        noisy = tl.where(is_kept, x + gumbel_block(seed, position, column), -float("inf"))
        best_id = tl.where(noisy > best, column, best_id)  # columns ascend: the lower one stays
        best = tl.maximum(best, noisy)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_id, 0x7FFFFFFF), axis=0)


@triton.jit
def _noisy_token(
    logits_ptr,
    row,
    best_ids,
    seconds,
    width,
    temperature,
    seed,
    position,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token with the largest noisy logit of a whole row, i64.

    Args:
        best_ids: [CHUNKS] i64, the first candidate of each chunk; past the last chunk: none.
        seconds: [CHUNKS] f32, what no other noisy logit of the chunk exceeds.
    """
    x = load_scaled(logits_ptr, row, best_ids, width, temperature)
    noisy = x + gumbel_block(seed, position, best_ids)
    best = tl.max(noisy, axis=0)
    best_id = tl.min(tl.where(noisy == best, best_ids, 0x7FFFFFFF), axis=0)
    has_chance = (seconds >= best) & (seconds > -float("inf"))
    if tl.max(has_chance.to(tl.int32), axis=0) > 0:
        for chunk in range(NUM_CHUNKS):
            is_chunk = tl.arange(0, CHUNKS) == chunk
            if tl.max((is_chunk & has_chance).to(tl.int32), axis=0) > 0:
                column = (chunk * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
                block = load_scaled(logits_ptr, row, column, width, temperature)
                block += gumbel_block(seed, position, column)
                chunk_best = tl.max(block, axis=0)
                chunk_id = tl.min(tl.where(block == chunk_best, column, 0x7FFFFFFF), axis=0)
                lower_id = tl.minimum(best_id, chunk_id)
                chunk_id = tl.where(chunk_best == best, lower_id, chunk_id)
                best_id = tl.where(chunk_best >= best, chunk_id, best_id)
                best = tl.maximum(best, chunk_best)
    return best_id


@triton.jit
def _best_of_row_kernel(
    logits_ptr,  # [R, V] f32
    temperature_ptr,  # [R] f32
    top_k_ptr,  # [R] i32
    top_p_ptr,  # [R] f32
    min_p_ptr,  # [R] f32
    seed_ptr,  # [R] i64
    position_ptr,  # [R] i64
    value_ptr,  # [R, C] f32
    id_ptr,  # [R, C] i32
    second_ptr,  # [R, C] f32, read for rows with noise and without filters only
    key_ptr,  # [R, CAPACITY] i64; this and the next three are read for filtered rows only
    num_listed_ptr,  # [R] i32
    level_ptr,  # [R] f32
    total_mass_ptr,  # [R] i64
    is_broken_ptr,  # [R, C] u8
    out_ptr,  # [R] i32 mutated
    is_finite_ptr,  # [R] u8 mutated
    width,
    HAS_FILTERS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    chunk = tl.arange(0, CHUNKS)
    in_row = chunk < NUM_CHUNKS
    at = row * NUM_CHUNKS + chunk
    largest = largest_of(value_ptr, row, NUM_CHUNKS, CHUNKS)
    best_ids = tl.load(id_ptr + at, mask=in_row, other=0x7FFFFFFF).to(tl.int64)
    is_noisy = temperature > 0.0
    token = tl.zeros((), dtype=tl.int64)
    if HAS_FILTERS:
        top_k, top_p, min_p = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row)
        if is_filtered(temperature, top_k, top_p, min_p, width):
            is_noisy = False
            token = _filtered_token(
                logits_ptr,
                key_ptr,
                row,
                tl.load(num_listed_ptr + row),
                tl.load(level_ptr + row),
                tl.load(total_mass_ptr + row),
                largest,
                width,
                temperature,
                top_k,
                top_p,
                min_p,
                tl.load(seed_ptr + row),
                tl.load(position_ptr + row),
                CAPACITY=CAPACITY,
                STEP=STEP,
                LANES=LANES,
            )
    if is_noisy:
        token = _noisy_token(
            logits_ptr,
            row,
            best_ids,
            tl.load(second_ptr + at, mask=in_row, other=-float("inf")),
            width,
            temperature,
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            NUM_CHUNKS=NUM_CHUNKS,
            CHUNKS=CHUNKS,
            BLOCK=BLOCK,
        )
    if temperature <= 0.0:
        value = tl.load(value_ptr + at, mask=in_row, other=-float("inf"))
        token = tl.min(tl.where(value == largest, best_ids, 0x7FFFFFFF), axis=0)
    is_broken = tl.load(is_broken_ptr + at, mask=in_row, other=0).to(tl.int32)
    tl.store(is_finite_ptr + row, (tl.max(is_broken, axis=0) ^ 1).to(tl.uint8))
    tl.store(out_ptr + row, token.to(tl.int32))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    has_filters: bool = True,
    is_finite: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token per row, as a pure function of that row's arguments.

    Args:
        logits: [R, V] f32, after bias, penalties and masks. NaN counts as -inf.
        temperature: [R] f32, 0 = argmax, ties by lower id.
        top_k: [R] i32, 0 = off. Exactly that many survive, ties by lower id.
        top_p: [R] f32, 1 = off. The smallest prefix, in descending (logit, lower id) order, whose
            mass among the survivors of top-k reaches top_p; at least one token.
        min_p: [R] f32, 0 = off. Least probability relative to the largest.
        seed: [R] i64 bit pattern of the unsigned seed.
        position: [R] i64. Absolute position of the token being sampled.
        has_filters: False promises that top_k, top_p and min_p are off in every row.
        is_finite: [R] u8, set to 1 for rows whose logits are all finite, else to 0.
    Returns: [R] i32 token ids.
    Mutates: is_finite.
    """
    columns: tuple[torch.Tensor, ...] = (temperature, top_k, top_p, min_p, seed, position)
    if not use_triton(logits):
        return sample_ref(logits, *columns, has_filters=has_filters, is_finite=is_finite)
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    num_rows, width = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    columns = tuple(column.contiguous() for column in columns)
    block = min(BLOCK, triton.next_power_of_2(width))
    num_chunks = triton.cdiv(width, block)
    value = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    second = torch.empty_like(value)
    is_broken = torch.empty((num_rows, num_chunks), dtype=torch.uint8, device=logits.device)
    if is_finite is None:
        is_finite = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    count_launch("sample")
    _best_of_chunk_kernel[(num_rows, num_chunks)](
        logits,
        *columns,
        value,
        best_id,
        second,
        is_broken,
        width,
        HAS_FILTERS=has_filters,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(logits),
    )
    # Read only if there are filters.
    listed = Shortlist(keys=best_id, num_listed=best_id, level=value, total_mass=best_id)
    if has_filters:
        listed = shortlist(logits, columns[:4], value, block=block)
    _best_of_row_kernel[(num_rows,)](
        logits,
        *columns,
        value,
        best_id,
        second,
        listed.keys,
        listed.num_listed,
        listed.level,
        listed.total_mass,
        is_broken,
        out,
        is_finite,
        width,
        HAS_FILTERS=has_filters,
        NUM_CHUNKS=num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=block,
        CAPACITY=listed.keys.shape[1] if has_filters else 0,
        STEP=STEP,
        LANES=LANES,
        num_warps=STEP // 32 if has_filters else 4,
        **dependent_launch(logits),
    )
    return out


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return which rows hold no NaN and no infinity, [R] bool.

    Args:
        logits: [R, V] f32.
    """
    if logits.device.type == "cpu":  # extremes cost a tenth of a test of each value
        return (logits.amax(-1) < math.inf) & (logits.amin(-1) > -math.inf)  # NaN is neither
    return logits.isfinite().all(-1)


def sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    has_filters: bool = True,
    is_finite: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `sample` does in plain torch, with a sort."""
    settle_vector_math()
    if is_finite is not None:
        is_finite.copy_(finite_rows(logits))
    best = logits.argmax(-1)
    if bool(logits.gather(1, best.unsqueeze(1)).isnan().any()):  # argmax prefers NaN
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        best = logits.argmax(-1)
    is_random = temperature > 0
    if not bool(is_random.any()):
        return best.int()
    scaled = logits / torch.where(is_random, temperature, 1.0).unsqueeze(1)
    if has_filters:
        noisy = _add_noise(scaled, _kept(scaled, top_k, top_p, min_p), seed, position)
    else:
        ids = torch.arange(logits.shape[1], device=logits.device)
        noisy = gumbel_noise_ref(seed, position, ids).add_(scaled)
    return torch.where(is_random, noisy.argmax(-1), best).int()


def _kept(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return what top-k, top-p and min-p leave, [R, V] bool.

    Each filter keeps a prefix of the order (descending logit, lower id), so the shortest decides.
    """
    width = scaled.shape[1]
    # numpy sorts values 20 times faster than torch.
    ascending = torch.from_numpy(np.sort(scaled.cpu().numpy(), axis=-1)).to(scaled.device)
    ordered = ascending.flip(-1)
    limit = torch.where(top_k > 0, top_k.clamp(max=width), width).long()
    largest = ordered[:, :1]
    difference = torch.where(ordered == largest, 0.0, ordered.double() - largest.double())
    # Below -64 the mass is 0 anyhow, and exp is slow.
    mass = (difference.clamp_(min=-64.0).exp_() * _MASS_ONE + 0.5).long()
    by_min_p = (mass >= (min_p.double().unsqueeze(1) * _MASS_ONE + 0.5).long()).sum(-1)

    mass.masked_fill_(torch.arange(width, device=scaled.device) >= limit.unsqueeze(1), 0)
    mass_up_to = mass.cumsum(-1)
    target = top_p.double().unsqueeze(1) * mass_up_to[:, -1:].double()
    needed = target.ceil().long().clamp(min=1)
    by_top_p = torch.where(top_p < 1, (mass_up_to - mass < needed).sum(-1), width)

    count = torch.minimum(torch.minimum(limit, by_top_p), by_min_p).clamp(min=1)
    threshold = ordered.gather(1, count.unsqueeze(1) - 1)
    is_above, is_tie = scaled > threshold, scaled == threshold
    num_ties = count - is_above.sum(-1)
    if bool((is_tie.sum(-1) > num_ties).any()):
        is_tie &= is_tie.cumsum(-1) <= num_ties.unsqueeze(1)
    return is_above | is_tie


def _add_noise(
    scaled: torch.Tensor, is_kept: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Return logits plus noise where kept, else -inf; noise is dear, so only for those."""
    row, token_id = is_kept.nonzero(as_tuple=True)
    noise = gumbel_noise_ref(seed[row], position[row], token_id.unsqueeze(1)).squeeze(1)
    noisy = torch.full_like(scaled, -torch.inf)
    noisy[row, token_id] = scaled[row, token_id] + noise
    return noisy
