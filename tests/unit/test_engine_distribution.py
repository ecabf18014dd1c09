"""Sampled output follows the target's distribution, through trees, under every filter."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.messages import SamplingParams, TreeShape
from tests import checkpoints
from tests.engines import Models, Pairing, make_draft, make_target
from tests.local_pair import LocalPair, LocalRequest
from tests.reference.causal_lm import ReferenceLM

pytestmark = pytest.mark.slow

VOCAB_SIZE = 9
PROMPT = [3, 1, 4]
NUM_SAMPLES = 1200
BATCH = 400
# One run in a thousand of an honest sampler would fail; the seeds are fixed, so none does.
LEAST_P = 1e-3


@pytest.fixture(scope="module")
def pairing(models: Models) -> Pairing:
    shape = checkpoints.Shape(vocab_size=VOCAB_SIZE, num_layers=2)
    target = models.get("nine-words", lambda d: checkpoints.write_llama(d, shape=shape))
    draft = models.get(
        "nine-words-draft", lambda d: checkpoints.write_standalone(d, target, noise=0.2)
    )
    return Pairing(target=target, draft=draft, algorithm="standalone")


def probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Filter and normalise one row, naively."""
    bias = dict(params.logit_bias)
    x = [(v + bias.get(i, 0.0)) / params.temperature for i, v in enumerate(logits)]
    kept = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    weight = {i: math.exp(x[i] - max(x)) for i in kept}
    total, mass, prefix = sum(weight.values()), 0.0, []
    for i in kept:
        if mass < params.top_p * total:
            prefix.append(i)
        mass += weight[i]
    most = max(weight.values())
    kept = [i for i in prefix if weight[i] >= params.min_p * most]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


def expected(target: ReferenceLM, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of three tokens."""
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for prefix, p in table.items():
            if p == 0.0:
                continue
            logits = target.forward([*PROMPT, *prefix]).logits[-1].tolist()
            for token, q in enumerate(probabilities(logits, params)):
                longer[(*prefix, token)] = p * q
        table = longer
    return table


def p_value(counts: Counter[Any], probability: dict[Any, float]) -> float:
    """Return the chi-square p-value; cells that expect less than 5 are one cell."""
    assert all(probability.get(cell, 0.0) > 0 for cell in counts), "an impossible output"
    num = sum(counts.values())
    statistic, rest_seen, rest_expected, num_cells = 0.0, 0, 0.0, 0
    for cell, p in probability.items():
        if num * p < 5:
            rest_seen, rest_expected = rest_seen + counts[cell], rest_expected + num * p
            continue
        statistic += (counts[cell] - num * p) ** 2 / (num * p)
        num_cells += 1
    if rest_expected > 1:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        num_cells += 1
    assert num_cells >= 4, "too few cells to tell anything"
    half = torch.tensor([(num_cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def marginal(table: dict[tuple[int, ...], float], *places: int) -> dict[tuple[int, ...], float]:
    result: dict[tuple[int, ...], float] = {}
    for cell, p in table.items():
        key = tuple(cell[i] for i in places)
        result[key] = result.get(key, 0.0) + p
    return result


FILTERS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.6": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.2, top_k=4),
    "top-p": SamplingParams(temperature=1.0, top_p=0.75),
    "min-p": SamplingParams(temperature=1.3, min_p=0.15),
    "all": SamplingParams(
        temperature=1.5, top_k=7, top_p=0.9, min_p=0.05, logit_bias=((2, 1.5), (5, -1.0))
    ),
}


@functools.cache
def sampled(pairing: Pairing, params: SamplingParams) -> list[LocalRequest]:
    """Serve NUM_SAMPLES requests that differ in their seed."""
    target = make_target(
        pairing, max_num_requests=BATCH, max_batch_rows=8192, page_size=64, num_pages=1 + 2 * BATCH
    )
    draft = make_draft(pairing, max_num_requests=BATCH, page_size=16)
    requests = [
        LocalRequest(
            prompt=PROMPT, max_new_tokens=3, sampling=replace(params, seed=seed),
            shape=TreeShape(num_steps=2, topk=2, num_draft_tokens=6),
        )
        for seed in range(NUM_SAMPLES)
    ]  # fmt: skip
    for first in range(0, NUM_SAMPLES, BATCH):
        LocalPair(target, draft).run(requests[first : first + BATCH])
    return requests


# The others are proved alone by tests/kernels, and here in the company of "all".
OFTEN = ("T=1", "all")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.exhaustive) for name in FILTERS],
)
def test_output_through_trees_follows_the_distribution(pairing: Pairing, name: str) -> None:
    params = FILTERS[name]
    requests = sampled(pairing, params)
    rounds = [path for request in requests for path in request.paths[1:]]
    assert sum(path.num_accepted_drafts for path in rounds) > 0.5 * len(rounds)
    assert any(path.num_accepted_drafts == 0 for path in rounds), "drafts must fail too"

    table = expected(ReferenceLM(pairing.target), params)
    assert sum(table.values()) == pytest.approx(1.0)
    outputs = Counter(tuple(request.output) for request in requests)
    for places in itertools.combinations(range(3), 2):
        counts: Counter[tuple[int, ...]] = Counter()
        for output, count in outputs.items():
            counts[tuple(output[i] for i in places)] += count
        assert p_value(counts, marginal(table, *places)) > LEAST_P, places
    assert p_value(outputs, table) > LEAST_P


def test_the_test_would_notice(pairing: Pairing) -> None:
    """Another temperature is rejected, and so is output that ignores a filter."""
    target = ReferenceLM(pairing.target)
    params = FILTERS["T=1"]
    outputs = Counter(tuple(request.output) for request in sampled(pairing, params))
    assert p_value(outputs, expected(target, replace(params, temperature=1.3))) < 1e-6
    with pytest.raises(AssertionError, match="impossible"):
        p_value(outputs, expected(target, FILTERS["top-k"]))
