"""Drafts in another dtype, and drafts that see less than the conversation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from draft_service.engine_factory import CHUNK_ROWS, EXTRA_SLOTS, MIN_WINDOW, fit_window
from shared.errors import ConfigError
from shared.messages import FeatureCommand, FeatureSubscribe, SamplingParams
from tests import checkpoints, families
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    make_draft,
    make_target,
    pool_of,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalPair, LocalRequest

pytestmark = pytest.mark.slow

WINDOW = 24


def requests_of(lengths: tuple[int, ...], max_new_tokens: int) -> list[LocalRequest]:
    rng = random.Random(1)
    return [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=max_new_tokens,
            shape=SHAPES[2 + i],
            sampling=SamplingParams(temperature=0.5 * (i % 2), seed=i),
        )
        for i, length in enumerate(lengths)
    ]


DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
# Features are converted in one place for all kinds: each kind with one of three pairs of dtypes.
KINDS_AND_DTYPES = [
    pytest.param(
        *(kind, target_dtype, draft_dtype),
        marks=[pytest.mark.exhaustive] if (k + pair) % 3 else [],
    )
    for k, kind in enumerate(KINDS)
    for pair, (target_dtype, draft_dtype) in enumerate(DTYPES)
]


@pytest.mark.parametrize(("kind", "target_dtype", "draft_dtype"), KINDS_AND_DTYPES)
def test_draft_and_target_in_different_dtypes(
    models: Models, kind: str, target_dtype: str, draft_dtype: str
) -> None:
    pairing = models.pairing(kind)
    target = make_target(pairing, dtype=target_dtype, page_size=4)
    draft = make_draft(pairing, dtype=draft_dtype)
    assert (target.info.dtype, draft.info.dtype) == (target_dtype, draft_dtype)
    if kind != "standalone":
        assert target.info.features.dtype == target_dtype
    requests = requests_of((1, 9, 30, 16), 30)
    plain = run_plain(target, requests)
    PoisonedPair(target, draft).run(requests)
    assert [r.output for r in requests] == [r.output for r in plain]
    assert all(len(tree.token_ids) > 1 for r in requests for tree in r.trees)
    if kind != "eagle3":  # a random EAGLE-3 head is never right, in any dtype
        assert sum(r.accept_length for r in requests) / 4 > 1.2


def narrow(models: Models, kind: str) -> Pairing:
    """Return a pairing whose draft was made for WINDOW tokens."""
    pairing = models.pairing(kind)

    def shorten(directory: Path) -> Path:
        def edit(fields: dict[str, Any]) -> None:
            fields.get("text_config", fields)["max_position_embeddings"] = WINDOW

        return checkpoints.edit_checkpoint(directory, config=edit)

    write = {
        "eagle3": lambda d: checkpoints.write_eagle3(
            d, pairing.target, max_position_embeddings=WINDOW
        ),
        "eagle": lambda d: checkpoints.write_eagle(
            d, pairing.target, branch_scale=0.3, max_position_embeddings=WINDOW
        ),
        "standalone": lambda d: shorten(checkpoints.write_standalone(d, pairing.target, noise=0.1)),
        "frozen_kv_mtp": lambda d: shorten(
            families.write_gemma4_agreeing_assistant(d, pairing.target)
        ),
    }[kind]
    return Pairing(
        target=pairing.target,
        draft=models.get(f"narrow-{kind}", write),
        algorithm=pairing.algorithm,
    )


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [
        ("eagle3", 16),
        ("eagle", 4),
        ("standalone", 1),
        pytest.param("standalone", 16, marks=pytest.mark.exhaustive),
        ("frozen_kv_mtp", 4),
    ],
)
def test_a_draft_speculates_on_in_its_window(models: Models, kind: str, page_size: int) -> None:
    pairing = narrow(models, kind)
    config = json.loads((pairing.target / "config.json").read_text())
    assert config["max_position_embeddings"] > 8 * WINDOW
    target = make_target(pairing, page_size=4)
    draft = make_draft(pairing, page_size=page_size)
    assert draft.info.draft_window == WINDOW
    requests = requests_of((1, WINDOW, WINDOW + 1, 5 * WINDOW), 3 * WINDOW)
    plain = run_plain(target, requests)
    pair = PoisonedPair(target, draft)
    for request in requests:
        pair.open(request)
    pool, most = pool_of(draft), 0
    while pair.step():
        held = [pool.num_held_pages(r.req_idx) for r in draft.requests.values() if r.req_idx >= 0]
        most = max([most, *held])
        if all(len(r.output) > 2 for r in requests):  # the prompts are read, in one chunk each
            ahead = max(s.num_steps + 1 + (s.num_steps - 1) * s.topk for s in SHAPES[2:6])
            assert max(held, default=0) <= (WINDOW + ahead) // page_size + 2
    pair.finish()
    assert most * page_size >= WINDOW, "the window was never full"
    accepted: list[int] = []
    for got, want in zip(requests, plain, strict=True):
        assert got.output == want.output
        late = [tree for tree in got.trees if tree.seq_len > 2 * WINDOW]
        assert len(late) >= 3 and all(len(tree.token_ids) > 1 for tree in late)
        accepted += [p.num_accepted_drafts for p in got.paths if p.seq_len > 2 * WINDOW]
    if kind != "eagle3":
        assert sum(accepted) > 0.2 * len(accepted), "hardly anything is accepted past the window"


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "standalone", "frozen_kv_mtp"])
def test_a_late_draft_asks_for_its_window_only(models: Models, kind: str) -> None:
    """A row of a one-layer head depends on nothing but its inputs: the trees are the same."""
    pairing = narrow(models, kind)
    target = make_target(pairing, page_size=4)
    draft = make_draft(pairing, page_size=4)
    early = requests_of((100,), 30)[0]
    LocalPair(target, make_draft(pairing), edit_tree=lambda _: None).run([early])
    late = fresh(early, joins_at=20)
    asked: list[int] = []

    class Watched(PoisonedPair):
        def on_draft(self, message: object) -> None:
            if isinstance(message, FeatureCommand) and isinstance(
                message.command, FeatureSubscribe
            ):
                asked.append(message.command.from_position)
            super().on_draft(message)

    Watched(target, draft, edit_tree=lambda _: None).run([late])
    assert asked == ([] if kind == "standalone" else [119 - WINDOW])
    assert len(late.trees) == 10
    by_position = {tree.seq_len: tree for tree in early.trees}
    for tree in late.trees:
        if kind == "standalone":
            assert len(tree.token_ids) == len(by_position[tree.seq_len].token_ids)
            continue
        assert tree.token_ids == by_position[tree.seq_len].token_ids
        assert tree.parent_index == by_position[tree.seq_len].parent_index
        assert tree.cumulative_logprobs == pytest.approx(
            by_position[tree.seq_len].cumulative_logprobs, abs=1e-4
        )


def test_a_small_pool_narrows_the_window(models: Models) -> None:
    """A conversation that outgrows the draft's pool goes on with what fits."""
    pairing = models.pairing("eagle")
    target = make_target(pairing)
    num_pages = (EXTRA_SLOTS + 40) // 4 + 3
    draft = make_draft(pairing, page_size=4, num_pages=num_pages)
    assert draft.info.draft_window == 40
    request = requests_of((120,), 120)[0]
    plain = run_plain(target, [request])[0]
    pair = PoisonedPair(target, draft)
    pair.run([request])
    assert pair.num_draft_retracted == 0
    assert request.output == plain.output
    assert [path.num_draft_tokens for path in request.paths[1:-1]] == [6] * (len(request.paths) - 2)


def test_fit_window_leaves_room_for_everything_else() -> None:
    assert CHUNK_ROWS + 15 * 16 <= EXTRA_SLOTS
    assert fit_window(100, 10_000, 16) == 100
    for page_size in (1, 3, 16, 64):
        for num_pages in range(2, 700 // page_size):
            room = (num_pages - 3) * page_size - EXTRA_SLOTS
            if room < MIN_WINDOW:
                with pytest.raises(ConfigError, match="--num-pages"):
                    fit_window(10_000, num_pages, page_size)
            else:
                assert fit_window(10_000, num_pages, page_size) == room
