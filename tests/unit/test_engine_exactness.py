"""Speculation changes no token: every tree shape, sampling, page size and draft kind, in batches.

The plain run is solo and on clean memory; the speculative one is batched, its KV is NaN wherever
nothing is committed, and target and draft have different page sizes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shared.messages import FinishReason, SamplingParams, TokenTree
from tests import checkpoints, families
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    graft,
    make_draft,
    make_target,
    plain_of,
    random_tokens,
)
from tests.local_pair import LocalRequest

PAGE_SIZES = {1: 16, 2: 64, 4: 1, 16: 2, 64: 4}  # the target's: the draft's
# Shorter than a page and around its edges, whatever its size: 128 is two of the largest.
PROMPT_LENGTHS = (1, 2, 8, 32, 128, 129, 191)
# One for each target, two of which are the same: its plain runs serve all page sizes.
SEEDS = {"eagle3": 3, "eagle": 1, "mtp": 2, "standalone": 3, "frozen_kv_mtp": 4}
BIASES = ((3, 8.0), (17, -100.0), (40, 7.5), (41, 7.0))


def requests_of(seed: int, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[LocalRequest]:
    """Return two requests per tree shape; prompt lengths and samplings rotate through them."""
    rng = random.Random(seed)
    stops = tuple(range(5, 250, 9))
    samplings = [
        {"sampling": SamplingParams()},
        {"sampling": SamplingParams(temperature=1.0, seed=rng.getrandbits(64))},
        {
            "sampling": SamplingParams(
                temperature=0.7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5,
                frequency_penalty=0.3, seed=2**64 - 1 - seed,
            )
        },
        {"sampling": SamplingParams(temperature=1.0, min_p=0.1, top_k=50, seed=7)},
        {"sampling": SamplingParams(temperature=0.8, logit_bias=BIASES, seed=seed)},
        {"sampling": SamplingParams(temperature=1.0, seed=5), "min_new_tokens": 9},
        {"stop_token_ids": stops},
        {"sampling": SamplingParams(repetition_penalty=1.3, logit_bias=BIASES)},
    ]  # fmt: skip
    samplings[5]["stop_token_ids"] = stops
    requests = []
    for i, shape in enumerate(SHAPES):
        for j in range(2):
            requests.append(
                LocalRequest(
                    prompt=random_tokens(rng, lengths[(i + 2 * j + seed) % len(lengths)]),
                    max_new_tokens=rng.randrange(16, 26),
                    shape=shape,
                    logprobs=(i + j) % 2 == 0,
                    top_logprobs=(i + j) % 5,
                    **samplings[(3 * i + j + seed) % len(samplings)],
                )
            )
    return requests


FAST = {("eagle3", 16), ("standalone", 4)}
# Pages meet kinds nowhere but in a slot's number: every size and every kind once at least.
OFTEN = FAST | {("eagle3", 1), ("eagle", 2), ("mtp", 64), ("frozen_kv_mtp", 4)}


def marks_of(kind: str, page_size: int) -> list[pytest.MarkDecorator]:
    """Return when a cell is run: always, but in `make check`, or in `make test-slow`."""
    if (kind, page_size) in FAST:
        return []
    return [pytest.mark.slow if (kind, page_size) in OFTEN else pytest.mark.exhaustive]


CELLS = [
    pytest.param(kind, page_size, marks=marks_of(kind, page_size))
    for kind in KINDS
    for page_size in PAGE_SIZES
]


@pytest.mark.parametrize(("kind", "page_size"), CELLS)
def test_output_equals_the_solo_plain_run(models: Models, kind: str, page_size: int) -> None:
    pairing = models.pairing(kind)
    target = make_target(pairing, page_size=page_size)
    requests = requests_of(SEEDS[kind])
    plain = plain_of(target, requests, alone=True)
    before = target.load

    speculative = [fresh(request) for request in requests]
    rng = random.Random(page_size)
    pair = PoisonedPair(target, make_draft(pairing, page_size=PAGE_SIZES[page_size]))
    by_id = {f"r{i + 1}": request for i, request in enumerate(plain)}

    def edit(tree: TokenTree) -> TokenTree:
        # A random EAGLE-3 head is never right: write the truth into most of its trees.
        if kind != "eagle3" or rng.random() < 0.2:
            return tree
        done = len(pair.requests[tree.request_id].output)
        return graft(tree, by_id[tree.request_id].output[done:], rng)

    pair.edit_tree = edit
    pair.run(speculative)

    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
        assert got.logprob_rows == want.logprob_rows
        assert got.finish_reason == want.finish_reason
        assert len(got.logprob_rows) == (len(got.output) if got.logprobs else 0)
        # Every round had its tree: a plain run in disguise would pass the rest.
        assert [path.num_draft_tokens for path in got.paths[1:]] == [
            len(tree.token_ids) for tree in got.trees
        ]
    load = target.load
    assert load.num_moved_rounds > 0, "no accepted path had to move KV"
    num_steps = load.num_steps - before.num_steps
    assert load.num_request_steps - before.num_request_steps > 4 * num_steps
    mean = sum(r.accept_length for r in speculative) / len(speculative)
    assert 1.1 < mean < 6, f"accept_length {mean}: paths should end at all depths"
    reasons = {request.finish_reason for request in speculative}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


FAMILIES = {
    "llama": checkpoints.write_llama,
    "mistral": checkpoints.write_mistral,  # a sliding window of 12
    "qwen3": checkpoints.write_qwen3,
}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        pytest.param("mistral", "float32", marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_any_tree_at_all_changes_nothing(models: Models, family: str, dtype: str) -> None:
    """Random trees with the truth hidden in them, of any topology up to 64 nodes."""
    path = models.get(family, FAMILIES[family])
    pairing = Pairing(target=path, draft=path, algorithm="none")
    target = make_target(pairing, page_size=4, dtype=dtype)
    rng = random.Random(1)
    requests = [replace(r, shape=None) for r in requests_of(9, (1, 2, 8, 9, 11))]
    plain = plain_of(target, requests, alone=True)
    speculative = [fresh(request) for request in requests]
    pair = PoisonedPair(target)
    by_id = {f"r{i + 1}": request for i, request in enumerate(plain)}
    verify = pair.verify

    def verify_a_random_tree(request: LocalRequest, tree: TokenTree | None) -> None:
        truth = by_id[request.request_id].output[len(request.output) :]
        num_nodes = rng.choice([1, 2, 3, 8, 9, 17, 63, 64])
        parents = [-1] + [rng.randrange(max(0, n - rng.choice([1, 3, 64])), n)
                          for n in range(1, num_nodes)]  # fmt: skip
        tree = TokenTree(
            request_id=request.request_id, target_epoch=1, draft_epoch=1,
            round_idx=request.paths[-1].round_idx + 1, seq_len=request.paths[-1].seq_len,
            token_ids=(request.output[-1], *random_tokens(rng, num_nodes - 1)),
            parent_index=tuple(parents),
        )  # fmt: skip
        verify(request, graft(tree, truth, rng))

    pair.verify = verify_a_random_tree  # type: ignore[method-assign]
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
        assert got.logprob_rows == want.logprob_rows
    assert target.load.num_moved_rounds > 0
    assert max(path.num_accepted_drafts for r in speculative for path in r.paths) >= 3


@pytest.mark.slow
def test_longrope_factors_follow_the_context_that_an_engine_is_configured_for(
    models: Models,
) -> None:
    """They are one choice for all its requests; targets that differ in it are not the same."""
    fields = families.PHI3 | {"original_max_position_embeddings": 96}
    path = models.get("phi3-96", lambda d: families.write(d, "phi3", **fields))
    pairing = Pairing(target=path, draft=path, algorithm="none")
    # In ten pages are 80 tokens beside a tree: how many there are changes no factor.
    short, long, long_in_ten_pages = (
        make_target(pairing, max_context_len=length, num_pages=pages).info.logits_hash
        for length, pages in ((96, 64), (97, 64), (97, 10))
    )
    assert short != long == long_in_ten_pages
