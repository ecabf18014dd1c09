"""What a stack consists of, and how `coppice up`'s few options spread over its services."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.config import (
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
    option,
    option_of,
)
from shared.config.check import check_config
from shared.config.ports import LOOPBACK
from shared.errors import ConfigError
from shared.gpu_lease import list_machine_gpus, visible_gpus

CORES_PER_WORKER = 8
MAX_AUTO_WORKERS = 4
STOP_SLACK_S = 10.0


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
        mps: Workers that share a GPU share its time, too, if the machine can do that.
        start_timeout_s: Budget for everything to become ready.
        metrics_port: Port of the first service's metrics, the others have the next ones; 0: none.
        gateway: Its `orchestrators` are filled in; None: there is no HTTP.
        any_http_port: Where the gateway's port is taken, any free one will do.
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
    mps: bool = True
    start_timeout_s: float = 600.0
    metrics_port: int = 0
    gateway: GatewayConfig | None = None
    any_http_port: bool = False

    @property
    def stop_budget_s(self) -> float:
        """Return how long `stop` waits for services to end before it kills them, seconds.

        Gateway and orchestrator end first, within their budgets; then workers have nothing left but
        requests of other orchestrators, if there are any.
        """
        parts = (self.orchestrator, self.target, self.draft, self.gateway)
        budgets = [part.drain_timeout_s for part in parts if part is not None]
        return max(budgets) + STOP_SLACK_S


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """The options of `coppice up`; a service's other options go into its table of --config."""

    target_model: str = option_of(TargetConfig, "model")
    draft_model: str = option_of(TargetConfig, "draft_model")
    algorithm: str = option_of(TargetConfig, "algorithm")
    draft_token_map: str = option_of(DraftConfig, "draft_token_map")
    num_steps: int = option_of(OrchestratorConfig, "num_steps")
    topk: int = option_of(OrchestratorConfig, "topk")
    num_draft_tokens: int = option_of(OrchestratorConfig, "num_draft_tokens")
    expected_accept_length: float = option_of(OrchestratorConfig, "expected_accept_length")
    page_size: int = option_of(TargetConfig, "page_size")
    device: str = option_of(TargetConfig, "device", help="auto, cpu or cuda")
    dtype: str = option_of(TargetConfig, "dtype", help="dtype of the target")
    draft_dtype: str = option_of(DraftConfig, "dtype", help="dtype of the draft")
    quantization: str = option_of(
        TargetConfig,
        "quantization",
        help="fp8 = weights of the target become FP8, fp8_lm_head = those of its output layer, "
        "too; auto, none = as they are",
    )
    draft_quantization: str = option_of(
        DraftConfig,
        "quantization",
        help="the same of the draft, whose weights auto makes FP8 where a GPU multiplies it",
    )
    kv_cache_dtype: str = option_of(
        TargetConfig,
        "kv_cache_dtype",
        help="fp8 = the target keeps K and V in FP8; auto = in its dtype",
    )
    draft_kv_cache_dtype: str = option_of(
        DraftConfig, "kv_cache_dtype", help="the same of the draft"
    )
    allow_inexact: bool = option_of(TargetConfig, "allow_inexact")
    pair_gpus: str = option(
        "",
        "GPUs, e.g. 0,1, that get a target and a draft each, which serve each other: more tokens "
        "per second than a GPU for each worker; all = every GPU of the machine",
    )
    target_gpus: str = option("", "GPU of each target in turn, e.g. 0,1; empty = the first")
    draft_gpus: str = option("", "GPU of each draft in turn; may be the target's; empty = any")
    mps: bool = option(
        default=True,
        help="let workers that share a GPU share its time, too, by NVIDIA's MPS, which is started "
        "for them if this machine has it; without it they take turns",
    )
    num_targets: int = option(1, "target processes", minimum=1)
    num_drafts: int = option(1, "draft processes; 0 = no speculation", minimum=0)
    workers: int = option_of(OrchestratorConfig, "workers")
    drain_timeout_s: float = option_of(
        OrchestratorConfig,
        "drain_timeout_s",
        help="seconds that running requests may finish in after Ctrl-C or SIGTERM",
    )
    start_timeout_s: float = option(
        600.0, "seconds that all services together may take to become ready", minimum=1
    )
    host: str = option(LOOPBACK, "address that the orchestrator listens on")
    port: int = option_of(
        OrchestratorConfig, "port", help="port that the orchestrator listens on; 0 = any free port"
    )
    http_port: int = option_of(
        GatewayConfig,
        "port",
        help="port that the HTTP gateway listens on, with OpenAI's API; 0 = no gateway; where it "
        "is not given, any free one if --port is 0 or 8000 is taken",
    )
    served_model_name: str = option_of(
        OrchestratorConfig,
        "served_model_name",
        help="name that clients call the model by; empty = the last part of its path",
    )
    chat_template: str = option_of(OrchestratorConfig, "chat_template")
    token_file: str = option_of(OrchestratorConfig, "token_file")
    tls_cert_file: str = option_of(
        OrchestratorConfig,
        "tls_cert_file",
        help="certificate chain (PEM) shown to clients; set = TLS; read again when it changes",
    )
    tls_key_file: str = option_of(OrchestratorConfig, "tls_key_file")
    tls_client_ca_file: str = option_of(
        OrchestratorConfig,
        "tls_client_ca_file",
        help="authorities (PEM) that certificates of clients must come from; set = mutual TLS",
    )
    insecure: bool = option_of(OrchestratorConfig, "insecure")
    reflection: bool = option_of(OrchestratorConfig, "reflection")
    secret_file: str = option(
        "",
        "file with the secret that the services prove to each other; empty = the variable "
        "COPPICE_SECRET, or one that is made up",
    )
    log_level: str = option_of(OrchestratorConfig, "log_level")
    log_format: str = option_of(OrchestratorConfig, "log_format")
    metrics_port: int = option_of(
        OrchestratorConfig,
        "metrics_port",
        help="port of the orchestrator's metrics for Prometheus, at /metrics; its other processes, "
        "the targets, the drafts and the gateway have the next ports; 0 = none",
    )
    otlp_endpoint: str = option_of(OrchestratorConfig, "otlp_endpoint")
    trace_sample_rate: float = option_of(OrchestratorConfig, "trace_sample_rate")


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


# The field of a service that each option of `coppice up` sets.
_OF_WORKERS = _same("page_size", "device", "drain_timeout_s", "log_level", "log_format")
_OF_TARGET = {
    **_OF_WORKERS,
    **_same("draft_model", "algorithm", "dtype", "quantization", "kv_cache_dtype", "allow_inexact"),
    "target_model": "model",
}
_OF_DRAFT = {
    **_OF_WORKERS,
    **_same("target_model", "algorithm", "draft_token_map"),
    "draft_model": "model",
    "draft_dtype": "dtype",
    "draft_quantization": "quantization",
    "draft_kv_cache_dtype": "kv_cache_dtype",
}
_OF_FRONTS = _same(
    *("drain_timeout_s", "token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"),
    *("insecure", "log_level", "log_format"),
)
_OF_ORCHESTRATOR = {
    **_OF_FRONTS,
    **_same(
        *("num_steps", "topk", "num_draft_tokens", "expected_accept_length", "reflection"),
        *("secret_file", "otlp_endpoint", "trace_sample_rate", "served_model_name"),
        "chat_template",
    ),
    "target_model": "model",
}


def stack_config(
    given: Mapping[str, Any],
    *,
    target: TargetConfig | None = None,
    draft: DraftConfig | None = None,
    orchestrator: OrchestratorConfig | None = None,
    gateway: GatewayConfig | None = None,
) -> StackConfig:
    """Spread the options of `coppice up` over the services.

    Args:
        given: Fields of UpConfig that somebody set; the others leave the services as they are.
        target: Starting point, e.g. the table of the configuration file; defaults otherwise.
        draft, orchestrator, gateway: Likewise.
    Raises: ConfigError naming the option that cannot work.
    """
    up = UpConfig(**given)
    check_config(up)
    pair_gpus = _pair_gpus(up, given)
    num_drafts = len(pair_gpus) or _num_drafts(up, given)
    target = replace(target or TargetConfig(), **_picked(given, _OF_TARGET))
    if num_drafts == 0:
        target = replace(target, draft_model="none", algorithm="none")
        given = {k: v for k, v in given.items() if k not in ("draft_model", "algorithm")}
    draft = _draft(up, given, draft or DraftConfig())
    for flag, gpus, worker in (
        ("--pair-gpus", up.pair_gpus, target),
        ("--pair-gpus", up.pair_gpus, draft),
        ("--target-gpus", up.target_gpus, target),
        ("--draft-gpus", up.draft_gpus, draft),
    ):
        _check_gpus(flag, gpus, worker.device)
    orchestrator = orchestrator or OrchestratorConfig()
    orchestrator = replace(
        orchestrator,
        host=up.host,
        port=up.port,
        workers=up.workers or orchestrator.workers or auto_workers(),
        **_picked(given, _OF_ORCHESTRATOR),
    )
    return StackConfig(
        orchestrator=orchestrator,
        gateway=_gateway(up, given, orchestrator, gateway or GatewayConfig()),
        any_http_port="http_port" not in given,
        target=target,
        draft=draft,
        num_targets=len(pair_gpus) or up.num_targets,
        num_drafts=num_drafts,
        target_gpus=pair_gpus or split_list(up.target_gpus),
        draft_gpus=pair_gpus or split_list(up.draft_gpus),
        mps=up.mps,
        start_timeout_s=up.start_timeout_s,
        metrics_port=up.metrics_port,
    )


def _draft(up: UpConfig, given: Mapping[str, Any], draft: DraftConfig) -> DraftConfig:
    """Return the drafts' configuration: they are warmed up for the trees that they will grow."""
    draft = replace(draft, **_picked(given, _OF_DRAFT))
    if up.num_steps and up.topk and up.num_draft_tokens:
        own = f"{up.num_steps}/{up.topk}/{up.num_draft_tokens}"
        draft = replace(draft, warm_up_trees=f"{own},{draft.warm_up_trees}")
    return draft


def _gateway(
    up: UpConfig,
    given: Mapping[str, Any],
    orchestrator: OrchestratorConfig,
    gateway: GatewayConfig,
) -> GatewayConfig | None:
    """Return the gateway's configuration; None: there is none.

    Raises: ConfigError if it was asked for and could not call the orchestrator.
    """
    if not up.http_port:
        return None
    if orchestrator.tls_cert_file and not gateway.tls_ca_file:
        if "http_port" not in given:
            return None
        raise ConfigError(
            "--http-port needs an orchestrator that the gateway can call: set tls_ca_file, which "
            "--tls-cert-file comes from, and tls_server_name in the table [gateway] of --config"
        )
    is_any = not up.port and "http_port" not in given
    return replace(
        gateway, host=up.host, port=0 if is_any else up.http_port, **_picked(given, _OF_FRONTS)
    )


def _pair_gpus(up: UpConfig, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the GPUs that get a pair each; none: other options say what is where."""
    if not up.pair_gpus:
        return ()
    for name in ("num_targets", "num_drafts", "target_gpus", "draft_gpus"):
        if given.get(name) not in (None, ""):
            raise ConfigError(
                f"--pair-gpus says how many workers there are, and where: leave out "
                f"--{name.replace('_', '-')}"
            )
    if "none" in (up.draft_model, up.algorithm):
        raise ConfigError("--pair-gpus needs a draft; for targets alone use --target-gpus")
    gpus = tuple(visible_gpus())
    if not gpus:
        raise ConfigError(f"--pair-gpus is {up.pair_gpus}, and this machine shows no GPU")
    named = gpus if up.pair_gpus == "all" else split_list(up.pair_gpus)
    if not named:
        raise ConfigError(f"--pair-gpus is {up.pair_gpus!r}, which names no GPU")
    return named


def _check_gpus(flag: str, gpus: str, device: str) -> None:
    """Raise ConfigError if GPUs are named where a worker would serve on the CPU all the same."""
    if not gpus:
        return
    if device == "cpu":
        raise ConfigError(f"{flag} is {gpus}, and the device there is cpu: leave out one of them")
    found = list_machine_gpus()
    if not found:
        raise ConfigError(f"{flag} is {gpus}, and this machine shows no GPU")
    # Where CUDA_VISIBLE_DEVICES is set, workers count what it shows, and say if it is too little.
    most = len(found) if "CUDA_VISIBLE_DEVICES" not in os.environ else math.inf
    for name in split_list(gpus):
        if name.isdecimal() and int(name) >= most:
            raise ConfigError(
                f"{flag} names GPU {name}, and this machine has {len(found)}, counted from 0"
            )


def _num_drafts(up: UpConfig, given: Mapping[str, Any]) -> int:
    if "none" not in (up.draft_model, up.algorithm):
        return up.num_drafts
    if given.get("num_drafts"):
        raise ConfigError("--num-drafts needs a draft: leave out --draft-model none")
    return 0


def _picked(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a service, by their names there, that `given` sets."""
    return {names[name]: value for name, value in given.items() if name in names}


def auto_workers() -> int:
    """Return how many orchestrator processes this machine has cores for, beside its engines."""
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_AUTO_WORKERS, num_cores // CORES_PER_WORKER))


def split_list(text: str) -> tuple[str, ...]:
    """Split a comma-separated option."""
    return tuple(item.strip() for item in text.split(",") if item.strip())
