"""InternLM3 as its published config.json writes it: `qkv_bias` and `bias` are two switches.

The class in transformers knows only equal ones; the reference takes the biases that are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.models.config import ModelConfig
from shared.models.llama import CausalLM
from tests import checkpoints
from tests.checkpoints import edit_checkpoint
from tests.reference.causal_lm import ReferenceLM
from tests.unit.test_models_llama import Runner, tokens_of

CPU = torch.device("cpu")
PUBLISHED = {
    "architectures": ["InternLM3ForCausalLM"],
    "model_type": "internlm3",
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
    "qkv_bias": False,
    "bias": False,
    "rope_parameters": None,
    "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    "rope_theta": 20000.0,
}


def write(directory: Path, *, qkv_bias: bool, bias: bool) -> Path:
    """Write an InternLM3 under the published names of its fields."""
    checkpoints.write_llama(
        directory,
        has_attention_bias=qkv_bias,
        has_mlp_bias=bias,
        rope={"rope_type": "default"},
    )

    def move_o_bias(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(checkpoints.TINY.num_layers):
            name = f"model.layers.{layer}.self_attn.o_proj.bias"
            tensors.pop(name, None)
            if bias:
                values = torch.randn(checkpoints.TINY.hidden_size, generator=_seeded(layer))
                tensors[name] = 0.3 * values

    def fields(config: dict[str, Any]) -> None:
        del config["attention_bias"], config["mlp_bias"]
        config.update(PUBLISHED | {"qkv_bias": qkv_bias, "bias": bias})

    return edit_checkpoint(directory, tensors=move_o_bias, config=fields)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_logits_equal_the_reference(tmp_path: Path, *, qkv_bias: bool, bias: bool) -> None:
    directory = write(tmp_path, qkv_bias=qkv_bias, bias=bias)
    config = ModelConfig.from_checkpoint(directory)
    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) == (qkv_bias, bias, bias)
    reference = ReferenceLM(directory)
    reference.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 20000.0}
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    ids = tokens_of(60)
    got = model.logits(Runner(model).extend(ids).hidden)
    torch.testing.assert_close(got, reference.forward(ids).logits, atol=1e-4, rtol=0)


def test_a_switch_that_contradicts_the_tensors_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, qkv_bias=True, bias=True)
    edit_checkpoint(directory, config=lambda config: config.update(bias=False))
    with pytest.raises(CheckpointError, match=r"left-over tensors.*bias"):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)
