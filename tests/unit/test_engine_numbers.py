"""A request whose logits are no numbers ends with an error; a worker whose are does not start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import CheckpointError, ConfigError, StatusCode
from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    RequestFailure,
    SamplingParams,
    StoppingParams,
    TargetOpen,
)
from target_service.engine import TargetEngine
from target_service.self_test import PATH_LEN, PREFIX_LEN
from tests import checkpoints
from tests.checkpoints import EOS_ID, VOCAB_SIZE, Tensors, edit_checkpoint
from tests.engines import Models, Pairing, make_draft, make_target

# A token that the start-up prompt does not hold: what it breaks shows only when a client sends it.
FIXED_PROMPT = set(np.random.default_rng(0).integers(0, VOCAB_SIZE, PREFIX_LEN + PATH_LEN).tolist())
CURSED = max(set(range(EOS_ID)) - FIXED_PROMPT)
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=["nan", "inf"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose embedding of one token is no number."""
    return edit_checkpoint(
        checkpoints.write_llama(tmp_path_factory.mktemp("model")),
        tensors=lambda t: t["model.embed_tokens.weight"][CURSED, 3:4].fill_(request.param),
    )


def make(checkpoint: Path) -> TargetEngine:
    return make_target(Pairing(target=checkpoint, draft=checkpoint, algorithm="none"))


def opened(request_id: str, *token_ids: int, **fields: Any) -> TargetOpen:
    return TargetOpen(
        request_id=request_id,
        target_epoch=1,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=fields.pop("sampling", SamplingParams()),
        stopping=StoppingParams(max_new_tokens=NUM_TOKENS, **fields),
    )


def run(target: TargetEngine, *opens: TargetOpen) -> list[Any]:
    """Serve requests by rounds on credit of the root alone; return every answer."""
    for message in opens:
        target.submit(message)
    answers = []
    while target.has_work:
        for answer in target.step():
            answers.append(answer)
            if isinstance(answer, AcceptedPath) and answer.round_idx == 0:
                target.submit(
                    CreditUpdate(
                        request_id=answer.request_id,
                        target_epoch=1,
                        credit=Credit(until_round_idx=NUM_TOKENS),
                    )
                )
    target.check_integrity()
    assert target.load.num_free_pages == target.load.num_pages
    return answers


def tokens_of(answers: list[Any], request_id: str) -> list[int]:
    paths = [a for a in answers if isinstance(a, AcceptedPath) and a.request_id == request_id]
    return [token_id for path in paths for token_id in path.token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_request_itself_is_ended(checkpoint: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    good = opened("good", 1, 2, 3, 4, sampling=sampling)
    alone = run(make(checkpoint), good)
    assert len(tokens_of(alone, "good")) == NUM_TOKENS

    target = make(checkpoint)
    answers = run(target, opened("bad", 1, CURSED, 3, sampling=sampling), good)
    (failure,) = [a for a in answers if isinstance(a, RequestFailure)]
    assert (failure.request_id, failure.reason) == ("bad", "NON_FINITE_LOGITS")
    assert (failure.code, failure.target_epoch, failure.round_idx) == (StatusCode.INTERNAL, 1, 0)
    assert tokens_of(answers, "bad") == []
    assert tokens_of(answers, "good") == tokens_of(alone, "good")
    # Nor does who gets its pages afterwards.
    again = run(target, replace(good, request_id="again"))
    assert tokens_of(again, "again") == tokens_of(alone, "good")


def test_a_token_that_is_sampled_later_ends_the_request_then(checkpoint: Path) -> None:
    sampling = SamplingParams(logit_bias=((CURSED, 100.0),))
    answers = run(make(checkpoint), opened("r", 1, 2, 3, sampling=sampling))
    assert tokens_of(answers, "r") == [CURSED]
    assert isinstance(answers[-1], RequestFailure) and answers[-1].round_idx == 1


def test_what_a_client_forbids_is_no_fault(checkpoint: Path) -> None:
    """-inf by a mask, and infinity by a penalty, are not the model's."""
    stops = tuple(i for i in range(VOCAB_SIZE) if i != 7)
    answers = run(
        make(checkpoint),
        opened("masked", 1, 2, 3, min_new_tokens=NUM_TOKENS, stop_token_ids=stops),
        opened("divided", 4, 5, sampling=SamplingParams(repetition_penalty=1e-38)),
    )
    assert not [a for a in answers if isinstance(a, RequestFailure)]
    assert tokens_of(answers, "masked") == [7] * NUM_TOKENS
    assert len(tokens_of(answers, "divided")) == NUM_TOKENS


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("eagle3", "fc.weight"),
        ("eagle3", "midlayer.self_attn.q_proj.weight"),
        ("eagle3", "lm_head.weight"),
        ("eagle", "fc.weight"),
        ("eagle", "layers.0.mlp.down_proj.weight"),
        ("mtp", "mtp_layers.0.input_proj.weight"),
        ("mtp", "mtp_layers.0.self_attn.k_proj.weight"),
        ("mtp-layers", "mtp_layers.1.input_proj.weight"),
        ("mtp-layers", "mtp_layers.2.mlp.down_proj.weight"),
        ("standalone", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_draft_that_computes_no_numbers_ends_its_start_and_is_named(
    tmp_path: Path, kind: str, part: str, value: float
) -> None:
    """It would be ready, grow no tree for anybody, and say nothing."""
    pairing = Models(tmp_path).pairing(kind)

    def damage(tensors: Tensors) -> None:
        (name,) = [name for name in tensors if name.endswith(part)]
        middle = tensors[name].numel() // 2
        tensors[name].view(-1)[middle : middle + 1].fill_(value)

    edit_checkpoint(pairing.draft, tensors=damage)
    with pytest.raises(CheckpointError, match=f"NaN or infinite.*1 tensors: .*{part}"):
        make_draft(pairing, project_features=False)


def test_fc_that_computes_no_numbers_ends_the_start_of_the_target_that_has_it(
    tmp_path: Path,
) -> None:
    """The draft does not load it."""
    pairing = Models(tmp_path).pairing("eagle3")
    edit_checkpoint(
        pairing.draft, tensors=lambda t: t["fc.weight"].view(-1)[9:10].fill_(float("nan"))
    )
    with pytest.raises(CheckpointError, match=r"NaN or infinite.*1 tensors: fc\.weight"):
        make_target(pairing)
    make_draft(pairing)


@pytest.mark.parametrize("kind", ["eagle3", "mtp-layers", "standalone"])
def test_the_shortest_context_of_a_draft_has_room_for_its_start(tmp_path: Path, kind: str) -> None:
    pairing = Models(tmp_path).pairing(kind)
    assert make_draft(pairing, max_context_len=2).info.max_context_len == 2
    with pytest.raises(ConfigError, match="--max-context-len 1 .*; set 2 or more"):
        make_draft(pairing, max_context_len=1)
