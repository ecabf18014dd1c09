"""Every hot kernel of a model's shape, against torch and against its own bytes.

Times are of CUDA-graph replays over copies of the weights or the KV that no cache can hold. The
limit is what the op must read and write, at the measured copy bandwidth. A line counts only with
its check: close to the same in float32, and the bits of a row those that it has alone.

    python -m benchmarks.kernels --output benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.inflation import SHAPES, Shape
from benchmarks.rows import build_rows, fill_noise, new_pool, tree_of
from benchmarks.timing import (
    add_output_flag,
    blocks,
    copy_bandwidth,
    integers,
    progress,
    report,
    time_ms,
)
from shared.device import DTYPES, resolve_device, resolve_dtype
from shared.kernels.linear import linear, linear_addends, sum_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.rms_norm import add_rms_norm
from shared.kernels.rope_store import rope_store, rope_store_ref
from shared.kernels.sampling import sample
from shared.kernels.tree_attention import AttentionParams, tree_attention
from shared.kv.layout import KVLayout
from shared.tree import lay_out_tree, paths_of

HEAD_DIM = 128
# More than the second-level cache of any GPU so far.
_ROTATED_BYTES = 256 * 2**20
_MAX_COPIES = 32
_MAX_LOGIT_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        rows: Rows, or requests x rows each.
        share: limit_us / us.
    """

    op: str
    rows: str
    us: float
    torch_us: float
    limit_us: float
    share: float
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size.

    Args:
        ours, theirs: One call per copy of what is read.
        num_bytes: Read and written by one call.
        check: Whether the results are right.
    """

    op: str
    rows: str
    ours: Sequence[Callable[[], object]]
    theirs: Sequence[Callable[[], object]]
    num_bytes: int
    check: Callable[[], bool]


def main() -> None:
    """Measure what the flags ask for."""
    args, device = _parse()
    dtype = resolve_dtype(args.dtype, checkpoint_dtype="bfloat16", device=device)
    bench = _Bench(shape=SHAPES[args.shape], dtype=dtype, device=device)
    lines = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth(device)
        for case in _cases(bench, args):
            line = _measure(case, bandwidth, device)
            progress(str(line))
            lines.append(line)
    dtype_name = next(name for name, value in DTYPES.items() if value is dtype)
    report(lines, args, extra={"dtype": dtype_name, "copy_bytes_per_s": bandwidth})
    if not all(line.is_right for line in lines):
        sys.exit("a kernel is wrong, or a row depends on the others")


def _parse() -> tuple[argparse.Namespace, torch.device]:
    """Return the flags, with the device's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="default: the 8B on a GPU, else small")
    parser.add_argument("--ops", default="linear,attention,norm,rope,sampling")
    parser.add_argument("--rows", type=integers, help="comma-separated")
    parser.add_argument("--trees", type=blocks, help="requests x nodes, comma-separated")
    parser.add_argument("--context", type=int, help="tokens before the rows, for attention")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16 on a GPU, else float32")
    add_output_flag(parser)
    args = parser.parse_args()
    device = resolve_device(args.device)
    is_gpu = device.type == "cuda"
    args.prompt_rows = [2048] if is_gpu and not args.rows else []  # of products only
    args.shape = args.shape or ("llama-3.1-8b" if is_gpu else "small")
    args.rows = args.rows or ([1, 8, 16, 32, 64, 128, 256] if is_gpu else [1, 8])
    args.trees = args.trees or ([(1, 64), (8, 16), (32, 4)] if is_gpu else [(1, 16)])
    args.context = args.context or (1024 if is_gpu else 100)
    return args, device


def _cases(bench: _Bench, args: argparse.Namespace) -> Iterator[Case]:
    """Yield what the flags ask for."""
    rows: list[int] = args.rows
    requests = [*((count, 1) for count in rows), *args.trees]
    cases: dict[str, Callable[[], Iterable[Case]]] = {
        "linear": lambda: bench.linears(rows + args.prompt_rows),
        "attention": lambda: (bench.attention(*block, args.context) for block in requests),
        "norm": lambda: map(bench.norm, rows),
        "rope": lambda: map(bench.rope, rows),
        "sampling": lambda: (bench.sampling(n, heat) for heat in (0.0, 1.0) for n in rows),
    }
    for op in args.ops.split(","):
        yield from cases[op]()


def _measure(case: Case, bandwidth: float, device: torch.device) -> Line:
    us = time_ms(case.ours, device) * 1e3
    limit_us = case.num_bytes / bandwidth * 1e6
    return Line(
        op=case.op,
        rows=case.rows,
        us=us,
        torch_us=time_ms(case.theirs, device) * 1e3,
        limit_us=limit_us,
        share=limit_us / us,
        is_right=case.check(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Makes the cases of one shape."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def linears(self, rows: Sequence[int]) -> Iterator[Case]:
        """Return the matrix products of a layer as a layer calls them, and the output layer."""
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        width, kv_width = self.shape.num_heads * HEAD_DIM, self.shape.num_kv_heads * HEAD_DIM
        # Name -> [N, K]; "+" and what is fused with the product.
        sizes = {
            "qkv": (width + 2 * kv_width, hidden),
            "o": (hidden, width),
            "gate_up + swiglu": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (self.shape.vocab_size, hidden),
        }
        for name, (num_out, num_in) in sizes.items():
            weight = self._normal(num_out, num_in) / math.sqrt(num_in)
            copies = self._copies(weight)
            for count in rows:
                if name != "head" or count <= _MAX_LOGIT_ROWS:
                    yield self._linear(name, copies, self._normal(count, num_in))

    def _linear(self, name: str, copies: Sequence[torch.Tensor], x: torch.Tensor) -> Case:
        weight = copies[0]
        is_head, is_gated = name == "head", "swiglu" in name
        out_width = len(weight) // 2 if is_gated else len(weight)
        out_dtype = torch.float32 if is_head else self.dtype

        def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if is_head:
                return linear(x, weight, out_dtype=out_dtype)
            return linear_swiglu(x, weight) if is_gated else linear_addends(x, weight)

        def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = functional.linear(x, weight)
            if not is_gated:
                return y
            gate, up = y.chunk(2, dim=1)
            return functional.silu(gate) * up

        def result(x: torch.Tensor) -> torch.Tensor:
            y = ours(x, weight)
            return sum_addends(y, None, out_dtype) if y.dim() == 3 else y

        def check() -> bool:
            y = result(x)
            parts = weight.chunk(1 if is_gated else 16)  # in float32 it is large
            want = torch.cat([theirs(x.float(), part.float()) for part in parts], dim=1)
            return self._is_close(y, want) and all(
                torch.equal(y[i : i + 1], result(x[i : i + 1]))
                for i in {0, len(x) // 2, len(x) - 1}
            )

        return Case(
            op=f"linear {name}",
            rows=str(len(x)),
            ours=[partial(ours, x, copy) for copy in copies],
            theirs=[partial(theirs, x, copy) for copy in copies],
            num_bytes=weight.nbytes + x.nbytes + len(x) * out_width * out_dtype.itemsize,
            check=check,
        )

    def attention(self, num_requests: int, num_nodes: int, context: int) -> Case:
        """Return attention of plain rows or, of several nodes, of trees."""
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        num_tokens, params = context + num_nodes, AttentionParams(scale=HEAD_DIM**-0.5)
        # What torch reads: the same bytes, one request after the other, no pages.
        dense = self._copies(self._normal(2, num_requests, num_kv_heads, num_tokens, HEAD_DIM))
        pool, req_idx = new_pool(
            KVLayout.uniform(len(dense), num_kv_heads, HEAD_DIM),
            num_requests=num_requests,
            num_tokens=num_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        fill_noise(pool)
        paged = pool.layers
        ids = np.zeros((num_requests, num_nodes), dtype=np.int64)
        parents = tree_of(num_nodes) if num_nodes > 1 else None
        rows = build_rows(pool, req_idx, ids, prefix_len=context, parents=parents)
        alone = build_rows(pool, req_idx[-1:], ids[-1:], prefix_len=context, parents=parents)
        q = self._normal(num_requests * num_nodes, num_heads, HEAD_DIM)
        # torch is fastest with the heads of a group as rows: nothing is repeated.
        group = num_heads // num_kv_heads
        packed = (num_requests, num_kv_heads, num_nodes * group, HEAD_DIM)
        dense_q = q.view(num_requests, num_nodes, num_kv_heads, group, HEAD_DIM)
        dense_q = dense_q.transpose(1, 2).reshape(packed)
        mask = None if parents is None else self._mask(num_nodes, context, group)

        def check() -> bool:
            out = tree_attention(q, *paged[0], rows.attention, params)[-num_nodes:]
            slots = pool.slots(req_idx[-1], np.arange(num_tokens)).astype(np.int64)
            index = torch.from_numpy(slots).to(self.device)
            k, v = (cache[index].float().transpose(0, 1)[None] for cache in paged[0])
            wide_mask = None if mask is None else mask.float()
            want = functional.scaled_dot_product_attention(dense_q[-1:].float(), k, v, wide_mask)
            want = want.view(num_kv_heads, num_nodes, group, HEAD_DIM).transpose(0, 1)
            own = tree_attention(q[-num_nodes:], *paged[0], alone.attention, params)
            return torch.equal(out, own) and self._is_close(out, want.reshape(out.shape))

        return Case(
            op=f"attention after {context}",
            rows=f"{num_requests} x {num_nodes}",
            ours=[partial(tree_attention, q, k, v, rows.attention, params) for k, v in paged],
            theirs=[
                partial(functional.scaled_dot_product_attention, dense_q, copy[0], copy[1], mask)
                for copy in dense
            ],
            num_bytes=dense[0].nbytes + 2 * q.nbytes,
            check=check,
        )

    def _mask(self, num_nodes: int, context: int, group: int) -> torch.Tensor:
        """Return 0 for what each node of a tree sees, else -inf. [N * group, context + N]."""
        layout = lay_out_tree(tuple(tree_of(num_nodes).tolist()))
        path_len, path = layout.path_len, paths_of([layout])
        mask = np.full((num_nodes, context + num_nodes), -np.inf, dtype=np.float32)
        mask[:, :context] = 0
        for node in range(num_nodes):
            mask[node, context + path[node, : path_len[node]].astype(np.int64)] = 0
        return torch.from_numpy(mask.repeat(group, axis=0)).to(self.device, self.dtype)

    def norm(self, count: int) -> Case:
        """Return the end of an MLP: its addends, the residual stream and the next norm."""
        width, eps = self.shape.hidden_size, 1e-5
        x, weight = self._normal(count, width), self._normal(width)
        addends = self._normal(count, self.shape.intermediate_size)
        addends = linear_addends(addends, self._normal(width, self.shape.intermediate_size) / 64)
        delta = sum_addends(addends, None, self.dtype)
        copies = self._copies(x)

        def theirs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = x + delta
            return total, functional.rms_norm(total, (width,), weight, eps)

        def check() -> bool:
            total, y = add_rms_norm(x, addends, None, weight, eps)
            own = add_rms_norm(x[-1:], addends[:, -1:].contiguous(), None, weight, eps)
            is_alone = torch.equal(total[-1:], own[0]) and torch.equal(y[-1:], own[1])
            want_total, want = theirs(x)
            return is_alone and torch.equal(total, want_total) and self._is_close(y, want)

        return Case(
            op="add + rms_norm",
            rows=str(count),
            ours=[partial(add_rms_norm, copy, addends, None, weight, eps) for copy in copies],
            theirs=[partial(theirs, copy) for copy in copies],
            num_bytes=3 * x.nbytes + addends.nbytes + weight.nbytes,
            check=check,
        )

    def rope(self, count: int) -> Case:
        """Return the end of the QKV product: its addends, RoPE and the KV store."""
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        width = (num_heads + 2 * num_kv_heads) * HEAD_DIM
        x = self._normal(count, self.shape.hidden_size)
        addends = linear_addends(x, self._normal(width, self.shape.hidden_size) / 64)
        angles = self._normal(count, HEAD_DIM // 2).float()
        cos, sin = angles.cos(), angles.sin()
        slots = torch.arange(1, count + 1, dtype=torch.int32, device=self.device)
        size = (count + 1, num_kv_heads, HEAD_DIM)
        caches = torch.zeros((4, *size), dtype=self.dtype, device=self.device)
        mine, others = (caches[0], caches[1]), (caches[2], caches[3])

        def check() -> bool:
            out = rope_store(addends, None, None, 0.0, cos, sin, *mine, slots)
            want = rope_store_ref(addends, None, None, 0.0, cos, sin, *others, slots)
            last = addends[:, -1:].contiguous()
            caches[:2, -1] = 0
            own = rope_store(last, None, None, 0.0, cos[-1:], sin[-1:], *mine, slots[-1:])
            is_alone = torch.equal(out[-1:], own)
            return is_alone and self._is_close(out, want) and self._is_close(caches[:2], caches[2:])

        return Case(
            op="rope + store",
            rows=str(count),
            ours=[partial(rope_store, addends, None, None, 0.0, cos, sin, *mine, slots)],
            theirs=[partial(rope_store_ref, addends, None, None, 0.0, cos, sin, *others, slots)],
            num_bytes=addends.nbytes + count * width * self.dtype.itemsize + 2 * cos.nbytes,
            check=check,
        )

    def sampling(self, count: int, temperature: float) -> Case:
        """Return the choice of a token in each of `count` rows, without filters."""
        logits = 3 * self._normal(count, self.shape.vocab_size).float()
        copies = self._copies(logits)
        place: dict[str, Any] = {"device": self.device}
        params = (
            torch.full((count,), temperature, **place),
            torch.zeros(count, dtype=torch.int32, **place),  # top_k
            torch.ones(count, **place),  # top_p
            torch.zeros(count, **place),  # min_p
            torch.arange(count, **place),  # seed
            torch.arange(count, **place),  # position
        )

        def theirs(logits: torch.Tensor) -> torch.Tensor:
            if not temperature:
                return logits.argmax(-1)
            probabilities = (logits / temperature).softmax(-1)
            return (probabilities / torch.empty_like(logits).exponential_()).argmax(-1)

        def check() -> bool:
            tokens = sample(logits, *params, has_filters=False)
            last = [param[-1:] for param in params]
            own = sample(logits[-1:], *last, has_filters=False)
            # Noise has tests of its own; here its tokens must be likely ones.
            want = tokens.long() == logits.argmax(-1)
            if temperature:
                chosen = logits.gather(1, tokens.long()[:, None])[:, 0]
                want = chosen > logits.mean(-1)
            return torch.equal(tokens[-1:], own) and bool(want.all())

        return Case(
            op=f"sampling T={temperature:g}",
            rows=str(count),
            ours=[partial(sample, copy, *params, has_filters=False) for copy in copies],
            theirs=[partial(theirs, copy) for copy in copies],
            num_bytes=logits.nbytes,
            check=check,
        )

    def _normal(self, *size: int) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(0)
        values = torch.randn(size, generator=generator, device=self.device)
        return values.to(self.dtype)

    def _copies(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor as often as no cache can hold; on a CPU nobody cares."""
        count = 1
        if self.device.type == "cuda":
            count = max(2, min(_MAX_COPIES, -(-_ROTATED_BYTES // tensor.nbytes)))
        return [tensor, *(tensor.clone() for _ in range(count - 1))]

    def _is_close(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Compare with a result in float32: the difference is that of a few roundings."""
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        return bool(error < max(4 * torch.finfo(self.dtype).eps, 1e-5))


if __name__ == "__main__":
    main()
