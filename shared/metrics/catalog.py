"""Every metric of Coppice: what it is called, what it counts, who has it.

docs/metrics.md is this table in words; a test compares the two, and what processes really say.
Labels have few values, known beforehand; a request is never a label. `role` is on every sample:
orchestrator, target, draft or gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

ORCHESTRATOR, TARGET, DRAFT, GATEWAY = "orchestrator", "target", "draft", "gateway"
WORKERS = (TARGET, DRAFT)
SERVICES = (ORCHESTRATOR, TARGET, DRAFT)
"""Those that speak gRPC."""
ALL = (*SERVICES, GATEWAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric.

    Args:
        name: As it is written; a histogram's samples have `_bucket`, `_count` and `_sum` after it.
        labels: Beside `role`.
        roles: The processes that have it.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    roles: tuple[str, ...] = (ORCHESTRATOR,)


def _metric(kind: Kind, name: str, meaning: str, *labels: str, roles: tuple[str, ...]) -> Metric:
    return Metric(name=name, kind=kind, meaning=meaning, labels=labels, roles=roles)


_counter, _gauge = partial(_metric, "counter"), partial(_metric, "gauge")
_histogram = partial(_metric, "histogram")

_EVERYWHERE = (
    _gauge("coppice_build_info", "1; who this is", "version", "python", roles=ALL),
    _gauge("coppice_ready", "1 if it takes requests, else 0", roles=ALL),
    _counter(
        "coppice_calls_refused_total",
        "gRPC calls turned away before their request was read, by reason (docs/errors.md): no "
        "proof of who calls, too many calls, bytes that are no message",
        "reason",
        roles=SERVICES,
    ),
    _gauge("coppice_requests_running", "Requests that hold a place on a target", roles=SERVICES),
    _gauge("coppice_requests_waiting", "Requests that wait for room", roles=SERVICES),
)

_REQUESTS = (
    _counter(
        "coppice_requests_total",
        "Requests that have ended, by gRPC code and, if they finished, by why",
        "code",
        "finish_reason",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_refusals_total",
        "Requests refused before work began, by reason (docs/errors.md)",
        "reason",
        roles=(ORCHESTRATOR,),
    ),
    _histogram(
        "coppice_time_to_first_token_seconds",
        "From the request to its first output, of requests that finished",
        roles=(ORCHESTRATOR,),
    ),
    _histogram(
        "coppice_inter_token_latency_seconds",
        "Time per token after the first: of each round its time over its tokens, once per token",
        roles=(ORCHESTRATOR,),
    ),
    _histogram(
        "coppice_request_duration_seconds",
        "From the request to its end, of requests that finished",
        roles=(ORCHESTRATOR,),
    ),
    _histogram(
        "coppice_request_queue_seconds",
        "From the request to its place on a target, of requests that finished",
        roles=(ORCHESTRATOR,),
    ),
    _histogram(
        "coppice_request_prefill_seconds",
        "From the place on a target to the first output, of requests that finished",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_prompt_tokens_total", "Prompt tokens of admitted requests", roles=(ORCHESTRATOR,)
    ),
    _counter(
        "coppice_cached_prompt_tokens_total",
        "Those that a target held already: 0, as there is no cache of prefixes",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_generation_tokens_total",
        "Output tokens, resumed ones excluded",
        roles=(ORCHESTRATOR,),
    ),
)

_SPECULATION = (
    _counter("coppice_rounds_total", "Rounds committed, prefills excluded", roles=(ORCHESTRATOR,)),
    _counter(
        "coppice_root_only_rounds_total",
        "Rounds without a tree, by why: off (no speculation asked for, or no drafts), absent (no "
        "draft holds the request), behind (the draft still reads, or its engine hangs), resting (a "
        "tree would not pay), "
        "missed (the tree or path did not come in time), late (the round went on without its tree)",
        "reason",
        roles=(ORCHESTRATOR,),
    ),
    _counter("coppice_draft_tokens_total", "Nodes verified, roots excluded", roles=(ORCHESTRATOR,)),
    _counter(
        "coppice_accepted_tokens_total",
        "Draft tokens accepted, bonus tokens excluded",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_accepted_tokens_per_depth_total",
        "Rounds that accepted a draft token at this depth of the tree; 1 is right below the root",
        "depth",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_moved_rounds_total",
        "Rounds whose accepted nodes were not the first of the tree",
        roles=(ORCHESTRATOR,),
    ),
    _histogram(
        "coppice_accept_length",
        "Mean tokens per round, bonus included, of each request that finished after a round",
        roles=(ORCHESTRATOR,),
    ),
)

_RECOVERY = (
    _counter(
        "coppice_rebuilds_total",
        "States of requests rebuilt on a worker of this role, by why: lost, moved, silent, failed, "
        "forgotten, retracted, no_room; of a draft reopened",
        "worker_role",
        "cause",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_stalls_total",
        "Times that a request waited in vain for its draft (draft), or for its client (reader)",
        "cause",
        roles=(ORCHESTRATOR,),
    ),
    _gauge(
        "coppice_workers",
        "Workers that this process talks to: available, draining, refused as they do not fit, or "
        "unpaired, which are drafts that fit no target",
        "worker_role",
        "state",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_workers_lost_total",
        "Sessions with workers that ended: ended (in order), error, silent",
        "worker_role",
        "cause",
        roles=(ORCHESTRATOR,),
    ),
    _counter(
        "coppice_event_loop_idle_seconds_total",
        "Time that the process had nothing to do: 1 less its rate is its busy share",
        roles=(ORCHESTRATOR,),
    ),
)

INFO_LABELS = (
    "incarnation", "model", "kind", "device", "dtype", "quantization", "kv_cache_dtype",
    "device_model", "versions"
)  # fmt: skip
_WORKERS = (
    _gauge(
        "coppice_worker_info",
        "1; what the worker serves, on what",
        *INFO_LABELS,
        roles=WORKERS,
    ),
    _gauge("coppice_sessions", "Orchestrators connected", roles=WORKERS),
    _gauge("coppice_kv_pages", "Pages of the KV pool: free, used", "state", roles=WORKERS),
    _gauge("coppice_kv_cache_usage_ratio", "Share of the KV pages that is used", roles=WORKERS),
    _gauge(
        "coppice_engine_silence_seconds",
        "For how long the engine has owed its front a report; an idle one is asked twice a second",
        roles=WORKERS,
    ),
    _counter(
        "coppice_engine_ends_total",
        "Engines that ended while they served and were replaced by a spare one, by why: died (its "
        "process ended or was killed), hung (it made no progress, and was killed for it)",
        "cause",
        roles=WORKERS,
    ),
    _counter("coppice_engine_steps_total", "Steps of the engine", roles=WORKERS),
    _counter("coppice_engine_rows_total", "Rows (tokens) computed", roles=WORKERS),
    _counter(
        "coppice_engine_request_steps_total",
        "Requests that took part in steps, summed over the steps",
        roles=WORKERS,
    ),
    _counter(
        "coppice_compiles_total",
        "Kernels compiled or loaded after the engine was ready",
        roles=WORKERS,
    ),
    _counter("coppice_captures_total", "Graphs captured after the engine was ready", roles=WORKERS),
    _counter(
        "coppice_eager_launches_total",
        "Operations launched outside of graphs after the engine was ready",
        roles=WORKERS,
    ),
    _counter(
        "coppice_kernel_launches_total", "Launches of each Triton kernel", "kernel", roles=WORKERS
    ),
)

_ENGINES = (
    _histogram("coppice_batch_rows", "Rows of each step", roles=WORKERS),
    _histogram("coppice_batch_requests", "Requests of each step", roles=WORKERS),
    _histogram(
        "coppice_step_seconds",
        "Target: time that each step added to those in flight. Draft: host's time of each step",
        roles=WORKERS,
    ),
    _counter(
        "coppice_step_stage_seconds_total",
        "Host's time by stage of the step. Target: plan, pack, launch (on a CPU: compute), wait "
        "(for the device), commit, send, learn (and decide about trees). Draft: confirm, extend, "
        "grow, wait, answer, ahead",
        "stage",
        roles=WORKERS,
    ),
    _counter(
        "coppice_engine_busy_seconds_total",
        "Host's time in steps: its rate is the busy share of the engine",
        roles=WORKERS,
    ),
    _counter(
        "coppice_device_busy_seconds_total",
        "Time with a step in flight: its rate is the busy share of the device",
        roles=(TARGET,),
    ),
    _counter(
        "coppice_engine_rounds_total",
        "Rounds launched by where their trees come from: device (the GPUs' mailbox), peer (the "
        "draft's engine), relayed (the orchestrator), grammar (what it forces), root_only",
        "source",
        roles=(TARGET,),
    ),
    _counter(
        "coppice_late_trees_total",
        "Rounds whose tree was not in the mailbox in time; they became root-only",
        roles=(TARGET,),
    ),
    _counter(
        "coppice_draft_trees_total",
        "Trees answered: overlapped (grown before the host had the order), peer, relayed",
        "order",
        roles=(DRAFT,),
    ),
    _counter(
        "coppice_retractions_total", "Requests that had to make room for older ones", roles=WORKERS
    ),
    _counter(
        "coppice_feature_bytes_total",
        "Feature rows sent, in bytes: ring (shared memory), mailbox (GPU to GPU), peer (TCP or "
        "socket between engines), front (gRPC)",
        "carrier",
        roles=(TARGET,),
    ),
)

_HTTP = (
    _counter(
        "coppice_http_requests_total",
        "HTTP requests that have ended, by endpoint and status; 499: the client went away",
        "path",
        "status",
        roles=(GATEWAY,),
    ),
    _gauge("coppice_http_requests_running", "HTTP requests being answered", roles=(GATEWAY,)),
    _counter(
        "coppice_http_tokens_total", "Output tokens of HTTP requests that ended", roles=(GATEWAY,)
    ),
    _histogram(
        "coppice_http_request_duration_seconds",
        "From the head of an HTTP request to the end of its answer",
        roles=(GATEWAY,),
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for group in (
            *(_EVERYWHERE, _REQUESTS, _SPECULATION, _RECOVERY, _WORKERS, _ENGINES),
            _HTTP,
        )
        for metric in group
    }
)
"""By name."""


def metric_of(sample_name: str) -> Metric:
    """Return the metric that a sample belongs to. Raises: KeyError."""
    if sample_name in METRICS:
        return METRICS[sample_name]
    for suffix in ("_bucket", "_count", "_sum"):
        metric = METRICS.get(sample_name.removesuffix(suffix))
        if metric is not None and metric.kind == "histogram":
            return metric
    raise KeyError(f"{sample_name} is not in the catalog")
