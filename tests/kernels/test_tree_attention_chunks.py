"""The kernels of tree attention: no cut of the work, and nothing that a row does not see, matters.

Chunks are of one tile here where the real ones are of four, so that short contexts have many.
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import pytest
import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS
from shared.kernels.tree_attention import AttentionParams, attend_in_chunks, few_rows_of
from shared.kernels.tree_attention_tiles import (
    TRITON_CHUNK_TILES,
    TRITON_KV_TILE,
    chunk_begin,
    chunk_of,
    num_chunks,
)
from tests.kernels.attention_cases import Batch, exact, pack, random_block

SCALE = 0.25
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
HEADS = [{"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}]
if not IS_INTERPRETED:
    HEADS += [
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        {"num_heads": 16, "num_kv_heads": 1, "head_dim": 256},
    ]
WIDE = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 512}  # which fit in 16 bits
BY_HEADS = pytest.mark.parametrize(
    ("heads", "dtype"),
    [*itertools.product(HEADS, DTYPES), *((WIDE, dtype) for dtype in DTYPES[1:])],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)


@pytest.fixture(autouse=True)
def _poisoned_workspaces(monkeypatch):
    """States that nobody stored are NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def deep_tree(depth: int) -> tuple[int, ...]:
    """Return a path of the even nodes, each with an odd one as a leaf."""
    return (-1, *(node - 1 if node % 2 else node - 2 for node in range(1, 2 * depth)))


def attend(batch: Batch, num_splits: int | None, chunk_tiles: int = 1) -> torch.Tensor:
    return attend_in_chunks(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.metadata,
        AttentionParams(scale=SCALE),
        num_splits=num_splits,
        chunk_tiles=chunk_tiles,
    )


def test_chunks_of_a_long_context_are_few():
    assert [num_chunks(tokens, TRITON_CHUNK_TILES) for tokens in (0, 1, 256, 257)] == [1, 1, 1, 2]
    assert [num_chunks(tokens, TRITON_CHUNK_TILES) for tokens in (4096, 4097, 5121)] == [16, 17, 18]
    assert [num_chunks(tokens, TRITON_CHUNK_TILES) for tokens in (32768, 32769)] == [44, 45]
    assert num_chunks(1 << 17, TRITON_CHUNK_TILES) == 68


@triton.jit
def _chunks_kernel(chunk_ptr, begin_ptr, CHUNK_TILES: tl.constexpr, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    chunk = chunk_of(tile, CHUNK_TILES)
    tl.store(chunk_ptr + tile, chunk)
    tl.store(begin_ptr + tile, chunk_begin(chunk, CHUNK_TILES))


@pytest.mark.kernel_only
@pytest.mark.parametrize("chunk_tiles", [1, TRITON_CHUNK_TILES])
def test_host_and_device_cut_the_same_chunks(device, chunk_tiles):
    chunk = torch.zeros(1024, dtype=torch.int32, device=device)
    begin = torch.zeros_like(chunk)
    _chunks_kernel[(1,)](chunk, begin, CHUNK_TILES=chunk_tiles, TILES=1024, **LAUNCH_OPTIONS)
    ends = [num_chunks((tile + 1) * TRITON_KV_TILE, chunk_tiles) for tile in range(1024)]
    assert chunk.tolist() == [end - 1 for end in ends]
    first = {}
    for tile, end in enumerate(ends):
        first.setdefault(end, tile)
    assert begin.tolist() == [first[end] for end in ends]


@pytest.mark.kernel_only
@pytest.mark.parametrize("window", [0, 100])
@BY_HEADS
def test_splits_do_not_matter(device, heads, dtype, window):
    """Own tiles cross a tile's and a chunk's edge, contexts the first 16 chunks."""
    blocks = [
        random_block(124, deep_tree(6), **heads),
        random_block(1021, deep_tree(5), **heads),
        random_block(1100, (-1,), **heads),
        random_block(1087, 3, **heads),
        random_block(130, 7, **heads),
        random_block(0, (-1, 0), **heads),
    ]
    batch = pack(blocks, page_size=4, device=device, dtype=dtype, window=window, num_padding_rows=2)
    expected = attend(batch, 0)
    for num_splits in (3,) if IS_INTERPRETED else (1, 3, 16):
        assert torch.equal(attend(batch, num_splits), expected), num_splits
    torch.testing.assert_close(
        expected.double().cpu(),
        exact(batch, SCALE),
        rtol=0,
        atol={torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype],
    )
    assert torch.equal(expected[-2:], torch.zeros_like(expected[-2:]))


@pytest.mark.kernel_only
@pytest.mark.parametrize("chunk_tiles", [1, TRITON_CHUNK_TILES])
@BY_HEADS
def test_a_row_across_chunks_has_the_same_bits_in_every_form(device, heads, dtype, chunk_tiles):
    """As one row, a chain, and a tree whose prefix ends before, at and after a chunk's edge."""
    length = 1030
    path = random_block(0, length, **heads)

    def last_row(prefix_len: int, *, is_tree: bool = False, num_splits: int = 3):
        block = dataclasses.replace(
            path,
            q=path.q[prefix_len:],
            prefix_len=prefix_len,
            parents=tuple(range(-1, length - prefix_len - 1)) if is_tree else None,
        )
        batch = pack([block], page_size=16, device=device, dtype=dtype)
        return attend(batch, num_splits, chunk_tiles)[-1]

    plain = last_row(length - 1)
    assert torch.equal(last_row(length - 1, is_tree=True), plain)
    for prefix_len in (1025, 1024, 1022) if IS_INTERPRETED else (1025, 1024, 1020, 955):
        assert torch.equal(last_row(prefix_len), plain), prefix_len
        assert torch.equal(last_row(prefix_len, is_tree=True), plain), prefix_len
    if not IS_INTERPRETED:
        assert torch.equal(last_row(0, num_splits=0), plain)


@pytest.mark.kernel_only
def test_requests_that_pad_a_captured_step(device):
    """Repeats of the last row_indptr, whose other fields are stale, beside padding rows."""
    blocks = [random_block(70, (-1, 0, 0)), random_block(200, 2)]
    batch = pack(blocks, page_size=4, device=device, num_padding_rows=4)
    metadata = batch.metadata
    stale = torch.tensor([0, 1, 0, 1, 0]).to(device)
    padded = dataclasses.replace(
        metadata,
        req_idx=metadata.req_idx[stale],
        prefix_len=metadata.prefix_len[stale],
        row_indptr=torch.tensor([0, 3, 5, 5, 5, 5]).int().to(device),
        is_chain=metadata.is_chain[stale],
    )
    expected = attend(batch, 1)
    for num_splits in (0, 1, 3, None):
        out = attend(dataclasses.replace(batch, metadata=padded), num_splits)
        assert torch.equal(out, expected), num_splits
        assert torch.equal(out[5:], torch.zeros_like(out[5:]))


@pytest.mark.kernel_only
def test_what_a_row_does_not_see_may_be_nan(device):
    """A leaf's K and V reach neither its siblings nor their descendants."""
    block = random_block(60, deep_tree(6))
    clean = attend(pack([block], page_size=4, device=device), 1)
    leaf = 3
    block.k[60 + leaf], block.v[60 + leaf] = torch.nan, torch.nan
    batch = pack([block], page_size=4, device=device)
    others = [row for row in range(len(block.q)) if leaf not in block.path(row)]
    assert len(others) == len(block.q) - 1
    for num_splits in (0, 1):
        out = attend(batch, num_splits)
        assert torch.equal(out[others], clean[others])
        assert out[leaf].isnan().all()


@pytest.mark.kernel_only
def test_a_step_of_many_rows_has_the_bits_of_a_split_one(device):
    """Chains alone need no second kernel; padding rows are 0 all the same."""
    blocks = [random_block(100, 50), random_block(7, 20)]
    batch = pack(blocks, page_size=16, device=device, num_padding_rows=3)
    chains = dataclasses.replace(
        batch, metadata=dataclasses.replace(batch.metadata, has_trees=False)
    )
    expected = attend(batch, 2, TRITON_CHUNK_TILES)
    for step in (batch, chains):
        out = attend(step, 0, TRITON_CHUNK_TILES)
        assert torch.equal(out, expected)
    assert torch.equal(expected[-3:], torch.zeros_like(expected[-3:]))


@pytest.mark.kernel_only
@pytest.mark.parametrize("window", [0, 100])
@BY_HEADS
def test_steps_of_few_rows_per_request_have_the_bits_of_any(
    device, heads, dtype, window, monkeypatch
):
    """Programs are dealt out by length: a long context gets many, the others one each."""
    few_rows = few_rows_of(heads["num_heads"], heads["num_kv_heads"])
    chains = [(1100, few_rows), (3, 1), (60, few_rows), (0, 1), (64, 1), (130, few_rows)]
    trees = [(1020, few_rows), (62, few_rows), (5, 1)]
    blocks = [random_block(prefix, deep_tree(4)[:rows], **heads) for prefix, rows in trees]
    blocks += [random_block(prefix, rows, **heads) for prefix, rows in chains]
    batch = pack(blocks, page_size=4, device=device, dtype=dtype, window=window, num_padding_rows=3)

    def of_few_rows() -> tuple[torch.Tensor, set[bool]]:
        """Return the outputs, and whether programs took all chunks of their rows."""
        metadata = dataclasses.replace(batch.metadata, most_rows=few_rows)
        out = attend(dataclasses.replace(batch, metadata=metadata), None)
        ((cut, tables),) = metadata.plans.items()
        assert cut.rows == few_rows and cut.is_sequential
        return out, {bool(line[10]) for line in tables.blocks.tolist() if line[1] > line[0]}

    expected = attend(batch, 3)
    assert torch.equal(attend(batch, 0), expected)
    out, are_whole = of_few_rows()
    assert torch.equal(out, expected)
    assert window or are_whole == {True, False}
    monkeypatch.setattr("shared.kernels.tree_attention._MAX_SPLIT_STATES", 0)
    out, are_whole = of_few_rows()
    assert torch.equal(out, expected)
    assert are_whole == {True}
