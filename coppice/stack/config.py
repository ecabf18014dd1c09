"""What a stack consists of, and how `coppice up`'s few options spread over its services."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.config import (
    ALGORITHMS,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
    option,
)
from shared.config.check import check_config
from shared.config.ports import LOOPBACK
from shared.errors import ConfigError
from shared.logs import FORMATS, LEVELS
from shared.messages import MAX_NUM_STEPS, MAX_TOPK, MAX_TREE_NODES

CORES_PER_WORKER = 8
MAX_AUTO_WORKERS = 4
STOP_SLACK_S = 10.0
DEFAULT_HTTP_PORT = 8000


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

    target_model: str = option(
        "demo",
        "checkpoint directory of the target, org/name[@revision] on the Hub, or demo",
        aliases=("model_path",),
    )
    draft_model: str = option(
        "demo",
        "checkpoint directory of the draft, org/name[@revision] on the Hub, demo or none",
        aliases=("speculative_draft_model_path",),
    )
    algorithm: str = option(
        "auto",
        "auto, eagle3, eagle, mtp, standalone or none",
        choices=ALGORITHMS,
        aliases=("speculative_algorithm",),
    )
    draft_token_map: str = option(
        "",
        "file of the token ids that an EAGLE-1/2 head may propose (FR-Spec); empty = all",
        aliases=("speculative_token_map",),
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
    expected_accept_length: float = option(
        0.0,
        "accept_length that the draft is known for: the log says if it stays far below; 0 = none",
        minimum=0,
    )
    page_size: int = option(16, "tokens per KV page, any value >= 1", minimum=1)
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "dtype of the target", choices=DTYPES)
    draft_dtype: str = option("auto", "dtype of the draft", choices=DTYPES)
    quantization: str = option(
        "auto", "fp8 = weights of the target become FP8; auto = as they are", choices=QUANTIZATIONS
    )
    draft_quantization: str = option("auto", "the same of the draft", choices=QUANTIZATIONS)
    kv_cache_dtype: str = option(
        "auto",
        "fp8 = the target keeps K and V in FP8; auto = in its dtype",
        choices=KV_CACHE_DTYPES,
    )
    draft_kv_cache_dtype: str = option("auto", "the same of the draft", choices=KV_CACHE_DTYPES)
    allow_inexact: bool = option(
        default=False,
        help="serve even if the target's self-test finds that speculation may change the output",
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
    workers: int = option(
        0,
        "orchestrator processes that share the port; 0 = auto (one per 8 cores, 4 at most)",
        minimum=0,
    )
    drain_timeout_s: float = option(
        20.0, "seconds that running requests may finish in after Ctrl-C or SIGTERM", minimum=0
    )
    start_timeout_s: float = option(
        600.0, "seconds that all services together may take to become ready", minimum=1
    )
    host: str = option(LOOPBACK, "address that the orchestrator listens on")
    port: int = option(
        50051, "port that the orchestrator listens on; 0 = any free port", minimum=0, maximum=65535
    )
    http_port: int = option(
        DEFAULT_HTTP_PORT,
        "port that the HTTP gateway listens on, with OpenAI's API; 0 = no gateway; where it is not "
        "given, any free one if --port is 0 or 8000 is taken",
        minimum=0,
        maximum=65535,
    )
    served_model_name: str = option(
        "", "name that clients of the gateway call the model by; empty = the last part of its path"
    )
    chat_template: str = option(
        "", "file with a Jinja chat template, in the place of the target checkpoint's"
    )
    token_file: str = option(
        "",
        "file with a line name:token[:until] for each token of clients, read again when it "
        "changes; empty = none is asked for",
    )
    tls_cert_file: str = option(
        "", "certificate chain (PEM) shown to clients; set = TLS; read again when it changes"
    )
    tls_key_file: str = option("", "private key (PEM) of --tls-cert-file")
    tls_client_ca_file: str = option(
        "", "authorities (PEM) that certificates of clients must come from; set = mutual TLS"
    )
    insecure: bool = option(default=False, help="listen beyond loopback even if anybody may call")
    reflection: bool = option(default=True, help="tell callers the methods and their messages")
    secret_file: str = option(
        "",
        "file with the secret that the services prove to each other; empty = the variable "
        "COPPICE_SECRET, or one that is made up",
    )
    log_level: str = option(
        "info", "least severity that is logged: debug, info, warning or error", choices=LEVELS
    )
    log_format: str = option("text", "text, or json: an object per line", choices=FORMATS)
    metrics_port: int = option(
        0,
        "port of the orchestrator's metrics for Prometheus, at /metrics; its other processes, the "
        "targets, the drafts and the gateway have the next ports; 0 = none",
        minimum=0,
        maximum=65535,
    )
    otlp_endpoint: str = option(
        "",
        "OpenTelemetry collector that gets traces, http(s)://HOST:PORT of its gRPC; empty = none",
    )
    trace_sample_rate: float = option(
        0.01, "share of the requests that are traced", minimum=0, maximum=1
    )


_OF_WORKERS = {
    name: name for name in ("page_size", "device", "drain_timeout_s", "log_level", "log_format")
}
_OF_TARGET = {
    **_OF_WORKERS,
    "target_model": "model",
    "draft_model": "draft_model",
    "algorithm": "algorithm",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "allow_inexact": "allow_inexact",
}
_OF_DRAFT = {
    **_OF_WORKERS,
    "draft_model": "model",
    "target_model": "target_model",
    "algorithm": "algorithm",
    "draft_dtype": "dtype",
    "draft_quantization": "quantization",
    "draft_kv_cache_dtype": "kv_cache_dtype",
    "draft_token_map": "draft_token_map",
}
_OF_ORCHESTRATOR = {
    "target_model": "model",
    **{
        name: name
        for name in (
            *("num_steps", "topk", "num_draft_tokens", "drain_timeout_s"),
            "expected_accept_length",
            *("token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"),
            *("insecure", "reflection", "secret_file", "log_level", "log_format"),
            *("otlp_endpoint", "trace_sample_rate", "served_model_name", "chat_template"),
        )
    },
}
_OF_GATEWAY = {
    name: name
    for name in (
        *("drain_timeout_s", "token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"),
        *("insecure", "log_level", "log_format"),
    )
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
    num_drafts = _num_drafts(up, given)
    target = replace(target or TargetConfig(), **_picked(given, _OF_TARGET))
    if num_drafts == 0:
        target = replace(target, draft_model="none", algorithm="none")
        given = {k: v for k, v in given.items() if k not in ("draft_model", "algorithm")}
    draft = replace(draft or DraftConfig(), **_picked(given, _OF_DRAFT))
    if up.num_steps and up.topk and up.num_draft_tokens:
        own = f"{up.num_steps}/{up.topk}/{up.num_draft_tokens}"
        draft = replace(draft, warm_up_trees=f"{own},{draft.warm_up_trees}")
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
        num_targets=up.num_targets,
        num_drafts=num_drafts,
        target_gpus=split_list(up.target_gpus),
        draft_gpus=split_list(up.draft_gpus),
        mps=up.mps,
        start_timeout_s=up.start_timeout_s,
        metrics_port=up.metrics_port,
    )


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
        gateway, host=up.host, port=0 if is_any else up.http_port, **_picked(given, _OF_GATEWAY)
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
