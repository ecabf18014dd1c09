"""What a stack consists of, and how `coppice up`'s few options spread over its services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.config import (
    ALGORITHMS,
    DTYPES,
    DraftConfig,
    OrchestratorConfig,
    TargetConfig,
    option,
)
from shared.config.check import check_config
from shared.errors import ConfigError
from shared.logs import LEVELS
from shared.messages import MAX_NUM_STEPS, MAX_TOPK, MAX_TREE_NODES

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The processes of a stack.

    Args:
        orchestrator: Its `targets` and `drafts` are filled in.
        target: Every target; host, port and gpus are filled in.
        draft: Every draft, likewise.
        num_targets: Target processes, >= 1.
        num_drafts: Draft processes; 0 = no speculation.
        target_gpus: GPU of each target in turn, index or uuid; empty = all visible ones.
        draft_gpus: GPU of each draft in turn; the same as a target's is allowed.
        start_timeout_s: Budget for everything to become ready.
        stop_timeout_s: Budget for requests to end on `stop` before processes are killed.
        log_level: Least severity that the services log.
    """

    orchestrator: OrchestratorConfig = field(
        default_factory=lambda: OrchestratorConfig(host=LOOPBACK, port=0)
    )
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    num_targets: int = 1
    num_drafts: int = 1
    target_gpus: tuple[str, ...] = ()
    draft_gpus: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    log_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """The options of `coppice up`; a service's other options go into its table of --config."""

    target_model: str = option(
        "demo", "checkpoint directory of the target, or demo", aliases=("model_path",)
    )
    draft_model: str = option(
        "demo",
        "checkpoint directory of the draft, demo or none",
        aliases=("speculative_draft_model_path",),
    )
    algorithm: str = option(
        "auto",
        "auto, eagle3, eagle, mtp, standalone or none",
        choices=ALGORITHMS,
        aliases=("speculative_algorithm",),
    )
    num_steps: int = option(
        0,
        "tree depth without the root; 0 = auto",
        minimum=0,
        maximum=MAX_NUM_STEPS,
        aliases=("speculative_num_steps",),
    )
    topk: int = option(
        0,
        "children kept per expanded node; 0 = auto",
        minimum=0,
        maximum=MAX_TOPK,
        aliases=("speculative_eagle_topk",),
    )
    num_draft_tokens: int = option(
        0,
        "nodes verified per round, root included; 0 = auto",
        minimum=0,
        maximum=MAX_TREE_NODES,
        aliases=("speculative_num_draft_tokens",),
    )
    page_size: int = option(16, "tokens per KV page, any value >= 1", minimum=1)
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "dtype of the target", choices=DTYPES)
    draft_dtype: str = option("auto", "dtype of the draft", choices=DTYPES)
    allow_inexact: bool = option(
        default=False,
        help="serve even if the target's self-test finds that speculation may change the output",
    )
    target_gpus: str = option("", "GPU of each target in turn, e.g. 0,1; empty = the first")
    draft_gpus: str = option("", "GPU of each draft in turn; may be the target's; empty = any")
    num_targets: int = option(1, "target processes", minimum=1)
    num_drafts: int = option(1, "draft processes; 0 = no speculation", minimum=0)
    workers: int = option(1, "orchestrator processes that share the port", minimum=1)
    host: str = option(LOOPBACK, "address that the orchestrator listens on")
    port: int = option(
        50051, "port that the orchestrator listens on; 0 = any free port", minimum=0, maximum=65535
    )
    log_level: str = option(
        "info", "least severity that is logged: debug, info, warning or error", choices=LEVELS
    )


def stack_config(
    given: Mapping[str, Any],
    *,
    target: TargetConfig | None = None,
    draft: DraftConfig | None = None,
    orchestrator: OrchestratorConfig | None = None,
) -> StackConfig:
    """Spread the options of `coppice up` over the services.

    Args:
        given: Fields of UpConfig that somebody set; the others leave the services as they are.
        target: Starting point, e.g. the table of the configuration file; defaults otherwise.
        draft: Likewise.
        orchestrator: Likewise.
    Raises: ConfigError naming the option that cannot work.
    """
    up = UpConfig(**given)
    check_config(up)

    def pick(**names: str) -> dict[str, Any]:
        return {to: given[name] for to, name in names.items() if name in given}

    num_drafts = up.num_drafts
    if "none" in (up.draft_model, up.algorithm):
        if given.get("num_drafts"):
            raise ConfigError("--num-drafts needs a draft: leave out --draft-model none")
        num_drafts = 0
    target = replace(
        target or TargetConfig(),
        **pick(
            model="target_model",
            draft_model="draft_model",
            algorithm="algorithm",
            page_size="page_size",
            device="device",
            dtype="dtype",
            allow_inexact="allow_inexact",
        ),
    )
    if num_drafts == 0:
        target = replace(target, draft_model="none", algorithm="none")
    names = {"model": "draft_model", "algorithm": "algorithm"} if num_drafts else {}
    draft = replace(
        draft or DraftConfig(),
        **pick(
            **names,
            target_model="target_model",
            page_size="page_size",
            device="device",
            dtype="draft_dtype",
        ),
    )
    shape = pick(num_steps="num_steps", topk="topk", num_draft_tokens="num_draft_tokens")
    if up.num_steps and up.topk and up.num_draft_tokens:
        own = f"{up.num_steps}/{up.topk}/{up.num_draft_tokens}"
        draft = replace(draft, warm_up_trees=f"{own},{draft.warm_up_trees}")
    orchestrator = replace(
        orchestrator or OrchestratorConfig(),
        host=up.host,
        port=up.port,
        **shape,
        **pick(model="target_model", workers="workers"),
    )
    return StackConfig(
        orchestrator=orchestrator,
        target=target,
        draft=draft,
        num_targets=up.num_targets,
        num_drafts=num_drafts,
        target_gpus=split_list(up.target_gpus),
        draft_gpus=split_list(up.draft_gpus),
        log_level=up.log_level,
    )


def split_list(text: str) -> tuple[str, ...]:
    """Split a comma-separated option."""
    return tuple(item.strip() for item in text.split(",") if item.strip())
