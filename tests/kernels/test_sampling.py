"""sample against a plain-Python oracle, row by row; the sort and the bisection keep the same."""

from __future__ import annotations

import math
import os

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.sampling import sample, sample_ref
from tests.kernels.sampling_oracle import kept_ids, sample_row

INF = math.inf
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def params(rows, device):
    """Return the tensors of rows of (temperature, top_k, top_p, min_p, seed, position)."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    return [
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]


def check(logits: torch.Tensor, rows, device) -> None:
    """Compare op, reference and oracle."""
    args = params(rows, device)
    out = sample(logits.to(device), *args)
    assert out.dtype == torch.int32
    # The oracle reads the float32 values that the op was given.
    columns = [column.tolist() for column in args]
    expected = [
        sample_row(row, *values)
        for row, values in zip(logits.tolist(), zip(*columns, strict=True), strict=True)
    ]
    assert out.tolist() == expected
    assert sample_ref(logits.to(device), *args).tolist() == expected


@pytest.mark.parametrize("width", [1, 2, 37, 1500])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_random_rows_match_the_oracle(device, width, spread):
    generator = torch.Generator().manual_seed(width)
    rows = [
        (temperature, top_k, top_p, min_p, seed, position)
        for position, (temperature, top_k, top_p, min_p, seed) in enumerate(
            [
                (0.0, 0, 1.0, 0.0, 1),
                (0.0, 3, 0.4, 0.2, 1),
                (1.0, 0, 1.0, 0.0, 2),
                (0.7, 5, 1.0, 0.0, -3),
                (1.3, 0, 0.9, 0.0, 4),
                (1.0, 0, 1.0, 0.1, 5),
                (0.9, 40, 0.8, 0.05, 2**62),
                (2.0, 10**6, 0.9999999, 0.0, 7),
                (1e-3, 0, 0.5, 0.0, 8),
                (50.0, 0, 0.3, 0.0, 9),
            ]
        )
    ]
    check(torch.randn(len(rows), width, generator=generator) * spread, rows, device)


@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 30, 64])
@pytest.mark.parametrize("top_p", [1.0, 0.35])
def test_ties_go_to_the_lower_id(device, top_k, top_p):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(-1, 2, (4, 64), generator=generator).float()
    logits[1] = 0.0
    logits[2, ::2] = -0.0  # equal to +0
    logits[2, 1::2] = 0.0
    check(logits, [(1.0, top_k, top_p, 0.0, 11, row) for row in range(4)], device)
    check(logits, [(0.0, top_k, top_p, 0.0, 11, row) for row in range(4)], device)


# numpy, which interprets the kernel, warns of logits / T beyond float32.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_nan_and_infinity(device):
    nan = math.nan
    logits = torch.tensor(
        [
            [nan, 1.0, nan, 2.0, -INF],
            [nan, nan, nan, nan, nan],
            [-INF, -INF, -INF, -INF, -INF],
            [nan, -INF, nan, -3.0, -INF],
            [INF, 0.0, INF, 1.0, nan],
            [3e38, -3e38, 0.0, 3e38, nan],
        ]
    )
    for row in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.5, 2, 0.9, 0.1), (1e-4, 0, 0.7, 0.0)):
        check(logits, [(*row, 3, position) for position in range(len(logits))], device)


def observed(logits, device, *, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
    """Return which ids are ever sampled, by the reference; the op must agree wherever it is run."""
    rows = [(temperature, top_k, top_p, min_p, 99, position) for position in range(48)]
    args = params(rows, device)
    values = torch.tensor([logits] * len(rows)).to(device)
    out = sample_ref(values, *args).tolist()
    count = 2 if IS_INTERPRETED else len(rows)
    assert sample(values[:count], *(column[:count] for column in args)).tolist() == out[:count]
    return set(out)


def test_filters_keep_exactly_what_they_should(device):
    # probabilities 1/4, 1/2, 1/8, 1/8
    logits = [math.log(2), math.log(4), 0.0, 0.0]
    assert observed(logits, device) == {0, 1, 2, 3}
    assert observed(logits, device, top_k=1) == {1}
    assert observed(logits, device, top_k=2) == {0, 1}
    assert observed(logits, device, top_k=3) == {0, 1, 2}
    assert observed(logits, device, top_k=4) == {0, 1, 2, 3}
    assert observed(logits, device, top_p=0.49) == {1}
    assert observed(logits, device, top_p=0.51) == {0, 1}
    assert observed(logits, device, top_p=0.76) == {0, 1, 2}
    assert observed(logits, device, top_p=0.88) == {0, 1, 2, 3}
    # renormalised over the survivors of top-k: 1/3, 2/3
    assert observed(logits, device, top_k=2, top_p=0.66) == {1}
    assert observed(logits, device, top_k=2, top_p=0.67) == {0, 1}
    assert observed(logits, device, min_p=0.24) == {0, 1, 2, 3}
    assert observed(logits, device, min_p=0.26) == {0, 1}
    assert observed(logits, device, min_p=1.0) == {1}
    # relative to the tempered distribution: T = 2 gives 1, sqrt(2), ...
    assert observed(logits, device, min_p=0.26, temperature=2.0) == {0, 1, 2, 3}


def test_the_prefix_ends_where_its_mass_reaches_top_p(device):
    """Equal logits have exactly representable masses: the boundary itself is tested."""
    assert observed([0.0] * 4, device, top_p=0.5) == {0, 1}
    assert observed([0.0] * 4, device, top_p=0.5000001) == {0, 1, 2}
    assert observed([0.0] * 4, device, top_p=0.4999999) == {0, 1}
    assert observed([0.0] * 4, device, top_p=1e-9) == {0}
    assert kept_ids([1.0, 1.0, 0.0], 2, 1.0, 0.0) == [0, 1]


def test_rows_do_not_know_each_other_and_flags_do_not_matter(device):
    logits = torch.randn(9, 300).to(device)
    rows = [(1.0 if row % 3 else 0.0, 0, 1.0, 0.0, row // 2, row) for row in range(9)]
    args = params(rows, device)
    together = sample(logits, *args)
    alone = [sample(logits[i : i + 1], *(a[i : i + 1] for a in args)).item() for i in range(9)]
    assert together.tolist() == alone
    assert sample(logits, *args, has_filters=False).tolist() == alone
    greedy = params([(0.0, *row[1:]) for row in rows], device)
    assert torch.equal(sample(logits, *greedy).long(), logits.argmax(-1))
    assert sample(logits[:0], *(a[:0] for a in args)).shape == (0,)
    assert launch_counts().get("sample", 0) == 12 * int(use_triton(logits))


@pytest.mark.parametrize("has_filters", [False, True])
def test_samples_follow_the_distribution(device, has_filters):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -2.0, 0.9, 1.4])
    count, temperature = (150 if IS_INTERPRETED else 3000), 0.8
    probabilities = torch.softmax(logits.double() / temperature, -1)
    top_k = 0
    if has_filters:
        top_k = 5
        probabilities[probabilities.argsort(descending=True)[5:]] = 0
        probabilities /= probabilities.sum()
    rows = [(temperature, top_k, 1.0, 0.0, 42, position) for position in range(count)]
    out = sample(
        logits.expand(count, -1).to(device), *params(rows, device), has_filters=has_filters
    )
    counts = torch.bincount(out.long().cpu(), minlength=8)
    is_possible = probabilities > 0
    assert counts[~is_possible].sum() == 0
    expected = probabilities[is_possible] * count
    statistic = ((counts[is_possible] - expected) ** 2 / expected).sum().item()
    assert statistic < 30  # 7 or 4 degrees of freedom: p < 1e-4
