"""The words of a mailbox: memory of the host through which two GPUs' kernels reach each other.

A word, i64: bits [40, 63) the round that it belongs to, bits [32, 40) a small number, bits [0, 32)
a token id. A store of eight bytes is whole or not there, so a word is what it says or belongs to
another round; what belongs together may still come apart, word by word. Device functions only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rounds count modulo 2 ** TAG_BITS. Memory of zeros holds words of round 0.
TAG_BITS = 23
# Most nodes of a tree, root included, and most tokens of a path, bonus included.
NODES = 64
MAX_PATH = 16
# The parent of a node that is not there.
NO_NODE = 255


@triton.jit
def tag_bits(round_tag):
    """Return the round as words hold it, i64."""
    return round_tag.to(tl.int64) & 0x7FFFFF


@triton.jit
def mailbox_words(round_tag, small, token):
    """Return words of a round, i64."""
    return (
        (tag_bits(round_tag) << 40) | (small.to(tl.int64) << 32) | (token.to(tl.int64) & 0xFFFFFFFF)
    )


@triton.jit
def is_word(word, round_tag):
    """Return which words belong to the round; the others say nothing."""
    return (word >> 40) == tag_bits(round_tag)


@triton.jit
def word_small(word):
    """Return the small numbers of words, i32 in 0..255."""
    return ((word >> 32) & 0xFF).to(tl.int32)


@triton.jit
def word_token(word):
    """Return the token ids of words, i64 in 0..2**32 - 1."""
    return word & 0xFFFFFFFF


@triton.jit
def await_words(
    word_ptrs,  # i64
    is_wanted,
    round_tag,
    timeout_us,
    stop_ptr,  # [1] i32
    stop_value,
    arrived_ptr,  # [1] i64, unread unless HAS_GRACE
    grace_us,
    HAS_GRACE: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Return words once all that are wanted belong to the round, or it took too long.

    There are at least as many words as threads: of one that two threads load, each might see
    another.

    Args:
        is_wanted: Of each word; the others come back as -1, which belongs to no round.
        timeout_us: From now on.
        stop_ptr: `stop_value` there ends the wait, too.
        arrived_ptr: Another time than 0 there, by the clock of the GPU, ends the wait `grace_us`
            later.
        WAITS: False: whatever is there.
    """
    if WAITS:
        deadline_ns = tl.extra.cuda.globaltimer() + timeout_us.to(tl.int64) * 1000
        num_missing = 1
        while num_missing > 0:
            word = tl.load(word_ptrs, mask=is_wanted, other=-1, volatile=True)
            is_missing = is_wanted & (is_word(word, round_tag) == 0)
            # Every thread reads a clock of its own; the sum is the same to all of them.
            now_ns = tl.extra.cuda.globaltimer()
            is_missing = is_missing & (now_ns < deadline_ns)
            is_missing = is_missing & (tl.load(stop_ptr, volatile=True) != stop_value)
            if HAS_GRACE:
                arrived_ns = tl.load(arrived_ptr, volatile=True)
                is_over = (arrived_ns != 0) & (now_ns > arrived_ns + grace_us.to(tl.int64) * 1000)
                is_missing = is_missing & (is_over == 0)
            num_missing = tl.sum(is_missing.to(tl.int32), axis=0)
    # Once more: Triton cannot carry what a loop loads out of it.
    return tl.load(word_ptrs, mask=is_wanted, other=-1, volatile=True)


def mailbox_words_ref(
    round_tag: torch.Tensor, small: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """Do what `mailbox_words` does in plain torch."""
    return (tag_bits_ref(round_tag) << 40) | (small.long() << 32) | (token.long() & 0xFFFFFFFF)


def tag_bits_ref(round_tag: torch.Tensor) -> torch.Tensor:
    """Do what `tag_bits` does in plain torch."""
    return round_tag.long() & 0x7FFFFF
