"""Configuration: one frozen dataclass per service, fed by flags, `COPPICE_*` variables and a TOML file.

A field's `help` metadata is its flag's help text; the flag of `page_size` is `--page-size`, its
variable `COPPICE_PAGE_SIZE`. "auto" and 0 are resolved into a NEW object at start-up, printed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str) -> Any:
    """Declare a configuration field with its default and its help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What both workers share."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(0, "port to listen on; 0 = any free port")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = option("auto", "auto, float32, float16 or bfloat16; auto = float32 on a CPU, else the checkpoint's")
    page_size: int = option(16, "tokens per KV page, any value >= 1")
    num_pages: int = option(0, "KV pages of the pool; 0 = as many as memory allows")
    kv_memory_fraction: float = option(0.85, "share of free GPU memory for the KV pool when num_pages is 0")
    max_num_requests: int = option(64, "requests that hold state at once; more wait")
    max_batch_rows: int = option(0, "rows (tokens) per engine step; 0 = 512 on a CPU, 4096 on a GPU")
    cpu_threads: int = option(0, "torch threads of the engine; 0 = min(2, cores)")
    gpus: str = option("", "GPU pool to lease from, e.g. 0,1; empty = all visible ones")
    gpu_lease_dir: str = option("", "shared folder for exclusive GPU leases; empty = no lease")
    self_test: bool = option(True, "prove bitwise exactness on the loaded model at start-up")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """The target worker."""

    model: str = option("demo", "checkpoint directory of the target, or demo")
    draft_model: str = option("demo", "draft checkpoint whose features to capture: a directory, demo or none")
    algorithm: str = option("auto", "auto, eagle3, eagle, mtp, standalone or none")
    max_context_len: int = option(0, "longest sequence; 0 = the model's, or what the KV pool holds")
    prefill_chunk_len: int = option(256, "most prompt tokens of one request per engine step")
    feature_retain_rows: int = option(8192, "feature rows kept per request until acknowledged; older ones are replayed")


@dataclass(frozen=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """The draft worker."""

    model: str = option("demo", "draft checkpoint directory, or demo")
    target_model: str = option("demo", "target checkpoint: source of shared embeddings, head and MTP layer")
    algorithm: str = option("auto", "auto, eagle3, eagle, mtp or standalone")
    window: int = option(0, "tokens a draft attends to; 0 = its max_position_embeddings")
    max_context_len: int = option(0, "longest conversation; 0 = the target's")


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """The orchestrator."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(50051, "port to listen on; 0 = any free port")
    targets: str = option("", "target workers: comma-separated HOST:PORT; a DNS name stands for all its addresses")
    drafts: str = option("", "draft workers, likewise; empty = no speculation")
    model: str = option("demo", "target checkpoint directory or demo: tokenizer and stop ids")
    num_steps: int = option(0, "tree depth without the root; 0 = auto (4 on a CPU target, 5 on a GPU)")
    topk: int = option(0, "children kept per expanded node; 0 = auto (2 on a CPU target, 8 on a GPU)")
    num_draft_tokens: int = option(0, "nodes verified per round, root included; 0 = auto (8 on a CPU target, 32 on a GPU)")
    max_num_requests: int = option(256, "requests admitted at once, waiting ones included")
    max_message_bytes: int = option(16 * 1024 * 1024, "largest request message")
    draft_timeout_ms: float = option(500.0, "floor of the time a round waits for its tree before it goes root-only")
    draft_open_timeout_ms: float = option(5000.0, "time that the first round waits for the draft to read the prompt")
    step_timeout_s: float = option(60.0, "time after which a silent target is given up")
    resolve_interval_s: float = option(3.0, "seconds between look-ups of worker DNS names")
    drain_timeout_s: float = option(20.0, "seconds that running requests may finish in after SIGTERM")
