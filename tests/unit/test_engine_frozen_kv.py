"""Engines with a draft that attends to its target's K and V: trees are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shared.messages import SamplingParams, TreeShape
from tests import families
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    make_draft,
    make_target,
    random_tokens,
)
from tests.local_pair import LocalRequest
from tests.reference.causal_lm import DenseOutput
from tests.reference.drafts import Row
from tests.reference.trees import draft_tree
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


class Assistant:
    """transformers' assistant as a ReferenceDraft. What it computes of a row is one vector: logits,
    and behind them the hidden state of its children.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._width = oracle.draft.config.backbone_hidden_size

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]:  # noqa: ARG002
        """Return the row of the root alone: nothing else depends on those before."""
        self._root = len(token_ids) - 1
        self._kv, features = self._oracle.read(token_ids[:-1])
        return [Row(token_id=token_ids[-1], position=self._root, recurrent=features[-1])]

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        assert rows[-1].recurrent is not None
        hidden = rows[-1].recurrent[-self._width :]
        return torch.cat(self._oracle.guess(self._kv, rows[-1].token_id, hidden, self._root))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[: -self._width]


@pytest.mark.parametrize("agrees", [True, pytest.param(False, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_trees_of_any_shape_are_those_that_transformers_would_grow(
    models: Models,
    agrees: bool,  # noqa: FBT001
) -> None:
    """Greedily and sampled, in one batch; the first tree of a request and its last one."""
    pairing = pairing_of(models, agrees=agrees)
    reference, rng = Assistant(Oracle(pairing.target, pairing.draft)), random.Random(5)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, rng.choice([1, 2, 7, 26])),
            max_new_tokens=11,
            shape=shape,
            sampling=SamplingParams(temperature=temperature, seed=i),
        )
        for i, shape in enumerate(SHAPES)
        for temperature in (0.0, 0.7)
    ]
    target = make_target(pairing, page_size=4, prefill_chunk_len=11)
    PoisonedPair(target, make_draft(pairing, page_size=2)).run(requests)
    nothing = DenseOutput(layers=[], final=torch.empty(0), logits=torch.empty(0))
    num_same = 0
    for request in requests:
        for tree in (request.trees[0], request.trees[-1]):
            assert request.shape is not None
            want = draft_tree(
                reference,
                request.tokens[: tree.seq_len + 1],
                nothing,
                num_steps=request.shape.num_steps,
                topk=request.shape.topk,
                num_draft_tokens=request.shape.num_draft_tokens,
                temperature=request.sampling.temperature,
                seed=request.sampling.seed,
            )
            if want.margin < TIE:
                continue
            num_same += 1
            assert (tree.token_ids, tree.parent_index) == (want.token_ids, want.parent_index)
            assert tree.cumulative_logprobs == pytest.approx(want.scores, abs=TIE)
    assert num_same > len(requests), "too many trees were too close to call"


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
