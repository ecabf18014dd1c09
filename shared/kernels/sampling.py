"""Choose a token per row: temperature, top-k, top-p, min-p, then argmax of logit + Gumbel noise.

Grid: (num_rows,). The kernel never sorts: it bisects over a total order of (logit, lower id), and
probabilities are fixed-point integers relative to the largest one, so that their sums do not depend
on the order and a sort (the reference) and a bisection keep exactly the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton
from shared.kernels.gumbel import gumbel_block, gumbel_noise_ref
from shared.kernels.vector_math import settle_vector_math

# The largest probability of a row, in fixed point: 2^40. 2^23 tokens cannot overflow 63 bits.
_MASS_ONE = 2.0**40

# Comparisons of a token with a candidate key that a pass makes at once. Blocks of fewer tokens
# leave room for more candidates, so that fewer passes find the key.
_NUM_COMPARED = 8192


@triton.jit
def _load_logits(logits_ptr, row, column, width, temperature):
    """Return a block of a row's logits / T; NaN and columns past the end are -inf, -0 is +0."""
    x = tl.load(logits_ptr + row * width + column, mask=column < width, other=-float("inf"))
    x = tl.div_rn(tl.where(x == x, x, -float("inf")), temperature)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _order_key(x, column):
    """Return i64 keys that ascend with x, ties with the lower column; differences fit 63 bits."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 31) + (0x7FFFFFFF - column)


@triton.jit
def _mass(x, largest):
    """Return exp(x - largest) in fixed point, i64; `largest` itself has 2^40."""
    is_largest = x == largest  # infinity less infinity is not a number
    wide = tl.where(is_largest, 0.0, x.to(tl.float64))
    difference = wide - tl.where(is_largest, 0.0, largest.to(tl.float64))
    return (tl.exp(difference) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def _weight_from(
    logits_ptr,
    row,
    width,
    temperature,
    largest,
    least,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the number, or the mass, of the tokens of a row whose key is at least each `least`.

    Args:
        least: [LANES] i64.
    """
    total = tl.zeros_like(least)
    for start in range(0, width, BLOCK):
        column = (start + tl.arange(0, BLOCK)).to(tl.int64)
        x = _load_logits(logits_ptr, row, column, width, temperature)
        weight = tl.full((BLOCK,), 1, dtype=tl.int64)
        if IS_MASS:
            weight = _mass(x, largest)
        weight = tl.where(column < width, weight, 0)
        is_counted = _order_key(x, column)[None, :] >= least[:, None]
        total += tl.sum(tl.where(is_counted, weight[None, :], 0), axis=1)
    return total


@triton.jit
def _largest_key(
    logits_ptr,
    row,
    width,
    temperature,
    largest,
    needed,
    low,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the largest key such that the tokens from it on weigh `needed`; from `low` on do."""
    high = _order_key(largest, tl.zeros_like(low)) + 1  # from here on nothing is left
    lane = tl.arange(0, LANES).to(tl.int64)
    while low + 1 < high:
        stride = tl.maximum((high - low) // LANES, 1)
        least = low + lane * stride
        weight = _weight_from(
            logits_ptr, row, width, temperature, largest, least, IS_MASS=IS_MASS, BLOCK=BLOCK
        )
        # Lane 0 is `low` itself; weights fall from lane to lane.
        last = tl.sum((weight >= needed).to(tl.int64), axis=0) - 1
        next_high = low + (last + 1) * stride
        high = tl.where(last == LANES - 1, high, tl.minimum(high, next_high))
        low = low + last * stride
    return low


@triton.jit
def _filter_keys(
    logits_ptr,
    row,
    width,
    temperature,
    largest,
    top_k,
    top_p,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the least key that top-k and top-p keep, i64."""
    lowest = tl.full((), -float("inf"), dtype=tl.float32)
    least = _order_key(lowest, tl.full((), 0x7FFFFFFF, dtype=tl.int64))
    if (top_k > 0) & (top_k < width):
        least = _largest_key(
            logits_ptr,
            row,
            width,
            temperature,
            largest,
            top_k.to(tl.int64),
            least,
            IS_MASS=False,
            BLOCK=BLOCK,
            LANES=LANES,
        )
    if top_p < 1.0:
        lane = least + tl.zeros((1,), dtype=tl.int64)
        total = _weight_from(
            logits_ptr, row, width, temperature, largest, lane, IS_MASS=True, BLOCK=BLOCK
        )
        target = top_p.to(tl.float64) * tl.sum(total, axis=0).to(tl.float64)
        needed = target.to(tl.int64)
        needed += (needed.to(tl.float64) < target).to(tl.int64)  # ceil
        least = _largest_key(
            logits_ptr,
            row,
            width,
            temperature,
            largest,
            tl.maximum(needed, 1),
            least,
            IS_MASS=True,
            BLOCK=BLOCK,
            LANES=LANES,
        )
    return least


@triton.jit
def _sample_kernel(
    logits_ptr,  # [R, V] f32
    temperature_ptr,  # [R] f32
    top_k_ptr,  # [R] i32
    top_p_ptr,  # [R] f32
    min_p_ptr,  # [R] f32
    seed_ptr,  # [R] i64
    position_ptr,  # [R] i64
    out_ptr,  # [R] i32 mutated
    width,
    HAS_FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    largest = tl.full((), -float("inf"), dtype=tl.float32)
    best_id = tl.zeros((), dtype=tl.int64)
    for start in range(0, width, BLOCK):
        column = (start + tl.arange(0, BLOCK)).to(tl.int64)
        x = _load_logits(logits_ptr, row, column, width, divisor)
        block_best = tl.max(x, axis=0)
        block_id = tl.min(tl.where(x == block_best, column, 0x7FFFFFFF), axis=0)
        best_id = tl.where(block_best > largest, block_id, best_id)
        largest = tl.maximum(largest, block_best)
    if temperature > 0.0:
        least = tl.zeros((), dtype=tl.int64)
        least_mass = tl.zeros((), dtype=tl.int64)
        if HAS_FILTERS:
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            least = _filter_keys(
                logits_ptr,
                row,
                width,
                divisor,
                largest,
                top_k,
                top_p,
                BLOCK=BLOCK,
                LANES=LANES,
            )
            least_mass = (min_p.to(tl.float64) * 1099511627776.0 + 0.5).to(tl.int64)
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        best = tl.full((), -float("inf"), dtype=tl.float32)
        best_id = tl.zeros((), dtype=tl.int64)
        for start in range(0, width, BLOCK):
            column = (start + tl.arange(0, BLOCK)).to(tl.int64)
            x = _load_logits(logits_ptr, row, column, width, divisor)
            noisy = x + gumbel_block(seed, position, column)
            if HAS_FILTERS:
                is_kept = (_order_key(x, column) >= least) & (_mass(x, largest) >= least_mass)
                noisy = tl.where(is_kept, noisy, -float("inf"))
            block_best = tl.max(noisy, axis=0)
            block_id = tl.min(tl.where(noisy == block_best, column, 0x7FFFFFFF), axis=0)
            best_id = tl.where(block_best > best, block_id, best_id)
            best = tl.maximum(best, block_best)
    tl.store(out_ptr + row, best_id.to(tl.int32))


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
    Returns: [R] i32 token ids.
    """
    if not use_triton(logits):
        return sample_ref(
            logits, temperature, top_k, top_p, min_p, seed, position, has_filters=has_filters
        )
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    num_rows, width = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    count_launch("sample")
    block = min(1024, triton.next_power_of_2(width))
    _sample_kernel[(num_rows,)](
        logits,
        temperature.contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        min_p.contiguous(),
        seed.contiguous(),
        position.contiguous(),
        out,
        width,
        HAS_FILTERS=has_filters,
        BLOCK=block,
        LANES=_NUM_COMPARED // block,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    return out


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
) -> torch.Tensor:
    """Do what `sample` does in plain torch, with a sort."""
    settle_vector_math()
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
