"""Latent attention against a row-by-row oracle; bits are in test_tree_attention_bitwise.py."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels import latent_attention as module
from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.latent_attention import (
    attend_latents,
    latent_attention,
    latent_attention_ref,
    num_head_groups,
    prepared_latents,
)
from tests.kernels.attention_cases import pack, random_block
from tests.kernels.test_tree_attention import BUSHY, TOLERANCE, mixed_blocks
from tests.marks import EXHAUSTIVE

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCALE = 0.2
VALUE = 16
OF_MODELS = [EXHAUSTIVE] if IS_INTERPRETED else []
HEADS = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 24}


def compare(batch, *, value_width=VALUE, dtype=torch.float32):
    """Compare the op with the oracle; return its output."""
    out = latent_attention(batch.q, batch.k_cache, batch.metadata, SCALE, value_width=value_width)
    assert out.dtype == dtype and out.shape == (*batch.q.shape[:2], value_width)
    want = latent_attention_ref(
        batch.q, batch.k_cache, batch.metadata, SCALE, value_width=value_width
    )
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[dtype])
    return out


@pytest.mark.parametrize("page_size", [1, 64] if IS_INTERPRETED else [1, 4, 16, 64])
def test_mixed_batch_matches_the_oracle_over_poisoned_permuted_pages(device, page_size):
    blocks = mixed_blocks(page_size, **HEADS)
    batch = pack(blocks, page_size=page_size, device=device, num_padding_rows=3)
    out = compare(batch)
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    assert launch_counts().get("latent_attention", 0) == int(use_triton(batch.q))


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_width", "dtype"),
    [
        (3, 28, 20, torch.float32),
        (24, 24, 16, torch.bfloat16),
        pytest.param(16, 576, 512, torch.bfloat16, marks=OF_MODELS),
        pytest.param(128, 576, 512, torch.bfloat16, marks=OF_MODELS),
    ],
)
def test_shapes_and_dtypes(device, num_heads, head_dim, value_width, dtype):
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": head_dim}
    blocks = [random_block(61, (-1, 0, 0, 2, 1), **heads), random_block(2, 4, **heads)]
    batch = pack(blocks, page_size=4, device=device, dtype=dtype)
    compare(batch, value_width=value_width, dtype=dtype)


@pytest.mark.parametrize("window", [5, 70])
def test_window_hides_old_tokens_and_pages_given_back(device, window):
    blocks = [random_block(140, BUSHY[:5], **HEADS), random_block(66, 7, **HEADS)]
    compare(pack(blocks, page_size=4, device=device, window=window))


@pytest.mark.kernel_only
def test_however_chunks_are_dealt_out_the_bits_are_the_same(device):
    """In sequence, by one program, by several: over no chunk, and over three with a tree's own."""
    blocks = [
        random_block(3, (-1, 0), **HEADS),
        random_block(1100, (-1, 0), **HEADS),
        random_block(511, (-1,), **HEADS),
        random_block(1023, 1, **HEADS),
    ]
    batch = pack(blocks, page_size=16, device=device)
    arguments = (batch.q, batch.k_cache, batch.metadata, SCALE)
    compare(batch)
    ways = [attend_latents(*arguments, value_width=VALUE, num_splits=n) for n in (0, 1, 2)]
    assert all(torch.equal(way, ways[0]) for way in ways[1:])


@pytest.mark.gpu
@pytest.mark.skipif(
    IS_INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of Hopper",
)
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_splits", [0, 1, None])
def test_the_kernel_of_hopper_has_the_bits_of_the_plain_one(monkeypatch, num_heads, num_splits):
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 576}
    blocks = [random_block(1100, (-1, 0, 0, 2), **heads), random_block(70, 3, **heads)]
    batch = pack(blocks, page_size=16, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert module.hopper_kernel() is not None

    def attend():
        arguments = (batch.q, batch.k_cache, batch.metadata, SCALE)
        return attend_latents(*arguments, value_width=512, num_splits=num_splits)

    of_hopper = attend()
    monkeypatch.setattr(module, "hopper_kernel", lambda: None)
    assert torch.equal(attend(), of_hopper)


def test_neither_a_cpu_nor_the_interpreter_asks_for_the_kernel_of_hopper(monkeypatch):
    monkeypatch.setattr(module, "suits_hopper", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(module, "hopper_kernel", lambda: pytest.fail("asked"))
    heads = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 144}
    batch = pack([random_block(3, (-1, 0), **heads)], page_size=4, device=torch.device("cpu"))
    compare(batch, value_width=128)


@pytest.mark.kernel_only
def test_what_is_prepared_is_what_layers_look_for(device):
    batch = pack([random_block(3, 2, **HEADS)], page_size=4, device=device)
    metadata = prepared_latents(batch.metadata, batch.q.dtype, 4, VALUE)
    assert not batch.metadata.plans and len(metadata.plans) == 1
    latent_attention(batch.q, batch.k_cache, metadata, SCALE, value_width=VALUE)
    assert len(metadata.plans) == 1


def test_heads_are_dealt_out_evenly():
    from triton import language

    groups = [num_head_groups(heads, language.bfloat16) for heads in (1, 16, 64, 96, 128, 130)]
    assert groups == [1, 1, 1, 2, 2, 5]
