"""Engines with a draft that attends to its target's K and V: guesses are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shared.messages import TreeShape
from tests import families
from tests.engines import Models, Pairing, PoisonedPair, make_draft, make_target, random_tokens
from tests.local_pair import LocalRequest
from tests.unit.test_models_frozen_kv import Oracle

CHAIN = TreeShape(num_steps=5, topk=1, num_draft_tokens=6)
# Of two logits that are as close either may be the largest.
TIE = 1e-3


def pairing_of(models: Models, *, agrees: bool) -> Pairing:
    """Return a target and its assistant, which is often right or reads K and V with all weight."""
    if agrees:
        return models.pairing("frozen_kv_mtp")

    def write(directory: Path) -> Path:
        return families.write(directory, "gemma4_text", **families.GEMMA4)

    return Pairing(
        target=models.get("gemma4", write),
        draft=models.get("gemma4-assistant", families.write_gemma4_assistant),
        algorithm="auto",
    )


@pytest.mark.parametrize("agrees", [True, False])
@torch.inference_mode()
def test_every_chain_of_a_conversation_is_what_transformers_guesses(
    models: Models,
    agrees: bool,  # noqa: FBT001
) -> None:
    """Greedily: the newest token at its own position, hidden state and K and V of what is
    committed, whatever was accepted before; prompts are read in chunks.
    """
    pairing = pairing_of(models, agrees=agrees)
    oracle, rng = Oracle(pairing.target, pairing.draft), random.Random(2)
    requests = [
        LocalRequest(prompt=random_tokens(rng, length), max_new_tokens=24, shape=CHAIN)
        for length in (1, 3, 33)
    ]
    engine = make_target(pairing, page_size=4, prefill_chunk_len=13)
    PoisonedPair(engine, make_draft(pairing, page_size=16)).run(requests)
    num_same = 0
    for request in requests:
        tokens = [*request.prompt, *request.output]
        for tree in request.trees:
            root = tree.seq_len
            assert tree.token_ids[0] == tokens[root]
            kv, features = oracle.read(tokens[:root])
            hidden = features[-1]
            for token, guess in zip(tree.token_ids, tree.token_ids[1:], strict=False):
                logits, hidden = oracle.guess(kv, token, hidden, root)
                assert float(logits.max() - logits[guess]) < TIE
                num_same += 1
    assert num_same > 100
    accepted = [path.num_accepted_drafts for request in requests for path in request.paths[1:]]
    if agrees:
        assert 0.3 < sum(accepted) / len(accepted) < CHAIN.num_steps


@torch.inference_mode()
def test_what_is_compared_depends_on_position_kv_and_hidden_state(models: Models) -> None:
    """So that another convention would have been seen."""
    pairing = pairing_of(models, agrees=False)
    oracle, ids = Oracle(pairing.target, pairing.draft), random_tokens(random.Random(4), 30)
    kv, features = oracle.read(ids[:29])
    logits, _ = oracle.guess(kv, ids[29], features[-1], 29)
    less = {kind: (k[:, :, :-1], v[:, :, :-1]) for kind, (k, v) in kv.items()}
    for other, _ in (
        oracle.guess(kv, ids[29], features[-1], 28),
        oracle.guess(less, ids[29], features[-1], 29),
        oracle.guess(kv, ids[29], features[-2], 29),
        oracle.guess(kv, ids[28], features[-1], 29),
    ):
        assert float((other - logits).abs().max()) > 100 * TIE
