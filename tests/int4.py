"""Checkpoints in int4, packed as their publishers do, and what their weights mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import Tensors, edit_checkpoint
from tests.quantized import is_quantized

GROUP = 32
AWQ_CONFIG = {
    "quant_method": "awq",
    "version": "gemm",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "modules_to_not_convert": None,
}
GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": False,
    "desc_act": False,
    "damp_percent": 0.01,
    "checkpoint_format": "gptq",
    "lm_head": False,
}
_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "actorder": None,
}
COMPRESSED_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None}
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def compressed_config(**weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors, with other fields of its weights."""
    group = COMPRESSED_CONFIG["config_groups"]["group_0"]
    return COMPRESSED_CONFIG | {
        "config_groups": {"group_0": group | {"weights": _WEIGHTS | weights}}
    }


CONFIGS = {
    "awq": AWQ_CONFIG,
    "gptq": GPTQ_CONFIG,
    "gptq symmetric": GPTQ_CONFIG | {"sym": True},
    "gptq v2": GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"},
    "gptq desc_act": GPTQ_CONFIG | {"desc_act": True},
    "compressed": COMPRESSED_CONFIG,
    "compressed zeros": compressed_config(symmetric=False),
    "compressed old zeros": compressed_config(symmetric=False),
    "compressed actorder": compressed_config(actorder="group"),
}


def write_int4(
    source: Path,
    directory: Path,
    form: str,
    *,
    is_chosen: Callable[[str], bool] = is_quantized,
) -> tuple[Path, Path]:
    """Write a checkpoint in int4, and one in float32 with the values that it means.

    Args:
        form: One of CONFIGS.
        is_chosen: Says of a tensor's name whether it becomes int4.
    Returns: (in int4, in float32), folders of `directory`.
    """
    quantized, plain = directory / "int4", directory / "plain"
    meant: Tensors = {}
    shutil.copytree(source, quantized)
    shutil.copytree(source, plain)

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if is_chosen(name)]:
            packed, meant[name] = _pack(tensors.pop(name), name.removesuffix(".weight"), form)
            tensors |= packed

    config = CONFIGS[form]
    edit_checkpoint(quantized, tensors=edit, config=lambda c: c.update(quantization_config=config))
    edit_checkpoint(plain, tensors=lambda t: t.update(meant))
    return quantized, plain


def _pack(weight: torch.Tensor, module: str, form: str) -> tuple[Tensors, torch.Tensor]:
    """Return a module's tensors, and the weight that they mean."""
    width_n, width_k = weight.shape
    groups = torch.arange(width_k) // GROUP
    if form in ("gptq desc_act", "compressed actorder"):
        generator = torch.Generator().manual_seed(width_k)
        groups = groups[torch.randperm(width_k, generator=generator)]
    num_groups = width_k // GROUP
    low = torch.stack([weight[:, groups == g].amin(dim=1) for g in range(num_groups)], dim=1)
    high = torch.stack([weight[:, groups == g].amax(dim=1) for g in range(num_groups)], dim=1)
    if form in ("gptq symmetric", "gptq desc_act", "compressed", "compressed actorder"):
        scales = (torch.maximum(high, -low) / 7).half()
        zeros = torch.full_like(scales, 8.0)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(1, 15)  # a zero of 0 has no form in GPTQ's first one
    of_k, zero_of_k = scales.float()[:, groups], zeros.float()[:, groups]
    values = (weight / of_k + zero_of_k).round().clamp(0, 15)
    pack = {"awq": _awq, "gptq": _gptq, "comp": _compressed}[form[:4].strip()]
    tensors = pack(form, values.long(), zeros.long(), scales, groups)
    named = {f"{module}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    return named, (values - zero_of_k) * of_k


def _awq(
    form: str, values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, _: torch.Tensor
) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
    assert form == "awq"
    return {
        "qweight": _words(values.T, order),
        "qzeros": _words(zeros.T, order),
        "scales": scales.T,
    }


def _gptq(
    form: str, values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> Tensors:
    stored = zeros if form == "gptq v2" else zeros - 1
    return {
        "qweight": _words(values).T,
        "qzeros": _words(stored.T),
        "scales": scales.T,
        "g_idx": groups.int(),
        "bias": torch.zeros(len(values)),  # as AutoGPTQ does of layers that have none
    }


def _compressed(
    form: str, values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> Tensors:
    tensors = {
        "weight_packed": _words(values),
        "weight_scale": scales,
        "weight_shape": torch.tensor(values.shape),
    }
    if form == "compressed zeros":
        tensors["weight_zero_point"] = _words(zeros.T).T
    if form == "compressed old zeros":
        tensors["weight_zero_point"] = (zeros - 8).to(torch.int8)
    if form == "compressed actorder":
        tensors["weight_g_idx"] = groups.int()
    return tensors


def _words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight neighbours of a row into a word each: neighbour order[i] into bits 4 i."""
    words = torch.zeros((len(values), values.shape[1] // 8), dtype=torch.int64)
    for i, neighbour in enumerate(order):
        words += values[:, neighbour::8] << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
