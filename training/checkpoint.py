"""Read and write Hugging Face checkpoint directories: bf16 safetensors, sharded, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.deepseek import DeepseekForCausalLM, DeepseekMTPLayer
from training.eagle3 import Eagle3Config, Eagle3Head
from training.final_hidden import EagleHead, MTPLayer
from training.model import LlamaConfig, LlamaForCausalLM
from training.train_tokenizer import END_OF_TEXT

MAX_SHARD_BYTES = 15 * 2**20


def write_json(path: Path, value: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def llama_config_json(config: LlamaConfig) -> dict:
    """Return the fields of config.json that every checkpoint here has."""
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def parse_llama_config(fields: dict) -> LlamaConfig:
    """Read what `llama_config_json` wrote."""
    return LlamaConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        rms_norm_eps=fields["rms_norm_eps"],
        rope_theta=fields["rope_theta"],
        max_position_embeddings=fields["max_position_embeddings"],
    )


def save_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write safetensors files of at most MAX_SHARD_BYTES, with an index if there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        tensor = (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        if used + tensor.nbytes > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file_name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    total_size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": weight_map},
    )


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all shards of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def save_tokenizer(directory: Path, tokenizer_path: Path) -> None:
    """Put the tokenizer and the generation defaults beside the weights."""
    shutil.copyfile(tokenizer_path, directory / "tokenizer.json")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_json(directory / "generation_config.json", {"eos_token_id": 0, "do_sample": False})


def save_llama(directory: Path, model: LlamaForCausalLM, tokenizer_path: Path) -> None:
    """Write a LlamaForCausalLM checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": ["LlamaForCausalLM"]} | llama_config_json(model.config)
    write_json(directory / "config.json", fields)
    save_tensors(directory, model.state_dict())
    save_tokenizer(directory, tokenizer_path)


def load_llama(directory: Path, device: torch.device) -> LlamaForCausalLM:
    """Load a LlamaForCausalLM checkpoint in float32."""
    config = parse_llama_config(json.loads((directory / "config.json").read_text()))
    model = LlamaForCausalLM(config)
    model.load_state_dict(load_tensors(directory))
    return model.float().to(device)


def save_eagle3(directory: Path, head: Eagle3Head, tokenizer_path: Path) -> None:
    """Write a LlamaForCausalLMEagle3 checkpoint; the embedding stays with the target."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": ["LlamaForCausalLMEagle3"]} | llama_config_json(head.config.decoder)
    fields |= {
        "draft_vocab_size": head.config.draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    write_json(directory / "config.json", fields)
    save_tensors(directory, head.state_dict())
    save_tokenizer(directory, tokenizer_path)


def load_eagle3(directory: Path, device: torch.device) -> Eagle3Head:
    """Load a LlamaForCausalLMEagle3 checkpoint in float32."""
    fields = json.loads((directory / "config.json").read_text())
    config = Eagle3Config(
        decoder=parse_llama_config(fields),
        draft_vocab_size=fields["draft_vocab_size"],
        aux_layer_ids=tuple(fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
    )
    head = Eagle3Head(config)
    head.load_state_dict(load_tensors(directory))
    return head.float().to(device)


def save_eagle(directory: Path, head: EagleHead) -> None:
    """Write a LlamaForCausalLMEagle checkpoint; embedding and output layer stay with the target."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": ["LlamaForCausalLMEagle"]} | llama_config_json(head.config)
    write_json(directory / "config.json", fields | {"bias": True})
    save_tensors(directory, head.state_dict())


def save_mimo(
    directory: Path, target: LlamaForCausalLM, mtp_layer: MTPLayer, tokenizer_path: Path
) -> None:
    """Write a MiMoForCausalLM checkpoint: a Llama with biases of zero computes the same."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": ["MiMoForCausalLM"]} | llama_config_json(target.config)
    fields |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    write_json(directory / "config.json", fields)
    tensors = target.state_dict()
    tensors |= {f"model.mtp_layers.0.{k}": v for k, v in mtp_layer.state_dict().items()}
    for name in list(tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = torch.zeros(len(tensors[name]))
            tensors[name.removesuffix("weight") + "bias"] = bias
    save_tensors(directory, tensors)
    save_tokenizer(directory, tokenizer_path)


def save_deepseek(
    directory: Path,
    target: DeepseekForCausalLM,
    mtp_layer: DeepseekMTPLayer,
    tokenizer_path: Path,
) -> None:
    """Write a DeepseekV3ForCausalLM checkpoint, the MTP layer behind the target's last one."""
    directory.mkdir(parents=True, exist_ok=True)
    config = target.config
    fields = {"architectures": ["DeepseekV3ForCausalLM"]} | llama_config_json(config)
    fields |= {
        "model_type": "deepseek_v3",
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.latent_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.head_dim,
        "v_head_dim": config.value_dim,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": config.expert_size,
        "first_k_dense_replace": config.num_dense,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    }
    write_json(directory / "config.json", fields)
    prefix = f"model.layers.{config.num_layers}"
    layer = {f"{prefix}.{name}": tensor for name, tensor in mtp_layer.state_dict().items()}
    save_tensors(directory, target.state_dict() | layer)
    save_tokenizer(directory, tokenizer_path)
