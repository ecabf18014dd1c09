"""Configuration: one frozen dataclass per service, fed by flags, variables and a TOML file.

A field's `help` metadata is its flag's help text; the flag of `page_size` is `--page-size`, its
variable `COPPICE_PAGE_SIZE` (shared/config/loader.py). "auto" and 0 are resolved into a NEW object
at start-up, printed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.option import option, option_of
from shared.config.ports import LOOPBACK, DialConfig, PortConfig
from shared.logs import FORMATS, LEVELS
from shared.messages import MAX_NUM_STEPS, MAX_TOPK, MAX_TREE_NODES
from shared.models.hub import last_part

QUANTIZATIONS = ("auto", "fp8", "fp8_lm_head", "none")
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
_ADMIN_OFFSET, _MAX_PORT = 1000, 65535
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3", "mistral", "none")
REASONING_PARSERS = ("auto", "think", "bracket", "none")
ALGORITHMS = ("auto", "eagle3", "eagle", "mtp", "frozen_kv_mtp", "standalone", "none")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(PortConfig):
    """What every service has: its port, log, metrics and end."""

    log_level: str = option(
        "info", "least severity that is logged: debug, info, warning or error", choices=LEVELS
    )
    log_format: str = option("text", "text, or json: an object per line", choices=FORMATS)
    metrics_host: str = option(LOOPBACK, "address of the metrics for Prometheus")
    metrics_port: int = option(
        0,
        "port of the metrics, at /metrics; of several orchestrator processes the first one's, the "
        "others have the next ports; 0 = none",
        minimum=0,
        maximum=65535,
    )
    drain_timeout_s: float = option(
        20.0,
        "seconds that running requests may finish in after SIGTERM; those of workers may move away",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What both workers share."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        "auto, float32, float16 or bfloat16; auto = float32 on a CPU, else the checkpoint's",
        choices=DTYPES,
    )
    quantization: str = option(
        "auto",
        "fp8 = weights of the layers' projections become FP8 while they load, which halves their "
        "bytes and changes the output a little; fp8_lm_head = those of the output layer, too; "
        "auto, none = as the checkpoint has them",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "fp8 (= fp8_e4m3): K and V are kept in FP8, of which the same memory holds twice as many "
        "tokens, and which changes the output a little; auto = in the dtype",
        choices=KV_CACHE_DTYPES,
    )
    page_size: int = option(16, "tokens per KV page, any value >= 1", minimum=1)
    num_pages: int = option(0, "KV pages of the pool; 0 = as many as memory allows", minimum=0)
    kv_memory_fraction: float = option(
        0.85,
        "share of free GPU memory for the KV pool when num_pages is 0",
        minimum=0.01,
        maximum=1.0,
    )
    max_num_requests: int = option(
        0,
        "requests that hold state at once; more wait; 0 = 64 on a CPU, 256 on a GPU",
        minimum=0,
        aliases=("max_running_requests",),
    )
    max_batch_rows: int = option(
        0, "rows (tokens) per engine step; 0 = 512 on a CPU, 2048 on a GPU", minimum=0
    )
    cpu_threads: int = option(
        0, "torch threads of the engine; 0 = half of the cores, at most 8", minimum=0
    )
    busy_poll_us: int = option(
        -1,
        "microseconds that an engine with running requests keeps looking for messages before it "
        "sleeps: saves the time that waking takes, costs up to a core; -1 = 20000 beside a GPU and "
        "at least 8 cores, else 0",
        minimum=-1,
    )
    gpus: str = option("", "GPU pool to lease from, e.g. 0,1; empty = all visible ones")
    gpu_lease_dir: str = option("", "shared folder for exclusive GPU leases; empty = no lease")
    gpu_is_shared: bool = option(
        default=False,
        help="other workers have the same GPU: no kernel waits there for words of another GPU, and "
        "a target expects its draft to read prompts there",
    )
    stall_timeout_s: float = option(
        60.0,
        "most seconds that an engine may be silent before it counts as hung and is killed; usually "
        "it is 20 times its longest step of late, at least 5",
        minimum=0.1,
    )
    spare_after_s: float = option(
        5.0,
        "seconds after which a worker that is ready keeps a second engine process, without a "
        "model, that takes over faster when the engine dies; 0: none",
        minimum=0,
    )
    profile_dir: str = option(
        "", "folder for profiles of the engine; empty = coppice-profiles in the temporary folder"
    )
    project_features: bool = option(
        default=True,
        help="the target applies an EAGLE-3 draft's fc to features, which makes rows a third as "
        "wide; the same on target and draft",
    )
    self_test: bool = option(
        default=True, help="prove bitwise exactness on the loaded model at start-up"
    )


@dataclass(frozen=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """The target worker."""

    model: str = option(
        "demo",
        "checkpoint directory of the target, org/name[@revision] on the Hub, or demo",
        aliases=("model_path",),
    )
    allow_inexact: bool = option(
        default=False,
        help="serve even if the self-test finds that speculation may change the output",
    )
    draft_model: str = option(
        "demo",
        "checkpoint directory of the draft, org/name[@revision] on the Hub, demo or none",
        aliases=("speculative_draft_model_path",),
    )
    algorithm: str = option(
        "auto",
        "auto, eagle3, eagle, mtp, frozen_kv_mtp, standalone or none",
        choices=ALGORITHMS,
        aliases=("speculative_algorithm",),
    )
    max_context_len: int = option(
        0,
        "longest sequence; 0 = the model's, or what the KV pool holds",
        minimum=0,
        aliases=("context_length",),
    )
    prefill_chunk_len: int = option(
        0,
        "most prompt tokens of one request per engine step; 0 = 256 on a CPU, all rows on a GPU",
        minimum=0,
    )
    feature_retain_rows: int = option(
        8192,
        "feature rows kept per request until acknowledged; older ones, and those sent with the "
        "order of a tree, are replayed",
        minimum=0,
    )
    feature_ring_mb: int = option(
        256,
        "most MiB of /dev/shm for the feature rows of drafts on this host; 0 = send them as bytes",
        minimum=0,
    )
    peer_rounds: bool = option(
        default=True,
        help="let drafts attach their engines to this one's: rounds go between the two without a "
        "hop through the orchestrator",
    )
    peer_socket: bool = option(
        default=True, help="let drafts on this host attach, by a socket in /dev/shm"
    )
    peer_host: str = option(
        "",
        "address where drafts on other hosts attach, over TCP; needs a secret unless it is a "
        "loopback address; empty = nowhere: their rounds go through the orchestrator",
    )
    peer_port: int = option(0, "port of --peer-host; 0 = any free port", minimum=0, maximum=65535)
    mailbox: bool = option(
        default=True,
        help="let the GPUs of attached drafts and this one's talk through memory in /dev/shm: each "
        "step waits on its GPU for what the other computes, and not for the hosts",
    )


@dataclass(frozen=True, kw_only=True)
class DraftConfig(WorkerConfig, DialConfig):
    """The draft worker."""

    model: str = option_of(
        TargetConfig,
        "draft_model",
        help="checkpoint directory of the draft, org/name[@revision] on the Hub, or demo",
    )
    target_model: str = option_of(
        TargetConfig,
        "model",
        help="target checkpoint: source of shared embeddings, head and MTP layers",
    )
    quantization: str = option_of(
        WorkerConfig,
        "quantization",
        help="fp8 (= fp8_lm_head): weights of projections and of the output layer become FP8 while "
        "they load, which changes guesses a little and no output; auto = so where a GPU multiplies "
        "FP8; none = as the checkpoint has them",
    )
    algorithm: str = option(
        "auto",
        "auto, eagle3, eagle, mtp, frozen_kv_mtp or standalone",
        choices=ALGORITHMS[:-1],
        aliases=("speculative_algorithm",),
    )
    draft_token_map: str = option(
        "",
        "file of token ids, JSON or .pt, that an EAGLE-1/2 head proposes no others than (FR-Spec), "
        "which makes its output layer smaller; empty = the whole vocabulary",
        aliases=("speculative_token_map",),
    )
    targets: str = option(
        "",
        "targets that the draft may connect to: comma-separated HOST or HOST:PORT, where HOST is a "
        "name, an address or a network; empty = those that the orchestrator names",
    )
    window: int = option(0, "tokens a draft attends to; 0 = its max_position_embeddings", minimum=0)
    max_context_len: int = option(0, "longest conversation; 0 = the target's", minimum=0)
    warm_up_trees: str = option(
        "9/8/40,7/8/32,7/4/16,7/2/8,5/1/6,3/1/4,2/1/3,1/1/2",
        "shapes of trees, steps/topk/nodes, that a GPU gets ready for before the first request; "
        "a tree that fits into none of them waits at its first use; one with a 0 is left out",
    )


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig(ServiceConfig, DialConfig):
    """The orchestrator."""

    token_file: str = option(
        "",
        "file with a line name:token[:until] for each token of clients, read again when it "
        "changes; empty = none is asked for",
    )
    port: int = option_of(ServiceConfig, "port", default=50051)
    targets: str = option(
        "", "target workers: comma-separated HOST:PORT; a DNS name stands for all its addresses"
    )
    drafts: str = option("", "draft workers, likewise; empty = no speculation")
    otlp_endpoint: str = option(
        "",
        "OpenTelemetry collector that gets traces, http(s)://HOST:PORT of its gRPC; empty = none",
    )
    trace_sample_rate: float = option(
        0.01,
        "share of the requests that are traced, of those whose client does not say it by a "
        "traceparent",
        minimum=0,
        maximum=1,
    )
    model: str = option_of(TargetConfig, "model")
    grammar_after_s: float = option(
        5.0,
        "seconds after which an orchestrator that has a target keeps a process that compiles "
        "grammars (structured output), so that the first one need not wait for it; 0: it is "
        "started when it is first needed",
        minimum=0,
    )
    vllm_engine: bool = option(
        default=False,
        help="also answer gateways that speak vLLM's gRPC, such as smg; needs coppice[smg]",
    )
    chat_template: str = option(
        "", "file with a Jinja chat template, in the place of the checkpoint's"
    )
    served_model_name: str = option(
        "",
        "name of the model in ListModels, which clients of the gateway ask for; empty = the last "
        "part of --model",
    )
    num_steps: int = option(
        0,
        "tree depth without the root, at most; 0 = auto (6)",
        minimum=0,
        maximum=MAX_NUM_STEPS,
        aliases=("speculative_num_steps",),
    )
    topk: int = option(
        0,
        "children kept per expanded node, at most; 0 = auto (2 on a CPU target, 8 on a GPU)",
        minimum=0,
        maximum=MAX_TOPK,
        aliases=("speculative_eagle_topk",),
    )
    num_draft_tokens: int = option(
        0,
        "nodes verified per round, root included, at most; 0 = auto (8 on a CPU, 32 on a GPU)",
        minimum=0,
        maximum=MAX_TREE_NODES,
        aliases=("speculative_num_draft_tokens",),
    )
    expected_accept_length: float = option(
        0.0,
        "accept_length, bonus included, that the draft is known for; if it stays far below, the "
        "log says so once, with likely causes; 0 = nothing is expected",
        minimum=0,
    )
    workers: int = option(
        0,
        "orchestrator processes that share the port: more tokens per second to many streams; a "
        "connection stays with one of them; 0 = auto (1; of `coppice up` one per 8 cores, 4 at "
        "most)",
        minimum=0,
    )
    max_num_requests: int = option(
        1024, "requests admitted at once by all its processes, waiting ones included", minimum=1
    )
    max_message_bytes: int = option(16 * 1024 * 1024, "largest request message", minimum=1024)
    max_calls: int = option(
        0,
        "calls that a process has open at once, of one address half as many; health checks are no "
        "calls; 0 = four times max_num_requests, at least 1024",
        minimum=0,
    )
    max_priority: str = option(
        "10",
        "highest priority that a request gets; of some tenants another one: 10,batch=0,web=20",
    )
    max_requests_per_tenant: str = option(
        "0",
        "requests of a tenant admitted at once by all its processes, waiting ones included; of "
        "some tenants another number: 64,batch=16; 0 = as many as there are places",
    )
    read_timeout_s: float = option(
        60.0,
        "seconds that a client may read nothing of what it is sent; then its stream ends, and can "
        "be resumed; 5 at most while others wait for its place",
        minimum=0.1,
    )
    stream_lifetime_s: float = option(
        3600.0, "seconds that a stream may be open; then it ends, and can be resumed", minimum=1
    )
    max_unread_mb: int = option(
        256,
        "MiB of output that clients may leave unread, all streams of a process together; the "
        "streams of those with most of it end then",
        minimum=1,
    )
    draft_timeout_ms: float = option(
        500.0,
        "floor of the time a round waits for its tree, a peer round for its path, before it goes "
        "root-only",
        minimum=0,
    )
    draft_open_timeout_ms: float = option(
        10_000.0,
        "time that a draft may take to read a request before it is opened again; no round waits",
        minimum=0,
    )
    step_timeout_s: float = option(
        60.0, "time after which a silent target is given up", minimum=0.1
    )
    resolve_interval_s: float = option(
        3.0, "seconds between look-ups of worker DNS names", minimum=0.05
    )
    admin_host: str = option(LOOPBACK, "address where operators are served")
    admin_token_file: str = option(
        "",
        "file with a line name:token[:until] for each token of operators, read again when it "
        "changes; empty = none is asked for, which is refused beyond loopback",
    )
    admin_port: int = option(
        0,
        "port where operators are served; 0 = 1000 above --port, any free one if that is 0 or "
        "taken; -1 = nowhere",
        minimum=-1,
        maximum=65535,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServiceConfig, DialConfig):
    """The HTTP gateway; who it dials are orchestrators."""

    port: int = option_of(ServiceConfig, "port", default=8000)
    orchestrators: str = option(
        "", "orchestrators: comma-separated HOST:PORT; those of one model share its requests"
    )
    trusted_proxies: str = option(
        "",
        "reverse proxies whose X-Forwarded-For names the client: addresses and networks, e.g. "
        "10.0.0.0/8, with commas between them; empty = none",
    )
    token_file: str = option(
        "",
        "file with a line name:token[:until] for each token of clients, the orchestrators' own; "
        "empty = the gateway asks for none, and passes on what a client shows",
    )
    metrics_port: int = option_of(
        ServiceConfig,
        "metrics_port",
        help="port of the metrics beside /metrics of --port, without a token; 0 = none",
    )
    num_connections: int = option(
        4,
        "connections to each orchestrator; each stays with one of its processes",
        minimum=1,
        maximum=64,
    )
    max_num_requests: int = option(
        1024, "HTTP requests open at once; more are refused with 429", minimum=1
    )
    max_choices: int = option(
        128, "most outputs of one HTTP request: n for each of its prompts", minimum=1
    )
    max_body_mb: int = option(16, "MiB of the largest HTTP request", minimum=1)
    read_timeout_s: float = option(
        60.0,
        "seconds that a client may read nothing of what it is sent, or send nothing of its "
        "request; then its connection ends",
        minimum=0.1,
    )
    tool_call_parser: str = option(
        "auto",
        "format of tool calls in the text of all models: hermes, llama3, mistral or none; auto = "
        "as the chat template says",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "split reasoning from answers: think (<think>), bracket ([THINK]) or none; auto = as the "
        "chat template says",
        choices=REASONING_PARSERS,
    )


def served_name(config: OrchestratorConfig) -> str:
    """Return what clients call the model."""
    return config.served_model_name or last_part(config.model)


def admin_port(config: OrchestratorConfig) -> int:
    """Return the port where operators are served if it is free; 0: any one; -1: nowhere."""
    if config.admin_port or not config.port:
        return config.admin_port
    port = config.port + _ADMIN_OFFSET
    return port if port <= _MAX_PORT else 0
