"""The bundled models: strictly loadable, equal to transformers, drafting as the reference does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from shared.models.checkpoint_names import resolve_model, tokenizer_hash
from shared.models.config import DraftKind, ModelConfig, feature_spec, resolve_draft
from shared.models.digest import model_hash
from shared.models.draft import load_draft
from shared.models.llama import CausalLM
from tests.paged import PagedKV
from tests.reference.causal_lm import ReferenceLM
from tests.reference.drafts import ReferenceEagle3

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPT = "def fibonacci(n: int) -> int:\n    if n < 2:\n        return"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def prompt_ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(resolve_model("demo", "target") / "tokenizer.json"))
    return tokenizer.encode(PROMPT).ids


def pool_for(model: Any) -> PagedKV:
    return PagedKV(
        model.kv_layout,
        page_size=16,
    )


@pytest.mark.parametrize("role", ["target", "standalone"])
def test_greedy_text_equals_transformers(role: str, prompt_ids: list[int]) -> None:
    directory = resolve_model("demo", role)
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([prompt_ids])
    want = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(prompt_ids) :].tolist()  # fmt: skip

    kv = pool_for(model.config)
    output: list[int] = []
    rows, start = prompt_ids, 0
    while len(output) < 24:
        hidden = model.forward(kv.chain(rows, start)).hidden
        if not start:
            torch.testing.assert_close(
                model.logits(hidden), oracle(ids).logits[0], atol=1e-4, rtol=0
            )
        start += len(rows)
        rows = [int(model.logits(hidden[-1:]).argmax())]
        output += rows
    assert output == want


def test_drafts_fit_the_target() -> None:
    target = resolve_model("demo", "target")
    config = ModelConfig.from_checkpoint(target)
    kind, spec = feature_spec(resolve_draft("demo", "auto", target), target, "auto")
    assert kind is DraftKind.EAGLE3
    assert spec.width == len(spec.layer_ids) * config.hidden_size
    assert feature_spec(resolve_draft("demo", "standalone", target), target, "auto")[0] is (
        DraftKind.STANDALONE
    )
    roles = ("target", "eagle3", "standalone")
    assert len({tokenizer_hash(resolve_model("demo", role)) for role in roles}) == 1
    assert len({model_hash(resolve_model("demo", role)) for role in roles}) == 3


def test_eagle3_head_equals_the_reference_and_guesses_the_target(prompt_ids: list[int]) -> None:
    target_dir = resolve_model("demo", "target")
    head_dir = resolve_model("demo", "eagle3")
    reference = ReferenceLM(target_dir)
    ids = prompt_ids + reference.generate(prompt_ids, 24)
    target = reference.forward(ids)
    oracle = ReferenceEagle3(head_dir, reference)
    rows = oracle.true_rows(ids, target)

    draft = load_draft("auto", head_dir, target_dir, device=CPU, dtype=torch.float32)
    features = torch.cat([target.layers[i] for i in draft.feature_spec.layer_ids], dim=-1)
    hidden = draft.extend(
        pool_for(draft).chain(ids[1:]),
        draft.project_features(features[: len(rows)]),
        carried=torch.zeros(1, draft.hidden_size),
    )
    torch.testing.assert_close(hidden[-1], oracle.hidden(rows), atol=1e-3, rtol=1e-3)
    guesses = draft.to_target_ids(draft.logits(hidden).argmax(-1)).tolist()
    # Row p has read tokens up to p + 1 and guesses token p + 2.
    right = [guess == token for guess, token in zip(guesses, ids[2:], strict=False)]
    generated = right[len(prompt_ids) - 2 :]
    assert sum(generated) / len(generated) > 0.5, "shift or capture point is off"


def test_the_demo_is_package_data() -> None:
    directory = resolve_model("demo", "target")
    assert directory.parent == Path(__file__).parents[2] / "coppice" / "bundled"
    size = sum(path.stat().st_size for path in directory.parent.rglob("*") if path.is_file())
    assert size < 40 * 2**20
