"""Outputs with grammars: what plain decoding gives, with any tree, and always of the grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar

from draft_service.growth_masks import GrowthMasks, MaskBuffers
from shared.errors import InvalidArgumentError
from shared.grammar.matcher import OutputMatcher
from shared.messages import (
    Credit,
    FinishReason,
    RequestFailure,
    RootOnly,
    SamplingParams,
    StoppingParams,
    TargetOpen,
)
from tests.checkpoints import EOS_ID
from tests.device_pair import Make, PoisonedDevicePair, check
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    make_draft,
    make_target,
    plain_of,
    random_tokens,
)
from tests.grammars import CASES, compiled_for, text_of
from tests.local_pair import LocalPair, LocalRequest
from tests.marks import first_fast
from tests.peer_pair import PoisonedPeerPair, close_channels

pytestmark = pytest.mark.usefixtures("patient_grammars")

PAGE_SIZES = {"eagle": (1, 16), "eagle3": (16, 4), "mtp": (64, 1), "standalone": (2, 64)}


def requests_of(directory: Path, seed: int) -> list[LocalRequest]:
    """Return a request of each grammar and sampling, and free ones beside them."""
    rng = random.Random(seed)
    samplings = (
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=seed),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.2, seed=3),
        SamplingParams(temperature=1.2, min_p=0.05, logit_bias=((65, 5.0),), seed=4),
    )
    requests = []
    for i, name in enumerate(CASES):
        for j in range(2):
            requests.append(
                LocalRequest(
                    prompt=random_tokens(rng, rng.choice([1, 15, 16, 40])),
                    max_new_tokens=90,
                    shape=SHAPES[(i + 3 * j + seed) % len(SHAPES)],
                    sampling=samplings[(i + j + seed) % len(samplings)],
                    stop_token_ids=(EOS_ID,),
                    logprobs=j == 1,
                    compiled_grammar=compiled_for(directory, name),
                    grows_forced=j == 0,
                )
            )
    for i in range(3):
        requests.append(
            LocalRequest(
                prompt=random_tokens(rng, 9), max_new_tokens=20, shape=SHAPES[i],
                sampling=samplings[i], logprobs=i == 0,
            )
        )  # fmt: skip
    return requests


def check_texts(directory: Path, requests: Sequence[LocalRequest]) -> None:
    """Check that outputs which ended by themselves are of their grammars."""
    num_whole = 0
    for i, request in enumerate(requests[: 2 * len(CASES)]):
        case = CASES[[*CASES][i // 2]]
        if request.finish_reason is FinishReason.STOP:
            assert request.output[-1] == EOS_ID
            assert case.has(text_of(directory, request.output)), [*CASES][i // 2]
            num_whole += 1
    assert num_whole > len(CASES), "too few outputs were whole"


def num_rounds(requests: Sequence[LocalRequest]) -> int:
    return sum(len(request.paths) - 1 for request in requests)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("eagle"),
        pytest.param("standalone", marks=pytest.mark.exhaustive),
        pytest.param("eagle3", marks=pytest.mark.exhaustive),
        pytest.param("mtp", marks=pytest.mark.exhaustive),
    ],
)
def test_output_equals_the_plain_run(models: Models, kind: str) -> None:
    pairing = models.pairing(kind)
    target_page, draft_page = PAGE_SIZES[kind]
    target = make_target(pairing, page_size=target_page)
    requests = requests_of(pairing.target, seed=len(kind))
    plain = plain_of(target, requests, alone=True)
    check_texts(pairing.target, plain)
    pair = PoisonedPair(target, make_draft(pairing, page_size=draft_page))
    speculative = [fresh(request) for request in requests]
    pair.run(speculative)
    check(speculative, plain)
    constrained = speculative[: 2 * len(CASES)]
    num_tokens = sum(len(request.output) for request in constrained)
    assert num_rounds(constrained) < num_tokens / 1.5, "what must follow is not drafted"


@pytest.mark.parametrize("kind", first_fast(["eagle", "standalone"]))
def test_peer_rounds_give_the_same(models: Models, kind: str) -> None:
    pairing = models.pairing(kind)
    target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
    requests = requests_of(pairing.target, seed=1)
    plain = plain_of(target, requests)
    pair = PoisonedPeerPair(target, draft)
    pair.run(requests)
    check(requests, plain)
    assert pair.trees, "no tree came over the channel"
    trees = [path for request in requests for path in request.paths if path.num_draft_tokens > 1]
    assert 0 < sum(path.is_forced for path in trees) < len(trees) / 2, "whose the trees are"
    close_channels(target, draft)


@pytest.mark.parametrize("overlaps", first_fast([True, False]))
def test_neighbours_stay_in_device_rounds(models: Models, make: Make, *, overlaps: bool) -> None:
    """The device cannot know the masks of a tree that the host has not seen."""
    target, draft, _ = make("eagle", (4, 16))
    target.scheduler.overlaps_steps = overlaps
    requests = requests_of(models.pairing("eagle").target, seed=2)
    plain = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, plain)
    assert pair.num_device_trees > 0


def test_what_is_certain_needs_no_draft(models: Models) -> None:
    """Rounds of the root alone have it as well, unless nothing is to be guessed."""
    pairing = models.pairing("standalone")
    target = make_target(pairing)
    requests = [fresh(request, shape=None) for request in requests_of(pairing.target, seed=1)]
    plain = plain_of(target, requests)
    pair = LocalPair(target, credit_rounds=30)
    pair.run(requests)
    check(requests, plain)
    for request in requests[: 2 * len(CASES)]:
        num_tokens, rounds = len(request.output) - 1, num_rounds([request])
        assert rounds <= num_tokens if request.grows_forced else rounds == num_tokens
        assert all(path.is_forced == (path.num_draft_tokens > 1) for path in request.paths)
    forced = [request for request in requests if request.grows_forced]
    assert num_rounds(forced) < sum(len(request.output) - 1 for request in forced) / 1.5


def test_a_draft_that_is_lost_changes_nothing(models: Models) -> None:
    pairing = models.pairing("eagle")
    target = make_target(pairing)
    requests = requests_of(pairing.target, seed=5)
    plain = plain_of(target, requests)
    pair = PoisonedPair(target, make_draft(pairing))
    for request in requests:
        pair.open(request)
    for _ in range(6):
        pair.step()
    pair.replace_draft(None)
    for _ in range(3):
        pair.step()
    pair.replace_draft(make_draft(pairing, page_size=4))
    pair.finish()
    check(requests, plain)


def test_masks_take_no_more_memory_for_many_shapes_than_for_the_largest() -> None:
    buffers, vocab_size, places = MaskBuffers(3200, torch.device("cpu")), 3200, set()
    for num_rows in range(1, 257):
        growth: Any = SimpleNamespace(logits=torch.empty(num_rows, 1), beams=None)
        masks = buffers.filled(GrowthMasks([], num_places=num_rows), growth)
        assert masks.shape == (num_rows, vocab_size // 32) and masks.is_contiguous()
        places.add((masks.data_ptr(), masks.untyped_storage().nbytes()))
        same = buffers.filled(GrowthMasks([], num_places=num_rows), growth)
        assert same.data_ptr() == masks.data_ptr(), "a graph would read elsewhere"
    assert sum(num_bytes for _, num_bytes in places) <= 2 * masks.nbytes


def test_requests_that_made_room_go_on(models: Models) -> None:
    """A target that takes a request over follows the output that is there."""
    pairing = models.pairing("eagle")
    requests = requests_of(pairing.target, seed=3)
    plain = plain_of(make_target(pairing), requests)
    target = make_target(pairing, page_size=16, num_pages=26, max_context_len=320)
    pair = PoisonedPair(target, make_draft(pairing))
    pair.run(requests)
    assert pair.num_retracted > 0
    check(requests, plain)


def open_of(directory: Path, name: str, **changes: Any) -> TargetOpen:
    fields: dict[str, Any] = {
        "request_id": "r1", "target_epoch": 1, "token_ids": (1, 2), "num_prompt_tokens": 2,
        "sampling": SamplingParams(), "credit": Credit(until_round_idx=50, trees=RootOnly()),
        "stopping": StoppingParams(max_new_tokens=60, stop_token_ids=(EOS_ID,)),
        "compiled_grammar": compiled_for(directory, name),
    }  # fmt: skip
    return TargetOpen(**{**fields, **changes})


def failures_of(pairing: Pairing, message: TargetOpen) -> list[RequestFailure]:
    """Return how a request ends that is opened beside a free one, which ends well."""
    target = make_target(pairing)
    pair = LocalPair(target, credit_rounds=10)
    pair.open(LocalRequest(prompt=[3, 4], max_new_tokens=20, request_id="other"))
    target.submit(message)
    failures = []
    while target.has_work:
        for answer in target.step():
            if answer.request_id == "other":
                pair.on_target(answer)
            elif isinstance(answer, RequestFailure):
                failures.append(answer)
    assert pair.requests["other"].finish_reason is FinishReason.LENGTH
    pair.check_idle()
    return failures


def test_what_is_no_grammar_of_these_tokens_is_refused(models: Models) -> None:
    pairing = models.pairing("standalone")
    for changes in (
        {"compiled_grammar": b"nonsense"},
        {"token_ids": (1, 2, 70), "num_prompt_tokens": 2},
    ):
        (failure,) = failures_of(pairing, open_of(pairing.target, "schema", **changes))
        assert failure.code == int(InvalidArgumentError.code)
        assert (failure.reason, failure.field) == ("INVALID_GRAMMAR", "structured_output")


def test_a_library_that_fails_ends_one_request(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing, count = models.pairing("standalone"), 0
    message = open_of(pairing.target, "schema")
    traverse = xgrammar.GrammarMatcher.traverse_draft_tree

    def fail(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 5:
            raise RuntimeError("Check failed")
        return traverse(*arguments)

    monkeypatch.setattr(xgrammar.GrammarMatcher, "traverse_draft_tree", fail)
    (failure,) = failures_of(pairing, message)
    assert failure.reason == "INVALID_GRAMMAR"


def test_an_output_that_no_token_can_follow_fails(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = models.pairing("standalone")
    fill = OutputMatcher.fill_masks
    count = 0

    def close(self: OutputMatcher, masks: torch.Tensor, *tree: Any) -> list[int]:
        nonlocal count
        count += 1
        shut = fill(self, masks, *tree)
        if count > 4:  # as of a grammar that asks for a letter that no token has
            masks.zero_()
        return shut

    monkeypatch.setattr(OutputMatcher, "fill_masks", close)
    (failure,) = failures_of(pairing, open_of(pairing.target, "schema"))
    assert failure.reason == "INVALID_GRAMMAR" and "no token" in failure.message
    assert failure.round_idx > 0
