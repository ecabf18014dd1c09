"""Everything at once: tiny pools, lost rows, dying drafts, fail-overs, cancellations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draft_service.engine_factory import EXTRA_SLOTS
from shared.messages import FeatureChunk, FeatureSubscribe, SamplingParams, TargetClose, TokenTree
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
from tests.local_pair import LocalRequest

pytestmark = pytest.mark.slow


def requests_of(rng: random.Random) -> list[LocalRequest]:
    return [
        LocalRequest(
            prompt=random_tokens(rng, rng.choice([1, 2, 15, 16, 33, 60])),
            max_new_tokens=rng.choice([1, 2, 20, 50]),
            shape=rng.choice([None, *SHAPES]),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.9]), seed=i,
                repetition_penalty=rng.choice([1.0, 1.4]), top_p=rng.choice([1.0, 0.9]),
            ),
            stop_token_ids=tuple(random_tokens(rng, rng.choice([0, 4]))),
            min_new_tokens=rng.choice([0, 4]),
            logprobs=rng.random() < 0.5,
            joins_at=rng.choice([0, 0, 3, 9]),
            priority=rng.randrange(2),
        )
        for i in range(12)
    ]  # fmt: skip


NUM_SEEDS = 3
# A seed for each kind in every run; both have two kinds.
CELLS = [
    pytest.param(kind, seed, marks=[] if seed == KINDS.index(kind) % 2 else pytest.mark.exhaustive)
    for kind in KINDS
    for seed in range(NUM_SEEDS)
]


class Chaos(PoisonedPair):
    """Does something unfriendly between most steps."""

    def __init__(self, *engines: Any, plain: dict[str, LocalRequest], rng: random.Random) -> None:
        super().__init__(*engines, edit_tree=self._meddle, edit_chunk=self._lose)
        self.plain = plain
        self.rng = rng
        self.cancelled: set[str] = set()
        self.events: dict[str, int] = {}

    def count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def live(self) -> list[LocalRequest]:
        return [
            request
            for request in self.requests.values()
            if not request.finish_reason and request.request_id not in self.cancelled
        ]

    def _meddle(self, tree: TokenTree) -> TokenTree | None:
        kind = self.rng.random()
        if kind < 0.1:
            self.count("tree lost")
            return None
        if kind < 0.6:
            done = len(self.requests[tree.request_id].output)
            return graft(tree, self.plain[tree.request_id].output[done:], self.rng)
        return tree

    def _lose(self, chunk: FeatureChunk) -> FeatureChunk | None:
        if self.rng.random() < 0.1:
            self.count("rows lost")
            return None
        return chunk

    def on_target(self, message: Any) -> None:
        if getattr(message, "request_id", None) in self.cancelled:
            return  # the orchestrator forgot it
        super().on_target(message)

    def on_draft(self, message: Any) -> None:
        if getattr(message, "request_id", None) in self.cancelled:
            return
        super().on_draft(message)

    def disturb(self) -> None:
        event = self.rng.random()
        live = self.live()
        if not live:
            return
        request = self.rng.choice(live)
        if event < 0.02:
            self.count("cancelled")
            self.cancelled.add(request.request_id)
            self.close_draft(request)
            self.target.submit(
                TargetClose(request_id=request.request_id, target_epoch=request.target_epoch)
            )
        elif event < 0.08 and request.paths:
            self.count("target reopened")  # as after a lost stream
            request.target_epoch += 1
            self.open_target(request)
            if request.has_draft:
                request.ordered_round = -1
                self.open_draft(request)
        elif event < 0.14 and request.has_draft:
            self.count("draft closed")
            self.close_draft(request)
            self.lose_draft(request)
        elif event < 0.25 and request.has_draft:
            self.count("order repeated")
            if request.ordered_round >= 0:
                self.order_tree(request)
        elif event < 0.35 and request.has_draft and request.ordered_round >= 0:
            self.count("gave up waiting")
            request.ordered_round = -1
            self.verify(request, None)

    def revive(self) -> bool:
        """Ask again for rows that were lost, as a front does that noticed a broken stream."""
        if self.draft is not None:
            for held in self.draft.requests.values():
                if held.pending is not None and held.features is not None and not held.can_grow:
                    self.target.submit(
                        FeatureSubscribe(
                            request_id=held.request_id, target_epoch=held.open.target_epoch,
                            from_position=held.features.end,
                        )
                    )  # fmt: skip
        return self.target.has_work


@pytest.mark.parametrize(("kind", "seed"), CELLS)
def test_output_is_plain_whatever_happens(models: Models, kind: str, seed: int) -> None:
    pairing = models.pairing(kind)
    rng = random.Random(100 * KINDS.index(kind) + seed)
    requests = requests_of(rng)
    plain = {
        f"r{i + 1}": request for i, request in enumerate(run_plain(make_target(pairing), requests))
    }
    page_size = rng.choice([1, 3, 4, 16])
    target = make_target(
        pairing, page_size=page_size, num_pages=1 + 320 // page_size, max_num_requests=5,
        prefill_chunk_len=rng.choice([7, 64]), max_batch_rows=rng.choice([40, 512]),
        feature_retain_rows=rng.choice([0, 5, 8192]),
    )  # fmt: skip

    def new_draft() -> Any:
        return make_draft(
            pairing, page_size=4, num_pages=(EXTRA_SLOTS + rng.choice([80, 400])) // 4,
            max_num_requests=12, window=rng.choice([0, 20]),
        )  # fmt: skip

    pair = Chaos(target, new_draft(), plain=plain, rng=rng)
    waiting = [fresh(request) for request in requests]
    for _ in range(3000):
        if waiting and rng.random() < 0.3:
            pair.open(waiting.pop(0))
        if rng.random() < 0.02:
            pair.count("draft replaced")
            pair.replace_draft(new_draft())
        pair.disturb()
        if not pair.step() and not pair.revive() and not waiting and not pair.live():
            break
    else:
        raise AssertionError(f"stuck: {pair.live()}")
    while pair.step():
        pass
    pair.check_idle()
    assert not pair.failures
    for name, request in pair.requests.items():
        want = plain[name]
        if name in pair.cancelled:
            assert request.output == want.output[: len(request.output)]
        else:
            assert request.output == want.output
            assert request.finish_reason == want.finish_reason
            assert request.logprob_rows == want.logprob_rows
    assert sum(pair.events.values()) > 0
