"""What a run with trees leaves is what a fresh prefill leaves: KV of both engines, features."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from draft_service.engine import DraftEngine
from shared.device import DTYPES
from shared.errors import NonFiniteError
from shared.messages import DraftOpen, FeatureChunk, FeatureSubscribe, SamplingParams, TokenTree
from target_service.engine import TargetEngine
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    PoisonedPair,
    committed_kv,
    fresh,
    graft,
    make_draft,
    make_target,
    prefilled_kv,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalPair, LocalRequest


class Eavesdropper(PoisonedPair):
    """A pair that keeps a copy of every feature row it forwards."""

    def __init__(self, target: TargetEngine, draft: DraftEngine) -> None:
        super().__init__(target, draft, edit_chunk=self._listen)
        self.rows: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)

    def _listen(self, chunk: FeatureChunk) -> FeatureChunk:
        for i, row in enumerate(rows_of(chunk)):
            known = self.rows[chunk.request_id].setdefault(chunk.start + i, row)
            assert torch.equal(known, row), "the same row twice, with other bits"
        return chunk


def rows_of(chunk: FeatureChunk) -> torch.Tensor:
    """Return [n, width]."""
    values = torch.frombuffer(bytearray(chunk.data), dtype=DTYPES[chunk.dtype])
    return values.view(chunk.shape)


def requests_of(vocab_size: int) -> list[LocalRequest]:
    rng = random.Random(4)
    return [
        LocalRequest(
            prompt=random_tokens(rng, length, vocab_size),
            max_new_tokens=50,
            shape=SHAPES[1 + i % 6],
            sampling=SamplingParams(temperature=0.5 * (i % 3), seed=i),
        )
        for i, length in enumerate((1, 3, 15, 16, 33, 61, 64, 5))
    ]


def draft_kv(engine: DraftEngine, request_id: str) -> torch.Tensor:
    return committed_kv(engine, request_id, engine.requests[request_id].kv_len)


KINDS_ONE_FAST = ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]


@pytest.mark.parametrize("kind", KINDS_ONE_FAST)
def test_kv_and_features_equal_those_of_a_fresh_prefill(models: Models, kind: str) -> None:
    pairing = models.pairing(kind)
    target = make_target(pairing, page_size=4, prefill_chunk_len=20)
    requests = requests_of(target.info.vocab_size - 1)
    plain = run_plain(target, requests)
    draft = make_draft(pairing, page_size=2)
    pair = Eavesdropper(target, draft)
    rng = random.Random(0)

    def edit(tree: TokenTree) -> TokenTree:
        request = pair.requests[tree.request_id]
        truth = plain[int(tree.request_id[1:]) - 1].output[len(request.output) :]
        return graft(tree, truth, rng) if kind == "eagle3" else tree

    pair.edit_tree = edit
    for request in requests:
        pair.open(request)
    for _ in range(14):
        pair.step()
    assert target.load.num_moved_rounds > 0

    other_target = make_target(pairing, page_size=16)
    other_draft = make_draft(pairing, page_size=16)
    num_compared = 0
    for request in requests:
        held = target.requests.get(request.request_id)
        if held is None or not held.committed_len:
            continue  # finished early
        num_compared += 1
        tokens = held.tokens[: held.committed_len]
        kv = committed_kv(target, request.request_id, held.committed_len)
        assert torch.equal(kv, prefilled_kv(other_target, tokens))
        if kind != "standalone":
            rows = pair.rows[request.request_id]
            assert sorted(rows) == list(range(held.committed_len)), (
                "a committed token without its row"
            )
        # A draft that reads everything at once from a target that prefills everything at once.
        other = Eavesdropper(other_target, other_draft)
        replica = fresh(request, prompt=held.tokens[:-1], max_new_tokens=2, request_id="replica")
        other.open(replica)
        while not replica.trees:
            assert other.step()
        if kind != "standalone":
            for position, row in other.rows["replica"].items():
                assert torch.equal(row, rows[position])
        ours = draft_kv(draft, request.request_id)
        theirs = draft_kv(other_draft, "replica")
        shared_len = min(len(ours), len(theirs))
        assert shared_len >= held.committed_len - 12
        assert torch.equal(ours[:shared_len], theirs[:shared_len])
        other.finish()
    assert num_compared >= 6
    pair.finish()
    assert [r.output for r in requests] == [r.output for r in plain]


def test_poison_is_really_there_and_really_read_by_whoever_looks(models: Models) -> None:
    """The other tests rest on this: NaN fills the pool, and KV that is visible matters."""
    pairing = models.pairing("standalone")
    target = make_target(pairing, page_size=4)
    pair = PoisonedPair(target)
    request = LocalRequest(prompt=list(range(10)), max_new_tokens=20)
    pair.open(request)
    while not request.paths:
        pair.step()
    pool = target.runner.pool
    assert committed_kv(target, "r1", 10).isfinite().all()
    page_row = target.requests["r1"].req_idx
    reserved = pool.reserved_len(page_row)
    assert reserved > 0
    assert committed_kv(target, "r1", reserved)[10:].isnan().all()
    assert pool.layers[0][0][: pool.page_size].isnan().all(), "the sink is poisoned too"

    slots = torch.from_numpy(pool.slots(page_row, np.array([3])).astype(np.int64))
    pool.layers[0][1][slots] = 1e3  # a committed slot: every later token sees it
    while pair.step():
        pass
    clean = run_plain(make_target(pairing), [request])[0]
    assert request.output[:1] == clean.output[:1]
    # Whether such values still have a finite end is up to the platform's arithmetic.
    assert [failure.reason for failure in pair.failures] in ([], [NonFiniteError.default_reason])
    assert pair.failures or request.output[1:] != clean.output[1:]


@pytest.mark.parametrize("retain_rows", [0, 1, 5, 8192])
def test_replayed_rows_are_the_same_bits(models: Models, retain_rows: int) -> None:
    """Whatever the target forgot, from whichever position a draft asks, in whatever phase."""
    pairing = models.pairing("eagle3")
    target = make_target(
        pairing, page_size=4, feature_retain_rows=retain_rows, prefill_chunk_len=13
    )
    rng = random.Random(2)
    request = LocalRequest(prompt=random_tokens(rng, 50), max_new_tokens=25, shape=SHAPES[0])
    request.joins_at = 10_000
    truth = make_target(pairing, prefill_chunk_len=256)
    once = Eavesdropper(truth, make_draft(pairing))
    whole = run_plain(truth, [request])[0]
    once.run([fresh(request, prompt=whole.tokens, max_new_tokens=2, joins_at=0)])
    rows = once.rows["r1"]
    assert sorted(rows) == list(range(75))

    pair = LocalPair(target)
    pair.open(request)
    received: dict[int, torch.Tensor] = {}
    expected_next: int | None = None
    num_subscriptions = 0
    while True:
        held = target.requests.get(request.request_id)
        is_last = len(request.output) == 16  # the rest is left for catching up
        is_asking = is_last or (len(request.output) < 16 and rng.random() < 0.5)
        if held is not None and held.req_idx >= 0 and is_asking:
            start = 0 if is_last else rng.randrange(held.committed_len + 1)
            target.submit(FeatureSubscribe(request_id="r1", target_epoch=1, from_position=start))
            expected_next, num_subscriptions = start, num_subscriptions + 1
        if not target.has_work:
            break
        for message in target.step():
            if not isinstance(message, FeatureChunk):
                pair.on_target(message)
                continue
            assert message.start == expected_next, "rows must be consecutive"
            for i, row in enumerate(rows_of(message)):
                received[message.start + i] = row
                assert torch.equal(row, rows[message.start + i]), message.start + i
            expected_next = message.start + message.shape[0]
        target.check_integrity()
    assert request.output == whole.output
    assert num_subscriptions >= 5 and len(received) >= 70
    pair.check_idle()


def test_a_draft_that_asks_for_features_of_nothing_waits(models: Models) -> None:
    """One-token prompts: the first row comes with the first path."""
    pairing = models.pairing("eagle3")
    target, draft = make_target(pairing), make_draft(pairing)
    draft.submit(
        DraftOpen(
            request_id="r1", target_epoch=1, draft_epoch=1, target_address="local",
            token_ids=(5,), sampling=SamplingParams(),
        )
    )  # fmt: skip
    [command] = draft.step()
    assert command.command == FeatureSubscribe(
        request_id="r1", target_epoch=1, from_position=0, draft_epoch=1
    )
    target.submit(command.command)  # before the target knows the request
    assert not target.has_work
    request = LocalRequest(prompt=[5], max_new_tokens=8, shape=SHAPES[2], request_id="r1")
    request.has_draft, request.draft_epoch = True, 1
    pair = PoisonedPair(target, draft)
    pair.requests["r1"] = request
    pair.open_target(request)
    pair.finish()
    assert request.trees and request.output == run_plain(target, [request])[0].output
