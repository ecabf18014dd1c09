"""Soft limit of logits against tanh in float64, and the bits of a row."""

from __future__ import annotations

import torch

from shared.kernels.softcap import softcap_


def test_it_is_a_scaled_tanh(device: torch.device) -> None:
    x = torch.cat([torch.linspace(-90, 90, 999), torch.tensor([-1e30, 1e30])]).to(device)
    out = softcap_(x.clone(), 30.0)
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_bits_of_a_row_do_not_depend_on_the_batch(device: torch.device) -> None:
    logits = (torch.randn(40, 1003) * 20).to(device)
    full = softcap_(logits.clone(), 30.0)
    for row in (0, 1, 17, 39):
        assert torch.equal(softcap_(logits[row : row + 1].clone(), 30.0)[0], full[row])
    for count in (2, 3, 31):
        assert torch.equal(softcap_(logits[:count].clone(), 30.0), full[:count])
