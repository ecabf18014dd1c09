"""What top-k, top-p and min-p keep, to the token at the boundary.

A seed that gives a token noise 36 shows in one sample whether the filters keep that token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.kernels.sampling import sample
from tests.kernels.noise_seeds import lucky_seed
from tests.kernels.sampling_oracle import Row, arguments, check_rows
from tests.marks import IS_INTERPRETED, exhaustive_if_interpreted

INF, NAN = math.inf, math.nan
LN2 = float(np.float32(math.log(2)))


def survivors(device: torch.device, logits: Sequence[float], **filters: float) -> set[int]:
    """Return the ids that can be sampled."""
    rows = [Row(logits=logits, seed=lucky_seed(i), **filters) for i in range(len(logits))]
    return set(sample(*arguments(rows, device)).tolist())


# The oracle says the same, by which the tests below judge the kernel.
@exhaustive_if_interpreted
def test_filters_keep_what_they_say(device: torch.device) -> None:
    logits = [math.log(2), math.log(4), 0.0, 0.0]  # probabilities 1/4, 1/2, 1/8, 1/8
    assert survivors(device, logits) == {0, 1, 2, 3}
    assert survivors(device, logits, top_k=1) == {1}
    assert survivors(device, logits, top_k=3) == {0, 1, 2}
    assert survivors(device, logits, top_p=0.49) == {1}
    assert survivors(device, logits, top_p=0.51) == {0, 1}
    assert survivors(device, logits, top_p=0.76) == {0, 1, 2}
    assert survivors(device, logits, top_p=0.88) == {0, 1, 2, 3}
    # renormalised over the survivors of top-k: 1/3, 2/3
    assert survivors(device, logits, top_k=2, top_p=0.66) == {1}
    assert survivors(device, logits, top_k=2, top_p=0.67) == {0, 1}
    assert survivors(device, logits, min_p=0.24) == {0, 1, 2, 3}
    assert survivors(device, logits, min_p=0.26) == {0, 1}
    assert survivors(device, logits, min_p=1.0) == {1}
    # relative to the tempered distribution: T = 2 gives 1, 1/sqrt(2), 1/2, 1/2
    assert survivors(device, logits, min_p=0.26, temperature=2.0) == {0, 1, 2, 3}


def check_boundaries(cases: Sequence[Row], device: torch.device) -> None:
    """Check that the last survivor of each case can be sampled and that the next token cannot."""
    rows, is_kept = [], []
    for case in cases:
        order, count = case.ranking(), len(case.kept())
        assert case.kept() == order[:count]
        for token in order[count - 1 : count + 1]:
            rows.append(replace(case, seed=lucky_seed(token, case.position)))
            is_kept.append(token == order[count - 1])
            assert (rows[-1].token() == token) == is_kept[-1]
    assert not all(is_kept)
    check_rows(rows, device)


def near(value: float) -> list[float]:
    """Return a float32 and its two neighbours."""
    middle = np.float32(value)
    return [float(np.nextafter(middle, np.float32(limit))) for limit in (0, value, 2)]


def test_top_k_cuts_ties_by_lower_id(device: torch.device) -> None:
    cases = [
        Row(logits=[0.0] * 8, top_k=1),
        Row(logits=[0.0] * 8, top_k=5),
        Row(logits=[-0.0, 0.0, -0.0, 0.0], top_k=2),
        Row(logits=[1.0, 3.0, 1.0, 2.0, 1.0], top_k=3),
        Row(logits=[1.0, 3.0, 1.0, 2.0, 1.0], top_k=4, temperature=0.25),
        Row(logits=[NAN, -5.0, NAN, -5.0, -6.0], top_k=1),
        Row(logits=[2.0, 1.0, 0.0], top_k=3),
        Row(logits=[2.0, 1.0, 0.0], top_k=2**31 - 1),
        Row(logits=[-1e30, -2e30, -1e30], top_k=1),
        Row(logits=[INF, 1.0, INF], top_k=1),
    ]
    check_boundaries(cases, device)


@pytest.mark.parametrize("size", [2, 8])
def test_top_p_is_reached_exactly(device: torch.device, size: int) -> None:
    """Equal logits weigh exactly 1 each: a prefix of r of 8 reaches r/8 and not one ulp more."""
    cases = [
        Row(logits=[0.5] * size, top_p=top_p)
        for reached in range(1, size, 6 if IS_INTERPRETED else 3)
        for top_p in near(reached / size)
    ]
    cases += [Row(logits=[0.5] * size, top_p=top_p) for top_p in (0.0, 1e-30, 1 - 2**-24)]
    check_boundaries(cases, device)


def test_top_p_near_ties(device: torch.device) -> None:
    """top_p is the float32 nearest to the mass of a prefix, and its neighbours."""
    rng = random.Random(3)
    shapes: list[Row] = [
        Row(logits=[0.0, -LN2, 0.0, -LN2, -LN2, -2 * LN2]),
        Row(logits=[rng.gauss(0, 1) for _ in range(16)]),
        Row(logits=[rng.gauss(0, 6) for _ in range(16)], temperature=1.7),
        Row(logits=[float(rng.randint(-1, 1)) for _ in range(16)]),
        Row(logits=[rng.gauss(0, 2) for _ in range(16)], top_k=7),
        Row(logits=[100 + rng.random() * 1e-5 for _ in range(16)]),
    ]
    if IS_INTERPRETED:
        shapes = shapes[::2]
    else:
        shapes += [Row(logits=[rng.gauss(0, 3) for _ in range(500)]) for _ in range(6)]
    cases = []
    for shape in shapes:
        x, order = shape.scaled(), shape.kept()
        weights = [math.exp(x[i] - x[order[0]]) for i in order]
        ranks = (2,) if IS_INTERPRETED else range(1, min(6, len(order)))
        for rank in ranks:
            mass = math.fsum(weights[:rank]) / math.fsum(weights)
            cases += [replace(shape, top_p=top_p) for top_p in near(mass)]
    check_boundaries(cases, device)


def test_min_p_is_relative_to_the_largest(device: torch.device) -> None:
    just_above_half = float(np.nextafter(np.float32(-LN2), np.float32(0)))
    cases = [
        Row(logits=[0.0, -LN2, just_above_half], min_p=0.5),
        Row(logits=[9.0, 3.0, 9.0, 8.99999], min_p=1.0),
        Row(logits=[3.0, 2.0, 1.0, 0.0], min_p=0.3),
        Row(logits=[3.0, 2.0, 1.0, 0.0], min_p=0.3, temperature=0.5),
        Row(logits=[3.0, 2.0, 1.0, 0.0], min_p=0.3, temperature=4.0),
        Row(logits=[-700.0, -701.0, -720.0], min_p=1e-6),
    ]
    check_boundaries(cases, device)


def test_filters_apply_in_order(device: torch.device) -> None:
    """top-p renormalises over top-k's survivors; min-p compares with the largest alone."""
    probabilities = [0.4, 0.3, 0.2, 0.1]
    logits = [math.log(p) for p in probabilities]
    cases = [
        Row(logits=logits, top_k=2, top_p=0.56),  # 4/7 alone reaches it
        Row(logits=logits, top_k=2, top_p=0.58),
        Row(logits=logits, top_k=3, top_p=0.7),
        Row(logits=logits, top_p=0.95, min_p=0.4),
        Row(logits=logits, top_k=3, top_p=0.95, min_p=0.6),
        Row(logits=logits, top_k=1, top_p=0.01, min_p=1.0),
    ]
    assert [len(case.kept()) for case in cases] == [1, 2, 2, 3, 2, 1]
    check_boundaries(cases, device)


def wide_cases() -> list[Row]:
    """Return rows of several chunks, the last one not full, that keep few tokens or most."""
    rng = random.Random(11)
    width = 2300 if IS_INTERPRETED else 20_011
    normal = [rng.gauss(0, 2.5) for _ in range(width)]
    # Ties on both sides of the borders between chunks of 1024 tokens.
    tied = [1.0 if 1000 <= i < 1050 or 2040 <= i < 2060 else -1.0 for i in range(width)]
    return [
        Row(logits=normal, top_k=50),
        Row(logits=normal, top_p=0.9),
        Row(logits=normal, top_k=40, top_p=0.8),
        Row(logits=normal, min_p=0.02),
        Row(logits=normal, temperature=0.2, top_k=300),
        Row(logits=normal, temperature=2.0, top_p=0.999),
        Row(logits=tied, top_k=25),
        Row(logits=tied, top_k=60),
        Row(logits=tied, top_k=1500),
        Row(logits=[0.25] * width, top_p=0.5),
    ]


@pytest.mark.parametrize("case", wide_cases(), ids=range(10))
def test_boundaries_in_rows_of_several_chunks(device: torch.device, case: Row) -> None:
    check_boundaries([case], device)


def test_rows_that_keep_more_than_a_list_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They search the whole vocabulary, to the same end."""
    monkeypatch.setattr("shared.kernels.sampling_filters.CAPACITY", 32)
    cases = wide_cases()
    check_boundaries([cases[i] for i in ((0, 7) if IS_INTERPRETED else (0, 6, 7))], device)
    check_boundaries([cases[i] for i in ((2,) if IS_INTERPRETED else (1, 2))], device)


def test_rows_whose_filters_reach_where_nothing_has_probability(device: torch.device) -> None:
    rng = random.Random(12)
    normal = [rng.gauss(0, 2.5) for _ in range(1500)]
    rows = [
        Row(logits=normal, temperature=0.01, top_k=900, seed=1),
        Row(logits=normal, temperature=0.01, top_k=900, top_p=0.9999999, seed=2),
        Row(logits=normal, min_p=1e-30, seed=3),
        Row(logits=[*normal, INF], top_k=2, top_p=0.9, seed=4),
        Row(logits=[value * 1e37 for value in normal], top_k=1100, seed=5),
        Row(logits=[-INF] * 1490 + [0.0, NAN, -1.0], top_k=1040, seed=lucky_seed(1039)),
    ]
    check_rows(rows, device)


def test_a_filtered_row_among_rows_without_filters(device: torch.device) -> None:
    rng = random.Random(5)
    logits = [rng.gauss(0, 2) for _ in range(1300)]
    rows = [
        Row(logits=logits, temperature=0.0, top_k=3),
        Row(logits=logits, temperature=0.9, seed=3),
        Row(logits=logits, temperature=0.9, seed=3, top_p=0.6),
        Row(logits=logits, temperature=0.9, seed=3, top_k=1300),
        Row(logits=[-INF] * 1300, top_k=7, top_p=0.5),
    ]
    check_rows(rows, device)
