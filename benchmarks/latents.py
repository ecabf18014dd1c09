"""Latent attention of DeepSeek's shapes, against its bytes and its operations.

All heads of a row read one latent of 576 values per token, so that the limit of few heads is the
memory and that of many the tensor cores: both are measured here, by a copy and by a product of
torch. Times are of CUDA-graph replays over copies of the cache that no cache of the GPU can hold.
A line counts only with its check: close to float64, and the bits of a row those that it has alone.
Steps of a whole model: `python -m benchmarks.experts --shapes "" --models deepseek-v2-lite`, or
`--models deepseek-v3 --layers 8 --context 4096`.

    python -m benchmarks.latents --output benchmarks/results/latents.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.rows import build_rows, fill_noise, new_pool, tree_of
from benchmarks.timing import (
    add_output_flag,
    blocks,
    copy_bandwidth,
    integers,
    product_rate,
    progress,
    report,
    time_ms,
)
from shared.device import resolve_device, resolve_dtype
from shared.kernels.latent_attention import (
    latent_attention,
    latent_attention_ref,
    prepared_latents,
)
from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kv.layout import KVLayout

_ROTATED_BYTES = 256 * 2**20
_MAX_COPIES = 16
_SCALE = 192**-0.5


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        rows: requests x rows each, a tree where there are several.
        tflop_per_s: Of both products, in all heads.
        bytes_us, flop_us: The limits of memory and of products, microseconds.
        share: The larger limit / us.
    """

    heads: int
    rows: str
    context: int
    us: float
    tflop_per_s: float
    bytes_us: float
    flop_us: float
    share: float
    is_right: bool


def main() -> None:
    """Measure what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=integers, help="comma-separated")
    parser.add_argument("--trees", type=blocks, help="requests x nodes, comma-separated")
    parser.add_argument("--contexts", type=integers, help="tokens, comma-separated")
    parser.add_argument("--device", default="auto")
    add_output_flag(parser)
    args = parser.parse_args()
    device = resolve_device(args.device)
    is_gpu = device.type == "cuda"
    dtype = resolve_dtype("auto", checkpoint_dtype="bfloat16", device=device)
    widths = (576, 512) if is_gpu else (24, 16)
    heads = args.heads or ([128, 16] if is_gpu else [4])
    trees = args.trees or ([(1, 1), (1, 16), (1, 64), (16, 1), (64, 1)] if is_gpu else [(1, 4)])
    contexts = args.contexts or ([4096, 32768] if is_gpu else [70])
    lines = []
    with torch.inference_mode():
        bandwidth, flop_rate = copy_bandwidth(device), product_rate(device, dtype)
        rates = (bandwidth, flop_rate)
        for num_heads, context, shape in itertools.product(heads, contexts, trees):
            line = _measure(num_heads, shape, context, widths, rates, device, dtype)
            progress(str(line))
            lines.append(line)
    extra = {"dtype": str(dtype), "copy_bytes_per_s": bandwidth, "product_flop_per_s": flop_rate}
    report(lines, args, extra=extra)
    if not all(line.is_right for line in lines):
        sys.exit("latent attention is wrong, or a row depends on the others")


def _measure(
    num_heads: int,
    shape: tuple[int, int],
    context: int,
    widths: tuple[int, int],
    rates: tuple[float, float],
    device: torch.device,
    dtype: torch.dtype,
) -> Line:
    """Measure one size.

    Args:
        shape: Requests, rows of each.
        widths: Of a cached row and of its value.
        rates: Bytes and operations per second.
    """
    num_requests, num_nodes = shape
    width, value_width = widths
    num_rows, num_tokens = num_requests * num_nodes, context + num_nodes
    num_bytes = num_requests * num_tokens * width * dtype.itemsize
    num_copies = max(1, min(_MAX_COPIES, _ROTATED_BYTES // num_bytes))
    pool, req_idx = new_pool(
        KVLayout.uniform(num_copies, 1, width, caches=("latent",)),
        num_requests=num_requests,
        num_tokens=num_tokens,
        dtype=dtype,
        device=device,
    )
    fill_noise(pool)
    ids = np.zeros((num_requests, num_nodes), dtype=np.int64)
    parents = tree_of(num_nodes) if num_nodes > 1 else None
    rows = build_rows(pool, req_idx, ids, prefix_len=context, parents=parents)
    alone = build_rows(pool, req_idx[-1:], ids[-1:], prefix_len=context, parents=parents)
    q = torch.randn(num_rows, num_heads, width, device=device).to(dtype)

    # As in a model, tables are made once for all layers.
    tables, own_tables = (
        prepared_latents(one.attention, dtype, num_heads, value_width) for one in (rows, alone)
    )

    def attend(
        queries: torch.Tensor, cache: torch.Tensor, metadata: TreeAttentionMetadata
    ) -> torch.Tensor:
        return latent_attention(queries, cache, metadata, _SCALE, value_width=value_width)

    caches = [layer[0] for layer in pool.layers]
    calls = [partial(attend, q, cache, tables) for cache in caches]
    own = attend(q[-num_nodes:], caches[0], own_tables)
    together = attend(q, caches[0], tables)[-num_nodes:]
    want = latent_attention_ref(
        q[-num_nodes:], caches[0], alone.attention, _SCALE, value_width=value_width
    )
    error = float((own.double() - want).norm() / want.norm())
    us = time_ms(calls, device) * 1e3
    flop = 2.0 * num_rows * num_heads * context * (width + value_width)
    bytes_us, flop_us = num_bytes / rates[0] * 1e6, flop / rates[1] * 1e6
    return Line(
        heads=num_heads,
        rows=f"{num_requests} x {num_nodes}",
        context=context,
        us=us,
        tflop_per_s=flop / us / 1e6,
        bytes_us=bytes_us,
        flop_us=flop_us,
        share=max(bytes_us, flop_us) / us,
        is_right=torch.equal(own, together) and error < max(4 * torch.finfo(dtype).eps, 1e-5),
    )


if __name__ == "__main__":
    main()
