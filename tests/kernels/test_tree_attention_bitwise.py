"""The output of a row is bitwise a function of its q and its K/V in KV-index order.

One and the same path of tokens is attended to in every form it can take in service: plain
decoding, prefill chunks of several lengths, a chain or a bushy tree at scattered node indices,
alone and among others, over several page sizes.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.device import MAX_FLOAT32_HEAD
from shared.kernels.fp8_cache import KVScales
from shared.kernels.latent_attention import latent_attention
from tests.kernels.attention_cases import Block, attention_of, pack, random_block
from tests.marks import exhaustive

SCALE = 0.3
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HEADS = [{"num_heads": 4, "num_kv_heads": 1, "head_dim": 16}]
if not IS_INTERPRETED:
    HEADS += [
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 17},
    ]
if torch.cuda.is_available():
    HEADS += [{"num_heads": 8, "num_kv_heads": 1, "head_dim": 512}]
# Every length around a tile edge.
LENGTHS = (1, 2, *range(62, 68), *range(127, 131))
NUM_OTHERS = (7,) if IS_INTERPRETED else (1, 7, 25)


# Heads of latent attention, whose values are the first 16 of a key.
LATENT_HEADS = [{"num_heads": 4, "num_kv_heads": 1, "head_dim": 24}]
if torch.cuda.is_available():  # the first 512
    LATENT_HEADS += [
        {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576},
        {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576},
    ]


def tree(batch):
    """Return the output of tree attention."""
    return attention_of(batch, SCALE)


def capped(batch):
    """Return it of scores under a soft cap that bends them."""
    return attention_of(batch, SCALE, softcap=2.0)


def fp8(batch):
    """Return it over caches in FP8."""
    k_cache, v_cache = (c.to(torch.float8_e4m3fn) for c in (batch.k_cache, batch.v_cache))
    batch = replace(batch, k_cache=k_cache, v_cache=v_cache)
    return attention_of(batch, SCALE, kv_scales=KVScales(k=0.7, v=1.3))


def latent(batch):
    """Return that of latent attention, over the keys alone."""
    width = 512 if batch.q.shape[2] == 576 else 16
    return latent_attention(batch.q, batch.k_cache, batch.metadata, SCALE, value_width=width)


OPS = [(tree, heads) for heads in HEADS] + [(latent, heads) for heads in LATENT_HEADS]


def attend(blocks, row, *, op, page_size, device, dtype, window=0):
    """Return one row of the output."""
    return op(pack(blocks, page_size=page_size, device=device, dtype=dtype, window=window))[row]


def chain_block(path: Block, prefix_len: int) -> Block:
    """Return the path as a chain that starts after `prefix_len` tokens."""
    return Block(q=path.q[prefix_len:], k=path.k, v=path.v, prefix_len=prefix_len)


def tree_block(path: Block, prefix_len: int, num_others: int, seed: int) -> tuple[Block, int]:
    """Return the path inside a bushy tree at scattered node indices, and its last node."""
    rng = random.Random(seed)
    length = len(path.q)
    own = list(range(prefix_len, length))
    kinds = ["own"] * (len(own) - 1) + ["other"] * num_others
    rng.shuffle(kinds)
    kinds.insert(0, "own")  # the root
    heads = {"num_heads": path.q.shape[1], "num_kv_heads": path.k.shape[1]}
    noise = random_block(prefix_len, len(kinds), head_dim=path.q.shape[2], **heads)
    noise.k[:prefix_len], noise.v[:prefix_len] = path.k[:prefix_len], path.v[:prefix_len]
    parents, last = [], -1
    for node, kind in enumerate(kinds):
        if kind == "own":
            token = own.pop(0)
            parents.append(last)
            last = node
            noise.q[node] = path.q[token]
            noise.k[prefix_len + node] = path.k[token]
            noise.v[prefix_len + node] = path.v[token]
        else:
            parents.append(rng.randrange(node))
    block = Block(q=noise.q, k=noise.k, v=noise.v, prefix_len=prefix_len, parents=tuple(parents))
    return block, last


def dtypes(op: Any, heads: dict[str, int]) -> list[torch.dtype]:
    """Return the dtypes to compare in; of the widest heads float32 does not fit into a GPU."""
    if IS_INTERPRETED:
        return [torch.float32]
    is_wide = op is not latent and heads["head_dim"] > MAX_FLOAT32_HEAD
    return [*[torch.float32] * (not is_wide), torch.float16, torch.bfloat16]


def cells():
    """Return every op, heads, length and window, half of them exhaustive: heads have each length
    with a window or without, and a window has each length with some heads.
    """
    if IS_INTERPRETED:
        cells = [[(*one, length, 0) for one in OPS] for length in (1, 64, 65, 63, 129)]
        return [*itertools.chain(*cells[:3]), *exhaustive(itertools.chain(*cells[3:]))]
    chosen, left = [], []
    for i, one in enumerate(OPS):
        for j, length in enumerate(LENGTHS):
            windows = (0, 40) if (i + j) % 2 else (40, 0)
            chosen.append((*one, length, windows[0]))
            left.append((*one, length, windows[1]))
    return [*chosen, *exhaustive(left)]


def name_of(value):
    """Return what a parameter is called in the name of a test; None: as pytest calls it."""
    if isinstance(value, dict):
        return "-".join(map(str, value.values()))
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("op", "heads", "length", "window"),
    cells(),
    ids=name_of,
)
def test_a_row_has_the_same_bits_in_every_form(device, length, op, heads, window):
    compare_forms(device, length, op, heads, window)


@pytest.mark.parametrize("length", [65] if IS_INTERPRETED else LENGTHS)
def test_a_row_under_a_soft_cap_has_them(device, length):
    for heads in HEADS[:2]:
        compare_forms(device, length, capped, heads, 0)


@pytest.mark.parametrize("length", [20] if IS_INTERPRETED else LENGTHS)
def test_a_row_over_caches_in_fp8_has_them(device, length):
    for heads in HEADS[:2]:
        compare_forms(device, length, fp8, heads, 0)


def compare_forms(device, length, op, heads, window):
    """Compare a row in every form with plain decoding."""
    path = random_block(0, length, **heads)
    others = [random_block(70, (-1, 0, 0, 1), **heads), random_block(3, 6, **heads)]
    for dtype in dtypes(op, heads):
        where = {"op": op, "device": device, "dtype": dtype, "window": window}
        plain = attend([chain_block(path, length - 1)], -1, page_size=16, **where)
        root = Block(
            q=path.q[-1:], k=path.k, v=path.v, prefix_len=length - 1, parents=(-1,)
        )  # a tree of one node
        forms = {
            "root": attend([root], 0, page_size=4, **where),
            "root among others": attend([others[1], root, others[0]], 6, page_size=1, **where),
            "prefill from 0": attend([chain_block(path, 0)], -1, page_size=64, **where),
        }
        splits = {max(0, length - 2), max(0, length - 5), length // 2}
        for split in sorted(splits)[-2:] if IS_INTERPRETED else splits:
            chunk = chain_block(path, split)
            forms[f"chunk from {split}"] = attend([others[0], chunk], -1, page_size=4, **where)
            if len(chunk.q) <= 64:
                linear = Block(
                    q=chunk.q,
                    k=path.k,
                    v=path.v,
                    prefix_len=split,
                    parents=tuple(range(-1, len(chunk.q) - 1)),
                )
                forms[f"tree chain from {split}"] = attend([linear], -1, page_size=2, **where)
        for seed, num_others in enumerate(NUM_OTHERS):
            prefix_len = max(0, length - 1 - 2 * seed)
            tree, node = tree_block(path, prefix_len, num_others, seed)
            forms[f"tree {seed}"] = attend([tree, others[0]], node, page_size=16, **where)
            forms[f"tree {seed} last"] = attend([*others, tree], 10 + node, page_size=1, **where)
        different = [name for name, out in forms.items() if not torch.equal(out, plain)]
        assert not different, f"{dtype}: bits differ from plain decoding in {different}"


def test_bits_do_depend_on_what_a_row_sees(device):
    """The comparison above can fail: one changed value of K or V changes the row."""
    where = {"page_size": 16, "device": device, "dtype": torch.float32}
    path = random_block(0, 65, num_heads=4, head_dim=24)
    for op, changed in ((tree, path.k), (tree, path.v), (latent, path.k)):
        for column in (3, 20):
            plain = attend([chain_block(path, 64)], -1, op=op, **where)
            changed[64, 0, column] += 0.01
            other = attend([chain_block(path, 64)], -1, op=op, **where)
            assert not torch.equal(plain, other)
