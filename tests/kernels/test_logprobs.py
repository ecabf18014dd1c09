"""Log-probabilities against a softmax in float64, and the order of ties."""

from __future__ import annotations

import math
import os

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.logprobs import chosen_logprobs

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def check(
    logits: torch.Tensor, rows: list[int], tokens: list[int], num_top: int, device: torch.device
) -> None:
    """Compare with a stable sort and a softmax in float64."""
    out = chosen_logprobs(
        logits.to(device),
        torch.tensor(rows, dtype=torch.int64).to(device),
        torch.tensor(tokens, dtype=torch.int32).to(device),
        num_top=num_top,
    )
    exact = torch.log_softmax(logits.double(), dim=-1)[rows]
    order = (logits + 0.0)[rows].sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(out.top_ids.cpu(), order)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.top.cpu().double(), exact.gather(1, order), **close)
    chosen = exact.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(out.chosen.cpu().double(), chosen, **close)


@pytest.mark.parametrize("width", [1, 2, 37, 1024, 1025, 3000])
def test_random_rows(device: torch.device, width: int) -> None:
    logits = torch.randn(6, width) * 5
    rows = [4, 0, 5]
    tokens = [width - 1, 0, width // 2]
    for num_top in (0, 1, min(3, width), min(20, width)):
        check(logits, rows, tokens, num_top, device)
    assert launch_counts().get("logprobs", 0) == 4 * int(use_triton(logits.to(device)))


def test_ties_go_to_the_lower_id_across_chunks(device: torch.device) -> None:
    logits = torch.full((4, 2500), -2.0)
    logits[0, [1023, 1024, 2499, 5]] = 3.0
    logits[1, [2048, 0]] = torch.tensor([0.0, -0.0])
    logits[2, 1500:] = 1.0
    check(logits, [0, 1, 2, 3], [1024, 2048, 1500, 0], 6, device)


def test_forbidden_tokens(device: torch.device) -> None:
    """Whole chunks of -inf add nothing, and -inf is listed by id once nothing else is left."""
    logits = torch.full((2, 2100), -math.inf)
    logits[0, [2050, 7]] = torch.tensor([-700.0, -701.0])
    logits[1, 1024] = 1e30
    out = chosen_logprobs(
        logits.to(device),
        torch.arange(2).to(device),
        torch.tensor([7, 1024], dtype=torch.int32).to(device),
        num_top=4,
    )
    assert out.top_ids.tolist() == [[2050, 7, 0, 1], [1024, 0, 1, 2]]
    assert out.top[:, 2:].eq(-math.inf).all() and out.top[1, 0] == out.chosen[1] == 0.0
    torch.testing.assert_close(
        out.chosen[0].item(), -1 - math.log1p(math.exp(-1)), rtol=1e-4, atol=0
    )


def test_a_row_has_the_same_bits_in_any_company(device: torch.device) -> None:
    width = 1500 if IS_INTERPRETED else 128256
    logits = (torch.randn(5, width) * 4).to(device)
    tokens = torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32).to(device)
    rows = torch.arange(5).to(device)
    together = chosen_logprobs(logits, rows, tokens, num_top=8)
    for row in range(5):
        at = rows[row : row + 1]
        alone = chosen_logprobs(logits, at, tokens[row : row + 1], num_top=1 + row)
        assert torch.equal(alone.chosen[0], together.chosen[row])
        assert torch.equal(alone.top[0], together.top[row, : 1 + row])
        assert torch.equal(alone.top_ids[0], together.top_ids[row, : 1 + row])


def test_no_rows(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    out = chosen_logprobs(torch.randn(2, 9).to(device), none, none.int(), num_top=3)
    assert out.chosen.shape == (0,) and out.top.shape == out.top_ids.shape == (0, 3)
