"""Build a target engine from its configuration: checkpoint, KV pool, identity, self-test."""

from __future__ import annotations

import logging
import secrets

import torch

from shared.config import TargetConfig
from shared.device import (
    dtype_name,
    max_batch_rows,
    prefill_chunk_len,
    resolve_device,
    resolve_dtype,
)
from shared.errors import ConfigError
from shared.kv.pool import KVPool
from shared.messages import FeatureSpec, WorkerInfo
from shared.models.checkpoint import (
    resolve_model,
    tokenizer_hash,
)
from shared.models.config import ModelConfig
from shared.models.digest import start_model_hash
from shared.peer.channel import PeerChannels, PeerListener, remove_stale_sockets
from shared.peer.mailbox import Mailbox
from shared.peer.ring import FeatureRing
from shared.peer.shared_files import MAILBOXES, RINGS
from shared.rpc.engine import ProgressCallback
from target_service.batch_window import BatchWindow
from target_service.engine import TargetEngine
from target_service.engine_state import EngineState
from target_service.fingerprint import finite_logits, take_fingerprint
from target_service.loading import LOADED, load_model, make_pool
from target_service.peer_rounds import PeerRounds
from target_service.runner import TargetRunner
from target_service.sampler import Sampler
from target_service.self_test import NUM_SLOTS, run_self_test
from target_service.tree_source import TreeSource
from target_service.warm_up import NUM_TOKENS, warm_up

logger = logging.getLogger(__name__)

# Steps whose rows a feature ring holds, if it may be as large as that.
RING_STEPS = 4


def create_engine(
    config: TargetConfig, progress: ProgressCallback, *, has_cpu_mailbox: bool = False
) -> TargetEngine:
    """Load the target and prove that it is exact.

    Args:
        has_cpu_mailbox: Run device rounds on a CPU as well, which gains nothing: for tests.
    Raises: ConfigError (CheckpointError included) with the fix.
    """
    device = resolve_device(config.device)
    directory = resolve_model(config.model, "target")
    model_hash = start_model_hash(directory)
    model_config = ModelConfig.from_checkpoint(directory)
    dtype = resolve_dtype(config.dtype, checkpoint_dtype=model_config.dtype, device=device)
    model, projection, features = load_model(config, directory, model_config, dtype, progress)
    progress("allocating the KV pool", LOADED)
    pool, context_len = make_pool(config, model_config, dtype, device)
    sampler = Sampler(
        max_num_requests=config.max_num_requests,
        vocab_size=model_config.vocab_size,
        device=device,
    )
    runner = TargetRunner(
        model,
        pool,
        sampler,
        features,
        max_batch_rows=max_batch_rows(config, device),
        projection=projection,
    )
    if runner.pads_rows:
        runner.capture(
            window=model_config.sliding_window,
            progress=lambda stage, done: progress(stage, LOADED + 0.1 * done),
        )
    progress("proving exactness", 0.9)
    prompt = {
        "vocab_size": model_config.vocab_size,
        "window": model_config.sliding_window,
        "max_num_tokens": context_len,
    }
    finite_logits(runner, directory, **prompt)  # first: NaN differs from itself in the self-test
    prove_exactness(config, runner, model_config, context_len)
    fingerprint = take_fingerprint(runner, directory, **prompt)  # of the products that it settled
    ring = open_ring(config, features.width * dtype.itemsize * max_batch_rows(config, device))
    channels = PeerChannels(open_listener(config))
    costs = None
    if runner.pads_rows:  # on a CPU cost grows evenly: waiting saves nothing
        progress("timing forwards", 0.92)
        costs = runner.measure_costs(window=model_config.sliding_window)
        logger.info("ms of a forward by its rows: %s", costs)
    info = WorkerInfo(
        incarnation=secrets.token_hex(8),
        model=config.model if config.model == "demo" else directory.name,
        model_hash=model_hash(),
        tokenizer_hash=tokenizer_hash(directory),
        vocab_size=model_config.vocab_size,
        max_context_len=context_len,
        page_size=config.page_size,
        dtype=dtype_name(dtype),
        device=device.type,
        features=features,
        kind="target",
        eos_token_ids=model_config.eos_token_ids,
        feature_ring=ring.name if ring is not None else "",
        peer_socket=channels.name,
        device_model=fingerprint.device_model,
        versions=fingerprint.versions,
        cpu_threads=fingerprint.cpu_threads,
        logits_hash=fingerprint.logits_hash,
    )
    state = EngineState.create(
        info,
        device,
        max_context_len=context_len,
        feature_retain_rows=config.feature_retain_rows,
        ring=ring,
    )
    mailbox = None
    if device.type == "cuda" or has_cpu_mailbox:
        mailbox = make_mailbox(config, channels.name, features, pool, dtype)
    source = make_source(state, BatchWindow(costs), channels, mailbox, device)
    if runner.pads_rows:
        runner.capture_verifies(
            source, progress=lambda stage, done: progress(stage, 0.93 + 0.02 * done)
        )
    engine = TargetEngine(
        runner,
        state,
        source,
        channels,
        max_batch_rows=max_batch_rows(config, device),
        prefill_chunk_len=prefill_chunk_len(config, device),
        overlaps_steps=device.type == "cuda",
        costs=costs,
    )
    if device.type == "cuda" and context_len > NUM_TOKENS:
        progress("compiling kernels", 0.95)
        warm_up(engine)
    engine.serving.begin()
    return engine


def prove_exactness(
    config: TargetConfig, runner: TargetRunner, model: ModelConfig, context_len: int
) -> None:
    """Run the self-test if it is asked for.

    Raises: ConfigError if it fails, unless the configuration allows that.
    """
    if not config.self_test:
        return
    if context_len < NUM_SLOTS:
        logger.warning("the context is too short for the self-test; exactness is unproven")
        return
    result = run_self_test(runner, model.vocab_size, model.sliding_window)
    if not result.is_exact and not config.allow_inexact:
        raise ConfigError(
            "the self-test failed: prefill, decoding and trees do not agree bit for bit on this "
            f"machine (logits by up to {result.max_logit_difference:g}, KV by up to "
            f"{result.max_kv_difference:g}), so speculation could change the output; pass "
            "--allow-inexact to serve all the same"
        )


def open_ring(config: TargetConfig, step_bytes: int) -> FeatureRing | None:
    """Create the feature ring; None where there is none to be had, or nothing to put into it.

    Args:
        step_bytes: Most bytes of feature rows that one step computes.
    """
    if not step_bytes or not config.feature_ring_mb:
        return None
    RINGS.remove_stale()
    num_bytes = min(RING_STEPS * step_bytes, config.feature_ring_mb << 20)
    try:
        ring = FeatureRing(num_bytes)
    except OSError as error:
        logger.warning("no feature ring, features go as bytes: %s", error)
        return None
    logger.info("feature ring: %.1f MiB of shared memory", ring.capacity / (1 << 20))
    return ring


def make_mailbox(
    config: TargetConfig, channel: str, features: FeatureSpec, pool: KVPool, dtype: torch.dtype
) -> Mailbox | None:
    """Create what the devices of attached drafts and this one talk through; None if they cannot."""
    if not (config.mailbox and channel):
        return None
    try:
        return Mailbox(
            channel,
            num_slots=pool.max_num_requests,
            width=features.width,
            dtype=dtype if features.width else None,
            device=pool.device,
        )
    except OSError as error:
        logger.warning("devices talk through their hosts: no mailbox: %s", error)
        return None


def make_source(
    state: EngineState,
    window: BatchWindow,
    channels: PeerChannels,
    mailbox: Mailbox | None,
    device: torch.device,
) -> TreeSource:
    """Return where trees come from: the orchestrator, attached drafts, or their devices."""
    if not channels.name:
        return TreeSource(window)
    if mailbox is None:
        return PeerRounds(state, window)
    # Not above: the engine works without this package.
    from target_service.device_rounds.compile import compile_mailbox
    from target_service.device_rounds.rounds import DeviceRounds

    if device.type == "cuda":
        compile_mailbox(mailbox, state.info.vocab_size, device)
    return DeviceRounds(state, window, mailbox)


def open_listener(config: TargetConfig) -> PeerListener | None:
    """Create the socket where drafts on this host attach; None if there is nothing to share."""
    if not config.peer_rounds or config.algorithm == "none" or config.draft_model == "none":
        return None
    try:
        remove_stale_sockets()
        MAILBOXES.remove_stale()
        return PeerListener()
    except OSError as error:
        logger.warning("trees go through the orchestrator: no socket for peer channels: %s", error)
        return None
