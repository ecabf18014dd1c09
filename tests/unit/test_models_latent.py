"""Latent attention in a model: what is kept, what config.json and checkpoints may say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.kv.layout import KVLayout
from shared.models.config import DraftKind, ModelConfig, detect_kind
from shared.models.draft import load_draft
from shared.models.llama import CausalLM
from tests.checkpoints import Tensors, edit_checkpoint
from tests.deepseek import write_deepseek
from tests.reference.deepseek import ReferenceDeepseek
from tests.unit.test_models_llama import Runner, tokens_of

CPU = torch.device("cpu")
ATTENTION = "model.layers.1.self_attn"
MTP = "model.layers.2"


def test_a_target_is_the_reference_that_makes_keys_and_values(tmp_path: Path) -> None:
    directory, ids = write_deepseek(tmp_path), tokens_of(70)
    with torch.inference_mode():
        model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
        got = model.logits(Runner(model).extend(ids).hidden)
        want = ReferenceDeepseek(directory).forward(ids).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_one_row_is_kept_of_a_token_in_every_layer(tmp_path: Path) -> None:
    layout = ModelConfig.from_checkpoint(write_deepseek(tmp_path)).kv_layout
    assert layout == KVLayout.uniform(2, 1, 16 + 8, caches=("latent",))
    assert layout.bytes_per_token(2) == 2 * 24 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, got None"),
        ({"q_lora_rank": "24"}, "q_lora_rank must be a positive integer, got '24'; or null"),
        ({"v_head_dim": 0}, "v_head_dim must be a positive integer, got 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 is odd, which rules out RoPE"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
    ],
)
def test_fields_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    directory = edit_checkpoint(write_deepseek(tmp_path), config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_checkpoint(directory)


def cut(name: str) -> Callable[[Tensors], None]:
    """Return what takes a row off a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][1:].contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut(f"{ATTENTION}.kv_b_proj.weight"), r"kv_b_proj.weight' has shape \[111, 16\]"),
        (cut(f"{ATTENTION}.kv_a_proj_with_mqa.weight"), r"has shape \[23, 48\].*\[24, 48\]"),
        (cut(f"{ATTENTION}.q_b_proj.weight"), r"q_b_proj.weight' has shape \[95, 24\]"),
        (
            lambda t: t.pop(f"{ATTENTION}.q_a_layernorm.weight"),
            rf"missing tensor '{ATTENTION}.q_a_layernorm.weight' of shape \[24\]",
        ),
        (
            lambda t: t.update({f"{ATTENTION}.k_proj.weight": torch.ones(2, 2)}),
            f"1 left-over tensors.*{ATTENTION}.k_proj.weight",
        ),
    ],
)
def test_tensors_are_accounted_for_by_name(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    directory = edit_checkpoint(write_deepseek(tmp_path), tensors=change)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MTP}.eh_proj.weight"), f"missing tensor '{MTP}.eh_proj.weight'"),
        (lambda t: t.pop(f"{MTP}.shared_head.norm.weight"), f"'{MTP}.shared_head.norm.weight'"),
        (
            lambda t: t.update({f"{MTP}.mlp.experts.4.up_proj.weight": torch.ones(2, 2)}),
            f"1 left-over tensors.*{MTP}.mlp.experts.4.up_proj.weight",
        ),
    ],
)
def test_tensors_of_the_layer_of_mtp_are_accounted_for_by_name(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    directory = edit_checkpoint(write_deepseek(tmp_path), tensors=change)
    CausalLM.from_checkpoint(directory, CPU, torch.float32)  # the target does not look at it
    with pytest.raises(CheckpointError, match=message):
        load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)


def test_mtp_is_detected_and_needs_the_layer(tmp_path: Path) -> None:
    directory = write_deepseek(tmp_path)
    assert detect_kind(directory, "auto") is DraftKind.MTP
    edit_checkpoint(directory, config=lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers = 0; mtp needs"):
        load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)
