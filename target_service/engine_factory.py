"""Build a target engine from its configuration: checkpoint, KV pool, identity, self-test."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import torch

from shared.config import PEERS, Secret, TargetConfig, read_secret
from shared.config.exposure import is_loopback
from shared.device import (
    dtype_name,
    kv_dtype_name,
    max_batch_rows,
    prefill_chunk_len,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from shared.errors import ConfigError
from shared.grammar.grammars import Grammars
from shared.kernels.token_mask import compile_token_masks
from shared.kv.pool import KVPool
from shared.ladder import LADDER
from shared.messages import FeatureSpec, WorkerInfo
from shared.models.checkpoint import resolve_model, tokenizer_hash
from shared.models.config import ModelConfig
from shared.models.digest import start_model_hash
from shared.models.hub import last_part
from shared.models.quantization import quantization_while_loading
from shared.peer.channel import PeerChannels, PeerListener, remove_stale_sockets
from shared.peer.mailbox import Mailbox
from shared.peer.ring import FeatureRing
from shared.peer.shared_files import MAILBOXES, RINGS
from shared.peer.tcp import TcpListener
from shared.rpc.engine import ProgressCallback
from target_service.batch_window import BatchWindow
from target_service.budgets.budget import TreeBudget
from target_service.budgets.costs import RoundCosts
from target_service.budgets.shapes import BudgetedShapes, TreeShapes
from target_service.engine import TargetEngine
from target_service.engine_state import EngineState
from target_service.fingerprint import finite_logits, take_fingerprint
from target_service.loading import LOADED, load_model, make_pool
from target_service.peer_rounds import PeerRounds
from target_service.prompt_budget import PromptBudget
from target_service.runner import TargetRunner
from target_service.sampler import Sampler
from target_service.scheduler import CHAIN_SHARE
from target_service.self_test import NUM_SLOTS, run_self_test
from target_service.start_up import capture_forwards, capture_verifies, measure_costs
from target_service.step_costs import StepCosts
from target_service.tree_source import TreeSource
from target_service.warm_up import NUM_TOKENS, warm_up

logger = logging.getLogger(__name__)

# Steps whose rows a feature ring holds, if it may be as large as that.
RING_STEPS = 4
# Rows of the forwards that are timed on a CPU; those of larger ones cost in proportion.
_CPU_SIZES = (1, 16, 32, 64, 128)


def create_engine(
    config: TargetConfig,
    progress: ProgressCallback,
    *,
    has_cpu_mailbox: bool = False,
    cpu_forwards: StepCosts | None = None,
) -> TargetEngine:
    """Load the target and prove that it is exact.

    Args:
        has_cpu_mailbox: Run device rounds on a CPU as well, which gains nothing: for tests.
        cpu_forwards: What forwards cost on a CPU; None: they are timed.
    Raises: ConfigError (CheckpointError included) with the fix.
    """
    secret = require_secret(config)
    device = resolve_device(config.device)
    directory = resolve_model(config.model, "target")
    model_hash = start_model_hash(directory)
    model_config = ModelConfig.from_checkpoint(directory)
    dtype = resolve_dtype(config.dtype, checkpoint_dtype=model_config.dtype, device=device)
    kv_dtype = resolve_kv_dtype(
        config.kv_cache_dtype, dtype=dtype, has_latents=model_config.kv_layout.has_latents
    )
    quantization = quantization_while_loading(
        config.quantization, checkpoint=model_config.quantization
    )
    model, projection, features = load_model(
        config, directory, model_config, dtype, quantization, progress
    )
    progress("allocating the KV pool", LOADED)
    pool, context_len = make_pool(config, model_config, kv_dtype, device)
    sampler = Sampler(
        max_num_requests=config.max_num_requests,
        vocab_size=model_config.vocab_size,
        device=device,
    )
    step_rows = max_batch_rows(config, device)
    runner = TargetRunner(
        model, pool, sampler, features, max_batch_rows=step_rows, projection=projection
    )
    if runner.pads_rows:
        capture_forwards(runner, lambda stage, done: progress(stage, LOADED + 0.1 * done))
    progress("proving exactness", 0.9)
    # First: NaN differs from itself in the self-test.
    finite_logits(runner, directory, max_num_tokens=context_len)
    prove_exactness(config, runner, context_len)
    # Of the products that the self-test settled.
    fingerprint = take_fingerprint(runner, directory, max_num_tokens=context_len)
    ring = open_ring(config, features.width * dtype.itemsize * step_rows)
    listener, tcp_listener = open_listener(config), open_tcp_listener(config, secret)
    channels = PeerChannels(*[one for one in (listener, tcp_listener) if one is not None])
    costs = time_padded_forwards(runner, progress)
    grammars = make_grammars(directory, model_config, device)
    info = WorkerInfo(
        incarnation=secrets.token_hex(8),
        model=config.model if config.model == "demo" else last_part(config.model),
        model_hash=model_hash(),
        tokenizer_hash=tokenizer_hash(directory),
        vocab_size=model_config.vocab_size,
        max_context_len=context_len,
        page_size=config.page_size,
        dtype=dtype_name(dtype),
        quantization=quantization or model_config.quantization,
        kv_cache_dtype=kv_dtype_name(kv_dtype, dtype),
        device=device.type,
        features=features,
        kind="target",
        eos_token_ids=model_config.eos_token_ids,
        feature_ring=_name_of(ring),
        peer_socket=_name_of(listener),
        peer_address=tcp_listener.address if tcp_listener is not None else "",
        device_model=fingerprint.device_model,
        versions=fingerprint.versions,
        cpu_threads=fingerprint.cpu_threads,
        logits_hash=fingerprint.logits_hash,
        has_grammars=grammars.are_served,
        num_experts=model_config.experts.num_experts if model_config.experts is not None else 0,
    )
    state = EngineState.create(
        info, device, feature_retain_rows=config.feature_retain_rows, ring=ring
    )
    mailbox = None
    if device.type == "cuda" or has_cpu_mailbox:
        mailbox = make_mailbox(config, info.peer_socket, features, pool, dtype)
    forwards = costs or cpu_forwards or measure_costs(runner, _CPU_SIZES)
    shapes = None
    if channels.has_sources:
        shapes = make_shapes(state, runner, forwards, step_rows)
    source = make_source(state, BatchWindow(costs), channels, mailbox, pool, shapes)
    if runner.pads_rows:
        capture_verifies(runner, source, lambda stage, done: progress(stage, 0.93 + 0.02 * done))
    engine = TargetEngine(
        runner,
        state,
        source,
        channels,
        grammars,
        max_batch_rows=step_rows,
        prefill_chunk_len=prefill_chunk_len(config, device),
        overlaps_steps=device.type == "cuda",
        costs=costs,
        prompt_budget=make_prompt_budget(config, forwards, device),
    )
    if device.type == "cuda" and context_len > NUM_TOKENS:
        progress("compiling kernels", 0.95)
        warm_up(engine)
    engine.serving.begin()
    return engine


def make_grammars(directory: Path, model: ModelConfig, device: torch.device) -> Grammars:
    """Return the grammars of outputs; on a GPU all that the first one needs is loaded."""
    grammars = Grammars(directory, model.vocab_size, model.eos_token_ids)
    if device.type == "cuda" and grammars.are_served:
        grammars.load()
        compile_token_masks(model.vocab_size, device)
    return grammars


def prove_exactness(config: TargetConfig, runner: TargetRunner, context_len: int) -> None:
    """Run the self-test if it is asked for.

    Raises: ConfigError if it fails, unless the configuration allows that.
    """
    if not config.self_test:
        return
    if context_len < NUM_SLOTS:
        logger.warning("the context is too short for the self-test; exactness is unproven")
        return
    result = run_self_test(runner)
    if not result.is_exact and not config.allow_inexact:
        raise ConfigError(
            "the self-test failed: prefill, decoding and trees do not agree bit for bit on this "
            f"machine (logits by up to {result.max_logit_difference:g}, KV by up to "
            f"{result.max_kv_difference:g}), so speculation could change the output; pass "
            "--allow-inexact to serve all the same"
        )


def time_padded_forwards(runner: TargetRunner, progress: ProgressCallback) -> StepCosts | None:
    """Return what forwards cost; None on a CPU, where cost grows evenly: waiting saves nothing."""
    if not runner.pads_rows:
        return None
    progress("timing forwards", 0.92)
    costs = measure_costs(runner)
    logger.info("ms of a forward by its rows: %s", costs)
    return costs


def make_prompt_budget(
    config: TargetConfig, forwards: StepCosts, device: torch.device
) -> PromptBudget | None:
    """Return what limits the prompts' rows of a step; None where the configuration does.

    Args:
        forwards: What forwards cost by their rows.
    """
    if device.type == "cpu" and config.prefill_chunk_len:
        return None
    return PromptBudget(forwards, learns_context=device.type == "cpu")


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


def make_shapes(
    state: EngineState, runner: TargetRunner, forwards: StepCosts, num_batch_rows: int
) -> TreeShapes:
    """Return what chooses the shapes of trees.

    Args:
        forwards: What forwards cost by their rows.
        num_batch_rows: Of a step; trees leave some of them to prompts.
    """
    most_rows = num_batch_rows - num_batch_rows // CHAIN_SHARE
    costs = RoundCosts(forwards, LADDER, is_padded=runner.pads_rows, most_rows=most_rows)
    budget = TreeBudget(
        costs, LADDER, runner.pool.max_num_requests, clock=runner.step_clock.ended_s
    )
    return BudgetedShapes(state.requests, budget, state.features.num_dropped)


def make_source(
    state: EngineState,
    window: BatchWindow,
    channels: PeerChannels,
    mailbox: Mailbox | None,
    pool: KVPool,
    shapes: TreeShapes | None = None,
) -> TreeSource:
    """Return where trees come from: the orchestrator, attached drafts, or their devices."""
    if not channels.has_sources:
        return TreeSource(window)
    if mailbox is None:
        return PeerRounds(state, window, shapes)
    # Not above: the engine works without this package.
    from target_service.device_rounds.compile import compile_mailbox
    from target_service.device_rounds.rounds import DeviceRounds

    if pool.device.type == "cuda":
        compile_mailbox(mailbox, pool, state.info.vocab_size)
    return DeviceRounds(state, window, mailbox, shapes)


def open_listener(config: TargetConfig) -> PeerListener | None:
    """Create the socket where drafts on this host attach; None if there is nothing to share."""
    if not (config.peer_socket and _has_peers(config)):
        return None
    try:
        remove_stale_sockets()
        MAILBOXES.remove_stale()
        return PeerListener()
    except OSError as error:
        logger.warning("trees go through the orchestrator: no socket for peer channels: %s", error)
        return None


def open_tcp_listener(config: TargetConfig, secret: Secret) -> TcpListener | None:
    """Listen for drafts on other hosts; None if that is not wanted.

    Raises: ConfigError if the address cannot be listened on.
    """
    if not (config.peer_host and _has_peers(config)):
        return None
    try:
        listener = TcpListener(config.peer_host, config.peer_port, secret.keys(PEERS))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --peer-host {config.peer_host} --peer-port {config.peer_port}: "
            f"{error.strerror}; choose another port, or 0 for any"
        ) from error
    logger.info("drafts on other hosts attach at port %d", listener.port)
    return listener


def require_secret(config: TargetConfig) -> Secret:
    """Return the secret of the deployment; falsy: none was given.

    Raises: ConfigError if others than this host can connect, and there is none.
    """
    secret = read_secret(config, os.environ)
    if config.peer_host and not secret and not is_loopback(config.peer_host):
        raise ConfigError(
            f"--peer-host {config.peer_host} needs a secret: give target and draft the same "
            "--secret-file, or bind it to 127.0.0.1"
        )
    return secret


def _name_of(shared: FeatureRing | PeerListener | None) -> str:
    return shared.name if shared is not None else ""


def _has_peers(config: TargetConfig) -> bool:
    return config.peer_rounds and "none" not in (config.algorithm, config.draft_model)
