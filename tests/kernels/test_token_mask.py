"""Token masks against a loop over rows and tokens."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.token_mask import apply_token_masks, compile_token_masks


def masks_of(allowed: list[set[int]], num_words: int) -> torch.Tensor:
    """Return the masks of sets of tokens."""
    masks = torch.zeros(len(allowed), num_words, dtype=torch.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            word = int(masks[row, token // 32]) & 0xFFFFFFFF | 1 << token % 32
            masks[row, token // 32] = word - (1 << 32) if word >> 31 else word
    return masks


@pytest.mark.parametrize("width", [5, 32, 33, 1500])
@pytest.mark.parametrize("has_ids", [False, True])
def test_only_what_is_allowed_keeps_its_logit(
    device: torch.device, *, width: int, has_ids: bool
) -> None:
    """Of the named rows; a draft's columns may be tokens of other numbers."""
    random = torch.Generator().manual_seed(width)
    most = 2 * width if has_ids else width
    ids = torch.randperm(most, generator=random)[:width] if has_ids else torch.arange(width)
    allowed = [
        {token for token in range(most) if torch.rand(1, generator=random) < share}
        for share in (0.5, 0.01, 1.0)
    ]
    rows = [3, 0, 2]
    logits = torch.randn(4, width, generator=random)
    expected = logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        for column, token in enumerate(ids.tolist()):
            if token not in tokens:
                expected[row, column] = -torch.inf
    on_device = logits.to(device)
    apply_token_masks(
        on_device,
        torch.tensor(rows, device=device),
        masks_of(allowed, -(-most // 32)).to(device),
        ids.to(device) if has_ids else None,
    )
    assert torch.equal(on_device.cpu(), expected)


def test_no_row_is_none(device: torch.device) -> None:
    logits = torch.randn(2, 40)
    on_device = logits.to(device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    apply_token_masks(on_device, none, torch.zeros(0, 2, dtype=torch.int32, device=device))
    compile_token_masks(40, device)
    assert torch.equal(on_device.cpu(), logits)
