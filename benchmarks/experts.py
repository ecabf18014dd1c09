"""Layers of experts: their products by rows, and whole steps of a model that has them.

`products` are those of one layer, against torch's grouped product and against the bytes of the
experts that the rows choose, at the measured copy bandwidth; `step` is the forward with logits of
a random model, captured as a graph, against all bytes that it must read. Routers are random, so
experts are chosen about evenly. A line counts only with its check: a row's bits are those that it
has alone, and products are close to float32.

    python -m benchmarks.experts --output benchmarks/results/experts.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional

from benchmarks.random_model import CONFIGS, random_model
from benchmarks.rows import build_rows, fill_noise, new_pool
from benchmarks.timing import (
    add_output_flag,
    copy_bandwidth,
    integers,
    progress,
    report,
    time_ms,
)
from shared.device import resolve_device, resolve_dtype
from shared.kernels.expert_choice import ChoiceRule, ChosenExperts, choose_experts
from shared.kernels.expert_order import order_pairs
from shared.kernels.expert_products import apply_experts
from shared.kernels.expert_products_cpu import hold_experts
from shared.kernels.linear import linear_addends
from shared.kernels.products_cpu import CpuProducts
from shared.models import experts as experts_module
from shared.models.attention import ForwardInput
from shared.models.decoder_config import ModelConfig
from shared.models.latent_config import LatentConfig
from shared.models.llama import CausalLM

_MAX_ROUTES = 16
_ROTATED_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer of experts."""

    num_experts: int
    count: int
    hidden_size: int
    width: int


SHAPES = {
    "qwen3-30b-a3b": Shape(num_experts=128, count=8, hidden_size=2048, width=768),
    "deepseek-v3": Shape(num_experts=256, count=8, hidden_size=7168, width=2048),
    "small": Shape(num_experts=8, count=2, hidden_size=64, width=32),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        num_experts: Distinct experts of a layer that the rows pass, on average.
        us: Of one call, microseconds.
        torch_us: None: torch has nothing to compare with, or it failed.
        share: limit_us / us.
    """

    op: str
    rows: int
    num_experts: float
    us: float
    torch_us: float | None
    limit_us: float
    share: float
    is_right: bool


def main() -> None:
    """Measure what the flags ask for."""
    args, device = _parse()
    dtype = resolve_dtype("auto", checkpoint_dtype="bfloat16", device=device)
    lines: list[Line] = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth(device)
        for name in args.shapes.split(",") if args.shapes else ():
            layer = _Layer(SHAPES[name], device, dtype)
            for count in args.rows:
                lines += layer.lines(name, count, bandwidth)
                progress("\n".join(map(str, lines[-2:])))
            del layer
        for name in args.models.split(",") if args.models else ():
            for line in _steps(CONFIGS[name], args, device, dtype, bandwidth, name):
                lines.append(line)
                progress(str(line))
    report(lines, args, extra={"dtype": str(dtype), "copy_bytes_per_s": bandwidth})
    if not all(line.is_right for line in lines):
        sys.exit("experts are wrong, or a row depends on the others")


def _parse() -> tuple[argparse.Namespace, torch.device]:
    """Return the flags, with the device's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", help=f"of layers, comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--models", help=f"of steps, comma-separated: {', '.join(CONFIGS)}")
    parser.add_argument("--rows", type=integers, help="comma-separated")
    parser.add_argument("--context", type=int, help="tokens before each row of a step")
    parser.add_argument("--device", default="auto")
    add_output_flag(parser)
    args = parser.parse_args()
    device = resolve_device(args.device)
    is_gpu = device.type == "cuda"
    if args.shapes is None:
        args.shapes = "qwen3-30b-a3b,deepseek-v3" if is_gpu else "small"
    if args.models is None:
        args.models = "qwen3-30b-a3b" if is_gpu else "small"
    args.rows = args.rows or ([1, 8, 32, 64, 256] if is_gpu else [1, 8])
    args.context = args.context or (1024 if is_gpu else 40)
    return args, device


class _Layer:
    """The weights of one layer of experts, and what is measured of it."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape
        self._rule = ChoiceRule(count=shape.count)
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(0)
        hidden, width = shape.hidden_size, shape.width
        # Scores of about 1, or most weights would be 0.
        router = self._normal(shape.num_experts, hidden) * hidden**-0.5
        self._router = router.to(dtype)
        sizes = ((2 * width, hidden), (hidden, width))
        self._gate_up, self._down = (
            torch.empty((shape.num_experts, *size), dtype=dtype, device=device).normal_(
                std=size[-1] ** -0.5, generator=self._generator
            )
            for size in sizes
        )
        products = CpuProducts()
        held = (self._gate_up, self._down)
        if device.type == "cpu":
            held = [hold_experts(products, iter(w), shape.num_experts) for w in held]  # type: ignore[assignment]
        self._held = held

    def lines(self, name: str, num_rows: int, bandwidth: float) -> list[Line]:
        """Measure the choice of experts and their products."""
        expert_bytes = self._gate_up[0].nbytes + self._down[0].nbytes
        few = min(self._shape.num_experts, num_rows * self._shape.count)
        num_routes = max(1, min(_MAX_ROUTES, -(-_ROTATED_BYTES // (few * expert_bytes))))
        if self._device.type == "cuda" and few < self._shape.num_experts:
            num_routes = max(4, num_routes)
        dtype, hidden = self._gate_up.dtype, self._shape.hidden_size
        inputs = [self._normal(num_rows, hidden).to(dtype) for _ in range(num_routes)]
        indptr = torch.tensor([0, num_rows], dtype=torch.int32, device=self._device)
        routes = [self._choose(x, indptr) for x in inputs]
        num_experts = float(np.mean([len(route.ids.unique()) for route in routes]))
        choice_bytes = self._router.nbytes + inputs[0].nbytes
        product_bytes = num_experts * expert_bytes + inputs[0].nbytes
        product_bytes += num_rows * self._shape.count * hidden * 4

        def line(
            op: str,
            ours: Sequence[Callable[[], object]],
            theirs_us: float | None,
            num_bytes: float,
            *,
            is_right: bool,
        ) -> Line:
            us, limit_us = time_ms(ours, self._device) * 1e3, num_bytes / bandwidth * 1e6
            return Line(
                op=f"{op} {name}", rows=num_rows, num_experts=num_experts, us=us,
                torch_us=theirs_us, limit_us=limit_us, share=limit_us / us, is_right=is_right,
            )  # fmt: skip

        pairs = list(zip(inputs, routes, strict=True))
        return [
            line(
                "choice",
                [lambda x=x: self._choose(x, indptr) for x in inputs],  # type: ignore[misc]
                None,
                choice_bytes,
                is_right=self._is_choice_alone(inputs[0], routes[0]),
            ),
            line(
                "products",
                [lambda x=x, r=r: self._apply(x, r) for x, r in pairs],  # type: ignore[misc]
                self._torch_us(pairs),
                product_bytes,
                is_right=self._is_right(*pairs[0]),
            ),
        ]

    def _choose(self, x: torch.Tensor, indptr: torch.Tensor) -> ChosenExperts:
        return choose_experts(linear_addends(x, self._router), None, indptr, self._rule)

    def _apply(self, x: torch.Tensor, chosen: ChosenExperts) -> torch.Tensor:
        size = (self._shape.count, *x.shape)
        out = torch.empty(size, dtype=torch.float32, device=x.device)
        apply_experts(x, *self._held, chosen, out)
        return out

    def _is_choice_alone(self, x: torch.Tensor, chosen: ChosenExperts) -> bool:
        one = torch.tensor([0, 1], dtype=torch.int32, device=x.device)
        alone = [(i, self._choose(x[i : i + 1], one)) for i in _some_of(len(x))]
        return all(
            torch.equal(own.ids[0], chosen.ids[i])
            and torch.equal(own.weights[0], chosen.weights[i])
            for i, own in alone
        )

    def _is_right(self, x: torch.Tensor, chosen: ChosenExperts) -> bool:
        """Compare rows with themselves alone, bit for bit, and with products in float32."""
        out = self._apply(x, chosen)
        for i in _some_of(len(x)):
            own = ChosenExperts(ids=chosen.ids[i : i + 1], weights=chosen.weights[i : i + 1])
            if not torch.equal(self._apply(x[i : i + 1], own)[:, 0], out[:, i]):
                return False
            for slot, expert in enumerate(chosen.ids[i].tolist()):
                gate, up = (self._gate_up[expert].float() @ x[i].float()).chunk(2)
                want = self._down[expert].float() @ (functional.silu(gate) * up)
                want *= chosen.weights[i, slot]
                error = (out[slot, i] - want).norm() / want.norm()
                if not error < max(4 * torch.finfo(x.dtype).eps, 1e-5):
                    return False
        return True

    def _torch_us(self, pairs: Sequence[tuple[torch.Tensor, ChosenExperts]]) -> float | None:
        """Return what torch's grouped product takes; rows are put in order beforehand."""
        calls = [self._theirs(x, chosen) for x, chosen in pairs]
        try:
            return time_ms(calls, self._device) * 1e3
        except (RuntimeError, AttributeError) as error:
            progress(f"torch's grouped product failed: {error}")
            return None

    def _theirs(self, x: torch.Tensor, chosen: ChosenExperts) -> Callable[[], torch.Tensor]:
        order, indptr = order_pairs(chosen.ids, self._shape.num_experts)
        rows, ends = order.long() // self._shape.count, indptr[1:-1].contiguous()
        weights = chosen.weights.flatten()[order.long(), None]
        gate_up, down = self._gate_up.mT, self._down.mT

        def run() -> torch.Tensor:
            gate, up = torch._grouped_mm(x[rows], gate_up, offs=ends).chunk(2, dim=1)
            y = torch._grouped_mm(functional.silu(gate) * up, down, offs=ends)
            return torch.zeros_like(x).index_add_(0, rows, (y * weights).to(x.dtype))

        return run

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self._device)


def _steps(
    config: ModelConfig,
    args: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float,
    name: str,
) -> list[Line]:
    """Measure steps of one token of each request."""
    model = random_model(config, device, dtype, context_len=args.context + 8)
    pool, req_idx = new_pool(
        config.kv_layout,
        num_requests=max(args.rows),
        num_tokens=args.context + 8,
        dtype=dtype,
        device=device,
    )
    fill_noise(pool)
    kv_bytes = args.context * config.kv_layout.bytes_per_token(dtype.itemsize)
    rng = np.random.default_rng(0)
    lines = []
    for count in args.rows:
        ids = rng.integers(0, config.vocab_size, (count, 1))
        rows = build_rows(pool, req_idx[:count], ids, prefix_len=args.context)
        alone = build_rows(pool, req_idx[count - 1 : count], ids[-1:], prefix_len=args.context)
        together, num_experts = _count_experts(model, rows)
        is_right = torch.equal(together[-1:], _logits(model, alone))
        us = time_ms([lambda rows=rows: _logits(model, rows)], device) * 1e3  # type: ignore[misc]
        num_bytes = _dense_bytes(config, dtype.itemsize) + count * kv_bytes
        num_bytes += num_experts * _num_sparse(config) * _expert_bytes(config, dtype.itemsize)
        limit_us = num_bytes / bandwidth * 1e6
        lines.append(
            Line(
                op=f"step {name}",
                rows=count,
                num_experts=num_experts,
                us=us,
                torch_us=None,
                limit_us=limit_us,
                share=limit_us / us,
                is_right=is_right,
            )  # fmt: skip
        )
    return lines


def _logits(model: CausalLM, rows: ForwardInput) -> torch.Tensor:
    return model.logits(model.forward(rows).hidden)


def _count_experts(model: CausalLM, rows: ForwardInput) -> tuple[torch.Tensor, float]:
    """Return the logits of rows, and how many experts of a layer they pass on average."""
    counts: list[int] = []

    def choose(*args: Any) -> ChosenExperts:
        chosen = choose_experts(*args)
        counts.append(len(chosen.ids.unique()))
        return chosen

    with mock.patch.object(experts_module, "choose_experts", choose):
        logits = _logits(model, rows)
    return logits.clone(), float(np.mean(counts))


def _num_sparse(config: ModelConfig) -> int:
    """Return how many layers have experts."""
    assert config.experts is not None
    return config.num_layers - len(config.experts.dense_layers)


def _expert_bytes(config: ModelConfig, itemsize: int) -> int:
    assert config.experts is not None
    return 3 * config.hidden_size * config.experts.width * itemsize


def _dense_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of weights that every row passes."""
    assert config.experts is not None
    hidden, experts = config.hidden_size, config.experts
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    if config.latent is not None:
        attention = _latent_values(config, config.latent)
    values = config.num_layers * attention + config.vocab_size * hidden
    for layer in range(config.num_layers):
        is_dense = layer in experts.dense_layers
        width = config.intermediate_size if is_dense else experts.shared_width
        values += 3 * hidden * width + (0 if is_dense else hidden * experts.num_experts)
    return values * itemsize


def _latent_values(config: ModelConfig, widths: LatentConfig) -> int:
    """Return the values in the matrices of a layer's latent attention."""
    hidden, heads = config.hidden_size, config.num_heads
    rank = widths.q_lora_rank
    queries = (rank or hidden) * heads * widths.qk_head_dim + rank * hidden
    made = widths.kv_lora_rank * heads * (widths.qk_nope_head_dim + widths.v_head_dim)
    return queries + hidden * widths.cached_width + made + heads * widths.v_head_dim * hidden


def _some_of(num_rows: int) -> set[int]:
    return {0, num_rows // 2, num_rows - 1}


if __name__ == "__main__":
    main()
