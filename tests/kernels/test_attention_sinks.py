"""Attention with sinks: against the oracle, and with bits that no cut of the work changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shared.kernels.tree_attention import AttentionParams, attend_in_chunks
from tests.kernels.attention_cases import Batch, attention_of, exact, pack, random_block

SCALE = 0.25
# Groups of 3 heads, which both backends pad.
HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)
# One that takes nearly all of the weight, one that takes none.
SINKS = torch.tensor([0.5, 9.0, -2.0, -1e30, 2.5, 0.0])


def attend(batch: Batch, sinks: torch.Tensor | None) -> torch.Tensor:
    return attention_of(batch, SCALE, sinks=sinks)


def mixed(device: torch.device, window: int = 0) -> Batch:
    blocks = [
        random_block(0, 1, **HEADS),
        random_block(140, BUSHY, **HEADS),
        random_block(63, 5, **HEADS),
        random_block(200, (-1,), **HEADS),
    ]
    return pack(blocks, page_size=4, device=device, window=window, num_padding_rows=2)


@pytest.mark.parametrize("window", [0, 20])
def test_sinks_take_their_share_of_the_weight(device: torch.device, window: int) -> None:
    batch = mixed(device, window)
    out = attend(batch, SINKS.to(device))
    expected = exact(batch, SCALE, SINKS.to(device))
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=2e-5)
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))
    without = attend(batch, None)
    assert (out - without).abs().amax(dim=(0, 2)).gt(1e-2).tolist() == [
        weight > -1e30 for weight in SINKS.tolist()
    ]
    assert torch.equal(out[:, 3], without[:, 3]), "a sink without weight must not change a bit"


@pytest.mark.kernel_only
def test_splits_do_not_matter(device: torch.device) -> None:
    """States of chunks are folded first, whoever folds them; the sink comes last."""
    blocks = [
        random_block(1021, (-1, 0, 0, 2), **HEADS),
        random_block(1087, 3, **HEADS),
        random_block(130, (-1,), **HEADS),
    ]
    batch = pack(blocks, page_size=4, device=device)
    outputs = [
        attend_in_chunks(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.metadata,
            AttentionParams(scale=SCALE, sinks=SINKS.to(device)),
            num_splits=num_splits,
            chunk_tiles=1,
        )
        for num_splits in (0, 3)
    ]
    assert torch.equal(*outputs)
    expected = exact(batch, SCALE, SINKS.to(device))
    torch.testing.assert_close(outputs[0].double().cpu(), expected, rtol=0, atol=2e-5)


def test_bits_of_a_row_do_not_depend_on_the_others(device: torch.device) -> None:
    """A row alone, the last of a chain, and a leaf of a tree, beside others or not."""
    path = random_block(0, 131, **HEADS)

    def last_row(prefix_len: int, *, is_tree: bool, others: int) -> torch.Tensor:
        num_rows = 131 - prefix_len
        block = dataclasses.replace(
            path,
            q=path.q[prefix_len:],
            prefix_len=prefix_len,
            parents=tuple(range(-1, num_rows - 1)) if is_tree else None,
        )
        neighbours = [random_block(30 * i, 1 + i, **HEADS) for i in range(others)]
        batch = pack([*neighbours, block], page_size=16, device=device)
        return attend(batch, SINKS.to(device))[-1]

    alone = last_row(130, is_tree=False, others=0)
    assert alone.isfinite().all()
    for prefix_len, is_tree, others in ((130, True, 4), (127, True, 1), (120, False, 0)):
        assert torch.equal(last_row(prefix_len, is_tree=is_tree, others=others), alone)
