"""Choose the best children of every row of draft logits, with their log-probabilities.

Two kernels. Grid (num_rows, chunks of V): the best key of a chunk and the mass of its
probabilities. Grid (num_rows,): the best of the K chunks with the best keys, which hold the row's K
best, and their log-probabilities.
Masses are fixed-point integers relative to the largest of their chunk, or row, so that no result
depends on the order of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.gumbel import gumbel_block, gumbel_noise_ref
from shared.kernels.order_key import NO_KEY, best_keys, key_index, key_value, order_key
from shared.kernels.topk import stable_topk
from shared.kernels.vector_math import settle_vector_math

# Draft ids of one program of the first kernel, a single warp. The second has a warp for each chunk.
_CHUNK = 1024
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildNoise:
    """The noise with which the target will sample the children of B requests' rows.

    Args:
        temperature: [B] f32; 0 = no noise.
        seed: [B] i64 bit pattern.
        position: [B] i64, absolute position of a child of the root.
        depth: Of the rows; 0 = the root. Their children are sampled at position + depth.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    depth: int


@triton.jit
def _finite_block(x):
    """Return what ranks a block of values: NaN is -inf, infinity less infinity is no number."""
    return tl.minimum(tl.where(x == x, x, -float("inf")), 3.4028234663852886e38)


@triton.jit(do_not_specialize=["depth", "rows_per_request"])
def _chunk_children_kernel(
    logits_ptr,  # [T, V] f32, rows logits_stride apart; mutated where there is noise
    target_ids_ptr,  # [V] i64, unread unless HAS_NOISE
    temperature_ptr,  # [B] f32, unread unless HAS_NOISE
    seed_ptr,  # [B] i64, unread unless HAS_NOISE
    position_ptr,  # [B] i64, unread unless HAS_NOISE
    key_ptr,  # [T, chunks] i64 mutated
    mass_ptr,  # [T, chunks] i64 mutated
    width,
    logits_stride,
    rows_per_request,
    depth,
    HAS_NOISE: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    in_row = column < width
    logits_ptrs = logits_ptr + row * logits_stride + column
    x = tl.load(logits_ptrs, mask=in_row, other=-float("inf"))
    if HAS_NOISE:
        request = row // rows_per_request
        temperature = tl.load(temperature_ptr + request)
        if temperature > 0.0:
            seed = tl.load(seed_ptr + request)
            position = tl.load(position_ptr + request) + depth
            ids = tl.load(target_ids_ptr + column, mask=in_row, other=0)
            x = tl.div_rn(x, tl.maximum(temperature, 1e-6)) + gumbel_block(seed, position, ids)
            tl.store(logits_ptrs, x, mask=in_row)
    x = _finite_block(x)
    best = tl.max(tl.where(in_row, order_key(x, column), NO_KEY), axis=0)
    program = row * tl.num_programs(1) + chunk
    tl.store(key_ptr + program, best)
    largest = tl.maximum(key_value(best), -3.4028234663852886e38)
    mass = (tl.exp(x - largest) * 1099511627776.0).to(tl.int64)  # 2^40
    tl.store(mass_ptr + program, tl.sum(mass, axis=0))


@triton.jit
def _merge_children_kernel(
    logits_ptr,  # [T, V] f32, rows logits_stride apart; the noise added
    key_ptr,  # [T, chunks] i64
    mass_ptr,  # [T, chunks] i64
    target_ids_ptr,  # [V] i64
    score_ptr,  # [T, K] f32 mutated
    token_ptr,  # [T, K] i32 mutated
    width,
    logits_stride,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    in_chunks = chunk < NUM_CHUNKS
    chunk_keys = tl.load(key_ptr + row * NUM_CHUNKS + chunk, mask=in_chunks, other=NO_KEY)
    best_chunks = best_keys(chunk_keys, COUNT, COUNT_BLOCK)

    column = (key_index(best_chunks) // CHUNK * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    in_row = (best_chunks != NO_KEY)[:, None] & (column < width)
    logits_ptrs = logits_ptr + row * logits_stride + column
    x = _finite_block(tl.load(logits_ptrs, mask=in_row, other=-float("inf")))
    keys = tl.where(in_row, order_key(x, column), NO_KEY)
    keys = tl.reshape(keys, (COUNT_BLOCK * CHUNK,), can_reorder=True)
    best = best_keys(keys, COUNT, COUNT_BLOCK)

    mass = tl.load(mass_ptr + row * NUM_CHUNKS + chunk, mask=in_chunks, other=0)
    largest = key_value(tl.max(chunk_keys, axis=0))
    largest = tl.maximum(largest, -3.4028234663852886e38).to(tl.float64)
    decay = tl.exp(key_value(chunk_keys).to(tl.float64) - largest)
    total = tl.sum((mass.to(tl.float64) * decay + 0.5).to(tl.int64), axis=0)
    total = tl.maximum(total, 1).to(tl.float64) * 9.094947017729282e-13  # 2^-40

    x = key_value(best)
    score = ((x.to(tl.float64) - largest) - tl.log(total)).to(tl.float32)
    rank = tl.arange(0, COUNT_BLOCK)
    out = row * COUNT + rank
    token = tl.load(target_ids_ptr + key_index(best)).to(tl.int32)
    tl.store(
        score_ptr + out, tl.where(x > -float("inf"), tl.minimum(score, 0.0), x), mask=rank < COUNT
    )
    tl.store(token_ptr + out, token, mask=rank < COUNT)


def best_children(
    logits: torch.Tensor, target_ids: torch.Tensor, count: int, noise: ChildNoise | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely children of every row, best first, ties by lower draft id.

    With noise, rows of T > 0 rank by logit / T + noise, what the target will rank by, and score by
    a log-softmax of that.

    Args:
        logits: [T, V] f32 over draft ids; NaN counts as -inf.
        target_ids: [V] i64, target id of every draft id.
        count: K, children per row.
        noise: Of B requests, rows of one adjacent: row t belongs to request t // (T / B).
    Returns: log-probabilities [T, K] f32, -inf: no such child; target ids [T, K] i32.
    Mutates: rows of `logits` with noise: it may be added in place.
    """
    if not use_triton(logits):
        return best_children_ref(logits, target_ids, count, noise)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    num_rows, width = logits.shape
    num_chunks = triton.cdiv(width, _CHUNK)
    device = logits.device
    keys = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    mass = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    score = torch.empty((num_rows, count), dtype=torch.float32, device=device)
    token = torch.empty((num_rows, count), dtype=torch.int32, device=device)
    count_block = triton.next_power_of_2(count)
    count_launch("chunk_children")
    _chunk_children_kernel[(num_rows, num_chunks)](
        logits,
        target_ids,
        logits if noise is None else noise.temperature,
        target_ids if noise is None else noise.seed,
        target_ids if noise is None else noise.position,
        keys,
        mass,
        width,
        logits.stride(0),
        1 if noise is None else num_rows // len(noise.seed),
        0 if noise is None else noise.depth,
        HAS_NOISE=noise is not None,
        CHUNK=_CHUNK,
        num_warps=1,
        **dependent_launch(logits),
    )
    count_launch("merge_children")
    _merge_children_kernel[(num_rows,)](
        logits,
        keys,
        mass,
        target_ids,
        score,
        token,
        width,
        logits.stride(0),
        NUM_CHUNKS=num_chunks,
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        COUNT=count,
        COUNT_BLOCK=count_block,
        CHUNK=_CHUNK,
        num_warps=count_block,
        **dependent_launch(logits),
    )
    return score, token


def best_children_ref(
    logits: torch.Tensor, target_ids: torch.Tensor, count: int, noise: ChildNoise | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `best_children` does in plain torch."""
    settle_vector_math()
    x = torch.nan_to_num(logits, nan=-torch.inf, neginf=-torch.inf)
    if noise is not None:
        repeats = len(logits) // len(noise.seed)
        temperature = noise.temperature.repeat_interleave(repeats)[:, None]
        drawn = gumbel_noise_ref(
            noise.seed.repeat_interleave(repeats),
            (noise.position + noise.depth).repeat_interleave(repeats),
            target_ids,
        )
        noisy = drawn.add_(x / temperature.clamp(min=_LEAST_TEMPERATURE))
        noisy.clamp_(max=torch.finfo(torch.float32).max)
        x = torch.where(temperature > 0, noisy, x)
    _, draft_id = stable_topk(x, min(count, x.shape[1]))
    score = torch.log_softmax(x, dim=1).gather(1, draft_id)
    score = torch.nan_to_num(score, nan=-torch.inf, neginf=-torch.inf)
    missing = count - draft_id.shape[1]
    if missing:
        score = torch.nn.functional.pad(score, (0, missing), value=-torch.inf)
        draft_id = torch.nn.functional.pad(draft_id, (0, missing))
    return score, target_ids[draft_id].int()
