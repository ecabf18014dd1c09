"""Parse how a checkpoint's weights in int4 are packed, from its config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import compressed_groups, require_one_of
from shared.models.config_file import read_config_json
from shared.models.kv_scales import check_kv_scheme

GROUP_SIZES = (32, 64, 128)
PACKED_FORMAT = "pack-quantized"
# Ends of the names of a module's tensors: values, in AWQ and GPTQ, and in compressed-tensors.
QWEIGHT, PACKED = "qweight", "weight_packed"
_HINT = (
    "of int4 AWQ (version gemm), GPTQ and pack-quantized files of compressed-tensors are read, "
    f"4 bits in groups of {', '.join(map(str, GROUP_SIZES))}"
)
_require = partial(require_one_of, hint=_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Config:
    """How values in int4 are packed.

    Args:
        method: "awq", "gptq" or "compressed-tensors".
        group_size: Inputs that share a scale.
        zero_offset: Added to stored zeros: GPTQ's first format stores each zero less 1.
        is_reordered: The inputs of a group are not neighbours (GPTQ's desc_act): such weights are
            dequantised while they load.
    """

    method: str
    group_size: int
    zero_offset: int = 0
    is_reordered: bool = False


def parse_int4(config: Mapping[str, Any], source: str) -> Int4Config | None:
    """Return how weights are packed, from a quantization_config; None: they are not in int4.

    Args:
        source: File and field to name in errors.
    Raises: CheckpointError naming the field of what is not supported.
    """
    method = config.get("quant_method")
    if method == "awq":
        _require(config, source, "version", ("gemm", "GEMM", None))
        _require(config, source, "zero_point", (True, None))
        return Int4Config(method=method, group_size=_parse_bits(config, source))
    if method == "gptq":
        return _parse_gptq(config, source)
    if method == "compressed-tensors" and config.get("format") == PACKED_FORMAT:
        return _parse_compressed(config, source)
    return None


def _parse_gptq(config: Mapping[str, Any], source: str) -> Int4Config:
    _require(config, source, "checkpoint_format", ("gptq", "gptq_v2", "", None))
    _require(config, source, "format", ("gptq", "gptq_v2", "", None))  # as GPTQModel calls it, too
    _require(config, source, "is_marlin_format", (False, None))
    _require(config, source, "lm_head", (False, None))
    _require(config, source, "pack_dtype", ("int32", None))
    if config.get("dynamic"):
        raise CheckpointError(f"{source}.dynamic: modules with settings of their own are not read")
    stored_as = config.get("checkpoint_format") or config.get("format")
    return Int4Config(
        method="gptq",
        group_size=_parse_bits(config, source),
        zero_offset=0 if stored_as == "gptq_v2" else 1,
        is_reordered=bool(config.get("desc_act")) and not config.get("static_groups"),
    )


def _parse_bits(config: Mapping[str, Any], source: str) -> int:
    """Return the size of groups."""
    _require(config, source, "bits", (4,))
    _require(config, source, "group_size", GROUP_SIZES)
    return int(config["group_size"])


def _parse_compressed(config: Mapping[str, Any], source: str) -> Int4Config:
    check_kv_scheme(config, source)
    found: dict[str, Int4Config] = {}
    for name, group, weights in compressed_groups(config, source, hint=_HINT):
        place = f"{source}.config_groups.{name}"
        _require(group, place, "input_activations", (None,))
        _require(group, place, "format", (None, PACKED_FORMAT))
        place = f"{place}.weights"
        _require(weights, place, "num_bits", (4,))
        _require(weights, place, "type", ("int",))
        _require(weights, place, "strategy", ("group",))
        _require(weights, place, "group_size", GROUP_SIZES)
        _require(weights, place, "actorder", (None, False, "static", "weight", "group", True))
        found[name] = Int4Config(
            method="compressed-tensors",
            group_size=weights["group_size"],
            is_reordered=weights.get("actorder") in ("group", True),
        )
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"{source}.config_groups: {', '.join(found)} differ in group_size or actorder; "
            "all must be alike"
        )
    return next(iter(found.values()))


def read_int4_config(directory: Path) -> Int4Config | None:
    """Return how a checkpoint's weights are packed; None: its config.json has no int4.

    Raises: CheckpointError naming what is not supported.
    """
    fields = read_config_json(directory)
    text = fields.get("text_config")
    if "quantization_config" not in fields and isinstance(text, Mapping):
        fields = dict(text)
    config = fields.get("quantization_config")
    if not isinstance(config, Mapping):
        return None
    return parse_int4(config, f"{directory / 'config.json'}: quantization_config")
