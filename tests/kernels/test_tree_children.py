"""The best children of rows of logits: which, in which order, with which log-probabilities."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.tree_children import ChildNoise, best_children
from tests.kernels.noise_seeds import int64
from tests.reference.noise import gumbel

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INF, NAN = math.inf, math.nan
LARGEST = float(np.finfo(np.float32).max)

# numpy, which interprets the kernels, warns of quotients beyond float32.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def oracle(row: list[float], count: int) -> list[tuple[float, int]]:
    """Return (log-probability, draft id) of the best children of a row of float32 values."""
    row = [-INF if math.isnan(x) else min(x, LARGEST) for x in row]
    largest = max(row)
    if largest == -INF:
        return [(-INF, i) for i in range(min(count, len(row)))]
    log_total = math.log(math.fsum(math.exp(x - largest) for x in row))
    best = sorted(range(len(row)), key=lambda i: -row[i])[:count]  # stable: ties by lower id
    return [(row[i] - largest - log_total, i) for i in best]


def check(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    count: int,
    noise: ChildNoise | None,
    rows: list[list[float]],
) -> None:
    """Compare with the oracle's choice from `rows`, the perturbed logits."""
    score, token = best_children(logits, target_ids, count, noise)
    assert score.shape == token.shape == (len(rows), count)
    assert score.dtype == torch.float32 and token.dtype == torch.int32
    for row, got_score, got_token in zip(rows, score.tolist(), token.tolist(), strict=True):
        want = oracle(row, count)
        want += [(-INF, 0)] * (count - len(want))
        assert got_token == [int(target_ids[i]) for _, i in want]
        with np.errstate(over="ignore"):
            value = np.array([value for value, _ in want]).astype(np.float32)
        assert got_score == pytest.approx(value.tolist(), rel=1e-6, abs=2e-6)
        assert all(value <= 0 for value in got_score)


def random_rows(rng: random.Random, width: int) -> list[list[float]]:
    gauss = [rng.gauss(0, 3) for _ in range(width)]
    rows = [
        gauss,
        [float(round(x)) for x in gauss],
        [rng.choice((x, -INF, NAN)) for x in gauss],
        [rng.choice((0.0, -0.0, 1e-45, -1e-45)) for _ in gauss],
        [x * 1e38 for x in gauss],
        [rng.choice((x, NAN, INF)) for x in gauss],
        [NAN] * width,
        [-INF] * width,
    ]
    return [np.array(row, dtype=np.float64).astype(np.float32).tolist() for row in rows]


def random_ids(rng: random.Random, width: int, device: torch.device) -> torch.Tensor:
    return int64(sorted(rng.sample(range(3 * width), width)), device)


@pytest.mark.parametrize(
    ("width", "count"), [(1, 1), (3, 8), (16, 16), (1000, 1), (1024, 10), (1025, 3), (2500, 16)]
)
def test_greedy_rows(device: torch.device, width: int, count: int) -> None:
    rng = random.Random(width)
    rows = random_rows(rng, width)
    check(torch.tensor(rows).to(device), random_ids(rng, width, device), count, None, rows)
    launched = int(use_triton(torch.empty(0, device=device)))
    for name in ("chunk_children", "merge_children"):
        assert launch_counts().get(name, 0) == launched


def test_ties_across_chunks_go_to_the_lower_id(device: torch.device) -> None:
    width = 2100
    ids = torch.arange(width, device=device) + 7
    logits = torch.zeros((2, width), device=device)
    logits[1, [2099, 1024, 1023, 5]] = 3.0
    score, token = best_children(logits, ids, 6)
    assert token.tolist() == [[7, 8, 9, 10, 11, 12], [12, 1030, 1031, 2106, 7, 8]]
    assert score[0].tolist() == pytest.approx([-math.log(width)] * 6)
    assert len(set(score[1, :4].tolist())) == len(set(score[1, 4:].tolist())) == 1


@pytest.mark.parametrize("width", [5, 1100])
def test_random_rows_rank_with_the_targets_noise(device: torch.device, width: int) -> None:
    """Noise is that of target ids at the children's position; rows of T = 0 have none."""
    rng = random.Random(width)
    per_request = 2
    requests = [  # temperature, seed, position
        (0.0, 3, 5),
        (0.7, 2**64 - 5, 2**31 + 6),
        (1e-9, 11, 0),
        (3.0, 7, 100),
    ]
    logits = random_rows(rng, width)
    target_ids = random_ids(rng, width, device)
    depth = 3
    rows = []
    for i, row in enumerate(logits):
        temperature, seed, position = requests[i // per_request]
        if temperature > 0:
            heat = np.float32(max(temperature, 1e-6))
            with np.errstate(over="ignore", invalid="ignore"):
                row = [
                    float(np.float32(x) / heat + gumbel(seed, position + depth, int(token)))
                    for x, token in zip(row, target_ids.tolist(), strict=True)
                ]
        rows.append(row)
    temperatures, seeds, positions = zip(*requests, strict=True)
    noise = ChildNoise(
        temperature=torch.tensor(temperatures).to(device),
        seed=int64(list(seeds), device),
        position=int64(list(positions), device),
        depth=depth,
    )
    check(torch.tensor(logits).to(device), target_ids, 4, noise, rows)


def test_a_row_is_the_same_whoever_is_beside_it(device: torch.device) -> None:
    """Nor does it matter how many children are wanted, or whether others draw noise."""
    width = 1500
    logits = torch.randn(6, width + 1).to(device)
    ids = torch.arange(width, device=device)
    want = [best_children(row[:-1].clone()[None], ids, 16) for row in logits]
    noise = ChildNoise(
        temperature=torch.tensor([0.0, 0.9, 0.0]).to(device),
        seed=int64([1, 2, 3], device),
        position=int64([4, 5, 6], device),
        depth=0,
    )
    for count, row_noise in ((16, None), (5, None), (7, noise)):
        score, token = best_children(logits[:, :-1], ids, count, row_noise)
        for row in range(6):
            if row_noise is not None and row in (2, 3):
                continue
            assert torch.equal(score[row], want[row][0][0, :count])
            assert torch.equal(token[row], want[row][1][0, :count])
