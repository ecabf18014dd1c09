"""Build a target engine from its configuration: checkpoint, KV pool, identity, self-test."""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict
from pathlib import Path

import torch

from shared.config import TargetConfig
from shared.device import (
    dtype_name,
    gpu_uuid,
    kv_dtype_name,
    max_batch_rows,
    prefill_chunk_len,
)
from shared.errors import ConfigError
from shared.grammar.grammars import Grammars
from shared.kernels.token_mask import compile_token_masks
from shared.kv.pool import KVPool
from shared.ladder import LADDER
from shared.messages import FeatureSpec, WorkerInfo
from shared.models.checkpoint_names import tokenizer_hash
from shared.models.config import ModelConfig
from shared.models.hub import last_part
from shared.peer.channel import PeerChannels, PeerListener
from shared.peer.mailbox import Mailbox
from shared.peer.ring import FeatureRing
from shared.rpc.engine import ProgressCallback
from target_service.batch_window import BatchWindow
from target_service.budgets.budget import TreeBudget
from target_service.budgets.costs import RoundCosts
from target_service.budgets.shapes import BudgetedShapes, TreeShapes
from target_service.draft_endpoints import DraftEndpoints, require_secret
from target_service.engine import TargetEngine
from target_service.engine_state import EngineState
from target_service.fingerprint import Fingerprint, finite_logits, take_fingerprint
from target_service.loading import LOADED, LoadedTarget, load_target
from target_service.peer_rounds import PeerRounds
from target_service.prompt_budget import PromptBudget
from target_service.runner import TargetRunner
from target_service.scheduler import CHAIN_SHARE
from target_service.self_test import NUM_SLOTS, run_self_test
from target_service.start_up import capture_forwards, capture_verifies, measure_costs
from target_service.step_costs import StepCosts
from target_service.tree_source import TreeSource
from target_service.warm_up import NUM_TOKENS, warm_up

logger = logging.getLogger(__name__)

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
    target = load_target(config, progress)
    runner, device = target.runner, target.runner.pool.device
    step_rows = max_batch_rows(config, device)
    if runner.pads_rows:
        capture_forwards(runner, lambda stage, done: progress(stage, LOADED + 0.1 * done))
    progress("proving exactness", 0.9)
    # First: NaN differs from itself in the self-test.
    finite_logits(runner, target.directory, max_num_tokens=target.context_len)
    prove_exactness(config, runner, target.context_len)
    # Of the products that the self-test settled.
    fingerprint = take_fingerprint(runner, target.directory, max_num_tokens=target.context_len)
    row_bytes = runner.features.width * target.dtype.itemsize
    endpoints = DraftEndpoints.open(config, secret, row_bytes * step_rows)
    channels = endpoints.channels()
    costs = time_padded_forwards(runner, progress)
    grammars = make_grammars(target.directory, target.model_config, device)
    info = describe(config, target, fingerprint, endpoints, grammars)
    state = EngineState.create(
        info, device, feature_retain_rows=config.feature_retain_rows, ring=endpoints.ring
    )
    mailbox = None
    if device.type == "cuda" or has_cpu_mailbox:
        mailbox = make_mailbox(config, info.peer_socket, runner.features, runner.pool, target.dtype)
    forwards = costs or cpu_forwards or measure_costs(runner, _CPU_SIZES)
    shapes = None
    if channels.has_sources:
        shapes = make_shapes(config, state, runner, forwards, step_rows)
        if runner.pads_rows:  # a host with a GPU has the memory, and steps no time for this
            state.features.rested.reserve()
    source = make_source(state, BatchWindow(costs), channels, mailbox, runner.pool, shapes)
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
    if device.type == "cuda" and target.context_len > NUM_TOKENS:
        progress("compiling kernels", 0.95)
        warm_up(engine)
    engine.serving.begin()
    return engine


def describe(
    config: TargetConfig,
    target: LoadedTarget,
    fingerprint: Fingerprint,
    endpoints: DraftEndpoints,
    grammars: Grammars,
) -> WorkerInfo:
    """Return what the engine tells of itself."""
    model_config = target.model_config
    return WorkerInfo(
        incarnation=secrets.token_hex(8),
        model=last_part(config.model),
        model_hash=target.model_hash(),
        tokenizer_hash=tokenizer_hash(target.directory),
        vocab_size=model_config.vocab_size,
        max_context_len=target.context_len,
        page_size=config.page_size,
        dtype=dtype_name(target.dtype),
        quantization=target.quantization,
        kv_cache_dtype=kv_dtype_name(target.kv_dtype, target.dtype),
        device=target.runner.pool.device.type,
        gpu=gpu_uuid(target.runner.pool.device),
        features=target.runner.features,
        kind="target",
        eos_token_ids=model_config.eos_token_ids,
        feature_ring=_name_of(endpoints.ring),
        peer_socket=_name_of(endpoints.listener),
        peer_address=endpoints.tcp_listener.address if endpoints.tcp_listener is not None else "",
        has_grammars=grammars.are_served,
        num_experts=model_config.experts.num_experts if model_config.experts is not None else 0,
        **asdict(fingerprint),
    )


def _name_of(shared: FeatureRing | PeerListener | None) -> str:
    return shared.name if shared is not None else ""


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
    return PromptBudget(forwards)


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
            gpu_is_shared=config.gpu_is_shared,
        )
    except OSError as error:
        logger.warning("devices talk through their hosts: no mailbox: %s", error)
        return None


def make_shapes(
    config: TargetConfig,
    state: EngineState,
    runner: TargetRunner,
    forwards: StepCosts,
    num_batch_rows: int,
) -> TreeShapes:
    """Return what chooses the shapes of trees.

    Args:
        forwards: What forwards cost by their rows.
        num_batch_rows: Of a step; trees leave some of them to prompts.
    """
    most_rows = num_batch_rows - num_batch_rows // CHAIN_SHARE
    costs = RoundCosts(forwards, LADDER, is_padded=runner.pads_rows, most_rows=most_rows)
    budget = TreeBudget(
        costs,
        LADDER,
        runner.pool.max_num_requests,
        clock=runner.step_clock.ended_s,
        gpu_is_shared=config.gpu_is_shared,
    )
    return BudgetedShapes(state.requests, budget, state.features.missed)


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
