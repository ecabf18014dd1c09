"""A head is trained on the rows that it is served with: the unrolled loss sees a tree's chains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_tokenizer
from tests.reference.causal_lm import ReferenceLM
from tests.reference.drafts import (
    ReferenceDraft,
    ReferenceEagle,
    ReferenceEagle3,
    ReferenceMTP,
    Row,
)
from training.checkpoint import save_eagle, save_eagle3, save_llama, save_mimo
from training.eagle3 import Eagle3Config, Eagle3Head
from training.final_hidden import EagleHead, MTPLayer
from training.model import LlamaConfig, LlamaForCausalLM
from training.unroll import drafted_hidden_states

NUM_STEPS = 3
CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)


def randomize(module: torch.nn.Module) -> None:
    """Give every parameter, norms and biases too, a value that bf16 holds exactly."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter.normal_(mean=1.0, std=0.3)
            parameter.copy_(parameter.bfloat16())


def make_draft(kind: str, target: LlamaForCausalLM, directory: Path, tokens: torch.Tensor):
    """Save a random head; return what the training sees of it and what it means."""
    tokenizer = write_tokenizer(directory) / "tokenizer.json"
    save_llama(directory / "target", target, tokenizer)
    output = target(tokens[None], (0, 1, 2))
    embeds = target.model.embed_tokens(tokens[None, 1:])
    reference: ReferenceDraft
    if kind == "eagle3":
        eagle3 = Eagle3Head(
            Eagle3Config(decoder=ONE_LAYER, draft_vocab_size=20, aux_layer_ids=(0, 1, 2))
        )
        randomize(eagle3)
        save_eagle3(directory / "draft", eagle3, tokenizer)
        hidden = eagle3.fc(torch.cat(output.aux, dim=-1))
        reference = ReferenceEagle3(directory / "draft", ReferenceLM(directory / "target"))
        return eagle3.midlayer, embeds, hidden, reference
    if kind == "eagle":
        eagle = EagleHead(ONE_LAYER)
        randomize(eagle)
        save_eagle(directory / "draft", eagle)
        reference = ReferenceEagle(directory / "draft", ReferenceLM(directory / "target"))
        return eagle, embeds, output.hidden, reference
    layer = MTPLayer(ONE_LAYER)
    randomize(layer)
    save_mimo(directory / "draft", target, layer, tokenizer)
    embeds = embeds.clone()
    embeds[:, 0] = 0
    reference = ReferenceMTP(ReferenceLM(directory / "draft"))
    return layer, embeds, output.hidden, reference


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
@torch.no_grad()
def test_unrolled_rows_are_those_of_a_chain(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = LlamaForCausalLM(CONFIG)
    randomize(target)
    tokens = torch.randint(CONFIG.vocab_size, (9,))
    layer, embeds, hidden, reference = make_draft(kind, target, tmp_path, tokens)
    num_rows = len(tokens) - NUM_STEPS
    unrolled = drafted_hidden_states(
        layer, ONE_LAYER, embeds, hidden[:, :num_rows], num_steps=NUM_STEPS
    )
    # The MiMo checkpoint holds the target too: biases of zero change nothing.
    dense = reference.target.forward(tokens.tolist())
    for base in range(num_rows):
        rows = reference.true_rows(tokens[: base + 2].tolist(), dense)
        for step in range(NUM_STEPS):
            expected = reference.hidden(rows)
            torch.testing.assert_close(unrolled[step][0, base], expected, atol=2e-4, rtol=2e-4)
            position = base + step + 1
            if position + 1 < len(tokens):
                rows.append(
                    Row(token_id=int(tokens[position + 1]), position=position, recurrent=expected)
                )
