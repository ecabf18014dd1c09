"""Tiny random-weight Hugging Face checkpoints of every supported family, written from scratch.

Every writer takes a directory and returns it. Weights come from a seed; matrices keep the size of
what they multiply, so that logits have a spread of about `LOGIT_SCALE` and greedy text wanders.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LOGIT_SCALE = 2.0
MERGES = [("h", "e"), ("Ġ", "t"), ("i", "n"), ("Ġt", "he"), ("r", "e"), ("Ġ", "a")]
EOS = "<|endoftext|>"
EOS_ID = 256 + len(MERGES)
VOCAB_SIZE = EOS_ID + 1

Tensors = dict[str, torch.Tensor]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a tiny decoder; head_dim is not hidden_size / num_heads, so no one may assume it."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 48
    intermediate_size: int = 80
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512


TINY = Shape()


def write_llama(
    directory: Path,
    *,
    seed: int = 0,
    shape: Shape = TINY,
    rope: dict[str, Any] | None = None,
    is_tied: bool = False,
    has_attention_bias: bool = False,
    has_mlp_bias: bool = False,
    old_names: bool = False,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a LlamaForCausalLM; llama3 rope scaling unless `rope` says otherwise.

    Args:
        old_names: config.json as before transformers 5 (rope_scaling, rope_theta, torch_dtype).
    """
    tensors = _decoder(
        shape,
        _generator(seed),
        is_tied=is_tied,
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
        has_mlp_bias=has_mlp_bias,
    )
    fields = _config(
        "LlamaForCausalLM", "llama", shape, rope=LLAMA3_ROPE if rope is None else rope,
        is_tied=is_tied, dtype=dtype, old_names=old_names,
    ) | {"attention_bias": has_attention_bias, "mlp_bias": has_mlp_bias}  # fmt: skip
    return _write(directory, fields, tensors, num_shards=num_shards, dtype=dtype)


def write_mistral(
    directory: Path, *, seed: int = 0, shape: Shape = TINY, sliding_window: int | None = 12
) -> Path:
    """Write a MistralForCausalLM."""
    fields = _config("MistralForCausalLM", "mistral", shape)
    fields |= {"sliding_window": sliding_window}
    return _write(directory, fields, _decoder(shape, _generator(seed)))


def write_qwen2(
    directory: Path, *, seed: int = 0, shape: Shape = TINY, is_tied: bool = True
) -> Path:
    """Write a Qwen2ForCausalLM (also Qwen2.5): biases on q, k and v."""
    fields = _config("Qwen2ForCausalLM", "qwen2", shape, is_tied=is_tied)
    # As the real ones: a window is named and not used.
    fields |= {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    tensors = _decoder(shape, _generator(seed), is_tied=is_tied, has_qkv_bias=True)
    return _write(directory, fields, tensors)


def write_qwen3(
    directory: Path, *, seed: int = 0, shape: Shape = TINY, is_tied: bool = False
) -> Path:
    """Write a dense Qwen3ForCausalLM: norms on q and k."""
    fields = _config("Qwen3ForCausalLM", "qwen3", shape, is_tied=is_tied)
    fields |= {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    tensors = _decoder(shape, _generator(seed), is_tied=is_tied, has_qk_norm=True)
    return _write(directory, fields, tensors)


def write_qwen3_moe(
    directory: Path, *, seed: int = 0, shape: Shape = TINY, num_experts: int = 6, width: int = 24
) -> Path:
    """Write a Qwen3MoeForCausalLM whose tokens pass two experts of a layer.

    Args:
        width: Of an expert.
    """
    generator = _generator(seed)
    tensors = _decoder(shape, generator, has_qk_norm=True)
    sizes = {"gate": (width, shape.hidden_size), "up": (width, shape.hidden_size)}
    sizes["down"] = (shape.hidden_size, width)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = _matrix(num_experts, shape.hidden_size, generator)
        for name, size in sizes.items():
            del tensors[f"{prefix}.{name}_proj.weight"]
            for expert in range(num_experts):
                full_name = f"{prefix}.experts.{expert}.{name}_proj.weight"
                tensors[full_name] = _matrix(*size, generator)
    fields = _config("Qwen3MoeForCausalLM", "qwen3_moe", shape)
    fields |= {"attention_bias": False, "use_sliding_window": False, "norm_topk_prob": True}
    fields |= {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return _write(directory, fields, tensors)


def write_mimo(
    directory: Path,
    *,
    seed: int = 0,
    shape: Shape = TINY,
    branch_scale: float = 1.0,
    num_mtp_layers: int = 1,
) -> Path:
    """Write a MiMoForCausalLM: a Qwen2 target and layers of multi-token prediction.

    Args:
        branch_scale: Small values make target and layer agree on most tokens: both then say what
            follows from the newest token alone.
    """
    generator = _generator(seed)
    tensors = _decoder(shape, generator, has_qkv_bias=True, branch_scale=branch_scale)
    for index in range(num_mtp_layers):
        prefix = f"model.mtp_layers.{index}"
        tensors |= _layer(prefix, shape, generator, has_qkv_bias=True, branch_scale=branch_scale)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = _norm(shape.hidden_size, generator)
        tensors[f"{prefix}.input_proj.weight"] = _mix(
            shape.hidden_size, generator, own_first=False, other_scale=branch_scale
        )
    fields = _config("MiMoForCausalLM", "mimo", shape)
    fields |= {"attention_bias": True, "num_nextn_predict_layers": num_mtp_layers}
    return _write(directory, fields, tensors)


def write_agreeable_target(directory: Path, *, seed: int = 0, shape: Shape = TINY) -> Path:
    """Write a Llama whose next token follows mostly from the newest one: easy to draft for."""
    tensors = _decoder(shape, _generator(seed), branch_scale=0.3)
    return _write(directory, _config("LlamaForCausalLM", "llama", shape), tensors)


def write_standalone(
    directory: Path, target_dir: Path, *, seed: int = 1, noise: float = 0.02, num_shards: int = 1
) -> Path:
    """Write a standalone draft: the target with noise on its matrices, so that it often agrees.

    Args:
        noise: Standard deviation, relative to that of each matrix.
    """
    generator = _generator(seed)
    tensors = {
        name: tensor + noise * tensor.std() * _normal(tensor.shape, generator)
        if tensor.ndim == 2
        else tensor
        for name, tensor in sorted(read_tensors(target_dir).items())
    }
    fields = json.loads((target_dir / "config.json").read_text())
    return _write(directory, fields, tensors, num_shards=num_shards)


def write_eagle3(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 2,
    draft_vocab_size: int | None = 100,
    has_embedding: bool = False,
    has_head: bool = True,
    layer_ids: tuple[int, ...] | None = (0, 2),
    has_fc_bias: bool = False,
    feeds_back_norm: bool = False,
    norm_before_residual: bool | None = None,
    norm_before_fc: bool = False,
    tap_norms: tuple[str, ...] = (),
    is_speculators: bool = False,
    model_type: str = "llama",
    hidden_size: int | None = None,
    heads: tuple[int, int] | None = None,
    max_position_embeddings: int = 512,
    prefix: str = "",
    layer_name: str = "midlayer",
    num_layers: int = 1,
) -> Path:
    """Write a LlamaForCausalLMEagle3.

    Args:
        draft_vocab_size: None: the target's vocabulary, no d2t.
        layer_ids: None: no eagle_config, so that the default layers are captured.
        norm_before_residual: None: config.json does not say.
        tap_norms: Names of the norms of the captured layers (EAGLE-3.1); none: there are none.
        is_speculators: The format of speculators: `transformer_layer_config`, tensors of
            `layers.0.`, and `layer_ids` + 1.
        model_type: Of the decoder layer, with `is_speculators`: "llama" or "qwen3".
        hidden_size: The head's own; needs `has_embedding` and `has_head` when not the target's.
        heads: Query heads and their width, to be wider than the hidden state.
    """
    generator = _generator(seed)
    target = json.loads((target_dir / "config.json").read_text())
    target |= target.get("text_config", {})
    target_width = target["hidden_size"]
    shape = _head_shape(target, hidden_size or target_width, max_position_embeddings)
    if heads is not None:
        shape = replace(shape, num_heads=heads[0], head_dim=heads[1])
    width = shape.hidden_size
    layer_name = "layers.0" if is_speculators else layer_name
    layer = _layer("x", shape, generator, input_width=2 * width, has_qk_norm=model_type == "qwen3")
    tensors = {
        f"{layer_name}.{name}": tensor
        for name, tensor in layer.items()
        for name in [name.removeprefix("x.")]
    }
    num_captured = 3 if layer_ids is None else len(layer_ids)
    tensors[f"{layer_name}.hidden_norm.weight"] = _norm(width, generator)
    for i in range(1, num_layers):
        tensors |= _layer(f"layers.{i}", shape, generator, has_qk_norm=model_type == "qwen3")
    tensors["fc.weight"] = _matrix(width, num_captured * target_width, generator)
    if has_fc_bias:
        tensors["fc.bias"] = 0.3 * _normal((width,), generator)
    tensors["norm.weight"] = _norm(width, generator)
    tensors |= {f"{name}.weight": _norm(target_width, generator) for name in tap_norms}
    if norm_before_fc:
        tensors["input_norm.weight"] = _norm(num_captured * target_width, generator)
    if has_embedding:
        tensors["embed_tokens.weight"] = _normal((shape.vocab_size, width), generator)
    fields = _config("LlamaForCausalLMEagle3", model_type, shape)
    fields |= {"num_hidden_layers": num_layers}
    if is_speculators:
        layer_fields = {name: value for name, value in fields.items() if name != "architectures"}
        fields = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/llm"}},
            "transformer_layer_config": layer_fields,
        }
    if has_head:
        size = draft_vocab_size or shape.vocab_size
        tensors["lm_head.weight"] = _matrix(size, width, generator, scale=LOGIT_SCALE)
        fields["draft_vocab_size"] = size
    if draft_vocab_size is not None:
        hot = torch.randperm(shape.vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = hot - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, hot, 1)
    if is_speculators and layer_ids is not None:
        fields["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in layer_ids]
    elif layer_ids is not None:
        fields["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(layer_ids),
            "use_aux_hidden_state": True,
        }
    if has_fc_bias:
        fields["bias"] = True
    if feeds_back_norm:
        fields["norm_output"] = True
    if norm_before_residual is not None:
        fields["norm_before_residual"] = norm_before_residual
    if norm_before_fc:
        fields["norm_before_fc"] = True
    if tap_norms:
        fields["use_aux_norm" if tap_norms[0].startswith("aux") else "fc_norm"] = True
    if width != target_width:
        fields["target_hidden_size"] = target_width
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    return _write(directory, fields, tensors, has_tokenizer=False)


def write_eagle(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 3,
    num_layers: int = 1,
    has_fc_bias: bool = True,
    has_embedding: bool = True,
    branch_scale: float = 1.0,
    max_position_embeddings: int = 512,
    prefix: str = "",
) -> Path:
    """Write a LlamaForCausalLMEagle (EAGLE-1/2); `embed_tokens` is a copy that nobody reads.

    Args:
        branch_scale: Small values make the head agree with an agreeable target.
    """
    generator = _generator(seed)
    target = json.loads((target_dir / "config.json").read_text())
    shape = _head_shape(target, target["hidden_size"], max_position_embeddings)
    width = shape.hidden_size
    tensors: Tensors = {}
    for i in range(num_layers):
        tensors |= _layer(f"layers.{i}", shape, generator, branch_scale=branch_scale)
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = _mix(width, generator, own_first=True, other_scale=branch_scale)
    if has_fc_bias:
        tensors["fc.bias"] = 0.3 * branch_scale * _normal((width,), generator)
    if has_embedding:
        tensors["embed_tokens.weight"] = _normal((shape.vocab_size, width), generator)
    fields = _config("LlamaForCausalLMEagle", "llama", shape)
    fields |= {"num_hidden_layers": num_layers, "bias": has_fc_bias}
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    return _write(directory, fields, tensors, has_tokenizer=False)


def write_tokenizer(directory: Path) -> Path:
    """Write a byte-level BPE tokenizer.json: 256 bytes, a few merges, one end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("".join(merge) for merge in MERGES)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def read_tensors(directory: Path) -> Tensors:
    """Return every tensor of a checkpoint."""
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def pickle_weights(directory: Path, to: Path, *, num_shards: int = 1) -> Path:
    """Write the checkpoint again with its weights in PyTorch's own format."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_tensors(directory)
    if num_shards == 1:
        torch.save(tensors, to / "pytorch_model.bin")
        return to
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for i in range(num_shards):
        name = f"pytorch_model-{i + 1:05d}-of-{num_shards:05d}.bin"
        shard = {tensor: tensors[tensor] for tensor in names[i::num_shards]}
        torch.save(shard, to / name)
        weight_map |= dict.fromkeys(shard, name)
    (to / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return to


def edit_checkpoint(
    directory: Path,
    *,
    tensors: Callable[[Tensors], None] = lambda _: None,
    config: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Path:
    """Change an unsharded checkpoint in place, to break it."""
    values = load_file(directory / "model.safetensors")
    tensors(values)
    save_file(values, directory / "model.safetensors")
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    config(fields)
    path.write_text(json.dumps(fields))
    return directory


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(size: Iterable[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(size), generator=generator)


def _matrix(
    rows: int, columns: int, generator: torch.Generator, *, scale: float = 1.0
) -> torch.Tensor:
    return _normal((rows, columns), generator) * (scale / math.sqrt(columns))


def _norm(size: int, generator: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * _normal((size,), generator)


def _mix(
    width: int, generator: torch.Generator, *, own_first: bool, other_scale: float
) -> torch.Tensor:
    """Return [width, 2 * width]: keep the embedding's half, mix the hidden half in."""
    own = torch.eye(width) + 0.3 * other_scale * _matrix(width, width, generator)
    other = other_scale * _matrix(width, width, generator)
    return torch.cat([own, other] if own_first else [other, own], dim=1)


def _layer(
    prefix: str,
    shape: Shape,
    generator: torch.Generator,
    *,
    input_width: int | None = None,
    has_qkv_bias: bool = False,
    has_o_bias: bool = False,
    has_mlp_bias: bool = False,
    has_qk_norm: bool = False,
    branch_scale: float = 1.0,
) -> Tensors:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    tensors: Tensors = {}

    def project(name: str, rows: int, columns: int, has_bias: bool, scale: float = 1.0) -> None:  # noqa: FBT001
        tensors[f"{prefix}.{name}.weight"] = _matrix(rows, columns, generator, scale=scale)
        if has_bias:
            tensors[f"{prefix}.{name}.bias"] = 0.3 * _normal((rows,), generator)

    for name, rows in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        project(f"self_attn.{name}_proj", rows, input_width or hidden, has_qkv_bias)
    project("self_attn.o_proj", hidden, q_width, has_o_bias, branch_scale)
    project("mlp.gate_proj", inner, hidden, has_mlp_bias)
    project("mlp.up_proj", inner, hidden, has_mlp_bias)
    project("mlp.down_proj", hidden, inner, has_mlp_bias, branch_scale)
    tensors[f"{prefix}.input_layernorm.weight"] = _norm(hidden, generator)
    tensors[f"{prefix}.post_attention_layernorm.weight"] = _norm(hidden, generator)
    if has_qk_norm:
        tensors[f"{prefix}.self_attn.q_norm.weight"] = _norm(shape.head_dim, generator)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = _norm(shape.head_dim, generator)
    return tensors


def _decoder(
    shape: Shape, generator: torch.Generator, *, is_tied: bool = False, **layer: Any
) -> Tensors:
    hidden = shape.hidden_size
    tensors = {
        "model.embed_tokens.weight": _normal((shape.vocab_size, hidden), generator)
        * (LOGIT_SCALE / math.sqrt(hidden) if is_tied else 1.0),
        "model.norm.weight": _norm(hidden, generator),
    }
    if is_tied:  # random signs, or the head would only ever echo the newest token
        tensors["model.norm.weight"] *= _normal((hidden,), generator).sign()
    for i in range(shape.num_layers):
        tensors |= _layer(f"model.layers.{i}", shape, generator, **layer)
    if not is_tied:
        tensors["lm_head.weight"] = _matrix(shape.vocab_size, hidden, generator, scale=LOGIT_SCALE)
    return tensors


def _head_shape(target: dict[str, Any], hidden_size: int, max_position_embeddings: int) -> Shape:
    return Shape(
        vocab_size=target["vocab_size"],
        hidden_size=hidden_size,
        num_layers=1,
        max_position_embeddings=max_position_embeddings,
    )


def _config(
    architecture: str,
    model_type: str,
    shape: Shape,
    *,
    rope: dict[str, Any] | None = None,
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
    old_names: bool = False,
) -> dict[str, Any]:
    rope = rope or {"rope_type": "default"}
    dtype_name = str(dtype).removeprefix("torch.")
    fields = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "bos_token_id": None,
        "eos_token_id": min(EOS_ID, shape.vocab_size - 1),
    }
    if old_names:
        is_default = rope["rope_type"] == "default"
        return fields | {
            "rope_theta": 20000.0,
            "rope_scaling": None if is_default else rope,
            "torch_dtype": dtype_name,
        }
    return fields | {"rope_parameters": rope | {"rope_theta": 20000.0}, "dtype": dtype_name}


def _write(
    directory: Path,
    fields: dict[str, Any],
    tensors: Tensors,
    *,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    has_tokenizer: bool = True,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
    if has_tokenizer:
        write_tokenizer(directory)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata=metadata)
        return directory
    weight_map = {}
    names = sorted(tensors)
    for i in range(num_shards):
        file_name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: tensors[name] for name in names[i::num_shards]}
        save_file(shard, directory / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
