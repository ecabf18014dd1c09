"""Resolve "auto" devices, dtypes and budgets. Called by engine processes only."""

from __future__ import annotations

import torch

from shared.config import TargetConfig, WorkerConfig
from shared.errors import ConfigError
from shared.kv.layout import KVLayout

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
FP8_CACHES = ("fp8", "fp8_e4m3")
MAX_FLOAT32_HEAD = 256


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a configured name; "auto" prefers a GPU.

    Raises: ConfigError if the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {name!r}, {count} GPUs are visible; use --device cpu")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N")
    return device


def resolve_dtype(name: str, *, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a configured name; "auto" = float32 on a CPU, else the
    checkpoint's.

    Raises: ConfigError for an unknown name.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint_dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_kv_dtype(name: str, *, dtype: torch.dtype, has_latents: bool) -> torch.dtype:
    """Return the torch dtype of KV caches by a configured name; "auto" = the model's.

    Args:
        has_latents: The model keeps latents, in the place of K and V.
    Raises: ConfigError for an unknown name, or FP8 of latents.
    """
    if name == "auto":
        return dtype
    if name not in FP8_CACHES:
        raise ConfigError(
            f"kv_cache_dtype is {name!r}, expected auto or one of {', '.join(FP8_CACHES)}"
        )
    if has_latents:
        raise ConfigError(
            f"--kv-cache-dtype {name} is for caches of K and V, and this model has latent "
            "attention, whose latents are kept in its dtype; leave it out"
        )
    return torch.float8_e4m3fn


def require_heads_fit(layout: KVLayout, *, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless a GPU's shared memory holds a tile of K and one of V.

    Raises: ConfigError with the dtypes that fit.
    """
    if device.type == "cpu" or dtype.itemsize < 4 or layout.has_latents:
        return
    widest = max(shape.width for shape in layout.layers)
    if widest > MAX_FLOAT32_HEAD:
        raise ConfigError(
            f"--dtype {dtype_name(dtype)} on a GPU is for heads of at most {MAX_FLOAT32_HEAD} "
            f"values, and this model has heads of {widest}; pass --dtype bfloat16"
        )


def kv_dtype_name(kv_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Return "fp8_e4m3", or "" for caches in the model's dtype."""
    return "" if kv_dtype == dtype else FP8_CACHES[-1]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32", "float16" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU; "" of any other device."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def max_batch_rows(config: WorkerConfig, device: torch.device) -> int:
    """Return the row budget of an engine step."""
    return config.max_batch_rows or (512 if device.type == "cpu" else 2048)


def max_num_requests(config: WorkerConfig, device: torch.device) -> int:
    """Return how many requests a worker holds state for at once."""
    return config.max_num_requests or (64 if device.type == "cpu" else 256)


def prefill_chunk_len(config: TargetConfig, device: torch.device) -> int:
    """Return the most prompt tokens of one request per engine step.

    On a GPU only a step's rows limit them, by default: how many of these are for prompts follows
    from what rows cost there.
    """
    if config.prefill_chunk_len:
        return config.prefill_chunk_len
    return 256 if device.type == "cpu" else max_batch_rows(config, device)
