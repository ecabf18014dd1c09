"""Log-probabilities of chosen tokens and of the most likely ones, without a softmax of the row.

Two kernels: maximum, sum of exponentials and best tokens of each chunk of the vocabulary, on the
grid (num_rows, num_chunks), then those of the row, on (num_rows,). Chunks are cut at fixed columns
and added in order, so a row's bits depend on nothing but the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton
from shared.kernels.order_key import NO_KEY, key_index, key_value, order_key
from shared.kernels.sampling_filters import load_scaled
from shared.kernels.vector_math import settle_vector_math

# Columns of one program of the first kernel.
BLOCK = 1024
# Alternatives that one binary finds; more need another one.
_TOP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of probabilities.

    Args:
        chosen: [P] f32, of the chosen tokens.
        top: [P, num_top] f32, of the tokens with the largest logits, best first, ties by lower id.
        top_ids: [P, num_top] i64.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


@triton.jit(do_not_specialize=["num_top"])
def _chunk_logprobs_kernel(
    logits_ptr,  # [R, V] f32
    rows_ptr,  # [P] i64
    largest_ptr,  # [P, C] f32 mutated
    sum_ptr,  # [P, C] f32 mutated
    key_ptr,  # [P, C, TOP] i64 mutated, the first num_top of each
    width,
    num_top,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row = tl.load(rows_ptr + tl.program_id(0))
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = load_scaled(logits_ptr, row, column, width, 1.0)
    largest = tl.max(x, axis=0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    tl.store(largest_ptr + out, largest)
    tl.store(sum_ptr + out, tl.sum(tl.exp(x - base), axis=0))
    key = order_key(x, column)
    for rank in range(num_top):
        best = tl.max(key, axis=0)
        tl.store(key_ptr + out * TOP + rank, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit(do_not_specialize=["num_top"])
def _row_logprobs_kernel(
    logits_ptr,  # [R, V] f32
    rows_ptr,  # [P] i64
    token_ptr,  # [P] i32
    largest_ptr,  # [P, C] f32
    sum_ptr,  # [P, C] f32
    key_ptr,  # [P, C, TOP] i64
    chosen_ptr,  # [P] f32 mutated
    top_ptr,  # [P, num_top] f32 mutated
    top_ids_ptr,  # [P, num_top] i64 mutated
    width,
    num_top,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOP: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + out)
    chunk = tl.arange(0, CHUNKS)
    in_row = chunk < NUM_CHUNKS
    at = out * NUM_CHUNKS + chunk
    largests = tl.load(largest_ptr + at, mask=in_row, other=-float("inf"))
    largest = tl.max(largests, axis=0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    sums = tl.load(sum_ptr + at, mask=in_row, other=0.0)
    log_sum = tl.log(tl.sum(sums * tl.exp(largests - base), axis=0))
    token = tl.load(token_ptr + out).to(tl.int64)
    tl.store(chosen_ptr + out, tl.load(logits_ptr + row * width + token) - base - log_sum)
    if num_top > 0:
        rank = tl.arange(0, TOP)[None, :]
        is_key = in_row[:, None] & (rank < num_top)
        key = tl.load(key_ptr + at[:, None] * TOP + rank, mask=is_key, other=NO_KEY)
        for place in range(num_top):
            best = tl.max(tl.max(key, axis=1), axis=0)
            tl.store(top_ptr + out * num_top + place, key_value(best) - base - log_sum)
            tl.store(top_ids_ptr + out * num_top + place, key_index(best))
            key = tl.where(key == best, NO_KEY, key)


def chosen_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, *, num_top: int
) -> Logprobs:
    """Return the log-probabilities of one token, and of the most likely ones, of some rows.

    Args:
        logits: [R, V] f32, no NaN; only the rows asked for are read.
        rows: [P] i64.
        token_ids: [P] i32, the tokens chosen in those rows.
        num_top: Alternatives per row, 0..V. The first of them do not depend on how many there are.
    """
    if not use_triton(logits):
        return chosen_logprobs_ref(logits, rows, token_ids, num_top=num_top)
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    count, width = rows.shape[0], logits.shape[1]
    block = min(BLOCK, triton.next_power_of_2(width))
    num_chunks = triton.cdiv(width, block)
    top = max(_TOP, triton.next_power_of_2(num_top))
    device = logits.device
    largest = torch.empty((count, num_chunks), dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    keys = torch.empty((count, num_chunks, top), dtype=torch.int64, device=device)
    out = Logprobs(
        chosen=torch.empty(count, dtype=torch.float32, device=device),
        top=torch.empty((count, num_top), dtype=torch.float32, device=device),
        top_ids=torch.empty((count, num_top), dtype=torch.int64, device=device),
    )
    if count == 0:
        return out
    count_launch("logprobs")
    _chunk_logprobs_kernel[(count, num_chunks)](
        logits,
        rows.contiguous(),
        largest,
        sums,
        keys,
        width,
        num_top,
        TOP=top,
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    _row_logprobs_kernel[(count,)](
        logits,
        rows.contiguous(),
        token_ids.contiguous(),
        largest,
        sums,
        keys,
        out.chosen,
        out.top,
        out.top_ids,
        width,
        num_top,
        NUM_CHUNKS=num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        TOP=top,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return out


def chosen_logprobs_ref(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, *, num_top: int
) -> Logprobs:
    """Do what `chosen_logprobs` does in plain torch."""
    settle_vector_math()
    selected = logits[rows]
    table = torch.log_softmax(selected, dim=-1)  # [P, V]
    top_ids = selected.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    chosen = table.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    return Logprobs(chosen=chosen, top=table.gather(1, top_ids), top_ids=top_ids)
