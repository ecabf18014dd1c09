"""FR-Spec: a file of token ids restricts what an EAGLE-1/2 head proposes, and changes no output."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.stack.config import stack_config
from shared.errors import ConfigError
from shared.messages import TokenTree, TreeShape
from shared.models.draft import load_draft
from tests import checkpoints
from tests.engines import Models, PoisonedPair, fresh, make_draft, make_target, plain_of
from tests.engines import random_tokens as tokens_of
from tests.local_pair import LocalRequest

CPU = torch.device("cpu")
IDS = [250, *range(7, 120, 2), 3]  # in no order
SAVERS = {
    "json": lambda path: path.write_text(json.dumps(IDS)),
    "list.pt": lambda path: torch.save(IDS, path),
    "tensor.pt": lambda path: torch.save(torch.tensor(IDS, dtype=torch.int32), path),
}


@pytest.mark.parametrize("name", SAVERS)
def test_the_head_has_those_rows_of_the_targets(tmp_path: Path, name: str) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle(tmp_path / "head", target)
    path = tmp_path / f"ids.{name}"
    SAVERS[name](path)
    place: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
    whole = load_draft("auto", head, target, **place)
    draft = load_draft("auto", head, target, token_map=path, **place)
    assert (whole.vocab_size, draft.vocab_size) == (checkpoints.VOCAB_SIZE, len(IDS))
    assert draft.to_target_ids(torch.arange(len(IDS))).tolist() == IDS
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draft.logits(hidden), whole.logits(hidden)[:, IDS])


def test_output_stays_and_trees_have_only_those_tokens(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairing = models.pairing("eagle")
    ids = list(range(0, checkpoints.VOCAB_SIZE, 2))
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    target = make_target(pairing)
    shape = TreeShape(num_steps=4, topk=8, num_draft_tokens=24)
    rng = random.Random(3)
    requests = [
        LocalRequest(prompt=tokens_of(rng, count), max_new_tokens=20, shape=shape)
        for count in (5, 30)
    ]
    plain = plain_of(target, requests, alone=True)
    speculative = [fresh(request) for request in requests]
    with caplog.at_level(logging.INFO, logger="draft_service"):
        draft = make_draft(pairing, draft_token_map=str(tmp_path / "ids.json"))
    assert f"proposes {len(ids)} of {checkpoints.VOCAB_SIZE} tokens" in caplog.text
    pair = PoisonedPair(target, draft)
    proposed: set[int] = set()

    def look(tree: TokenTree) -> TokenTree:
        proposed.update(tree.token_ids[1:])
        return tree

    pair.edit_tree = look
    pair.run(speculative)
    assert [request.output for request in speculative] == [request.output for request in plain]
    assert proposed and proposed <= set(ids)
    assert sum(path.num_accepted_drafts for r in speculative for path in r.paths) > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "JSON list of token ids"),
        ("{}", "token ids"),
        ('["a"]', "token ids"),
        ("[[1, 2], [3, 4]]", "flat list"),
        ("[0.5, 1.5]", "flat list"),
        ("[true, false]", "flat list"),
        ("[1, 2, 3]", "16 or more different"),
        (json.dumps([5] * 20), "it has 20, 1 of them different"),
        (json.dumps([*range(20), 263]), "from 0 to 263, but the target's vocabulary has 263"),
        (json.dumps(list(range(-1, 20))), "from -1"),
        (None, "No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle(tmp_path / "head", target)
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--draft-token-map.*{message}"):
        load_draft("auto", head, target, device=CPU, dtype=torch.float32, token_map=path)
    path.rename(tmp_path / "ids.pt") if content is not None else None
    with pytest.raises(ConfigError, match="--draft-token-map"):
        load_draft(
            "auto", head, target, device=CPU, dtype=torch.float32, token_map=tmp_path / "ids.pt"
        )


def test_it_is_of_eagle_heads_only(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(tmp_path / "head", target)
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    with pytest.raises(ConfigError, match="the draft is eagle3.*d2t"):
        load_draft(
            "auto",
            head,
            target,
            device=CPU,
            dtype=torch.float32,
            token_map=tmp_path / "ids.json",
        )


def test_coppice_up_hands_it_to_the_draft() -> None:
    assert stack_config({"draft_token_map": "ids.pt"}).draft.draft_token_map == "ids.pt"
