"""Load a target: its weights, the KV pool that the memory beside them holds, and their runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shared.config import TargetConfig
from shared.device import (
    dtype_name,
    max_batch_rows,
    max_num_requests,
    require_heads_fit,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from shared.errors import CheckpointError, ConfigError
from shared.kv.pool import KVPool
from shared.kv.sizing import choose_num_pages, require_room
from shared.messages import MAX_TREE_NODES, FeatureSpec
from shared.models.broken_tensors import describe_broken_tensors
from shared.models.checkpoint_names import resolve_model
from shared.models.config import ModelConfig, feature_spec, resolve_draft
from shared.models.digest import start_model_hash
from shared.models.eagle3 import FeatureProjection
from shared.models.llama import CausalLM
from shared.models.quantization import quantization_while_loading
from shared.models.tensor_reads import report_reads
from shared.models.weight_memory import stored_bytes, weight_bytes
from shared.rpc.engine import ProgressCallback
from target_service.runner import TargetRunner

logger = logging.getLogger(__name__)

# Share of the start that is over when the weights are loaded.
LOADED = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target that can compute.

    Args:
        directory: Its checkpoint.
        model_hash: Waits for the digest of the checkpoint.
        model_config: As the checkpoint says it.
        dtype, kv_dtype: What it computes in, and what the KV cache holds.
        quantization: Of its weights, as they were stored and as they were loaded; "": none.
        context_len: Longest sequence that fits into the pool alone with a whole round.
    """

    directory: Path
    model_hash: Callable[[], str]
    model_config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantization: str
    runner: TargetRunner
    context_len: int


def load_target(config: TargetConfig, progress: ProgressCallback) -> LoadedTarget:
    """Load the weights and allocate what they compute with.

    Raises: ConfigError (CheckpointError included) with the fix.
    """
    device = resolve_device(config.device)
    directory = resolve_model(config.model, "target")
    model_hash = start_model_hash(directory)
    model_config = ModelConfig.from_checkpoint(directory)
    dtype = resolve_dtype(config.dtype, checkpoint_dtype=model_config.dtype, device=device)
    kv_dtype = resolve_kv_dtype(
        config.kv_cache_dtype, dtype=dtype, has_latents=model_config.kv_layout.has_latents
    )
    require_heads_fit(model_config.kv_layout, dtype=dtype, device=device)
    quantization = quantization_while_loading(
        config.quantization, checkpoint=model_config.quantization
    )
    model, projection, features = load_model(
        config, directory, model_config, dtype, quantization, progress
    )
    progress("allocating the KV pool", LOADED)
    pool, context_len = make_pool(config, model_config, kv_dtype, device)
    step_rows = max_batch_rows(config, device)
    quantization = model_config.quantization + quantization
    runner = TargetRunner(
        model,
        pool,
        features,
        max_batch_rows=step_rows,
        projection=projection,
        is_quantized=bool(quantization),
    )
    return LoadedTarget(
        directory=directory,
        model_hash=model_hash,
        model_config=model_config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        runner=runner,
        context_len=context_len,
    )


def load_model(
    config: TargetConfig,
    directory: Path,
    model_config: ModelConfig,
    dtype: torch.dtype,
    quantization: str,
    progress: ProgressCallback,
) -> tuple[CausalLM, FeatureProjection | None, FeatureSpec]:
    """Load the weights; return the model, and what makes features of captured rows.

    Args:
        quantization: What becomes FP8, see `quantization_while_loading`.
    Raises: ConfigError if they do not fit, or CheckpointError.
    """
    device = resolve_device(config.device)
    features = resolve_features(config, directory)
    require_room(
        num_bytes=weight_bytes(directory, dtype.itemsize, quantization),
        what=str(directory),
        device=device,
    )
    context_len = longest_context(config, model_config)
    progress("loading weights")
    with report_reads(
        lambda text, share: progress(text, LOADED * share), num_bytes=stored_bytes(directory)
    ):
        model = CausalLM.from_checkpoint(
            directory, device, dtype, context_len=context_len, quantization=quantization
        )
    projection = None
    if features.projection:
        projection = load_projection(
            resolve_draft(config.draft_model, config.algorithm, directory),
            len(features.layer_ids) * model_config.hidden_size,
            device=device,
            dtype=dtype,
        )
    return model, projection, replace(features, dtype=dtype_name(dtype) if features.width else "")


@torch.inference_mode()
def load_projection(
    head: Path, width: int, *, device: torch.device, dtype: torch.dtype
) -> FeatureProjection:
    """Load what an EAGLE-3 head does to features first; the head's own worker does not read it.

    Args:
        head: Its checkpoint.
        width: Values of a feature.
    Raises: CheckpointError if it does not fit, or computes NaN or infinity.
    """
    projection = FeatureProjection.from_checkpoint(head, width, device=device, dtype=dtype)
    if not bool(projection(torch.ones(1, width, device=device, dtype=dtype)).isfinite().all()):
        raise CheckpointError(
            f"{head}: numbers that fc of the head computes are NaN or infinite; "
            f"{describe_broken_tensors(head, dtype)}"
        )
    return projection


def longest_context(config: TargetConfig, model_config: ModelConfig) -> int:
    """Return the longest sequence that the model takes. Raises: ConfigError."""
    longest = config.max_context_len or model_config.max_position_embeddings
    if longest > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_context_len is {longest}, {config.model} was made for "
            f"{model_config.max_position_embeddings}; lower it"
        )
    return longest


def make_pool(
    config: TargetConfig, model_config: ModelConfig, kv_dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, int]:
    """Return the KV pool, and the longest sequence that fits into it alone with a whole round.

    Args:
        kv_dtype: Of the caches.
    Raises: ConfigError if there is no room for one round.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took and left
    longest, layout = longest_context(config, model_config), model_config.kv_layout
    num_pages = choose_num_pages(
        num_pages=config.num_pages,
        bytes_per_page=layout.bytes_per_token(kv_dtype.itemsize) * config.page_size,
        page_size=config.page_size,
        max_num_requests=max_num_requests(config, device),
        max_request_tokens=longest + MAX_TREE_NODES,
        memory_fraction=config.kv_memory_fraction,
        device=device,
    )
    # One request, alone, must always fit with a whole round.
    context_len = min(longest, (num_pages - 1) * config.page_size - MAX_TREE_NODES)
    if context_len < 2:
        raise ConfigError(
            f"a KV pool of {num_pages} pages of {config.page_size} tokens cannot hold one round "
            f"of {MAX_TREE_NODES} nodes; raise --num-pages"
        )
    pool = KVPool(
        layout=layout,
        num_pages=num_pages,
        page_size=config.page_size,
        max_num_requests=max_num_requests(config, device),
        max_pages_per_request=-(-(context_len + MAX_TREE_NODES) // config.page_size) + 1,
        dtype=kv_dtype,
        device=device,
    )
    logger.info(
        "KV pool: %d pages of %d tokens = %d tokens, in %s",
        pool.num_pages,
        config.page_size,
        pool.num_pages * config.page_size,
        dtype_name(kv_dtype),
    )
    return pool, context_len


def resolve_features(config: TargetConfig, target: Path) -> FeatureSpec:
    """Return what to send to the configured draft; width 0 when it needs nothing."""
    if config.algorithm == "none" or config.draft_model == "none":
        return FeatureSpec()
    draft = resolve_draft(config.draft_model, config.algorithm, target)
    _, spec = feature_spec(draft, target, config.algorithm, is_projected=config.project_features)
    return spec
