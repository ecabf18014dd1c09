"""Latents in their pages, and queries begun: against the reference and by hand."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.latent_store import latent_store, latent_store_ref

NOPE, RANK, ROPE = 12, 20, 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize("num_heads", [1, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_match_the_reference(device, num_heads, dtype):
    num_rows, slots = 5, [9, 2, 0, 14, 5]
    addends = torch.randn(3, num_rows, RANK + ROPE, device=device)
    norm = torch.rand(RANK, device=device).to(dtype)
    q = torch.randn(num_rows, num_heads, NOPE + ROPE, device=device).to(dtype)
    angles = torch.rand(num_rows, ROPE, device=device)
    cos, sin = angles.cos().chunk(2, dim=1)[0], angles.sin().chunk(2, dim=1)[0]
    mapping = torch.tensor(slots, dtype=torch.int32, device=device)
    cache = torch.full((16, 1, RANK + ROPE), torch.nan, device=device).to(dtype)
    want_cache = cache.clone()
    arguments = (addends, norm, 1e-5, q, cos, sin)
    query = latent_store(*arguments, cache, mapping)
    want = torch.empty_like(query)
    latent_store_ref(*arguments, want_cache, mapping, want)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(cache, want_cache, equal_nan=True, **close)
    torch.testing.assert_close(query[..., RANK:], want[..., RANK:], **close)


def test_by_hand(device):
    """One row: its latent divided by its root mean square, the pairs (i, i + 1) turned by 90°."""
    row = torch.tensor([[[3.0, 4.0, 3.0, 4.0, 1.0, 2.0, 5.0, 6.0]]], device=device)
    q = torch.arange(6.0, device=device).view(1, 1, 6)
    cos, sin = torch.zeros(1, 2, device=device), torch.ones(1, 2, device=device)
    cache = torch.zeros(4, 1, 8, device=device)
    slot = torch.tensor([3], dtype=torch.int32, device=device)
    norm = torch.tensor([1.0, 1.0, 2.0, 1.0], device=device)
    query = latent_store(row, norm, 0.0, q, cos, sin, cache, slot)
    root = 12.5**0.5
    want = torch.tensor([3 / root, 4 / root, 6 / root, 4 / root, -5, -6, 1, 2], device=device)
    torch.testing.assert_close(cache[3, 0], want)
    assert torch.equal(cache[:3], torch.zeros_like(cache[:3]))
    assert query[0, 0, 4:].tolist() == [-4, -5, 2, 3]
