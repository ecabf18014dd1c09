"""Sampling of mixed rows against the oracle, row by row, and in distribution."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.sampling import BLOCK, finite_rows, sample
from tests.kernels.noise_seeds import int64, lucky_seed
from tests.kernels.sampling_oracle import Row, arguments, check_rows

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INF, NAN = math.inf, math.nan

# numpy, which interprets the kernel, warns of quotients beyond float32.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def random_row(rng: random.Random, width: int) -> Row:
    logits = [rng.gauss(0, rng.choice((0.3, 2, 9))) for _ in range(width)]
    kind = rng.randrange(6)
    if kind == 0:
        logits = [float(rng.randint(-2, 2)) for _ in logits]
    elif kind == 1:
        logits = [rng.choice((value, -INF, NAN)) for value in logits]
    elif kind == 2:
        logits = [rng.choice((0.0, -0.0, 1e-45, -1e-45)) for _ in logits]
    elif kind == 3:
        logits = [value * 1e37 for value in logits]
    return Row(
        logits=logits,
        temperature=rng.choice((0.0, 0.01, 0.7, 1.0, 1.0, 3.0)),
        top_k=rng.choice((0, 0, 1, 2, width - 1, width, width + 7)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 1e-4, 0.0)),
        min_p=rng.choice((0.0, 0.0, 0.05, 0.6, 1.0)),
        seed=rng.getrandbits(64),
        position=rng.choice((0, rng.getrandbits(10), 2**31 + rng.getrandbits(20))),
    )


@pytest.mark.parametrize("width", [1, 2, 23, 1100])
def test_mixed_random_rows(device: torch.device, width: int) -> None:
    rng = random.Random(width)
    plain_count = 25 if width > 100 else 150
    count = 5 if IS_INTERPRETED else plain_count
    check_rows([random_row(rng, width) for _ in range(count)], device)


def test_nan_and_infinity(device: torch.device) -> None:
    rows = [
        Row(logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=5, position=9)
        for logits in (
            [NAN, 1.0, NAN, 2.0, -INF],
            [NAN, -INF, NAN, -3.0, -INF],
            [INF, 0.0, INF, 1.0, NAN],
            [3e38, -3e38, 0.0, 3e38, NAN],
        )
        for temperature in (0.0, 0.5)
        for top_k, top_p in ((0, 1.0), (2, 0.9))
    ]
    check_rows(rows, device)


@pytest.mark.parametrize("has_filters", [True, False])
def test_rows_that_are_not_all_finite_are_flagged(
    device: torch.device, *, has_filters: bool
) -> None:
    """Wherever the value stands, chunks past the first included, and whatever is sampled."""
    width = 2 * BLOCK + 3
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(1, width, generator=generator)
    places = [(value, column) for value in (NAN, INF, -INF) for column in (0, BLOCK - 1, width - 1)]
    if IS_INTERPRETED:  # each value and each column is still there
        places = places[::2]
    logits = clean.repeat(2 + len(places), 1)
    logits[1] = 3e38  # finite, though a sum of them is not
    for row, (value, column) in enumerate(places, start=2):
        logits[row, column] = value
    num_rows = len(logits)
    temperature = torch.tensor([0.0, 0.7, 1e-5]).repeat(num_rows)[:num_rows]
    args = (
        temperature,
        torch.full((num_rows,), 5 if has_filters else 0, dtype=torch.int32),
        torch.ones(num_rows),
        torch.zeros(num_rows),
        torch.arange(num_rows),
        torch.arange(num_rows),
    )
    flags = torch.full((num_rows,), 9, dtype=torch.uint8, device=device)
    on_device = [value.to(device) for value in (logits, *args)]
    tokens = sample(*on_device, has_filters=has_filters, is_finite=flags)
    assert flags.tolist() == [1, 1] + [0] * len(places)
    assert torch.equal(tokens, sample(*on_device, has_filters=has_filters))
    assert finite_rows(logits.to(device)).int().tolist() == flags.tolist()


def test_hopeless_rows(device: torch.device) -> None:
    """Where every token is forbidden the lowest id comes out, whatever is filtered."""
    for width in (1, 5):
        rows = [
            Row(logits=[bad] * width, temperature=temperature, top_k=top_k, top_p=top_p)
            for bad in (NAN, -INF)
            for temperature in (0.0, 0.8)
            for top_k, top_p in ((0, 1.0), (2, 0.5))
        ]
        assert [row.token() for row in rows] == [0] * len(rows)
        check_rows(rows, device)


@pytest.mark.parametrize("has_filters", ["filters", ""])
def test_a_forbidden_token_is_not_sampled_even_with_the_largest_noise(
    device: torch.device, has_filters: str
) -> None:
    """A client may choose the seed: noise must not lift what a mask has ruled out."""
    for forbidden in (-INF, NAN):
        logits = [0.5, forbidden, 0.25, forbidden, -3.0]
        rows = [Row(logits=logits, seed=lucky_seed(token), top_p=0.99) for token in range(5)]
        if not has_filters:
            rows = [replace(row, top_p=1.0) for row in rows]
        out = sample(*arguments(rows, device), has_filters=bool(has_filters)).tolist()
        assert out == [row.token() for row in rows]
        assert [out[0], out[2], out[4]] == [0, 2, 4]


def test_temperatures_that_overflow(device: torch.device) -> None:
    rows = [
        Row(logits=[100.0, 300.0, 200.0, -1.0], temperature=temperature, top_p=top_p, seed=seed)
        for temperature in (1e-37, 1e-30, 1e30)
        for top_p in (1.0, 0.9)
        for seed in (0, 1)
    ]
    assert rows[0].token() == 0  # all three positive quotients are infinite
    check_rows(rows, device)


@pytest.mark.parametrize("width", [1, 37, 2500])
def test_no_filters_promised_is_no_filters_given(device: torch.device, width: int) -> None:
    rng = random.Random(width)
    rows = [
        replace(random_row(rng, width), top_k=0, top_p=1.0, min_p=0.0)
        for _ in range(6 if IS_INTERPRETED else 60)
    ]
    args = arguments(rows, device)
    promised = sample(*args, has_filters=False)
    assert torch.equal(promised, sample(*args, has_filters=True))
    assert launch_counts().get("sample", 0) == 2 * int(use_triton(promised))
    if width < 100:
        assert promised.tolist() == [row.token() for row in rows]


@pytest.mark.parametrize("width", [3, 1200])
def test_the_first_candidate_of_a_chunk_need_not_win(device: torch.device, width: int) -> None:
    """The bound of the largest noise lies above it: others between the two must be looked at."""
    lucky, other = width - 1, width - 3
    rows = []
    for step in range(-8, 5):
        logits = [-1.0] * width
        logits[lucky], logits[other] = 0.0, 36.0 + step / 4
        rows.append(Row(logits=logits, seed=lucky_seed(lucky)))
    assert {row.token() for row in rows} == {lucky, other}
    check_rows(rows, device)
    out = sample(*arguments(rows, device), has_filters=False)
    assert out.tolist() == [row.token() for row in rows]


def test_ties_across_blocks_and_the_tail_of_the_vocabulary(device: torch.device) -> None:
    width = 4999 if IS_INTERPRETED else 128256
    logits = torch.full((5, width), -3.0)
    logits[0, [2300, 4100]] = 2.0
    logits[1, width - 1] = 2.0
    logits[2] = -INF
    logits[2, width - 1] = -50.0
    greedy, hot = torch.zeros(5), torch.ones(5)
    seed = int64([0, 0, 0, lucky_seed(width - 1), lucky_seed(1024)], device)
    rest = (torch.zeros(5, dtype=torch.int32), torch.ones(5), torch.zeros(5))
    args = [argument.to(device) for argument in rest]
    position = torch.zeros(5, dtype=torch.int64, device=device)
    logits = logits.to(device)
    out = sample(logits, greedy.to(device), *args, seed, position)
    assert out.tolist() == [2300, width - 1, width - 1, 0, 0]
    for has_filters in (True, False):
        out = sample(logits, hot.to(device), *args, seed, position, has_filters=has_filters)
        assert out.tolist()[2:] == [width - 1, width - 1, 1024]


def test_layouts_of_the_arguments(device: torch.device) -> None:
    rng = random.Random(8)
    rows = [replace(random_row(rng, 11), top_p=0.8, top_k=6) for _ in range(4)]
    logits, *columns = arguments(rows, device)
    expected = [row.token() for row in rows]
    wide = torch.full((4, 20), 50.0).to(device)
    wide[:, 3:14] = logits
    doubled = [column.repeat_interleave(2)[::2] for column in columns]
    for layout in (wide[:, 3:14], logits.T.contiguous().T):
        assert sample(layout, *doubled).tolist() == expected
    one_seed = replace(rows[0], temperature=0.9)
    repeated = [column[:1].expand(4) for column in arguments([one_seed], device)[1:]]
    tokens = [replace(one_seed, logits=row.logits).token() for row in rows]
    assert sample(logits[:1].expand(4, -1), *repeated).tolist() == [one_seed.token()] * 4
    assert sample(logits, *repeated).tolist() == tokens


def test_no_rows(device: torch.device) -> None:
    args = [argument[:0] for argument in arguments([Row(logits=[0.0, 1.0])], device)]
    for has_filters in (True, False):
        out = sample(*args, has_filters=has_filters)
        assert out.shape == (0,) and out.dtype == torch.int32


FLAT = [0.3, -0.5, 1.0, 0.0, 0.6, -0.2, 0.9, 0.5]
# The 0.001 quantile of chi-square for 7, 4 and 2 degrees of freedom.
CRITICAL = {8: 24.3, 5: 18.5, 3: 13.8}


ALL = Row(logits=FLAT, temperature=0.8)
TOP_K = Row(logits=FLAT, temperature=1.3, top_k=5)
TOGETHER = Row(logits=FLAT, temperature=1.0, top_k=7, top_p=0.7, min_p=0.65)
# Interpreted, these take a minute; the tests above compare rows with the oracle by the token.
SLOW_IF_INTERPRETED = [pytest.mark.exhaustive] if IS_INTERPRETED else []


@pytest.mark.parametrize(
    ("row", "axis"),
    [
        pytest.param(ALL, "positions", id="all-positions", marks=SLOW_IF_INTERPRETED),
        pytest.param(ALL, "seeds", id="all-seeds", marks=SLOW_IF_INTERPRETED),
        pytest.param(TOP_K, "positions", id="top_k-positions", marks=SLOW_IF_INTERPRETED),
        pytest.param(TOP_K, "seeds", id="top_k-seeds", marks=SLOW_IF_INTERPRETED),
        pytest.param(TOGETHER, "positions", id="together-positions", marks=SLOW_IF_INTERPRETED),
        pytest.param(TOGETHER, "seeds", id="together-seeds", marks=SLOW_IF_INTERPRETED),
    ],
)
def test_samples_follow_the_distribution(device: torch.device, row: Row, axis: str) -> None:
    kept = row.kept()
    is_filtered = len(kept) < len(FLAT)
    interpreted_count = 60 if is_filtered else 250
    count = interpreted_count if IS_INTERPRETED else 20_000
    one, fixed = arguments([row], device), torch.full((count,), 77, device=device)
    logits, *filters = (column.expand(count, *column.shape[1:]) for column in one[:-2])
    many = torch.arange(count).to(device)
    noise = (fixed, many) if axis == "positions" else (many, fixed)
    out = sample(logits, *filters, *noise, has_filters=is_filtered)
    counts = torch.bincount(out.long().cpu(), minlength=len(FLAT)).double()
    assert counts[kept].sum() == count
    expected = (torch.tensor(row.scaled()).double()[kept]).softmax(0) * count
    assert ((counts[kept] - expected) ** 2 / expected).sum() < CRITICAL[len(kept)]
