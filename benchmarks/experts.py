"""Layers of experts: their products by rows, and whole steps of a model that has them.

`products` are those of one layer, against torch's grouped product and against the bytes of the
experts that the rows choose, at the measured copy bandwidth, or their operations at the measured
rate of torch's products; `step` is the forward with logits of a random model, captured as a graph,
against all that it must read and compute. Experts in FP8 have a scale for each block of 128 x 128,
and rows are multiplied by them in FP8. Routers are random, so experts are chosen about evenly. A
line counts only with its check: a row's bits are those that it has alone, as a chain where it is of
a tree, and products are close to float32.

    python -m benchmarks.experts --output benchmarks/results/experts.json
    python -m benchmarks.experts --shapes deepseek-v3 --weights fp8 --models ""
    python -m benchmarks.experts --shapes "" --models deepseek-v3 --layers 8 --context 4096
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from benchmarks.expert_steps import Line, Rates, bytes_per_value, measure_steps
from benchmarks.random_model import CONFIGS, random_fp8, shortened
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
from shared.kernels.dispatch import is_interpreted
from shared.kernels.expert_choice import ChoiceRule, ChosenExperts, choose_experts
from shared.kernels.expert_order import order_pairs
from shared.kernels.expert_products import apply_experts
from shared.kernels.expert_products_cpu import ExpertWeights, hold_experts
from shared.kernels.fp8_experts import QuantizedExperts, pack_fp8
from shared.kernels.linear import linear_addends
from shared.kernels.products_cpu import CpuProducts
from shared.kernels.quantized import QuantizedWeight

_MAX_ROUTES = 16
_ROTATED_BYTES = 256 * 2**20
# Rows become FP8 before both products: values of 3 bits of mantissa.
_FP8_ROWS_ERROR = 0.08


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


def main() -> None:
    """Measure what the flags ask for."""
    args, device = _parse()
    dtype = resolve_dtype("auto", checkpoint_dtype="bfloat16", device=device)
    lines: list[Line] = []
    with torch.inference_mode():
        rates = Rates(copied_bytes=copy_bandwidth(device), product_flop=product_rate(device, dtype))
        for name in args.shapes.split(",") if args.shapes else ():
            layer = _Layer(SHAPES[name], device, dtype, is_fp8=args.weights == "fp8")
            for count in args.rows:
                lines += layer.lines(name, count, rates)
                progress("\n".join(map(str, lines[-2:])))
            del layer
        shapes = [*((count, 1) for count in args.rows), *args.trees]
        for name in args.models.split(",") if args.models else ():
            config = shortened(CONFIGS[name], args.layers or CONFIGS[name].num_layers)
            config = replace(config, quantization=args.weights or config.quantization)
            for line in measure_steps(config, shapes, args.context, rates, device, dtype, name):
                lines.append(line)
                progress(str(line))
    extra = {
        "dtype": str(dtype),
        "copy_bytes_per_s": rates.copied_bytes,
        "product_flop_per_s": rates.product_flop,
    }
    report(lines, args, extra=extra)
    if not all(line.is_right for line in lines):
        sys.exit("experts are wrong, or a row depends on the others")


def _parse() -> tuple[argparse.Namespace, torch.device]:
    """Return the flags, with the device's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", help=f"of layers, comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--models", help=f"of steps, comma-separated: {', '.join(CONFIGS)}")
    parser.add_argument("--rows", type=integers, help="comma-separated")
    parser.add_argument(
        "--trees", type=blocks, default=[], help="of steps: requests x nodes, comma-separated"
    )
    parser.add_argument("--context", type=int, help="tokens before the rows of a step")
    parser.add_argument("--layers", type=int, default=0, help="of models; 0: all")
    parser.add_argument(
        "--weights",
        choices=("", "fp8"),
        default="",
        help="of experts and projections; empty: layers have the dtype, models their own form",
    )
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

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, *, is_fp8: bool
    ) -> None:
        self._shape = shape
        self._rule = ChoiceRule(count=shape.count)
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(0)
        hidden, width = shape.hidden_size, shape.width
        # Scores of about 1, or most weights would be 0.
        router = self._normal(shape.num_experts, hidden) * hidden**-0.5
        self._router = router.to(dtype)
        sizes = ((2 * width, hidden), (hidden, width))
        self._weights = "fp8" if is_fp8 else _name(dtype)
        self._dtype = dtype
        self._gate_up, self._down = (self._random(size, is_fp8=is_fp8) for size in sizes)
        self._held: list[ExpertWeights] = [self._gate_up, self._down]
        if device.type == "cpu" and not is_interpreted():
            products, count = CpuProducts(), shape.num_experts
            self._held = [
                hold_experts(products, (held[i] for i in range(count)), count)
                for held in (self._gate_up, self._down)
            ]

    def _random(self, size: tuple[int, int], *, is_fp8: bool) -> torch.Tensor | QuantizedExperts:
        """Return one weight of each expert that keeps the size of values."""
        count, device, dtype = self._shape.num_experts, self._device, self._dtype
        if is_fp8:
            weights = (random_fp8(size, device, dtype, self._generator) for _ in range(count))
            return pack_fp8(weights)
        values = torch.empty((count, *size), dtype=dtype, device=device)
        return values.normal_(std=size[-1] ** -0.5, generator=self._generator)

    def lines(self, name: str, num_rows: int, rates: Rates) -> list[Line]:
        """Measure the choice of experts and their products."""
        expert_values = 3 * self._shape.hidden_size * self._shape.width
        expert_bytes = expert_values * bytes_per_value(self._weights, self._dtype.itemsize)
        few = min(self._shape.num_experts, num_rows * self._shape.count)
        num_routes = max(1, min(_MAX_ROUTES, math.ceil(_ROTATED_BYTES / (few * expert_bytes))))
        if self._device.type == "cuda" and few < self._shape.num_experts:
            num_routes = max(4, num_routes)
        dtype, hidden = self._dtype, self._shape.hidden_size
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
            num_values: float,
            *,
            weights: str,
            is_right: bool,
        ) -> Line:
            return Line(
                op=f"{op} {name}",
                weights=weights,
                rows=f"{num_rows} x 1",
                num_experts=num_experts,
                us=time_ms(ours, self._device) * 1e3,
                torch_us=theirs_us,
                bytes_us=num_bytes / rates.copied_bytes * 1e6,
                flop_us=2 * num_rows * num_values / rates.product_flop * 1e6,
                is_right=is_right,
            )

        pairs = list(zip(inputs, routes, strict=True))
        return [
            line(
                "choice",
                [lambda x=x: self._choose(x, indptr) for x in inputs],  # type: ignore[misc]
                None,
                choice_bytes,
                self._router.numel(),
                weights=_name(self._dtype),
                is_right=self._is_choice_alone(inputs[0], routes[0]),
            ),
            line(
                "products",
                [lambda x=x, r=r: self._apply(x, r) for x, r in pairs],  # type: ignore[misc]
                self._torch_us(pairs),
                product_bytes,
                self._shape.count * expert_values,
                weights=self._weights,
                is_right=self._is_right(*pairs[0]),
            ),
        ]

    def _choose(self, x: torch.Tensor, indptr: torch.Tensor) -> ChosenExperts:
        return choose_experts(linear_addends(x, self._router), None, indptr, self._rule)

    def _apply(self, x: torch.Tensor, chosen: ChosenExperts) -> torch.Tensor:
        size = (self._shape.count, *x.shape)
        out = torch.empty(size, dtype=torch.float32, device=x.device)
        gate_up, down = self._held
        apply_experts(x, gate_up, down, chosen, out)
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
        """Compare rows with themselves alone, bit for bit, and with products in float32.

        Of experts in FP8 these are products of the dequantised weights.
        """
        out = self._apply(x, chosen)
        for i in _some_of(len(x)):
            own = ChosenExperts(ids=chosen.ids[i : i + 1], weights=chosen.weights[i : i + 1])
            if not torch.equal(self._apply(x[i : i + 1], own)[:, 0], out[:, i]):
                return False
            for slot, expert in enumerate(chosen.ids[i].tolist()):
                gate, up = (_dense(self._gate_up[expert]) @ x[i].float()).chunk(2)
                want = _dense(self._down[expert]) @ (functional.silu(gate) * up)
                want *= chosen.weights[i, slot]
                error = (out[slot, i] - want).norm() / want.norm()
                rows_error = _FP8_ROWS_ERROR if self._weights == "fp8" else 0.0
                if not error < max(4 * torch.finfo(x.dtype).eps, 1e-5, rows_error):
                    return False
        return True

    def _torch_us(self, pairs: Sequence[tuple[torch.Tensor, ChosenExperts]]) -> float | None:
        """Return what torch's grouped product takes; rows are put in order beforehand."""
        if self._weights == "fp8":
            return None
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
        assert isinstance(self._gate_up, torch.Tensor) and isinstance(self._down, torch.Tensor)
        gate_up, down = self._gate_up.mT, self._down.mT

        def run() -> torch.Tensor:
            gate, up = torch._grouped_mm(x[rows], gate_up, offs=ends).chunk(2, dim=1)
            y = torch._grouped_mm(functional.silu(gate) * up, down, offs=ends)
            return torch.zeros_like(x).index_add_(0, rows, (y * weights).to(x.dtype))

        return run

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self._device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantized()


def _some_of(num_rows: int) -> set[int]:
    return {0, num_rows // 2, num_rows - 1}


if __name__ == "__main__":
    main()
