"""Layers of multi-token prediction of GLM-4.5, 4.5V and 4.7-Flash against those of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.models.draft import load_draft
from shared.models.llama import CausalLM
from tests import families
from tests.checkpoints import Tensors, edit_checkpoint, read_tensors
from tests.paged import PagedKV
from tests.unit.test_models_llama import Runner, load_transformers, tokens_of

CPU = torch.device("cpu")
NUM_LAYERS, HIDDEN = 2, 64
FIELDS: dict[str, dict[str, Any]] = {
    "glm4_moe": families.GLM4_MOE,
    "glm4v_moe": families.GLM4V_MOE,
    "glm4_moe_lite": families.GLM4_MOE_LITE | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
}


def model_of(model_type: str) -> str:
    """Return what the names of a checkpoint's tensors begin with."""
    return "model.language_model" if model_type == "glm4v_moe" else "model"


def write_whole(directory: Path, model_type: str) -> Path:
    """Write a GLM whose last layer `write_glm` makes one of multi-token prediction."""
    fields = FIELDS[model_type] | {"num_hidden_layers": NUM_LAYERS + 1}
    if model_type == "glm4v_moe":
        return families.write_glm4v(directory, name="Glm4vMoe", **fields)
    return families.write(directory, model_type, **fields)


def write_glm(directory: Path, model_type: str) -> Path:
    """Write a GLM with a layer of multi-token prediction, and config.json as published."""
    generator = torch.Generator().manual_seed(8)
    model = model_of(model_type)
    layer = f"{model}.layers.{NUM_LAYERS}"

    def add(tensors: Tensors) -> None:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{layer}.{name}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
        matrix = torch.randn((HIDDEN, 2 * HIDDEN), generator=generator)
        tensors[f"{layer}.eh_proj.weight"] = matrix / math.sqrt(2 * HIDDEN)
        for own, copied in (
            ("embed_tokens", f"{model}.embed_tokens"),
            ("shared_head.head", "lm_head"),
        ):
            tensors[f"{layer}.{own}.weight"] = tensors[f"{copied}.weight"].clone()

    def shorten(config: dict[str, Any]) -> None:
        config = config.get("text_config", config)
        config.pop("mlp_layer_types", None)
        config.update(num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1)
        config.update(first_k_dense_replace=1)

    write_whole(directory, model_type)
    return edit_checkpoint(directory, tensors=add, config=shorten)


@pytest.mark.parametrize("model_type", FIELDS)
@torch.inference_mode()
def test_the_layer_is_one_of_transformers(tmp_path: Path, model_type: str) -> None:
    directory, ids = write_glm(tmp_path / "glm", model_type), tokens_of(30)
    num_rows = len(ids) - 1
    target = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    features = Runner(target).extend(ids[:-1]).hidden
    draft = load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)
    rows = PagedKV(draft.kv_layout).chain(ids[1:])
    positions = rows.position_ids
    got = draft.extend(rows, features, carried=torch.zeros(1, draft.hidden_size))

    model = load_transformers(write_whole(tmp_path / "whole", model_type)).model
    model = getattr(model, "language_model", model)
    weights, prefix = read_tensors(directory), model_of(model_type)
    layer = f"{prefix}.layers.{NUM_LAYERS}"

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        root = (x * x).mean(-1, keepdim=True).add(1e-5).rsqrt()
        return x * root * weights[f"{layer}.{name}.weight"]

    embeds = weights[f"{prefix}.embed_tokens.weight"][ids[1:]]
    x = torch.cat([norm(embeds, "enorm"), norm(features, "hnorm")], dim=1)
    x = (x @ weights[f"{layer}.eh_proj.weight"].T)[None]
    places = positions.expand(3, 1, -1) if model_type == "glm4v_moe" else positions[None]
    angles = model.rotary_emb(x, places)
    mask = torch.full((1, 1, num_rows, num_rows), -torch.inf).triu(1)
    y = model.layers[NUM_LAYERS](x, attention_mask=mask, position_embeddings=angles)
    want = norm(y[0], "shared_head.norm")
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        draft.logits(got), want @ weights["lm_head.weight"].T, atol=1e-4, rtol=0
    )
