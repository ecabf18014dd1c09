"""A trained DeepSeek-V3 is the checkpoint that is saved: for transformers, and for both workers."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from shared.messages import SamplingParams, TreeShape
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engines import Pairing, fresh, make_draft, make_target, run_plain
from tests.local_pair import LocalPair, LocalRequest
from training import data
from training.checkpoint import save_deepseek
from training.deepseek import (
    DeepseekConfig,
    DeepseekForCausalLM,
    DeepseekMTPLayer,
    Router,
    balanced,
)
from training.loop import LoopConfig, run_steps
from training.regression import training_test_losses
from training.train_target import training_losses

CONFIG = DeepseekConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    nope_dim=16,
    value_dim=12,
    query_rank=24,
    latent_rank=16,
    num_experts=4,
    num_experts_per_token=2,
    expert_size=16,
)
PERIOD = 5
HEAD = argparse.Namespace(
    tokens_per_step=512, seed=0, num_test_steps=2, step_weight=0.85, regression_weight=0.1
)


def short_loop(num_steps: int) -> LoopConfig:
    return LoopConfig(num_steps=num_steps, max_seconds=0, warmup_steps=5, learning_rate=1e-2)


@torch.no_grad()
def test_a_saved_target_is_that_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, layer = DeepseekForCausalLM(CONFIG), DeepseekMTPLayer(CONFIG)
    for name, tensor in itertools.chain(target.named_parameters(), target.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.3)
        tensor.copy_(tensor.bfloat16())
    directory = tmp_path / "saved"
    save_deepseek(directory, target, layer, write_tokenizer(tmp_path) / "tokenizer.json")
    model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.randint(VOCAB_SIZE, (2, 40))
    logits = target.lm_head(target.eval()(tokens).hidden)
    torch.testing.assert_close(logits, model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_both_learn_and_trees_of_the_layer_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of five tokens that come again and again."""
    monkeypatch.setattr(data, "SHORT_LENGTH", 64)
    monkeypatch.setattr(data, "LONG_LENGTH", 128)
    torch.manual_seed(0)
    tokens = torch.arange(8000) % PERIOD + 20
    target, layer = DeepseekForCausalLM(CONFIG), DeepseekMTPLayer(CONFIG)
    seen: list[float] = []

    def noted(losses: Iterator[torch.Tensor], module: torch.nn.Module) -> Iterator[torch.Tensor]:
        for loss in balanced(losses, module):
            seen.append(float(loss.detach()))
            yield loss

    losses = training_losses(target, tokens, tokens_per_step=512, seed=1)
    run_steps(noted(losses, target), target, short_loop(30))
    assert seen[-1] < 0.3 * seen[0]
    biases = [each.e_score_correction_bias for each in target.modules() if isinstance(each, Router)]
    assert all(bool(bias.any()) for bias in biases)
    target.eval().requires_grad_(requires_grad=False)
    seen.clear()
    losses = training_test_losses(layer, target, tokens, HEAD)
    run_steps(noted(losses, layer), layer, short_loop(30))
    assert seen[-1] < 0.5 * seen[0]

    directory = tmp_path / "saved"
    save_deepseek(directory, target, layer, write_tokenizer(tmp_path) / "tokenizer.json")
    pairing = Pairing(target=directory, draft=directory, algorithm="mtp")
    served = make_target(pairing)
    shape = TreeShape(num_steps=3, topk=2, num_draft_tokens=6)
    requests = [
        LocalRequest(prompt=tokens[:30].tolist(), max_new_tokens=20, shape=shape, sampling=sampling)
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=9))
    ]
    plain = run_plain(served, requests, alone=True)
    speculative = [fresh(request) for request in requests]
    LocalPair(served, make_draft(pairing)).run(speculative)
    assert [request.output for request in speculative] == [request.output for request in plain]
    assert speculative[0].accept_length > 2.5


def test_a_corpus_that_is_not_there_is_said_with_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="train.bin: python -m training.corpus, then"):
        data.load_tokens(tmp_path / "train.bin", torch.device("cpu"))
