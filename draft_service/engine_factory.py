"""Build a draft engine from its configuration: head or small model, KV pool, identity."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Protocol

import torch

from draft_service.engine import DraftEngine
from draft_service.path_source import PathSource
from draft_service.pipeline import CHUNK_ROWS
from draft_service.runner import DraftRunner
from draft_service.self_test import require_finite
from draft_service.warm_up import warm_up
from shared.config import DraftConfig, read_secret
from shared.config.check import parse_shapes
from shared.device import (
    dtype_name,
    gpu_uuid,
    kv_dtype_name,
    max_batch_rows,
    max_num_requests,
    require_heads_fit,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from shared.errors import ConfigError
from shared.grammar.grammars import Grammars
from shared.kernels.dispatch import multiplies_fp8
from shared.kernels.token_mask import compile_token_masks
from shared.kv.pool import KVPool
from shared.kv.sizing import choose_num_pages, require_room
from shared.messages import MAX_NUM_STEPS, MAX_TOPK, WorkerInfo
from shared.models.checkpoint_names import resolve_model, tokenizer_hash
from shared.models.config import (
    DraftKind,
    HeadConfig,
    ModelConfig,
    feature_layers,
    feature_spec,
    resolve_draft,
)
from shared.models.digest import start_model_hash
from shared.models.draft import DraftModel, load_draft
from shared.models.hub import last_part
from shared.models.quantization import draft_quantization_while_loading, read_quantization
from shared.models.tensor_reads import report_reads
from shared.models.weight_memory import stored_bytes, weight_bytes
from shared.rpc.engine import ProgressCallback

logger = logging.getLogger(__name__)

# Slots past the committed rows that the largest tree expands.
MAX_SCRATCH_SLOTS = (MAX_NUM_STEPS - 1) * MAX_TOPK
# What a request holds beside its window: rows being extended, and the tree that grows from them.
EXTRA_SLOTS = CHUNK_ROWS + MAX_SCRATCH_SLOTS
MIN_WINDOW = 16
# A token that it reads, and one that it guesses.
_LEAST_CONTEXT = 2
# Share of the start that is over when the weights are loaded.
LOADED = 0.8


class MakeSource(Protocol):
    """Makes the source of paths that the device has before its host."""

    def __call__(self, runner: DraftRunner, *, gpu_is_shared: bool) -> PathSource: ...


def choose_source(runner: DraftRunner, *, gpu_is_shared: bool) -> PathSource:
    """Return device rounds on a GPU; a CPU never waits, so there every path comes with an order."""
    if runner.pool.device.type != "cuda":
        return PathSource()
    from draft_service.device_rounds.rounds import DeviceRounds

    return DeviceRounds(runner, gpu_is_shared=gpu_is_shared)


def create_engine(
    config: DraftConfig,
    progress: ProgressCallback,
    *,
    make_source: MakeSource = choose_source,
) -> DraftEngine:
    """Load the draft; embedding and head that its checkpoint lacks come from the target's files.

    Raises: ConfigError (CheckpointError included) with the fix.
    """
    secret = read_secret(config, os.environ)
    device = resolve_device(config.device)
    target = resolve_model(config.target_model, "target")
    directory = resolve_draft(config.model, config.algorithm, target)
    model_hash = start_model_hash(directory)
    target_config = ModelConfig.from_checkpoint(target)
    kind, spec = feature_spec(
        directory, target, config.algorithm, is_projected=config.project_features
    )
    dtype = resolve_dtype(config.dtype, checkpoint_dtype=target_config.dtype, device=device)
    stored = read_quantization(directory)
    quantization = draft_quantization_while_loading(
        config.quantization,
        checkpoint=stored,
        is_faster=dtype.itemsize == 2 and multiplies_fp8(device),
    )
    longest = config.max_context_len or target_config.max_position_embeddings
    if longest < _LEAST_CONTEXT:
        raise ConfigError(
            f"--max-context-len {longest} leaves no room for a draft; set {_LEAST_CONTEXT} or more"
        )
    model = load_model(
        config, directory, target, kind, dtype, quantization, progress, longest=longest
    )
    if config.draft_token_map:
        logger.info("proposes %d of %d tokens", model.vocab_size, target_config.vocab_size)
    kv_dtype = resolve_kv_dtype(
        config.kv_cache_dtype, dtype=dtype, has_latents=model.kv_layout.has_latents
    )
    require_heads_fit(model.kv_layout, dtype=dtype, device=device)
    progress("allocating the KV pool", LOADED)
    pool, window = make_pool(config, model, kv_dtype, device, longest=longest)
    logger.info("%s draft, window of %d tokens (0 = whole context)", kind, window)
    log_feature_layers(directory, kind, target_config)
    if spec.kv_layer_ids:
        logger.info("attends to K and V of the target's layers %s", list(spec.kv_layer_ids))
    info = WorkerInfo(
        incarnation=secrets.token_hex(8),
        model=last_part(config.model),
        model_hash=model_hash(),
        tokenizer_hash=tokenizer_hash(directory if kind is DraftKind.STANDALONE else target),
        vocab_size=target_config.vocab_size,
        max_context_len=longest,
        page_size=config.page_size,
        dtype=dtype_name(dtype),
        quantization=stored + quantization,
        kv_cache_dtype=kv_dtype_name(kv_dtype, dtype),
        device=device.type,
        gpu=gpu_uuid(device),
        features=spec,  # without a dtype, which is the target's to say
        kind=str(kind),
        draft_window=window,
    )
    runner = DraftRunner(
        model,
        pool,
        window=window,
        vocab_size=target_config.vocab_size,
        max_batch_rows=max_batch_rows(config, device),
        is_quantized=bool(stored + quantization),
    )
    if device.type == "cuda":
        progress("compiling kernels", 0.9)
    require_finite(runner, directory, max_num_tokens=longest)
    grammars = Grammars(target, target_config.vocab_size, target_config.eos_token_ids)
    if device.type == "cuda" and grammars.are_served:
        grammars.load()
        ids = torch.arange(model.vocab_size, device=device)
        compile_token_masks(model.vocab_size, device, model.to_target_ids(ids))
    engine = DraftEngine(
        runner,
        info,
        max_batch_rows=max_batch_rows(config, device),
        max_context_len=longest,
        source=make_source(runner, gpu_is_shared=config.gpu_is_shared),
        grammars=grammars,
        secret=secret,
    )
    if device.type == "cuda":
        warm_up(
            engine,
            shapes=parse_shapes(config.warm_up_trees),
            dtype=dtype,
            max_num_requests=max_num_requests(config, device),
        )
    engine.serving.begin()
    return engine


def load_model(
    config: DraftConfig,
    directory: Path,
    target: Path,
    kind: DraftKind,
    dtype: torch.dtype,
    quantization: str,
    progress: ProgressCallback,
    *,
    longest: int,
) -> DraftModel:
    """Load the weights.

    Args:
        directory, target: The checkpoints.
        quantization: What becomes FP8, see `draft_quantization_while_loading`.
        longest: Tokens of the longest request.
    Raises: ConfigError if they do not fit, or CheckpointError.
    """
    device = resolve_device(config.device)
    num_bytes = 0
    if kind is not DraftKind.MTP:  # which is a small part of its checkpoint
        require_room(
            num_bytes=weight_bytes(directory, dtype.itemsize, quantization),
            what=str(directory),
            device=device,
        )
        num_bytes = stored_bytes(directory)
    progress("loading weights")
    with report_reads(lambda text, share: progress(text, LOADED * share), num_bytes=num_bytes):
        return load_draft(
            config.algorithm,
            directory,
            target,
            device=device,
            dtype=dtype,
            context_len=longest,
            is_projected=config.project_features,
            quantization=quantization,
            token_map=Path(config.draft_token_map).expanduser() if config.draft_token_map else None,
        )


def make_pool(
    config: DraftConfig,
    model: DraftModel,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    longest: int,
) -> tuple[KVPool, int]:
    """Return the KV pool, and how many tokens a row attends to; 0 = all.

    Args:
        kv_dtype: Of the caches.
        longest: Tokens of the longest request.
    Raises: ConfigError if hardly any token would be seen.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took and left
    window = min(config.window or model.max_position, model.max_position, longest)
    num_pages = choose_num_pages(
        num_pages=config.num_pages,
        bytes_per_page=model.kv_layout.bytes_per_token(kv_dtype.itemsize) * config.page_size,
        page_size=config.page_size,
        max_num_requests=max_num_requests(config, device),
        max_request_tokens=window + EXTRA_SLOTS + config.page_size,
        memory_fraction=config.kv_memory_fraction,
        device=device,
    )
    window = fit_window(window, num_pages, config.page_size)
    pool = KVPool(
        layout=model.kv_layout,
        num_pages=num_pages,
        page_size=config.page_size,
        max_num_requests=max_num_requests(config, device),
        max_pages_per_request=-(-(longest + MAX_SCRATCH_SLOTS) // config.page_size) + 1,
        dtype=kv_dtype,
        device=device,
    )
    return pool, window if window < longest else 0  # no conversation gets past `longest`


def log_feature_layers(directory: Path, kind: DraftKind, target: ModelConfig) -> None:
    """Say which layers of the target an EAGLE-3 head reads, and how its config.json counts them.

    A head that was trained with others drafts badly, and nothing else shows it.
    """
    if kind is not DraftKind.EAGLE3:
        return
    layers = feature_layers(directory, HeadConfig.from_checkpoint(directory, kind), target)
    logger.info("reads the outputs of the target's layers %s (%s)", list(layers.ids), layers)


def fit_window(window: int, num_pages: int, page_size: int) -> int:
    """Return the largest window, at most the given one, with which one request alone always fits.

    A conversation that outgrew the pool would be retracted and read again for ever.

    Raises: ConfigError if hardly any token would be seen.
    """
    room = (num_pages - 1) * page_size - EXTRA_SLOTS - 2 * page_size  # partial pages at both ends
    if room < MIN_WINDOW:
        raise ConfigError(
            f"a KV pool of {num_pages} pages of {page_size} tokens cannot hold a draft's chunk of "
            f"{CHUNK_ROWS} rows and a window of {MIN_WINDOW} tokens; raise --num-pages"
        )
    return min(window, room)
