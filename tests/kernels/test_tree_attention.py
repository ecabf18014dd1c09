"""Tree attention against a row-by-row oracle: layouts, pages, head shapes, dtypes, windows."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.tree_attention_cpu import tree_attention_cpu
from shared.kernels.tree_attention_metadata import AttentionParams
from tests.kernels.attention_cases import attention_of, exact, pack, random_block

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_cpu(batch, scale):
    params = AttentionParams(scale=scale)
    return tree_attention_cpu(batch.q, batch.k_cache, batch.v_cache, batch.metadata, params)


def mixed_blocks(page_size: int, **heads: int):
    """Return chains and trees behind prefixes at the edges of pages and of tiles."""
    return [
        random_block(0, 1, **heads),
        random_block(page_size - 1, BUSHY, **heads),
        random_block(page_size, (-1,), **heads),
        random_block(63, (-1, 0, 1, 1, 0), **heads),
        random_block(64, 3, **heads),
        random_block(0, (-1, -1, 0, 1), **heads),
        random_block(1, 5, **heads),
    ]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_mixed_batch_matches_the_oracle_over_poisoned_permuted_pages(device, page_size):
    blocks = mixed_blocks(page_size)
    batch = pack(blocks, page_size=page_size, device=device, num_padding_rows=3)
    out = attention_of(batch, 0.25)
    torch.testing.assert_close(
        out.double().cpu(), exact(batch, 0.25), rtol=0, atol=TOLERANCE[torch.float32]
    )
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    want = on_cpu(batch, 0.25)
    torch.testing.assert_close(out, want, rtol=0, atol=TOLERANCE[torch.float32])
    assert launch_counts().get("tree_attention", 0) == int(use_triton(batch.q))


HEADS = [(1, 1, 64), (8, 1, 80), (7, 1, 96), (32, 2, 20), (4, 2, 128), (2, 2, 256), (3, 3, 17)]
DTYPES = list(TOLERANCE)
# An interpreter pads every head_dim alike for all dtypes: one for each shape in turn is enough.
HEADS_AND_DTYPES = [
    pytest.param(
        *heads,
        dtype,
        id="-".join((*map(str, heads), str(dtype).removeprefix("torch."))),
        marks=[pytest.mark.exhaustive] if IS_INTERPRETED and (shape + turn) % len(DTYPES) else [],
    )
    for shape, heads in enumerate(HEADS)
    for turn, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "dtype"), HEADS_AND_DTYPES)
def test_head_shapes_and_dtypes(device, num_heads, num_kv_heads, head_dim, dtype):
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    blocks = [random_block(61, (-1, 0, 0, 2, 1), **heads), random_block(2, 4, **heads)]
    batch = pack(blocks, page_size=4, device=device, dtype=dtype)
    scale = head_dim**-0.5
    out = attention_of(batch, scale)
    assert out.dtype == dtype
    expected = exact(batch, scale)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 64, 70])
def test_window_hides_old_tokens_and_pages_given_back(device, window):
    blocks = [
        random_block(140, BUSHY),
        random_block(66, 7),
        random_block(3, (-1, 0)),
        random_block(129, 1),
    ]
    batch = pack(blocks, page_size=4, device=device, window=window)
    out = attention_of(batch, 0.25)
    expected = exact(batch, 0.25)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_soft_cap_bends_scores(device, softcap):
    blocks = [random_block(66, BUSHY), random_block(3, 7), random_block(129, 1)]
    batch = pack(blocks, page_size=4, device=device)
    out = attention_of(batch, 0.9, softcap=softcap)
    expected = exact(batch, 0.9, softcap=softcap)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=2e-5)
    assert (exact(batch, 0.9) - expected).abs().max() > 1e-3


# numpy, which interprets the kernels, warns of infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_scores_far_beyond_a_soft_cap_are_finite(device):
    batch = pack([random_block(9, (-1, 0, 0))], page_size=4, device=device)
    out = attention_of(batch, 1e4, softcap=3.0)
    torch.testing.assert_close(
        out.double().cpu(), exact(batch, 1e4, softcap=3.0), rtol=0, atol=2e-5
    )


def test_every_row_count_up_to_a_full_tree(device):
    for num_rows in (64,) if IS_INTERPRETED else (1, 2, 17, 33, 64):
        parents = tuple((row - 1) // 3 if row else -1 for row in range(num_rows))
        blocks = [random_block(5, parents), random_block(0, num_rows)]
        batch = pack(blocks, page_size=16, device=device)
        out = attention_of(batch, 0.25)
        expected = exact(batch, 0.25)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=2e-5)


def test_a_step_without_rows(device):
    batch = pack([random_block(3, 2)], page_size=4, device=device)
    metadata = batch.metadata
    empty = type(metadata)(
        page_table=metadata.page_table,
        req_idx=metadata.req_idx[:0],
        prefix_len=metadata.prefix_len[:0],
        row_indptr=metadata.row_indptr[:1],
        path_len=metadata.path_len[:0],
        path_offset=metadata.path_offset[:0],
        is_chain=metadata.is_chain[:0],
        page_size=metadata.page_size,
    )
    out = attention_of(replace(batch, q=batch.q[:0], metadata=empty), 0.25)
    assert out.shape == (0, 2, 16)


def test_requests_without_rows_among_others(device):
    blocks = [random_block(3, 2), random_block(70, (-1, 0, 0))]
    batch = pack(blocks, page_size=4, device=device)
    metadata = batch.metadata
    where = torch.tensor([0, 0, 1, 1, 1]).to(device)
    padded = type(metadata)(
        page_table=metadata.page_table,
        req_idx=metadata.req_idx[where],
        prefix_len=metadata.prefix_len[where],
        row_indptr=torch.tensor([0, 0, 2, 2, 5, 5]).int().to(device),
        path_len=metadata.path_len,
        path_offset=metadata.path_offset,
        is_chain=metadata.is_chain[where],
        page_size=metadata.page_size,
    )
    out = attention_of(replace(batch, metadata=padded), 0.25)
    torch.testing.assert_close(out.double().cpu(), exact(batch, 0.25), rtol=0, atol=2e-5)


def test_many_requests_and_long_chunks_are_cut_into_slices(device):
    """More tiles than one slice of the CPU path holds; ragged lengths from 1 to 4 tiles."""
    count, chunk_len = (6, 70) if IS_INTERPRETED else (700, 150)
    blocks = [random_block(17 * index % 230, (-1,)) for index in range(count)]
    blocks += [random_block(40, chunk_len), random_block(130, BUSHY)]
    batch = pack(blocks, page_size=16, device=device)
    out = attention_of(batch, 0.25)
    torch.testing.assert_close(out.double().cpu(), exact(batch, 0.25), rtol=0, atol=2e-5)


def test_buffers_of_a_served_step_serve_outside_of_inference_mode(device):
    # Larger than any other test's step, so that the first call makes the buffers anew.
    with torch.inference_mode():
        blocks = [random_block(600, 40, num_heads=8, num_kv_heads=2, head_dim=64)]
        batch = pack(blocks, page_size=16, device=device)
        on_cpu(batch, 0.125)
    blocks = [random_block(61, BUSHY)]
    batch = pack(blocks, page_size=4, device=device)
    out = on_cpu(batch, 0.25)
    torch.testing.assert_close(
        out.double().cpu(), exact(batch, 0.25), rtol=0, atol=TOLERANCE[torch.float32]
    )
