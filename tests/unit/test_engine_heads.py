"""Heads as they are published, in engines: speculation changes no token, logs say what is read.

The target is a mixture of experts; the heads' queries are wider than their hidden state, as those
of heads for Qwen3-235B are.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from shared.messages import SamplingParams, TokenTree, TreeShape
from tests import checkpoints
from tests.engines import (
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

HEADS: dict[str, dict[str, Any]] = {
    "speculators": {"is_speculators": True, "norm_before_fc": True, "has_embedding": True},
    "layers": {"is_speculators": True, "num_layers": 3},
    "eagle3.1": {
        "layer_ids": (0, 1, 2),
        "tap_norms": ("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        "feeds_back_norm": True,
    },
}


def requests_of(seed: int) -> list[LocalRequest]:
    rng = random.Random(seed)
    return [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=16,
            shape=TreeShape(num_steps=4, topk=topk, num_draft_tokens=nodes),
            logprobs=True,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for length, topk, nodes, temperature in ((9, 4, 16, 0.0), (40, 1, 5, 1.0))
    ]


def pairing_of(models: Models, name: str) -> Pairing:
    target = models.get("qwen3-moe", checkpoints.write_qwen3_moe)
    options = HEADS[name]
    head = models.get(
        f"moe-{name}", lambda d: checkpoints.write_eagle3(d, target, heads=(8, 16), **options)
    )
    return Pairing(target=target, draft=head, algorithm="auto")


@pytest.mark.parametrize(
    ("name", "project_features"),
    [("speculators", True), ("layers", False), ("eagle3.1", True), ("eagle3.1", False)],
)
def test_a_wide_head_of_experts_changes_no_token(
    models: Models,
    name: str,
    project_features: bool,  # noqa: FBT001
) -> None:
    pairing = pairing_of(models, name)
    target = make_target(pairing, page_size=4, project_features=project_features)
    assert bool(target.info.features.projection) is project_features
    plain = plain_of(target, requests_of(5), alone=True)
    speculative = [fresh(request) for request in requests_of(5)]
    pair = PoisonedPair(target, make_draft(pairing, project_features=project_features))
    by_id = {f"r{i + 1}": request for i, request in enumerate(plain)}
    rng = random.Random(5)

    def edit(tree: TokenTree) -> TokenTree:
        done = len(pair.requests[tree.request_id].output)
        return graft(tree, by_id[tree.request_id].output[done:], rng)

    pair.edit_tree = edit
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
        assert got.logprob_rows == want.logprob_rows
    accepted = sum(path.num_accepted_drafts for r in speculative for path in r.paths)
    assert accepted > 4


def test_the_draft_says_how_its_layer_ids_count(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    said = {}
    with caplog.at_level(logging.INFO, logger="draft_service"):
        for name in HEADS:
            caplog.clear()
            make_draft(pairing_of(models, name))
            said[name] = "\n".join(caplog.messages)
    name = "eagle_aux_hidden_state_layer_ids"
    line = "reads the outputs of the target's layers"
    assert f"{line} [0, 2] ({name} [1, 3], each the number of layers before" in said["speculators"]
    assert f"{line} [0, 1, 2] (eagle_config.{name} [0, 1, 2], each the layer" in said["eagle3.1"]


def test_pickled_heads_are_the_same_heads(models: Models, tmp_path: Path) -> None:
    pairing = pairing_of(models, "eagle3.1")
    pickled = checkpoints.pickle_weights(pairing.draft, tmp_path / "pickled")
    draft = make_draft(Pairing(target=pairing.target, draft=pickled, algorithm="auto"))
    target = make_target(pairing)
    assert draft.info.features.projection == target.info.features.projection != ""
