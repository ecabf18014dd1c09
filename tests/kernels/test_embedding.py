"""Embeddings of tokens that the host names, and of those that only the device knows."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.embedding import embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_the_table(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(11, 70).to(device, dtype)
    token_ids = torch.tensor([10, 0, 3, 3, 7]).to(device)
    assert torch.equal(embed(token_ids, table), table[token_ids])
    assert torch.equal(embed(token_ids.int(), table), table[token_ids])
    assert embed(token_ids[:0], table).shape == (0, 70)
    assert launch_counts().get("embed", 0) == 2 * int(use_triton(table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_times_a_multiplier_are_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(11, 70).to(device, dtype)
    token_ids = torch.tensor([10, 0, 3]).to(device)
    want = (table[token_ids].double() * 7.25).to(dtype)
    assert torch.equal(embed(token_ids, table, multiplier=7.25), want)


def test_rows_may_name_roots_instead_of_tokens(device: torch.device) -> None:
    table = torch.randn(11, 6).to(device)
    roots = torch.tensor([4, 9, 0, 10]).to(device)
    token_ids = torch.tensor([0, 5, 0, 0, 0, 7]).to(device)
    root_idx = torch.tensor([0, -1, 3, 1, -1, 2]).to(device)
    assert torch.equal(embed(token_ids, table, roots, root_idx), table[[4, 5, 10, 9, 0, 0]])
    none = torch.full_like(roots, -1)
    assert torch.equal(embed(roots, table, roots, none), table[roots])
