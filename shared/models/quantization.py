"""Decide which weights are quantised, and how: from config.json and `--quantization`. No torch.

`parse_quantization` checks what a checkpoint asks for. Accepted are:

- FP8 (e4m3): DeepSeek's format (a scale per block of 128 x 128), compressed-tensors (a scale per
  output, block or tensor) and older FP8 files (per tensor); routed experts and the output layer may
  be FP8 as well. If the checkpoint asks for activations in 8 bits, a GPU quantises each row when it
  is computed; static scales of activations are not used.
- int4: see int4_config.py.
- MXFP4 for experts, where the architecture stores all experts of a layer in one tensor (gpt-oss).

`quantization_while_loading` decides what becomes FP8 while it is loaded. docs/quantization.md is
the user's view.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import compressed_groups, require_one_of
from shared.models.config_file import read_config_json
from shared.models.int4_config import PACKED, QWEIGHT, parse_int4
from shared.models.kv_scales import check_kv_scheme

FP8, INT4, MXFP4 = "fp8", "int4", "mxfp4"
# Projections and the output layer become FP8.
FP8_LM_HEAD = "fp8_lm_head"
# The output layer alone becomes FP8. Appended to how the checkpoint has its other weights, as in
# "int4+fp8_lm_head".
FP8_OUTPUT = "+fp8_lm_head"
_SIDE = 128
_DENSE = ("kv_b_proj", "input_proj", "eh_proj")
_WEIGHTS = ("weight", QWEIGHT, PACKED)
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")
_HINT = (
    "only weights in FP8 (e4m3) and int4, and experts of gpt-oss in MXFP4, are read; use such a "
    "checkpoint, or one in bfloat16, of which --quantization fp8 makes FP8 while it is loaded"
)
_require = partial(require_one_of, hint=_HINT)


def parse_quantization(fields: Mapping[str, Any], source: str, *, has_fused_experts: bool) -> str:
    """Return how the weights of a config.json are quantised: "fp8" or "int4" (projections),
    "mxfp4" (experts), or "".

    Args:
        source: File to name in errors.
        has_fused_experts: The architecture has tensors of all experts, which may be MXFP4.
    Raises: CheckpointError naming what is not supported.
    """
    config = fields.get("quantization_config")
    if config is None:
        return ""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{source}: quantization_config must be an object, got {config!r}")
    method = config.get("quant_method")
    source = f"{source}: quantization_config"
    if method == MXFP4 and has_fused_experts:
        return MXFP4
    if parse_int4(config, source) is not None:
        return INT4
    if method == "compressed-tensors":
        _check_compressed(config, source)
    elif method == "fp8":
        _require(config, source, "fmt", (None, "e4m3", "float8_e4m3fn"))
        _check_block(config.get("weight_block_size"), f"{source}.weight_block_size")
    else:
        raise CheckpointError(f"{source}.quant_method = {method!r} is not supported: {_HINT}")
    return FP8


def has_fp8_rows(config: Mapping[str, Any]) -> bool:
    """Return whether the quantization_config of a checkpoint in FP8 asks for activations in FP8."""
    if config.get("quant_method") == "fp8":
        return config.get("activation_scheme") in ("dynamic", "static")
    groups = config.get("config_groups")
    activations = [
        group.get("input_activations")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    return bool(activations) and all(
        isinstance(one, Mapping) and one.get("num_bits") == 8 and one.get("type") == "float"
        for one in activations
    )


def quantization_while_loading(name: str, *, checkpoint: str) -> str:
    """Return what becomes FP8 while it is loaded: FP8 (projections), FP8_LM_HEAD, FP8_OUTPUT or "".

    The checkpoint's own quantization followed by this string describes the loaded weights.

    Args:
        name: The option `--quantization`; "auto" and "none" keep weights as stored.
        checkpoint: The checkpoint's own quantization, see `parse_quantization`. If it is not "",
            projections stay as they are.
    """
    if name in ("auto", "none"):
        return ""
    if checkpoint:
        return FP8_OUTPUT if name == FP8_LM_HEAD else ""
    return name


def draft_quantization_while_loading(name: str, *, checkpoint: str, is_faster: bool) -> str:
    """Return what of a draft becomes FP8 while it is loaded: FP8_LM_HEAD, FP8_OUTPUT, or "".

    A draft only guesses, so "auto" takes what is faster, and the output layer is always included.

    Args:
        name: The option `--draft-quantization`.
        checkpoint: See `quantization_while_loading`.
        is_faster: The device multiplies FP8.
    """
    is_left = name == "none" or (name == "auto" and not is_faster)
    return quantization_while_loading("none" if is_left else FP8_LM_HEAD, checkpoint=checkpoint)


def projections_become_fp8(quantization: str) -> bool:
    """Return whether projections that are not quantised become FP8.

    Args:
        quantization: What `quantization_while_loading` returned.
    """
    return quantization in (FP8, FP8_LM_HEAD)


def output_layer_becomes_fp8(quantization: str) -> bool:
    """Return whether an output layer that is not quantised becomes FP8.

    Args:
        quantization: What `quantization_while_loading` returned.
    """
    return quantization in (FP8_LM_HEAD, FP8_OUTPUT)


def is_projection(name: str) -> bool:
    """Return whether a tensor is a projection of a layer: a weight that may stay in FP8 or int4,
    and may become FP8.

    Routed experts do not count: they may stay in FP8 and never become FP8. Nor do the projections
    that latent attention cuts into parts: these are dequantised while they load.
    """
    return ".experts." not in name and _is_multiplied(name)


def stays_fp8(name: str) -> bool:
    """Return whether a tensor that is stored in FP8 stays in FP8: a projection of a layer or of a
    routed expert, or the output layer."""
    return ".experts." in name or _is_multiplied(name) or is_output_layer(name)


def is_output_layer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is the weight of a language model's output layer."""
    return name.split(".")[-2:] == ["lm_head", "weight"]


def _is_multiplied(name: str) -> bool:
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 and parts[-1] in _WEIGHTS else parts[-1]
    return module.endswith(("_proj", "_proj_with_mqa")) and module not in _DENSE


def activation_scale_of(name: str) -> str:
    """Return the name of the weight whose inputs a tensor is the static scale of; "": the tensor is
    no such scale.

    Static scales are not needed: each row of activations in FP8 gets its own scale.
    """
    module, _, kind = name.rpartition(".")
    return f"{module}.weight" if kind == "input_scale" else ""


def _check_compressed(config: Mapping[str, Any], source: str) -> None:
    """Raise unless all groups of a file of compressed-tensors have weights that are read."""
    _require(config, source, "format", _COMPRESSED_FORMATS)
    check_kv_scheme(config, source)
    for name, _, weights in compressed_groups(config, source, hint=_HINT):
        place = f"{source}.config_groups.{name}.weights"
        _require(weights, place, "num_bits", (8,))
        _require(weights, place, "type", ("float",))
        _require(weights, place, "symmetric", (None, True))
        _require(weights, place, "strategy", ("tensor", "channel", "block"))
        if weights["strategy"] == "block":
            _check_block(weights.get("block_structure"), f"{place}.block_structure")


def _check_block(block: Any, field: str) -> None:
    if block is not None and list(block) != [_SIDE, _SIDE]:
        raise CheckpointError(f"{field} = {block!r} is not supported, only [{_SIDE}, {_SIDE}] is")


def read_fp8_rows(directory: Path) -> bool:
    """Return whether a checkpoint in FP8 asks for activations in FP8, see `has_fp8_rows`."""
    config = read_config_json(directory).get("quantization_config")
    return isinstance(config, Mapping) and has_fp8_rows(config)


def read_quantization(directory: Path) -> str:
    """Return how the weights of a checkpoint are quantised, see `parse_quantization`."""
    fields = read_config_json(directory)
    source = f"{directory / 'config.json'}"
    return parse_quantization(fields, source, has_fused_experts=True)
