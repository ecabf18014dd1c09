"""Checkpoints in FP8, made of others, and what their weights mean."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import Tensors, edit_checkpoint

SIDE = 128
HEAD = "lm_head.weight"
BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [SIDE, SIDE],
}
FORMS = ("block", "channel", "tensor")


def compressed_config(strategy: str) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def is_quantized(name: str) -> bool:
    ends = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    return name.endswith(ends) and not name.endswith("eh_proj.weight")


def write_fp8(
    source: Path,
    directory: Path,
    form: str,
    *,
    kept: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
    has_fp8_head: bool = False,
) -> Path:
    """Write a checkpoint as its publisher would in FP8: values, and scales beside them.

    Args:
        form: "block": DeepSeek's format; "channel", "tensor": compressed-tensors.
        kept: Projections that stay as they are.
        others: Modules that are no projections, and are in FP8 as well.
        has_fp8_head: The output layer is in FP8 as well.
    """
    shutil.copytree(source, directory)

    def edit(tensors: Tensors) -> None:
        heads = [HEAD] if has_fp8_head else []
        ends = tuple(f".{module}.weight" for module in others)
        extra = [name for name in tensors if name.endswith(ends)]
        for name in [*filter(is_quantized, tensors), *extra, *heads]:
            if name.split(".")[-2] in kept:
                continue
            scales = scales_of(tensors[name], form)
            values = (tensors[name] / spread(scales, tensors[name].shape)).clamp(-448, 448)
            tensors[name] = values.to(torch.float8_e4m3fn)
            if form == "block":
                tensors[f"{name}_scale_inv"] = scales
            else:
                tensors[f"{name}_scale"] = scales
                tensors[name.replace(".weight", ".input_scale")] = torch.ones(1)

    config = BLOCK_CONFIG if form == "block" else compressed_config(form)
    if has_fp8_head:
        config = config | {"ignore": []}
    return edit_checkpoint(
        directory, tensors=edit, config=lambda c: c.update(quantization_config=config)
    )


def write_dequantized(quantized: Path, directory: Path) -> Path:
    """Write a plain float32 checkpoint with the values that one in FP8 means."""
    shutil.copytree(quantized, directory)

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if tensors[name].dtype == torch.float8_e4m3fn]:
            end = "_scale_inv" if f"{name}_scale_inv" in tensors else "_scale"
            scales = tensors.pop(f"{name}{end}").float()
            tensors.pop(name.replace(".weight", ".input_scale"), None)
            tensors[name] = tensors[name].float() * spread(scales, tensors[name].shape)

    return edit_checkpoint(
        directory, tensors=edit, config=lambda c: c.pop("quantization_config", None)
    )


def write_rounded(source: Path, directory: Path, *, has_fp8_head: bool = False) -> Path:
    """Write a checkpoint whose projections have the values that `--quantization fp8` makes.

    Args:
        has_fp8_head: So has its output layer, which is no longer tied to its embedding.
    """
    shutil.copytree(source, directory)

    def edit(tensors: Tensors) -> None:
        if has_fp8_head:
            tensors.setdefault(HEAD, tensors["model.embed_tokens.weight"].clone())
        heads = [HEAD] if has_fp8_head else []
        for name in [*filter(is_quantized, tensors), *heads]:
            scales = scales_of(tensors[name], "channel")
            values = (tensors[name] / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[name] = values.float() * scales

    untied = {"tie_word_embeddings": False} if has_fp8_head else {}
    return edit_checkpoint(directory, tensors=edit, config=lambda c: c.update(untied))


def scales_of(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return scales that let the largest value of each part be 448, in the form's shape."""
    if form == "tensor":
        return weight.abs().max().reshape(1) / 448
    if form == "channel":
        return weight.abs().amax(dim=1, keepdim=True) / 448
    rows = []
    for n in range(0, weight.shape[0], SIDE):
        blocks = weight[n : n + SIDE].split(SIDE, dim=1)
        rows.append(torch.stack([block.abs().max() for block in blocks]))
    return torch.stack(rows) / 448


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each value."""
    if scales.numel() == 1 or scales.shape == (shape[0], 1):
        return scales.reshape(-1, 1).expand(shape)
    every = scales.repeat_interleave(SIDE, dim=0).repeat_interleave(SIDE, dim=1)
    return every[: shape[0], : shape[1]]
