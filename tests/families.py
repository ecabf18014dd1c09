"""Tiny random checkpoints of architectures, written by their own classes in transformers.

`checkpoints.py` writes the others by hand, for tests that have no time to import transformers.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.checkpoints import (
    EOS_ID,
    LOGIT_SCALE,
    TINY,
    Tensors,
    edit_checkpoint,
    read_tensors,
    write_tokenizer,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def longrope(num_pairs: int) -> dict[str, Any]:
    """Return factors of longrope that differ from each other, for an original context of 32."""
    return {
        "rope_type": "longrope",
        "rope_theta": 20000.0,
        "short_factor": [1 + 0.1 * i for i in range(num_pairs)],
        "long_factor": [2 + 0.7 * i for i in range(num_pairs)],
        "original_max_position_embeddings": 32,
    }


# A window that hides tokens, and long factors from token 33 on.
PHI3 = {
    "sliding_window": 20,
    "original_max_position_embeddings": 32,
    "rope_parameters": longrope(8),
}
GRANITE = {
    "attention_bias": True,
    "mlp_bias": True,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.17,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
SMOLLM3 = {
    "no_rope_layers": [1, 0, 1],
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
# Layers with and without a window, of which the second kind is not rotated.
SMOLLM3_WINDOWS = SMOLLM3 | {"use_sliding_window": True, "sliding_window": 20, "seed": 2}
# Only the last layer has a window.
QWEN3_WINDOWS = {
    "head_dim": 24,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 2,
}
_GEMMA = {
    "head_dim": 24,
    "attention_bias": True,
    "query_pre_attn_scalar": 13,
    "tie_word_embeddings": True,
    "sliding_window": 20,
    "num_hidden_layers": 4,
}
# Caps that bend what they cap.
GEMMA2 = _GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
GEMMA3 = _GEMMA | {
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
# Layers without a window have wider heads, and K for V; of their pairs some are not rotated.
GEMMA4 = {
    "head_dim": 24,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "sliding_window": 20,
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 50000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
# Experts beside the MLP of each layer.
_GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
GEMMA4_EXPERTS = GEMMA4 | _GEMMA4_MOE
# As E2B and E4B: layers read embeddings of their own, the last three have no K and V, and wider
# MLPs. They attend to layers 1 (without a window) and 2.
GEMMA4_E = GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": TINY.vocab_size + 24,
}
# No published model has all of it.
GEMMA4_E_EXPERTS = GEMMA4_E | _GEMMA4_MOE
GEMMA4_UNIFIED, GEMMA4_UNIFIED_SHARED_KV = (
    {name: value for name, value in fields.items() if "per_layer" not in name}
    for fields in (GEMMA4, GEMMA4_E)
)
# Layers with a rotary embedding of their own, heads of one shape and a projection of V.
GEMMA4_PLAIN = GEMMA4 | {
    "global_head_dim": 24,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
}
# Layers with a window have a rotary embedding of their own, or the only one.
OLMO3 = {
    "attention_bias": True,
    "sliding_window": 20,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
EXAONE4 = {"head_dim": 24, "sliding_window": 20, "sliding_window_pattern": 2}
MINISTRAL = {
    "head_dim": 24,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
GLM4 = {"head_dim": 16, "attention_bias": True}
SEED_OSS = {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}
# As published: dynamic rope, whose angles are the default ones up to max_position_embeddings.
INTERNLM3 = {
    "head_dim": 24,
    "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50000.0},
}
INTERNLM3_BIASES = INTERNLM3 | {"attention_bias": True, "mlp_bias": True}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rope_parameters": YARN,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# As V2-Lite: no rank of queries, and all experts are chosen from, whatever groups there are.
DEEPSEEK_V2 = _LATENT | {"q_lora_rank": None, "topk_method": "greedy"}
# As V3: ranks, groups, a bias.
DEEPSEEK_V3 = _LATENT | {"q_lora_rank": 48, "num_mtp_layers": 0}
# As GLM-4.7-Flash: V3 with a list of dense layers, here the second one; groups are V3's.
GLM4_MOE_LITE = _LATENT | {"q_lora_rank": 48, "mlp_layer_types": ["sparse", "dense", "sparse"]}
# As Kimi K2: V3 without groups, yarn that blends nothing.
KIMI_K2 = DEEPSEEK_V3 | {
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 24}
# The second layer is dense; weights are not normalised; the first layer has a window.
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "mlp_only_layers": [1],
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}
QWEN3_VL = {"attention_bias": True, "tie_word_embeddings": True}
QWEN3_VL_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40} | {
    "mlp_only_layers": [0]
}
# The first layer is dense; weights are not normalised.
QWEN3_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 24,
    "attention_bias": True,
    "mlp_only_layers": [0],
}
# Six of the 24 values of a head are no pairs; the published files say so by `rotary_dim`.
MINIMAX_M2 = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 20000.0,
        "partial_rotary_factor": 0.75,
    },
}
# Weights are not normalised.
OLMOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "attention_bias": True,
}
# The first layer is dense, the last one has a window.
DOTS1 = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "sliding_window": 20,
    "max_window_layers": 2,
}
# As published: "dynamic" is a base that alpha stretches; the other keys mean nothing.
HUNYUAN = {
    "head_dim": 24,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 500.0,
        "alpha": 30.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
# The norms undo the factor of yarn.
HUNYUAN_YARN = HUNYUAN | {"rope_parameters": YARN | {"mscale_all_dim": 0.0}}
ERNIE4_5 = {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True}
# The first layer and the last one are dense.
ERNIE4_5_MOE = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 40,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "num_hidden_layers": 4,
}
# A window that hides tokens in every other layer, and limits that many values are beyond.
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "head_dim": 24,
    "sliding_window": 20,
    "swiglu_limit": 0.7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 20000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "truncate": False,
    },
}
# Layers with a window have twice the K/V heads, and sinks; two layers are dense; a head has fewer
# values of V than of Q and K, of which ten are rotated.
MIMO_V2_FLASH = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "v_head_dim": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "sliding_window": 21,
    "layer_types": [
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "full_attention": YARN | {"partial_rotary_factor": 0.42},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.42,
        },
    },
}
# Queries grow from position 32 on.
GROWING = YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
MINISTRAL3 = {"head_dim": 24, "sliding_window": 20, "rope_parameters": GROWING}
# Softmax over groups that are judged by two; all layers but the first have experts.
MISTRAL4 = _LATENT | {
    "q_lora_rank": 48,
    "rope_parameters": GROWING,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
ARCEE = {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}
APERTUS = {"head_dim": 24, "attention_bias": True}
COHERE = {"attention_bias": True, "logit_scale": 0.3, "tie_word_embeddings": True}
COHERE2 = COHERE | {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CWM = {
    "bos_token_id": 0,
    "head_dim": 24,
    "sliding_window": 20,
    "num_hidden_layers": 4,
    "mlp_bias": True,
    "layer_types": [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}
IQUESTCODER = {"head_dim": 24, "attention_bias": True, "mlp_bias": True}
# As published: "dynamic" is a base that alpha stretches.
HUNYUAN_V1_MOE = {
    "num_experts": 6,
    "moe_topk": 3,
    "intermediate_size": 40,
    "head_dim": 24,
    "attention_bias": True,
    "rope_parameters": HUNYUAN["rope_parameters"],
}
# The second layer is dense, the last one has no window and is not rotated.
EXAONE_MOE = {
    "head_dim": 24,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
SOLAR_OPEN = {
    "head_dim": 24,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": YARN,
}
GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
}
GLM4V_MOE = {name: value for name, value in GLM4_MOE.items() if name != "use_qk_norm"}
_SIZES = {
    "vocab_size": TINY.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": EOS_ID,
}


def write(directory: Path, model_type: str, *, seed: int = 0, **fields: Any) -> Path:
    """Write a checkpoint of an architecture; matrices keep the size of what they multiply.

    Args:
        model_type: As in config.json.
        fields: Of config.json, beside the sizes.
    """
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(_SIZES | fields))
    if model_type == "mistral4":  # which AutoModelForCausalLM does not know
        model = transformers.Mistral4ForCausalLM(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, seed)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def write_internlm3(directory: Path, **fields: Any) -> Path:
    """Write an InternLM3; to transformers it is a Llama, and its checkpoints say so."""
    write(directory, "internlm3", **fields)
    published = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    return edit_checkpoint(directory, config=lambda config: config.update(published))


def write_kimi_k2(directory: Path) -> Path:
    """Write a Kimi K2; to transformers it is a DeepSeek-V3, and its checkpoints say so."""
    write(directory, "deepseek_v3", **KIMI_K2)
    called = {"architectures": ["KimiK2ForCausalLM"], "model_type": "kimi_k2"}
    return edit_checkpoint(directory, config=lambda config: config.update(called))


def write_gemma3_with_vision(directory: Path) -> Path:
    """Write a Gemma 3 with a vision tower, whose output layer is the embedding."""
    import transformers

    text = _SIZES | GEMMA3 | {"model_type": "gemma3_text", "final_logit_softcapping": None}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={"model_type": "siglip_vision_model", **_VISION},
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    fill(model, seed=0)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


def write_gemma4_unified_with_vision(directory: Path) -> Path:
    """Write a Gemma 4 without towers, whose embedders of images and sounds are left out."""
    import transformers

    text = _SIZES | GEMMA4_UNIFIED | {"model_type": "gemma4_unified_text", "pad_token_id": 0}
    vision = {"model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 1}
    vision |= {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config=None, tie_word_embeddings=True
    )
    model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    fill(model, seed=0)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


def write_gemma4_with_vision(directory: Path, fields: dict[str, Any] = GEMMA4) -> Path:
    """Write a Gemma 4 with a vision tower, whose config.json has the published fields of heads.

    Args:
        fields: Of the language model, beside the sizes.
    """
    import transformers

    text = _SIZES | fields | {"model_type": "gemma4_text", "pad_token_id": 0}
    vision = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision |= {"head_dim": 8, "position_embedding_size": 16}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, tie_word_embeddings=True
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    fill(model, seed=0)
    model.save_pretrained(directory)

    def publish(fields: dict[str, Any]) -> None:
        text = fields["text_config"]
        del text["per_layer_config"]
        text |= {name: GEMMA4[name] for name in _GLOBAL_HEADS}

    return write_tokenizer(edit_checkpoint(directory, config=publish))


def write_gemma4_e_with_vision(directory: Path) -> Path:
    """Write a Gemma 4 as E2B is published: projections of V in all layers, and tensors of K and V
    in layers that do not read them.
    """
    fields = GEMMA4_E | {"attention_k_eq_v": False, "num_key_value_heads": 1}
    write_gemma4_with_vision(directory, fields)

    def add_unread(tensors: Tensors) -> None:
        prefix = "model.language_model.layers"
        for layer_id, source in ((3, 1), (4, 2), (5, 1)):
            for name in ("k_proj", "v_proj", "k_norm"):
                like = tensors[f"{prefix}.{source}.self_attn.{name}.weight"]
                unread = torch.full_like(like, torch.nan)
                tensors[f"{prefix}.{layer_id}.self_attn.{name}.weight"] = unread

    return edit_checkpoint(directory, tensors=add_unread)


def write_gemma4_assistant(
    directory: Path,
    *,
    seed: int = 3,
    name: str = "Gemma4",
    text: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a draft for a `GEMMA4` that attends to its K and V.

    Args:
        name: "Gemma4Unified": for one of those.
        text: Fields of its layers, beside those of the target.
        fields: Of config.json, beside its layers.
    """
    import transformers

    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 3}
    own |= {"layer_types": layers, "num_attention_heads": 2, "num_kv_shared_layers": 3}
    target = GEMMA4
    if name == "Gemma4Unified":
        target, own["model_type"] = GEMMA4_UNIFIED, "gemma4_unified_text"
    config = getattr(transformers, f"{name}AssistantConfig")(
        text_config=_SIZES | target | own | (text or {}),
        backbone_hidden_size=_SIZES["hidden_size"],
        tie_word_embeddings=True,
        **fields,
    )
    with kv_sharing():
        model = getattr(transformers, f"{name}AssistantForCausalLM")(config)
        fill(model, seed)
        for name, parameter in model.named_parameters():
            if "q_norm" in name:  # or each row sees one token alone, from anywhere
                parameter.data *= 0.3
        if model.masked_embedding is not None:
            order = model.masked_embedding.token_ordering
            order.copy_(torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)))
        model.save_pretrained(directory)
    return write_tokenizer(directory)


def _soften(tensors: Tensors, share: float) -> None:
    """Let layers add little to the residual stream."""
    for name, tensor in tensors.items():
        if re.search("post_(attention_layer|feedforward_layer|per_layer_input_)norm", name):
            tensor *= share
        if name.endswith("layer_scalar"):
            tensor.fill_(1)


def write_gemma4_agreeable(directory: Path, fields: dict[str, Any] = GEMMA4) -> Path:
    """Write a target whose next token is mostly a function of the newest one.

    Args:
        fields: Of config.json, beside the sizes.
    """
    write(directory, "gemma4_text", **fields)
    return edit_checkpoint(directory, tensors=lambda tensors: _soften(tensors, 0.15))


def write_gemma4_agreeing_assistant(directory: Path, target: Path) -> Path:
    """Write a draft that mostly guesses what an agreeable target says."""
    hidden, theirs = _SIZES["hidden_size"], read_tensors(target)

    def agree(tensors: Tensors) -> None:
        _soften(tensors, 0.15)
        mostly_embedding = torch.cat([torch.eye(hidden), torch.eye(hidden) / 20], dim=1)
        tensors["pre_projection.weight"] = mostly_embedding
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            tensors[name] = theirs[name].clone()

    write_gemma4_assistant(directory, text={"hidden_size": hidden})
    return edit_checkpoint(directory, tensors=agree)


@contextmanager
def kv_sharing() -> Iterator[None]:
    """Let assistants of Gemma 4 be made, and targets without shared layers give them their K and V.

    transformers 5.23 means both, and neither works: a model whose layers all reuse K and V raises,
    and of one whose layers all have their own no layer stores them.
    """
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4_unified.configuration_gemma4_unified import (
        Gemma4UnifiedTextConfig,
    )

    def modes(config: Any) -> list[str | None]:
        count = config.num_kv_shared_layers
        kinds = config.layer_types[: len(config.layer_types) - count]
        own = [None if kind in kinds[i + 1 :] else "store" for i, kind in enumerate(kinds)]
        return [*own, *["reuse"] * count]

    patched = [
        mock.patch.object(one, "kv_sharing_modes", property(modes))
        for one in (Gemma4TextConfig, Gemma4UnifiedTextConfig)
    ]
    with patched[0], patched[1]:
        yield


_GLOBAL_HEADS = ("global_head_dim", "num_global_key_value_heads")


_MISTRAL = {"model_type": "mistral", "head_dim": 24, "sliding_window": None}


def write_mistral3(directory: Path, text: dict[str, Any] = _MISTRAL) -> Path:
    """Write a Mistral with a vision tower; head_dim is not hidden_size / heads.

    Args:
        text: Fields of the language model, beside the sizes.
    """
    import transformers

    config = transformers.Mistral3Config(
        text_config=copy.deepcopy(_SIZES | text),  # which it writes into
        vision_config={"model_type": "pixtral", "head_dim": 8, **_VISION},
        tie_word_embeddings=False,
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    fill(model, seed=0)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


def write_kimi_k25(directory: Path, *, is_published: bool = False) -> Path:
    """Write a Kimi K2.5.

    Args:
        is_published: Its config.json has the names of published files.
    """
    import transformers

    text = _SIZES | KIMI_K2 | {"model_type": "deepseek_v3"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    config = transformers.Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )
    model = transformers.Kimi_K25ForConditionalGeneration(config)
    fill(model, seed=0)
    model.save_pretrained(directory)

    def publish(fields: dict[str, Any]) -> None:
        if is_published:
            fields["architectures"] = ["KimiK25ForConditionalGeneration"]
            fields["text_config"]["model_type"] = "kimi_k2"

    def rename(tensors: Tensors) -> None:  # transformers 5.23 calls layers blocks, and reads both
        for name in [name for name in tensors if name.startswith("language_model.model.blocks.")]:
            tensors[name.replace("blocks", "layers", 1)] = tensors.pop(name)

    return write_tokenizer(edit_checkpoint(directory, config=publish, tensors=rename))


def write_qwen2_vl(directory: Path, *, name: str = "Qwen2_5_VL", is_flat: bool = False) -> Path:
    """Write a Qwen 2 VL or 2.5 VL, whose last layer has a window.

    Args:
        is_flat: The fields of its language model are beside the others, as published.
    """
    import transformers

    rope = {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [2, 3, 3]}
    text = {"rope_parameters": rope, "use_sliding_window": True, "sliding_window": 20}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    if name == "Qwen2_5_VL":
        vision |= {"out_hidden_size": _SIZES["hidden_size"], "fullatt_block_indexes": [0]}
    else:
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": _SIZES["hidden_size"], "num_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        text_config=_SIZES | text | {"max_window_layers": 2, "tie_word_embeddings": True},
        vision_config=vision,
        tie_word_embeddings=True,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    fill(model, seed=0)
    model.save_pretrained(directory)

    def flatten(fields: dict[str, Any]) -> None:
        text = fields.pop("text_config")
        rope = text.pop("rope_parameters") | {"type": "mrope"}
        del text["model_type"], text["layer_types"], rope["rope_type"]
        fields.update(text | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope})

    return write_tokenizer(edit_checkpoint(directory, config=flatten) if is_flat else directory)


def write_glm4v(directory: Path, *, name: str = "Glm4v", **fields: Any) -> Path:
    """Write a GLM-4.1V or a GLM-4.5V, of whose heads a part is rotated.

    Args:
        fields: Of the language model, beside the sizes; with experts, if they say how many.
    """
    import transformers

    rope = {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [1, 1, 2]}
    text = {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": _SIZES["hidden_size"], "image_size": 28}
    kind = "glm4v_moe" if "n_routed_experts" in fields else "glm4v"
    config = getattr(transformers, f"{name}Config")(
        text_config=_SIZES | text | {"model_type": f"{kind}_text"} | fields,
        vision_config=vision | {"model_type": f"{kind}_vision"},
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    fill(model, seed=0)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


def write_iquestcoder(directory: Path) -> Path:
    """Write an IQuest-Coder; to transformers it is a Llama, and its checkpoints say so."""
    write(directory, "iquestcoder", **IQUESTCODER)
    published = {"architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder"}
    return edit_checkpoint(directory, config=lambda config: config.update(published))


def write_exaone_moe(directory: Path) -> Path:
    """Write a K-EXAONE, with a tensor of a layer of multi-token prediction, as published."""
    write(directory, "exaone_moe", **EXAONE_MOE)
    return edit_checkpoint(
        directory,
        config=lambda config: config.update({"architectures": ["ExaoneMoEForCausalLM"]}),
        tensors=lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(64)}),
    )


def write_hunyuan_moe(directory: Path) -> Path:
    """Write a Hunyuan with experts, whose config.json has lists for all layers, as published."""
    write(directory, "hunyuan_v1_moe", **HUNYUAN_V1_MOE)
    lists = {"moe_topk": [3] * 3, "moe_intermediate_size": [40] * 3, "num_shared_expert": [1] * 3}
    return edit_checkpoint(directory, config=lambda config: config.update(lists))


def write_qwen3_vl(directory: Path, **fields: Any) -> Path:
    """Write a Qwen 3 VL; tokens of text have one position in all sections of the rotary embedding.

    Args:
        fields: Of the language model, beside the sizes; with experts, if they say how many.
    """
    import transformers

    rope = {"rope_type": "default", "rope_theta": 20000.0, "mrope_interleaved": True}
    text = {"head_dim": 24, "rope_parameters": rope | {"mrope_section": [4, 4, 4]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": _SIZES["hidden_size"], "num_position_embeddings": 4}
    vision |= {"deepstack_visual_indexes": [0]}
    name = "Qwen3VLMoe" if "num_experts" in fields else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=_SIZES | text | fields,
        vision_config=vision,
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    fill(model, seed=0)
    model.save_pretrained(directory)

    def transpose(tensors: Tensors) -> None:  # as published
        for tensor in [one for one in tensors if ".experts." in one]:
            tensors[tensor] = tensors[tensor].transpose(1, 2).contiguous()

    return write_tokenizer(edit_checkpoint(directory, tensors=transpose))


def fill(model: Any, seed: int) -> None:
    """Fill a model's parameters at random, so that logits have a spread of about LOGIT_SCALE."""
    generator = torch.Generator().manual_seed(seed)
    is_tied = model.config.tie_word_embeddings
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            has_offset = model.config.model_type.startswith(("gemma2", "gemma3"))
            center = 0 if has_offset else 1
            values = center + 0.2 * values
        elif parameter.ndim == 1:
            values = 0.3 * values
        elif "embed" not in name or is_tied:
            scale = LOGIT_SCALE if "lm_head" in name or "embed" in name else 1.0
            values = values * scale / math.sqrt(parameter.shape[-1])
        if is_tied and name.endswith("model.norm.weight"):  # or the head echoes the newest token
            sign = torch.randn(values.shape, generator=generator).sign()
            values = (values + 1) * sign - 1 if center == 0 else values * sign
        parameter.data.copy_(values)
    biases = [*model.named_buffers(), *model.named_parameters()]
    for name, bias in sorted(biases, key=lambda pair: pair[0]):
        if "correction_bias" in name:
            bias.data.copy_(0.3 * torch.randn(bias.shape, generator=generator))
        if name.endswith("layer_scalar"):
            bias.data.copy_(1 + 0.3 * torch.randn(bias.shape, generator=generator))


WRITERS: dict[str, Callable[[Path], Path]] = {
    "glm": lambda d: write(d, "glm", head_dim=16),
    "smollm3": lambda d: write(d, "smollm3", **SMOLLM3),
    "smollm3-windows": lambda d: write(d, "smollm3", **SMOLLM3_WINDOWS),
    "qwen3-windows": lambda d: write(d, "qwen3", **QWEN3_WINDOWS),
    "seed-oss": lambda d: write(d, "seed_oss", **SEED_OSS),
    "mistral3": write_mistral3,
    "olmo2": lambda d: write(d, "olmo2", attention_bias=True),
    "gemma2": lambda d: write(d, "gemma2", **GEMMA2),
    "gemma3": lambda d: write(d, "gemma3_text", **GEMMA3),
    "gemma3-with-vision": write_gemma3_with_vision,
    "gemma4": lambda d: write(d, "gemma4_text", **GEMMA4),
    "gemma4-experts": lambda d: write(d, "gemma4_text", **GEMMA4_EXPERTS),
    "gemma4-plain": lambda d: write(d, "gemma4_text", **GEMMA4_PLAIN),
    "gemma4-with-vision": write_gemma4_with_vision,
    # Sharper softmaxes of other seeds enlarge what float32 rounds, in transformers as well.
    "gemma4-e": lambda d: write(d, "gemma4_text", **GEMMA4_E, seed=7),
    "gemma4-e-experts": lambda d: write(d, "gemma4_text", **GEMMA4_E_EXPERTS),
    "gemma4-e-with-vision": write_gemma4_e_with_vision,
    "gemma4-unified": lambda d: write(d, "gemma4_unified_text", **GEMMA4_UNIFIED),
    "gemma4-unified-with-vision": write_gemma4_unified_with_vision,
    "olmo3": lambda d: write(d, "olmo3", **OLMO3),
    "exaone4": lambda d: write(d, "exaone4", **EXAONE4),
    "ministral": lambda d: write(d, "ministral", **MINISTRAL),
    "glm4": lambda d: write(d, "glm4", **GLM4),
    "qwen2-moe": lambda d: write(d, "qwen2_moe", **QWEN2_MOE),
    "qwen2-moe-gelu": lambda d: write(
        d, "qwen2_moe", **QWEN2_MOE | {"hidden_act": "gelu_pytorch_tanh"}
    ),
    "granite": lambda d: write(d, "granite", **GRANITE),
    "mixtral": lambda d: write(d, "mixtral", **MIXTRAL),
    "qwen3-moe": lambda d: write(d, "qwen3_moe", **QWEN3_MOE),
    "glm4-moe": lambda d: write(d, "glm4_moe", **GLM4_MOE),
    "deepseek-v2": lambda d: write(d, "deepseek_v2", **DEEPSEEK_V2),
    "kimi-k2": write_kimi_k2,
    "glm4-moe-lite": lambda d: write(d, "glm4_moe_lite", **GLM4_MOE_LITE),
    "mimo-v2": lambda d: write(d, "mimo_v2_flash", **MIMO_V2_FLASH),
    "minimax-m2": lambda d: write(d, "minimax_m2", **MINIMAX_M2),
    "olmoe": lambda d: write(d, "olmoe", **OLMOE),
    "dots1": lambda d: write(d, "dots1", **DOTS1),
    "hunyuan": lambda d: write(d, "hunyuan_v1_dense", **HUNYUAN),
    "ernie4-5": lambda d: write(d, "ernie4_5", **ERNIE4_5),
    "ernie4-5-moe": lambda d: write(d, "ernie4_5_moe", **ERNIE4_5_MOE),
    "ministral3": lambda d: write(d, "ministral3", **MINISTRAL3),
    "mistral3-ministral3": lambda d: write_mistral3(d, MINISTRAL3 | {"model_type": "ministral3"}),
    "mistral3-mistral4": lambda d: write_mistral3(d, MISTRAL4 | {"model_type": "mistral4"}),
    "mistral4": lambda d: write(d, "mistral4", **MISTRAL4),
    "kimi-k2.5": lambda d: write_kimi_k25(d, is_published=True),
    "kimi-k2.5-transformers": write_kimi_k25,
    "qwen2-vl": lambda d: write_qwen2_vl(d, name="Qwen2VL"),
    "qwen2.5-vl": lambda d: write_qwen2_vl(d, is_flat=True),
    "cohere": lambda d: write(d, "cohere", **COHERE),
    "cohere2": lambda d: write(d, "cohere2", **COHERE2),
    "arcee": lambda d: write(d, "arcee", **ARCEE, seed=3),
    "apertus": lambda d: write(d, "apertus", **APERTUS, seed=1),
    "cwm": lambda d: write(d, "cwm", **CWM),
    "iquestcoder": write_iquestcoder,
    "hunyuan-moe": write_hunyuan_moe,
    "exaone-moe": write_exaone_moe,
    "exaone-moe-transformers": lambda d: write(d, "exaone_moe", **EXAONE_MOE),
    "solar-open": lambda d: write(d, "solar_open", **SOLAR_OPEN),
    "glm4v": write_glm4v,
    "glm4v-46": lambda d: write_glm4v(d, name="Glm46V"),
    "glm4v-moe": lambda d: write_glm4v(d, name="Glm4vMoe", **GLM4V_MOE),
    "qwen3-vl": lambda d: write_qwen3_vl(d, **QWEN3_VL),
    "qwen3-vl-moe": lambda d: write_qwen3_vl(d, **QWEN3_VL_MOE),
}
"""Of checkpoints that are compared with transformers and served by engines."""
