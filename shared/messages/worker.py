"""Who a worker is, and how busy."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from coppice.v1 import tree_pb2
from shared.messages.codec import message
from shared.messages.features import FeatureSpec
from shared.messages.fields import Count, Ids, Text, require_range

AtLeastOne = Annotated[int, partial(require_range, low=1)]


@message(tree_pb2.WorkerLoad)
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Progress and room of an engine; see proto WorkerLoad.

    Args:
        num_compiles, num_captures, num_eager_launches: Since the engine was ready.
        kernel_launches: (kernel, launches) pairs, ascending.
        counts: (name, value) pairs of what the engine counts, ascending; a front adds them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_request_steps: int = 0
    num_moved_rounds: int = 0
    num_compiles: int = 0
    num_captures: int = 0
    num_eager_launches: int = 0
    kernel_launches: tuple[tuple[str, int], ...] = ()
    counts: tuple[tuple[str, float], ...] = ()


@message(tree_pb2.WorkerInfo)
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Identity and limits of a worker; see proto WorkerInfo.

    Args:
        feature_ring: Name of the target's feature ring; empty: it has none.
        peer_socket: Name of the target's socket for drafts on its host; empty: it has none.
        peer_address: Where drafts on other hosts attach (shared/peer/tcp.py); empty: nowhere.
        protocol_version: See shared/rpc/protocol.py; its front adds it.
        device_model, versions, cpu_threads, logits_hash: Of a target; what else decides about bits.
        has_grammars: Of a target: outputs may have grammars.
        num_experts: Of a layer of a target that says which of them rows were routed to; else 0.
        quantization: Of weights: "fp8" or "int4" (projections), "mxfp4" (experts), "fp8_lm_head"
            (projections and output layer); "+fp8_lm_head" after the others: the output layer as
            well; empty: none.
        kv_cache_dtype: "fp8_e4m3"; empty: the dtype's.
        gpu: UUID of its GPU; empty: it has none.
    """

    incarnation: Text
    model: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: AtLeastOne
    max_context_len: AtLeastOne
    page_size: AtLeastOne
    dtype: str
    device: str
    features: FeatureSpec
    kind: str
    load: WorkerLoad = field(default_factory=WorkerLoad)
    eos_token_ids: Ids = ()
    draft_window: Count = 0
    feature_ring: str = ""
    peer_socket: str = ""
    device_model: str = ""
    versions: str = ""
    cpu_threads: int = 0
    logits_hash: str = ""
    peer_address: str = ""
    protocol_version: Count = 0
    has_grammars: bool = False
    quantization: str = ""
    num_experts: Count = 0
    kv_cache_dtype: str = ""
    gpu: str = ""
