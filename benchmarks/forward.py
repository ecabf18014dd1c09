"""The target's whole forward: rows x context, as plain rows and as trees; and prefill.

`forward_ms` is the model alone (all layers, features, logits of every row) as a CUDA graph;
`step_ms` is what the engine takes for the same rows, wall time: packing, forward, sampling, walk,
commit and the read of the result. The context is noise; its cost is that of text. A row counts
only with its check: logits of some rows are bitwise those of a run of theirs alone.

    python -m benchmarks.forward --output benchmarks/results/forward.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.models import add_model_flags, open_pair, resolve_flags
from benchmarks.rows import acquire, build_rows, fill_noise, tree_of
from benchmarks.target_steps import StretchedRequests
from benchmarks.timing import (
    add_output_flag,
    blocks,
    copy_bandwidth,
    integers,
    progress,
    report,
    synchronize,
    time_ms,
)
from shared.messages import MAX_TREE_NODES
from shared.models.attention import ForwardInput
from shared.models.config import ModelConfig
from target_service.engine import TargetEngine

_NUM_STEPS = 12
_PREFILL_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        shape: requests x rows each.
        context: Tokens before the rows, per request.
        forward_ms, step_ms: None: the KV does not fit into memory.
        limit_ms: Weights and KV at the measured copy bandwidth.
        is_exact: None: not measured.
    """

    shape: str
    rows: int
    context: int
    forward_ms: float | None = None
    step_ms: float | None = None
    limit_ms: float | None = None
    is_exact: bool | None = None


def main() -> None:
    """Measure what the flags ask for."""
    args, device = _parse()
    shapes = [*((count, 1) for count in args.rows), *args.trees]
    with open_pair(args.model, args.draft_model) as pair:
        engine = pair.target_engine(
            args,
            max_num_requests=max(count for count, _ in shapes),
            max_context_len=max(*args.contexts, args.prefill_len) + 4 * MAX_TREE_NODES,
        )
    with torch.inference_mode():
        fill_noise(engine.runner.pool)
        bandwidth = copy_bandwidth(device)
        lines = [
            _measure(engine, *shape, context, bandwidth, not args.no_graph)
            for context in args.contexts
            for shape in shapes
        ]
        prefill = _prefill(engine, args.prefill_len)
    report(lines, args, extra={"model": args.model, "copy_bytes_per_s": bandwidth, **prefill})
    if not prefill["prefill_is_exact"] or any(line.is_exact is False for line in lines):
        sys.exit("logits depend on the other rows: that is a bug")


def _parse() -> tuple[argparse.Namespace, torch.device]:
    """Return the flags, with the device's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_flags(parser)
    parser.add_argument("--rows", type=integers, help="plain rows, comma-separated")
    parser.add_argument("--trees", type=blocks, help="requests x nodes, comma-separated")
    parser.add_argument("--contexts", type=integers, help="tokens, comma-separated")
    parser.add_argument("--prefill-len", type=int, help="tokens of the prompt to prefill")
    parser.add_argument("--no-graph", action="store_true", help="launch kernel by kernel")
    add_output_flag(parser)
    args = parser.parse_args()
    device = resolve_flags(args)
    is_gpu = device.type == "cuda"
    args.rows = args.rows or ([1, 8, 16, 32, 64, 128, 256] if is_gpu else [1, 8])
    args.trees = args.trees or ([(1, 64), (8, 16), (32, 4)] if is_gpu else [(1, 16)])
    args.contexts = args.contexts or ([256, 1024, 4096, 16384] if is_gpu else [64, 200])
    args.prefill_len = args.prefill_len or (2048 if is_gpu else 128)
    return args, device


def _measure(
    engine: TargetEngine,
    num_requests: int,
    num_nodes: int,
    context: int,
    bandwidth: float,
    use_graph: bool,  # noqa: FBT001
) -> Line:
    model, pool = engine.runner.model, engine.runner.pool
    shape, num_rows = f"{num_requests} x {num_nodes}", num_requests * num_nodes
    pages = pool.pages_for(context + 2 * MAX_TREE_NODES)
    if num_requests * pages > pool.num_free_pages:
        progress(f"{shape} rows after {context} tokens do not fit")
        return Line(shape=shape, rows=num_rows, context=context)
    req_idx = [acquire(pool, context + num_nodes) for _ in range(num_requests)]
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, model.config.vocab_size, (num_requests, num_nodes))
    parents = tree_of(num_nodes) if num_nodes > 1 else None
    rows = build_rows(pool, req_idx, token_ids, prefix_len=context, parents=parents)
    is_exact = _is_exact(engine, rows, req_idx, token_ids, context)
    forward_ms = time_ms([lambda: _logits(engine, rows)], model.device, use_graph=use_graph)
    for row in req_idx:
        pool.release(row)
    requests = StretchedRequests(engine, num_requests, context)
    step_ms = requests.step_ms(num_nodes, _NUM_STEPS)
    requests.close()
    num_bytes = _weight_bytes(model.config, model.dtype.itemsize)
    num_bytes += num_requests * context * _kv_bytes(engine)
    line = Line(
        shape=shape,
        rows=num_rows,
        context=context,
        forward_ms=forward_ms,
        step_ms=step_ms,
        limit_ms=num_bytes / bandwidth * 1e3,
        is_exact=is_exact,
    )
    progress(str(line))
    return line


def _logits(engine: TargetEngine, rows: ForwardInput) -> torch.Tensor:
    model = engine.runner.model
    return model.logits(model.forward(rows, capture_layers=engine.info.features.layer_ids).hidden)


def _is_exact(
    engine: TargetEngine,
    rows: ForwardInput,
    req_idx: Sequence[int],
    token_ids: NDArray[np.int64],
    context: int,
) -> bool:
    """Compare the last request's deepest path, in the batch, with the same tokens as a chain."""
    num_nodes = token_ids.shape[1]
    path = [num_nodes - 1]
    while path[0] > 0:
        path.insert(0, int(tree_of(num_nodes)[path[0]]))
    together = _logits(engine, rows).view(len(req_idx), num_nodes, -1)[-1, path].clone()
    chain = build_rows(engine.runner.pool, req_idx[-1:], token_ids[-1:, path], prefix_len=context)
    return torch.equal(together, _logits(engine, chain))


def _prefill(engine: TargetEngine, num_tokens: int) -> dict[str, Any]:
    """Return how fast a prompt is read: by the model in one forward, and by the engine."""
    model, pool = engine.runner.model, engine.runner.pool
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocab_size, num_tokens)
    req_idx = acquire(pool, num_tokens)
    rows = build_rows(pool, [req_idx], prompt[None])

    def forward() -> torch.Tensor:
        output = model.forward(rows, capture_layers=engine.info.features.layer_ids)
        return model.logits(output.hidden[-1:])

    forward_ms = time_ms([forward], model.device, use_graph=False)
    at_once = forward().clone()
    half = num_tokens // 2  # the second half again, over the KV of the first
    rows = build_rows(pool, [req_idx], prompt[None, half:], prefix_len=half)
    is_exact = torch.equal(at_once, forward())
    pool.release(req_idx)
    seconds = []
    for _ in range(1 + _PREFILL_REPEATS):
        synchronize(model.device)
        started = time.perf_counter()
        requests = StretchedRequests(engine, 1, 0, prompt=prompt.tolist())
        seconds.append(time.perf_counter() - started)
        requests.close()
    engine_ms = min(seconds[1:]) * 1e3
    tflop = _prefill_flop(model.config, num_tokens) / 1e12
    return {
        "prefill_len": num_tokens,
        "prefill_is_exact": is_exact,
        "prefill_forward_ms": forward_ms,
        "prefill_forward_tflop_per_s": tflop / forward_ms * 1e3,
        "prefill_engine_ms": engine_ms,
        "prefill_engine_tflop_per_s": tflop / engine_ms * 1e3,
    }


def _layer_weights(config: ModelConfig) -> int:
    """Return the values in the matrices of all layers."""
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer = hidden * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
    return config.num_layers * layer


def _weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of weights that a forward with logits reads."""
    return (_layer_weights(config) + config.vocab_size * config.hidden_size) * itemsize


def _kv_bytes(engine: TargetEngine) -> int:
    """Return the bytes of a token in all caches."""
    return sum(cache[0].nbytes for cache in engine.runner.pool.caches)


def _prefill_flop(config: ModelConfig, num_tokens: int) -> float:
    """Return the operations of a prompt: matrices of the layers, causal attention."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2
    return 2.0 * _layer_weights(config) * num_tokens + attention


if __name__ == "__main__":
    main()
