"""Where requests end, with trees as without: stop ids, lengths, context, minima, tiny prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared.messages import FinishReason, SamplingParams, TokenTree
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    PoisonedPair,
    fresh,
    graft,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalPair, LocalRequest

FULL_CHAIN = SHAPES[5]  # 6/8/64: a path of 6 fits


class Prophet(PoisonedPair):
    """Every tree holds as much of the plain output as fits: paths run past every end."""

    def __init__(self, *engines: Any, truth: dict[str, list[int]]) -> None:
        super().__init__(*engines, edit_tree=self._tell)
        self.truth = truth
        self.rng = random.Random(0)

    def _tell(self, tree: TokenTree) -> TokenTree:
        done = len(self.requests[tree.request_id].output)
        return graft(tree, self.truth[tree.request_id][done:], self.rng, doubt=0)


def speculate(
    models: Models, requests: list[LocalRequest], kind: str = "standalone", **options: Any
) -> tuple[list[LocalRequest], list[LocalRequest]]:
    """Serve the requests plain and with trees that know too much; return both."""
    pairing = models.pairing(kind)
    target = make_target(pairing, page_size=4, **options)
    plain = run_plain(target, requests)
    endless = [
        fresh(
            request, stop_token_ids=(), min_new_tokens=0, shape=None,
            max_new_tokens=request.max_new_tokens + 10,
        )
        for request in requests
    ]  # fmt: skip
    LocalPair(target).run(endless)
    truth = {
        # What follows a stop, so that paths run past it; but first, what the request will say.
        longer.request_id: [*request.output, *longer.output[len(request.output) :]]
        for longer, request in zip(endless, plain, strict=True)
    }
    pair = Prophet(target, make_draft(pairing), truth=truth)
    pair.run(requests)
    for got, want in zip(requests, plain, strict=True):
        assert got.output == want.output
        assert got.finish_reason == want.finish_reason
        assert got.paths[-1].matched_stop_token_id == want.paths[-1].matched_stop_token_id
        assert got.logprob_rows == want.logprob_rows
        check_paths(got)
    return requests, plain


def check_paths(request: LocalRequest) -> None:
    """Check what every reply of a request says about itself."""
    num_tokens = len(request.prompt)
    for i, path in enumerate(request.paths):
        is_last = i == len(request.paths) - 1
        assert path.round_idx == i
        assert len(path.accept_index) == len(path.token_ids) >= 1
        assert path.accept_index[0] == 0
        num_tokens += len(path.token_ids)
        assert path.seq_len == num_tokens - 1
        assert (path.finish_reason == FinishReason.NONE) != is_last
        if is_last:
            assert len(path.token_ids) <= path.num_accepted_drafts + 1
        else:
            assert len(path.token_ids) == path.num_accepted_drafts + 1


KINDS_ONE_FAST = ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]


@pytest.mark.parametrize("kind", KINDS_ONE_FAST)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_a_few_tokens_from_tiny_prompts(models: Models, kind: str, max_new_tokens: int) -> None:
    rng = random.Random(max_new_tokens)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length), max_new_tokens=max_new_tokens, shape=shape,
            sampling=SamplingParams(temperature=length % 2, seed=length), logprobs=True,
        )
        for length in (1, 2, 5) for shape in (SHAPES[0], SHAPES[3], FULL_CHAIN)
    ]  # fmt: skip
    speculate(models, requests, kind)
    for request in requests:
        assert len(request.output) == max_new_tokens
        assert request.finish_reason == FinishReason.LENGTH
        assert len(request.paths) == min(max_new_tokens, 2), "the tree held everything"


def test_stop_ids_cut_a_path_wherever_they_stand(models: Models) -> None:
    """Each token of a known output in turn is the stop id: at every place inside a path."""
    target = make_target(models.pairing("standalone"))
    prompt = random_tokens(random.Random(6), 6)
    [whole] = run_plain(target, [LocalRequest(prompt=prompt, max_new_tokens=20)])
    requests = [
        LocalRequest(
            prompt=prompt, max_new_tokens=20, shape=FULL_CHAIN, logprobs=True, top_logprobs=1,
            stop_token_ids=(stop, 261),
        )
        for stop in whole.output
    ]  # fmt: skip
    speculate(models, requests)
    places = set()
    for request, stop in zip(requests, whole.output, strict=True):
        end = whole.output.index(stop) + 1
        assert request.output == whole.output[:end]
        assert request.finish_reason == FinishReason.STOP
        last = request.paths[-1]
        assert last.matched_stop_token_id == stop == last.token_ids[-1]
        assert len(request.logprob_rows) == end
        if len(last.token_ids) < last.num_accepted_drafts + 1:
            places.add(len(last.token_ids))
    assert len(places) >= 2, "no path was cut inside"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_new_tokens_holds_stops_back_and_masks_them(models: Models, temperature: float) -> None:
    """Every other id is a stop, so that one is wanted right before and right after the minimum."""
    stops = tuple(range(0, 262, 2))
    rng = random.Random(2)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, 3), max_new_tokens=40, shape=FULL_CHAIN,
            sampling=SamplingParams(temperature=temperature, seed=minimum),
            min_new_tokens=minimum, stop_token_ids=stops,
        )
        for minimum in range(0, 24)
    ]  # fmt: skip
    speculate(models, requests)
    for minimum, request in enumerate(requests):
        assert not set(request.output[:minimum]) & set(stops), "a stop id came too early"
        assert len(request.output) > minimum
        if request.finish_reason == FinishReason.STOP:
            assert request.output[-1] in stops and not set(request.output[:-1]) & set(stops)
    ends = [len(r.output) - 1 - minimum for minimum, r in enumerate(requests)]
    assert ends.count(0) > 0, "no stop was wanted as soon as it was allowed"


@pytest.mark.parametrize("max_new_tokens", range(4, 12))
def test_max_new_tokens_cuts_inside_a_path(models: Models, max_new_tokens: int) -> None:
    request = LocalRequest(
        prompt=[1, 2, 3], max_new_tokens=max_new_tokens, shape=FULL_CHAIN, logprobs=True
    )
    speculate(models, [request])
    assert len(request.output) == max_new_tokens
    assert request.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("kind", KINDS_ONE_FAST)
def test_the_context_ends(models: Models, kind: str) -> None:
    """Trees may reach past the end of the context; output may not."""
    rng = random.Random(3)
    context = 60
    requests = [
        LocalRequest(prompt=random_tokens(rng, length), max_new_tokens=100, shape=shape)
        for length, shape in zip((59, 58, 57, 50, 40, 1), [FULL_CHAIN, *SHAPES[1:]], strict=False)
    ]
    speculate(models, requests, kind, max_context_len=context)
    for request in requests:
        assert len(request.tokens) == context
        assert request.finish_reason == FinishReason.CONTEXT_LENGTH


def test_the_pool_may_be_what_ends_the_context(models: Models) -> None:
    pairing = models.pairing("standalone")
    target = make_target(pairing, page_size=4, num_pages=1 + (64 + 40) // 4)
    assert target.info.max_context_len == 40
    request = LocalRequest(prompt=[1, 2], max_new_tokens=100, shape=FULL_CHAIN)
    PoisonedPair(target, make_draft(pairing)).run([request])
    assert len(request.tokens) == 40
    assert request.finish_reason == FinishReason.CONTEXT_LENGTH


def test_a_stop_beats_a_length_beats_a_context(models: Models) -> None:
    target = make_target(models.pairing("standalone"), max_context_len=20)
    prompt = random_tokens(random.Random(4), 14)
    [whole] = run_plain(target, [LocalRequest(prompt=prompt, max_new_tokens=30)])
    assert whole.finish_reason == FinishReason.CONTEXT_LENGTH and len(whole.output) == 6
    last = whole.output[-1]
    assert last not in whole.output[:-1]
    by_length, by_stop = (
        LocalRequest(prompt=prompt, max_new_tokens=6, stop_token_ids=stops)
        for stops in ((), (last,))
    )
    LocalPair(target).run([by_length, by_stop])
    assert by_length.finish_reason == FinishReason.LENGTH
    assert by_stop.finish_reason == FinishReason.STOP
    assert by_stop.paths[-1].matched_stop_token_id == last
