"""Checkpoints of random weights, written fast: they are one random block, again and again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_VOCABULARY = 8192
_BLOCK_VALUES = 4 << 20
_NUM_THREADS = 8
_SCALE_BLOCK = 128
_ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype as safetensors calls it, and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What is written.

    Args:
        num_experts: Of each layer, of which a token passes 8; 0: a Llama is written.
        expert_width: Of an expert.
        is_fp8: Projections and experts are in FP8, with a scale for each block of 128 x 128.
    """

    gigabytes: float
    hidden_size: int
    num_experts: int = 0
    expert_width: int = 768
    is_fp8: bool = False


def write_model(directory: Path, shape: ModelShape) -> None:
    """Write a LlamaForCausalLM or a Qwen3MoeForCausalLM, a shard per layer."""
    hidden, inner = shape.hidden_size, 4 * shape.hidden_size
    num_heads = max(1, hidden // 128)
    num_kv_heads = max(1, num_heads // 4)
    layer = _layer(shape, inner, num_heads, num_kv_heads)
    vocabulary = ("BF16", (_VOCABULARY, hidden))
    ends: Tensors = {
        "lm_head.weight": vocabulary,
        "model.embed_tokens.weight": vocabulary,
        "model.norm.weight": ("BF16", (hidden,)),
    }
    left = shape.gigabytes * 1e9 - sum(map(_num_bytes, ends.values()))
    num_layers = max(1, round(left / sum(map(_num_bytes, layer.values()))))
    shards = [ends]
    for i in range(num_layers):
        shards.append({f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()})
    names = [f"model-{i:05d}.safetensors" for i in range(len(shards))]
    blocks = _random_blocks()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for _ in pool.map(lambda *file: _write(directory, blocks, *file), names, shards):
            pass
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **_fields_of_experts(shape),
    }
    (directory / "config.json").write_text(json.dumps(config))


def _fields_of_experts(shape: ModelShape) -> dict[str, Any]:
    """Return what config.json says of experts and of FP8."""
    fields: dict[str, Any] = {}
    if shape.num_experts:
        fields = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.num_experts,
            "num_experts_per_tok": min(8, shape.num_experts),
            "moe_intermediate_size": shape.expert_width,
            "norm_topk_prob": True,
        }
    if shape.is_fp8:
        fields["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_SCALE_BLOCK, _SCALE_BLOCK],
        }
    return fields


def _layer(shape: ModelShape, inner: int, num_heads: int, num_kv_heads: int) -> Tensors:
    """Return the tensors of a layer."""
    hidden = shape.hidden_size
    sizes = {
        "self_attn.q_proj": (128 * num_heads, hidden),
        "self_attn.k_proj": (128 * num_kv_heads, hidden),
        "self_attn.v_proj": (128 * num_kv_heads, hidden),
        "self_attn.o_proj": (hidden, 128 * num_heads),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    plain: Tensors = {}
    mlps = {"mlp": inner}
    if shape.num_experts:
        mlps = {f"mlp.experts.{i}": shape.expert_width for i in range(shape.num_experts)}
        norms |= {"self_attn.q_norm": 128, "self_attn.k_norm": 128}
        plain["mlp.gate.weight"] = ("BF16", (shape.num_experts, hidden))
    for module, width in mlps.items():
        sizes |= {f"{module}.{part}_proj": (width, hidden) for part in ("gate", "up")}
        sizes[f"{module}.down_proj"] = (hidden, width)
    plain |= {f"{name}.weight": ("BF16", (width,)) for name, width in norms.items()}
    return plain | dict(_projections(sizes, is_fp8=shape.is_fp8))


def _projections(
    sizes: Mapping[str, tuple[int, int]], *, is_fp8: bool
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the tensors of projections."""
    for name, size in sizes.items():
        yield f"{name}.weight", ("F8_E4M3" if is_fp8 else "BF16", size)
        if is_fp8:
            blocks = tuple(-(-width // _SCALE_BLOCK) for width in size)
            yield f"{name}.weight_scale_inv", ("F32", blocks)


def _num_bytes(tensor: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = tensor
    return _ITEM_BYTES[dtype] * torch.Size(shape).numel()


def _random_blocks() -> dict[str, memoryview]:
    """Return the bytes of random numbers, by their dtype."""
    values = torch.randn(_BLOCK_VALUES, generator=torch.Generator().manual_seed(0))
    blocks = {
        "BF16": (0.02 * values).bfloat16(),
        "F8_E4M3": (32 * values).clamp(-448, 448).to(torch.float8_e4m3fn),
        "F32": (values.abs() + 0.5) * 1e-3,
    }
    return {dtype: memoryview(one.view(torch.uint8).numpy()) for dtype, one in blocks.items()}


def _write(
    directory: Path, blocks: Mapping[str, memoryview], file_name: str, tensors: Tensors
) -> None:
    """Write a safetensors file, in order of names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items()):
        begin, end = end, end + _num_bytes((dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / file_name).open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (dtype, shape) in sorted(tensors.items()):
            left = _num_bytes((dtype, shape))
            while left:
                left -= file.write(blocks[dtype][:left])
