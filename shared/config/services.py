"""Configuration: one frozen dataclass per service, fed by flags, variables and a TOML file.

A field's `help` metadata is its flag's help text; the flag of `page_size` is `--page-size`, its
variable `COPPICE_PAGE_SIZE` (shared/config/loader.py). "auto" and 0 are resolved into a NEW object
at start-up, printed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shared.messages import MAX_NUM_STEPS, MAX_TOPK, MAX_TREE_NODES

DTYPES = ("auto", "float32", "float16", "bfloat16")
ALGORITHMS = ("auto", "eagle3", "eagle", "mtp", "standalone", "none")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a configuration field.

    Args:
        default: Its type is the option's type: str, int, float or bool.
        help: Help text of the flag.
        choices: The values that a str may have, lower case.
        minimum: Smallest number allowed.
        maximum: Largest number allowed.
        aliases: More flags for the same field: SGLang's names.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "aliases": aliases,
        },
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What both workers share."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(0, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        "auto, float32, float16 or bfloat16; auto = float32 on a CPU, else the checkpoint's",
        choices=DTYPES,
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
        64,
        "requests that hold state at once; more wait",
        minimum=1,
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
    drain_timeout_s: float = option(
        20.0, "seconds that open requests may move away in after SIGTERM", minimum=0
    )
    stall_timeout_s: float = option(
        60.0,
        "seconds without an engine step, while work waits, after which health is NOT_SERVING",
        minimum=0.1,
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
        "demo", "checkpoint directory of the target, or demo", aliases=("model_path",)
    )
    allow_inexact: bool = option(
        default=False,
        help="serve even if the self-test finds that speculation may change the output",
    )
    draft_model: str = option(
        "demo",
        "draft checkpoint whose features to capture: a directory, demo or none",
        aliases=("speculative_draft_model_path",),
    )
    algorithm: str = option(
        "auto",
        "auto, eagle3, eagle, mtp, standalone or none",
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
        "feature rows kept per request until acknowledged; older ones are replayed",
        minimum=0,
    )
    feature_ring_mb: int = option(
        256,
        "most MiB of /dev/shm for the feature rows of drafts on this host; 0 = send them as bytes",
        minimum=0,
    )
    peer_rounds: bool = option(
        default=True,
        help="let drafts on this host attach their engines to this one's, by a socket in /dev/shm: "
        "rounds go between the two without a hop through the orchestrator",
    )
    mailbox: bool = option(
        default=True,
        help="let the GPUs of attached drafts and this one's talk through memory in /dev/shm: each "
        "step waits on its GPU for what the other computes, and not for the hosts",
    )


@dataclass(frozen=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """The draft worker."""

    model: str = option(
        "demo", "draft checkpoint directory, or demo", aliases=("speculative_draft_model_path",)
    )
    target_model: str = option(
        "demo",
        "target checkpoint: source of shared embeddings, head and MTP layer",
        aliases=("model_path",),
    )
    algorithm: str = option(
        "auto",
        "auto, eagle3, eagle, mtp or standalone",
        choices=ALGORITHMS[:-1],
        aliases=("speculative_algorithm",),
    )
    window: int = option(0, "tokens a draft attends to; 0 = its max_position_embeddings", minimum=0)
    max_context_len: int = option(0, "longest conversation; 0 = the target's", minimum=0)
    warm_up_trees: str = option(
        "5/8/32,3/1/4",
        "shapes of trees, steps/topk/nodes, that a GPU gets ready for before the first request; "
        "a tree that fits into none of them waits at its first use; one with a 0 is left out",
    )


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """The orchestrator."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(50051, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    targets: str = option(
        "", "target workers: comma-separated HOST:PORT; a DNS name stands for all its addresses"
    )
    drafts: str = option("", "draft workers, likewise; empty = no speculation")
    model: str = option(
        "demo",
        "target checkpoint directory or demo: tokenizer and stop ids",
        aliases=("model_path",),
    )
    num_steps: int = option(
        0,
        "tree depth without the root; 0 = auto (4 on a CPU target, 5 on a GPU)",
        minimum=0,
        maximum=MAX_NUM_STEPS,
        aliases=("speculative_num_steps",),
    )
    topk: int = option(
        0,
        "children kept per expanded node; 0 = auto (2 on a CPU target, 8 on a GPU)",
        minimum=0,
        maximum=MAX_TOPK,
        aliases=("speculative_eagle_topk",),
    )
    num_draft_tokens: int = option(
        0,
        "nodes verified per round, root included; 0 = auto (8 on a CPU target, 32 on a GPU)",
        minimum=0,
        maximum=MAX_TREE_NODES,
        aliases=("speculative_num_draft_tokens",),
    )
    workers: int = option(
        1,
        "orchestrator processes that share the port: more tokens per second to many streams; a "
        "connection stays with one of them",
        minimum=1,
    )
    max_num_requests: int = option(
        256, "requests admitted at once by each process, waiting ones included", minimum=1
    )
    max_message_bytes: int = option(16 * 1024 * 1024, "largest request message", minimum=1024)
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
    drain_timeout_s: float = option(
        20.0, "seconds that running requests may finish in after SIGTERM", minimum=0
    )
