"""The input of an EAGLE-3 layer against its parts, and the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.head_input import head_input
from shared.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 70, 128])
def test_an_embedding_and_a_hidden_row_side_by_side(
    device: torch.device, dtype: torch.dtype, width: int
) -> None:
    table = (3 * torch.randn(11, width)).to(device, dtype)
    hidden = torch.randn(5, width).to(device, dtype)
    norms = (torch.randn(width).to(device, dtype), torch.randn(width).to(device, dtype))
    token_ids = torch.tensor([10, 0, 3, 3, 7]).to(device)
    x = head_input(token_ids, table, hidden, norms, 1e-5)
    assert launch_counts().get("head_input", 0) == int(use_triton(table))
    parts = [rms_norm(table[token_ids], norms[0], 1e-5), rms_norm(hidden, norms[1], 1e-5)]
    assert x.dtype == dtype
    torch.testing.assert_close(x, torch.cat(parts, dim=1))
    assert head_input(token_ids[:0], table, hidden[:0], norms, 1e-5).shape == (0, 2 * width)
    for row in range(5):
        place = slice(row, row + 1)
        alone = head_input(token_ids[place], table, hidden[place], norms, 1e-5)
        assert torch.equal(alone, x[place])
