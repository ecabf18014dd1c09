"""Accepted paths that the target's GPU posts in a mailbox, and the draft's takes out of it.

Words (mailbox_words.py) of a slot: word r is the r-th token of the path (accepted drafts, then the
bonus), its small number the length of the path, the same in all words of the slot. Words past the
path have token 0. Feature rows of a path lie beside them, or in memory of the draft's GPU, apart
for even and odd rounds: they are there before the words are.

The order: rows are stored, their kernel ends, a fence of the whole system, words. Whoever takes a
word fences as well, then another kernel loads the rows: as volatile, from the L2 of the GPU whose
memory it is, where another GPU's stores end up, and from no L1, which does not see these.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton
from shared.kernels.mailbox_words import (
    MAX_PATH,
    await_words,
    is_word,
    mailbox_words,
    mailbox_words_ref,
    tag_bits_ref,
    word_small,
    word_token,
)

# Mailboxes that one launch can take paths from.
MAX_MAILBOXES = 4
# Threads of a warp, see `await_words`.
_LANES = 32
# Values of a feature row of one program.
_BLOCK = 1024


@triton.jit
def _fence_system():
    """Let all that was stored before be seen, by whoever sees what is stored next; and load next
    what was stored before, by whoever stored what was loaded so far.
    """
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_slots", "num_steps"])
def _post_rows_kernel(
    rows_ptr,  # [B] i64, addresses of [2, S, MAX_PATH, WIDTH] mutated
    slot_ptr,  # [B] i32
    round_tag_ptr,  # [B] i32
    accept_length_ptr,  # [B] i64
    path_rows_ptr,  # [B, D + 1] i64
    features_ptr,  # [L, WIDTH]
    num_slots,  # S
    num_steps,  # D + 1
    MAX_PATH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if (slot >= 0) & (step < tl.load(accept_length_ptr + request)):
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < WIDTH
        row = tl.load(path_rows_ptr + request * num_steps + step)
        feature = tl.load(features_ptr + row * WIDTH + column, mask=in_row, other=0.0)
        half = tl.load(round_tag_ptr + request) & 1
        posted = ((half * num_slots + slot) * MAX_PATH + step) * WIDTH
        own_rows_ptr = tl.load(rows_ptr + request).to(
            tl.pointer_type(features_ptr.dtype.element_ty)
        )
        own_rows_ptr = tl.multiple_of(own_rows_ptr, 16)
        tl.store(own_rows_ptr + posted + column, feature, mask=in_row)


@triton.jit(do_not_specialize=["num_steps"])
def _post_paths_kernel(
    paths_ptr,  # [S, MAX_PATH] i64 mutated
    slot_ptr,  # [B] i32
    round_tag_ptr,  # [B] i32
    accept_length_ptr,  # [B] i64
    path_rows_ptr,  # [B, D + 1] i64
    tokens_ptr,  # [L] i32
    num_steps,  # D + 1
    MAX_PATH: tl.constexpr,
    HAS_FENCE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    if HAS_FENCE:
        _fence_system()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    length = tl.load(accept_length_ptr + request)
    step = tl.arange(0, MAX_PATH)
    on_path = (step < length) & (step < num_steps)
    row = tl.load(path_rows_ptr + request * num_steps + step, mask=on_path, other=0)
    token = tl.load(tokens_ptr + row, mask=on_path, other=0)
    word = mailbox_words(tl.load(round_tag_ptr + request), length, token)
    word_ptrs = paths_ptr + slot * MAX_PATH + step
    tl.store(word_ptrs, word, mask=slot >= 0, cache_modifier=".wt")


def post_paths(
    paths: torch.Tensor,
    rows: torch.Tensor | None,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    accept_length: torch.Tensor,
    path_rows: torch.Tensor,
    tokens: torch.Tensor,
    features: torch.Tensor | None,
) -> None:
    """Post what B requests accepted: feature rows first, then the words that vouch for them.

    Of a path that is longer than a slot, words and rows of the first tokens are posted, with its
    length: no reader takes it. Grids: (B, min(D + 1, MAX_PATH), blocks of W), then (B,).

    Args:
        paths: [S, MAX_PATH] i64, the mailbox.
        rows: [B] i64, where the rows of each request's draft are, which this device can write to:
            [2, S, MAX_PATH, W] of the features' dtype, at a multiple of 16; None without features.
        slot: [B] i32; -1: nothing to post.
        round_tag: [B] i32, rounds.
        accept_length: [B] i64, tokens of the path, bonus included; at most D + 1.
        path_rows: [B, D + 1] i64, logit rows of the path's nodes.
        tokens: [L] i32, the target's token at each logit row.
        features: [L, W], or None.
    Mutates: `paths` at these slots, and their rows of this half that are on the path.
    """
    if not use_triton(tokens):
        post_paths_ref(paths, rows, slot, round_tag, accept_length, path_rows, tokens, features)
        return
    batch, num_steps = path_rows.shape
    assert paths.shape[1] == MAX_PATH and paths.is_contiguous()
    assert path_rows.is_contiguous() and len(slot) == len(round_tag) == batch
    if batch == 0:
        return
    options = dependent_launch(tokens)
    if features is not None:
        assert rows is not None and len(rows) == batch and features.is_contiguous()
        width = features.shape[1]
        count_launch("post_rows")
        _post_rows_kernel[(batch, min(num_steps, MAX_PATH), triton.cdiv(width, _BLOCK))](
            rows,
            slot,
            round_tag,
            accept_length,
            path_rows,
            features,
            paths.shape[0],
            num_steps,
            MAX_PATH=MAX_PATH,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=4,
            **options,
        )
    count_launch("post_paths")
    _post_paths_kernel[(batch,)](
        paths,
        slot,
        round_tag,
        accept_length,
        path_rows,
        tokens,
        num_steps,
        MAX_PATH=MAX_PATH,
        HAS_FENCE=tokens.is_cuda,
        num_warps=1,
        **options,
    )


def post_paths_ref(
    paths: torch.Tensor,
    rows: torch.Tensor | None,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    accept_length: torch.Tensor,
    path_rows: torch.Tensor,
    tokens: torch.Tensor,
    features: torch.Tensor | None,
) -> None:
    """Do what `post_paths` does in plain torch."""
    path_rows = path_rows[:, :MAX_PATH]
    batch, num_steps = path_rows.shape
    on_path = torch.arange(num_steps) < accept_length[:, None]  # [B, min(D + 1, MAX_PATH)]
    token = torch.zeros((batch, MAX_PATH), dtype=torch.int64)
    token[:, :num_steps] = torch.where(on_path, tokens[path_rows], 0)
    words = mailbox_words_ref(round_tag[:, None], accept_length[:, None], token)
    is_posted = slot >= 0
    paths[slot[is_posted].long()] = words[is_posted]
    if features is not None:
        assert rows is not None
        half = tag_bits_ref(round_tag) & 1
        for request in torch.nonzero(is_posted).flatten().tolist():
            own = _rows_at(
                int(rows[request]), (2, len(paths), MAX_PATH, features.shape[1]), features
            )
            kept = path_rows[request][on_path[request]]
            own[half[request], slot[request].long(), : len(kept)] = features[kept]


def _rows_at(address: int, shape: tuple[int, ...], features: torch.Tensor) -> torch.Tensor:
    """Return rows of the features' dtype that lie at an address of the host."""
    num_bytes = math.prod(shape) * features.itemsize
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=features.dtype).view(shape)


@triton.jit(
    do_not_specialize=[
        "slot_width", "path_width", "spare_idx", "vocab_size", "timeout_us", "grace_us",
    ]
)  # fmt: skip
def _take_paths_kernel(
    paths_0_ptr,  # [S, MAX_PATH] i64, of each mailbox
    paths_1_ptr,
    paths_2_ptr,
    paths_3_ptr,
    mailbox_ptr,  # [R] i32, 0..3
    slot_ptr,  # [M, slot_width] i32
    round_tag_ptr,  # [R] i32
    stop_ptr,  # [1] i32
    arrived_ptr,  # [1] i64 mutated
    token_ids_ptr,  # [T] i64 mutated
    slot_mapping_ptr,  # [T] i32 mutated
    last_rows_ptr,  # [R] i64 mutated
    hidden_idx_ptr,  # [R] i64 mutated
    taken_ptr,  # [R, 1 + MAX_PATH] i32 mutated
    slot_width,
    path_width,  # P
    spare_idx,
    vocab_size,
    timeout_us,
    grace_us,
    MAX_PATH: tl.constexpr,
    LANES: tl.constexpr,
    WAITS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    mailbox = tl.load(mailbox_ptr + request)
    paths_ptr = tl.where(mailbox == 1, paths_1_ptr, paths_0_ptr)
    paths_ptr = tl.where(mailbox == 2, paths_2_ptr, paths_ptr)
    paths_ptr = tl.where(mailbox == 3, paths_3_ptr, paths_ptr)
    slot = tl.load(slot_ptr + mailbox.to(tl.int64) * slot_width + request).to(tl.int64)
    round_tag = tl.load(round_tag_ptr + request)
    step = tl.arange(0, LANES)
    in_path = step < MAX_PATH
    is_wanted = in_path & (slot >= 0)
    word_ptrs = paths_ptr + slot * MAX_PATH + step
    word = await_words(
        word_ptrs,
        is_wanted,
        round_tag,
        timeout_us,
        stop_ptr,
        1,
        arrived_ptr,
        grace_us,
        HAS_GRACE=True,
        WAITS=WAITS,
    )
    if WAITS:
        _fence_system()

    length = tl.sum(tl.where(step == 0, word_small(word), 0), axis=0)
    token = word_token(word)
    is_wrong = in_path & (is_word(word, round_tag) == 0)
    is_wrong = is_wrong | ((step < length) & (token >= vocab_size))
    num_wrong = tl.sum(is_wrong.to(tl.int32), axis=0)
    if WAITS:
        tl.store(arrived_ptr, tl.extra.cuda.globaltimer(), mask=num_wrong == 0)
    length = tl.where((num_wrong == 0) & (length <= path_width), length, 0)
    token = tl.where(step < length, token, 0)

    first = request * path_width
    row = first + step
    is_row = step < path_width
    tl.store(token_ids_ptr + row, token, mask=is_row)
    tl.store(slot_mapping_ptr + row, 0, mask=is_row & (step >= length))
    tl.store(last_rows_ptr + request, first + tl.maximum(length, 1) - 1)
    tl.store(hidden_idx_ptr + request, spare_idx, mask=length == 0)
    taken_ptr += request * (1 + MAX_PATH)
    tl.store(taken_ptr, length)
    tl.store(taken_ptr + 1 + step, token.to(tl.int32), mask=in_path)


def take_paths(
    paths: Sequence[torch.Tensor],
    mailbox: torch.Tensor,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    stop: torch.Tensor,
    arrived: torch.Tensor,
    token_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    last_rows: torch.Tensor,
    hidden_idx: torch.Tensor,
    *,
    num_reqs: int,
    path_width: int,
    spare_idx: int,
    vocab_size: int,
    timeout_us: int,
    grace_us: int,
) -> torch.Tensor:
    """Wait for paths and make their tokens the first rows of a draft extend.

    Paths that are posted together come together. So once one is here the wait for the others is
    nearly over: no request waits long for one that has ended, or is in another step or of another
    target.

    A path counts if all its words came, its length is 1..P and its tokens are of the vocabulary.
    Otherwise its length is 0: its rows hold token 0 and go to the sink.
    On a CPU the words are there or are not: nothing waits. Grid: (R,).

    Args:
        paths: Of up to 4 mailboxes, [S, MAX_PATH] i64 each.
        mailbox: [R] i32, of `paths`.
        slot: [M, R] i32, a row for each mailbox; -1: no word comes.
        round_tag: [>= R] i32, rounds.
        stop: [1] i32, of the host; 1: wait no longer.
        arrived: [1] i64, 0: for the kernel alone.
        token_ids: [T] i64; request r has the rows [r * P, (r + 1) * P).
        slot_mapping: [T] i32.
        last_rows: [>= R] i64.
        hidden_idx: [>= R] i64.
        num_reqs: R.
        path_width: P, at most MAX_PATH.
        spare_idx: What `hidden_idx` becomes of requests without a path.
        timeout_us: How long to wait at most, from the start of the kernel.
        grace_us: How long to wait at most once a path is here.
    Returns: [R, 1 + MAX_PATH] i32: lengths, then the tokens, 0 past the path.
    Mutates: `token_ids` of all these rows, `slot_mapping` of those past their path (0),
        `last_rows` (the last row of the path; the first without one), `hidden_idx`.
    """
    if not use_triton(token_ids):
        return take_paths_ref(
            *(paths, mailbox, slot, round_tag, token_ids, slot_mapping, last_rows, hidden_idx),
            num_reqs=num_reqs,
            path_width=path_width,
            spare_idx=spare_idx,
            vocab_size=vocab_size,
        )
    assert 1 <= len(paths) <= MAX_MAILBOXES and path_width <= MAX_PATH
    assert all(own.shape[1] == MAX_PATH and own.is_contiguous() for own in paths)
    assert slot.shape == (len(paths), num_reqs) and slot.stride(1) == 1
    assert len(token_ids) >= num_reqs * path_width <= len(slot_mapping)
    taken = torch.empty((num_reqs, 1 + MAX_PATH), dtype=torch.int32, device=token_ids.device)
    if num_reqs == 0:
        return taken
    count_launch("take_paths", is_single=True)
    # It waits for another GPU, so it must not begin early: kernels before it need the room.
    _take_paths_kernel[(num_reqs,)](
        *paths,
        *[paths[0]] * (MAX_MAILBOXES - len(paths)),
        mailbox,
        slot,
        round_tag,
        stop,
        arrived,
        token_ids,
        slot_mapping,
        last_rows,
        hidden_idx,
        taken,
        slot.stride(0),
        path_width,
        spare_idx,
        vocab_size,
        timeout_us,
        grace_us,
        MAX_PATH=MAX_PATH,
        LANES=_LANES,
        WAITS=token_ids.is_cuda,
        num_warps=1,
        **LAUNCH_OPTIONS,
    )
    return taken


def take_paths_ref(
    paths: Sequence[torch.Tensor],
    mailbox: torch.Tensor,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    token_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    last_rows: torch.Tensor,
    hidden_idx: torch.Tensor,
    *,
    num_reqs: int,
    path_width: int,
    spare_idx: int,
    vocab_size: int,
) -> torch.Tensor:
    """Do what `take_paths` does in plain torch, of the words that are there."""
    round_tag = round_tag[:num_reqs, None]
    word = torch.full((num_reqs, MAX_PATH), -1)  # [R, MAX_PATH]
    for i, own in enumerate(paths):
        is_own = (mailbox == i) & (slot[i] >= 0)
        word[is_own] = own[slot[i][is_own].long()]
    step = torch.arange(MAX_PATH)
    token, length = word & 0xFFFFFFFF, (word[:, :1] >> 32) & 0xFF
    is_good = (word >> 40 == tag_bits_ref(round_tag)) & ((step >= length) | (token < vocab_size))
    is_path = is_good.all(dim=1, keepdim=True) & (length <= path_width)
    length = torch.where(is_path, length, 0)  # [R, 1]
    token = torch.where(step < length, token, 0)

    total = num_reqs * path_width
    token_ids[:total] = token[:, :path_width].flatten()
    slot_mapping[:total][(step >= length)[:, :path_width].flatten()] = 0
    taken = torch.cat([length, token], dim=1).int()
    length = length.squeeze(1)
    last_rows[:num_reqs] = torch.arange(num_reqs) * path_width + length.clamp(min=1) - 1
    hidden_idx[:num_reqs][length == 0] = spare_idx
    return taken


@triton.jit(do_not_specialize=["num_slots", "path_width"])
def _take_rows_kernel(
    rows_ptr,  # [2, S, MAX_PATH, WIDTH]
    slot_ptr,  # [R] i32
    round_tag_ptr,  # [R] i32
    taken_ptr,  # [R, 1 + MAX_PATH] i32
    features_ptr,  # [T, WIDTH] mutated
    num_slots,  # S
    path_width,  # P
    MAX_PATH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    half = tl.load(round_tag_ptr + request) & 1
    is_taken = step < tl.load(taken_ptr + request * (1 + MAX_PATH))
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < WIDTH
    posted = ((half * num_slots + slot) * MAX_PATH + step) * WIDTH
    is_read = in_row & is_taken & (slot >= 0)
    feature = tl.load(rows_ptr + posted + column, mask=is_read, other=0.0, volatile=True)
    row = request * path_width + step
    tl.store(features_ptr + row * WIDTH + column, feature, mask=in_row & (slot >= 0))


def take_rows(
    rows: torch.Tensor,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    taken: torch.Tensor,
    features: torch.Tensor,
    *,
    path_width: int,
) -> None:
    """Take the feature rows of the paths that `take_paths` took from one of its mailboxes.
    Grid: (R, P, blocks of W).

    Args:
        rows: [2, S, MAX_PATH, W], of the mailbox, or of its target in this device's memory.
        slot: [>= R] i32; -1: of another mailbox.
        round_tag: [>= R] i32, rounds.
        taken: [R, 1 + MAX_PATH] i32, from `take_paths`.
        features: [T, W] of the rows' dtype; request r has the rows [r * P, (r + 1) * P).
        path_width: P.
    Mutates: `features` of the rows of this mailbox's requests; those past their path become 0.
    """
    if not use_triton(features):
        take_rows_ref(rows, slot, round_tag, taken, features, path_width=path_width)
        return
    num_reqs, width = len(taken), features.shape[1]
    assert rows.shape[2:] == (MAX_PATH, width) and rows.dtype == features.dtype
    assert rows.is_contiguous() and features.is_contiguous() and path_width <= MAX_PATH
    assert len(features) >= num_reqs * path_width
    if num_reqs == 0:
        return
    count_launch("take_rows", is_single=True)
    _take_rows_kernel[(num_reqs, path_width, triton.cdiv(width, _BLOCK))](
        rows,
        slot,
        round_tag,
        taken,
        features,
        rows.shape[1],
        path_width,
        MAX_PATH=MAX_PATH,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent_launch(features),
    )


def take_rows_ref(
    rows: torch.Tensor,
    slot: torch.Tensor,
    round_tag: torch.Tensor,
    taken: torch.Tensor,
    features: torch.Tensor,
    *,
    path_width: int,
) -> None:
    """Do what `take_rows` does in plain torch."""
    own = torch.nonzero(slot[: len(taken)] >= 0).squeeze(1)  # [R'], requests of this mailbox
    half = tag_bits_ref(round_tag[own]) & 1
    posted = rows[half, slot[own].long(), :path_width]  # [R', P, W]
    is_taken = torch.arange(path_width) < taken[own, :1]  # [R', P]
    of_requests = features[: len(taken) * path_width].unflatten(0, (-1, path_width))
    of_requests[own] = torch.where(is_taken[..., None], posted, 0)
