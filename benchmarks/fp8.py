"""Weights in FP8 against bfloat16: every product of a layer, and whole steps of the model.

`limit_us` is what a product must read and write, at the measured copy bandwidth; `speedup` is
against bfloat16. A product counts only with its check: close to the dequantised weight's, by rows
as they are quantised, and the bits of a row those that it has alone. Steps are the model's forward
with logits, as a CUDA graph, after `--context` tokens of noise. `--tiles` times more tiles of the
products, to choose from.

    python -m benchmarks.fp8 --output benchmarks/results/fp8.json
    python -m benchmarks.fp8 --parts products --rows 1 --tiles 64/16/128/4/6,64/16/256/4/4
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.nn import functional

from benchmarks.inflation import SHAPES, Shape
from benchmarks.models import open_pair
from benchmarks.rows import build_rows, fill_noise, new_pool
from benchmarks.timing import add_output_flag, copy_bandwidth, integers, progress, report, time_ms
from shared.device import resolve_device
from shared.kernels import linear as linear_module
from shared.kernels.fp8_rows import quantize_rows, wants_fp8_rows
from shared.kernels.int4 import MIDDLE, Int4Weight, pack_int4
from shared.kernels.linear import (
    linear_addends,
    most_split_rows,
    multiply,
    splits_of,
    sum_addends,
)
from shared.kernels.linear_swiglu import linear_swiglu, multiply_swiglu
from shared.kernels.linear_tiles import Tiles
from shared.kernels.quantized import (
    SCALE_BLOCK,
    GpuWeight,
    QuantizedWeight,
    quantize,
    values_of,
)
from shared.models.checkpoint import CheckpointReader
from shared.models.llama import CausalLM

HEAD_DIM = 128
DTYPE = torch.bfloat16
INT4_FORMS = ("group", "zeros")
_GROUP, _INT4_BLOCK = 128, 512
# Of a weight, with its scales.
_BYTES = {"bfloat16": 2, "channel": 1, "block": 1 + 4 / SCALE_BLOCK}
_BYTES |= {f"{form}-rows": _BYTES[form] for form in ("channel", "block")}
_BYTES |= {"group": 0.5 + 2 / _GROUP, "zeros": 0.5 + 4 / _GROUP}
# More than the second-level cache of any GPU so far.
_ROTATED_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        what: A product, or "step".
        weights: "bfloat16"; "channel" or "block": what shares a scale in FP8; "channel-rows" or
            "block-rows": rows in FP8 as well; "group" or "zeros": int4, without and with zeros.
        tiles: "" = those that are chosen; else N/T/K/warps/stages, and splits if they were said.
        us: -1: these tiles do not fit.
        share: limit_us / us.
        speedup: Against bfloat16.
    """

    what: str
    rows: int
    weights: str
    tiles: str
    us: float
    limit_us: float
    share: float
    speedup: float
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Tiles to try.

    Args:
        splits: Of K; 0 = as many as are chosen.
    """

    name: str
    tiles: Tiles
    splits: int


def main(
    description: str | None = __doc__, scalings: str = "channel,block,channel-rows,block-rows"
) -> None:
    """Measure what the flags ask for.

    Args:
        scalings: What is measured unless flags say otherwise.
    """
    args = _parse((description or "").split("\n")[0], scalings)
    device = resolve_device(args.device)
    lines: list[Line] = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth(device)
        if "products" in args.parts:
            for line in _products(args, device, bandwidth):
                progress(str(line))
                lines.append(line)
        if "step" in args.parts:
            for line in _steps(args, device, bandwidth):
                progress(str(line))
                lines.append(line)
    report(lines, args, extra={"shape": args.shape, "copy_bytes_per_s": bandwidth})
    if not all(line.is_right for line in lines):
        sys.exit("a product is wrong, or a row depends on the others")


def _parse(description: str, scalings: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--parts", default="products,step")
    parser.add_argument("--products", default="qkv,o,gate_up,down")
    parser.add_argument("--rows", type=integers, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--step-rows", type=integers, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens before the rows of steps")
    parser.add_argument("--scalings", default=scalings, help=f"of {', '.join(_BYTES)}")
    parser.add_argument("--tiles", type=_candidates, default=[], help="N/T/K/warps/stages[/splits]")
    parser.add_argument("--device", default="auto")
    add_output_flag(parser)
    return parser.parse_args()


def _candidates(text: str) -> list[Candidate]:
    found = []
    for name in text.split(","):
        numbers = [int(number) for number in name.split("/")]
        if len(numbers) not in (5, 6):
            raise argparse.ArgumentTypeError(f"{name} is not N/T/K/warps/stages[/splits]")
        found.append(Candidate(name=name, tiles=Tiles(*numbers[:5]), splits=sum(numbers[5:])))
    return found


def _products(args: argparse.Namespace, device: torch.device, bandwidth: float) -> Iterator[Line]:
    """Yield the products of a layer, as a layer calls them."""
    for name, size in _sizes(SHAPES[args.shape]).items():
        if name not in args.products.split(","):
            continue
        generator = torch.Generator(device=device).manual_seed(0)
        weight = torch.randn(size, generator=generator, device=device).to(DTYPE)
        weight = weight / math.sqrt(size[1])
        forms = {form: _in_form(weight, form) for form in ("bfloat16", *args.scalings.split(","))}
        x = torch.randn((max(args.rows), size[1]), generator=generator, device=device).to(DTYPE)
        for rows in args.rows:
            plain_us = 0.0
            for form in forms:
                for candidate in (None, *(args.tiles if form != "bfloat16" else ())):
                    if candidate is not None and not _fits(candidate, rows, form):
                        continue
                    line = _product(
                        name, forms[form], x[:rows], candidate, bandwidth, plain_us or None
                    )
                    plain_us = plain_us or line.us
                    yield line


def _sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the products' weights [N, K]."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    width, kv_width = shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
    return {
        "qkv": (width + 2 * kv_width, hidden),
        "o": (hidden, width),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def _in_form(weight: torch.Tensor, form: str) -> GpuWeight:
    """Return a weight in bfloat16, FP8 or int4."""
    if form in INT4_FORMS:
        return round_to_int4(weight, has_zeros=form == "zeros")
    if form == "bfloat16":
        return weight
    quantized = quantize(weight, has_fp8_rows=form.endswith("-rows"))
    return _by_block(quantized) if form.startswith("block") else quantized


def round_to_int4(weight: torch.Tensor, *, has_zeros: bool) -> Int4Weight:
    """Return a weight rounded to the nearest values of groups of 128, as no tool would do it."""
    width_k = weight.shape[1]
    groups = functional.pad(weight.float(), (0, -width_k % _GROUP)).unflatten(1, (-1, _GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    if has_zeros:
        scales = ((high - low) / 15).clamp(min=1e-4).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (torch.maximum(high, -low) / 7).clamp(min=1e-4).half()
        zeros = torch.full_like(low, MIDDLE)
    values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = values.flatten(1)[:, :width_k].to(torch.uint8)
    return pack_int4(values, scales, zeros if has_zeros else None, _GROUP, weight.dtype)


def _by_block(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with a scale for each block of K, the same in all of them."""
    num_blocks = -(-weight.shape[1] // SCALE_BLOCK)
    return replace(weight, scales=weight.scales.repeat(num_blocks, 1).contiguous())


def _fits(candidate: Candidate, rows: int, form: str) -> bool:
    """Return whether tiles are worth a try: wide enough for the rows, no longer than blocks."""
    wide = candidate.tiles.block_t >= min(rows, 128) and candidate.tiles.block_t <= max(
        16, 4 * rows
    )
    block_k = {"group": _INT4_BLOCK, "zeros": _INT4_BLOCK}.get(form)
    if form.startswith("block"):
        block_k = SCALE_BLOCK
    return wide and (block_k is None or candidate.tiles.block_k == block_k)


def _product(
    name: str,
    weight: GpuWeight,
    x: torch.Tensor,
    candidate: Candidate | None,
    bandwidth: float,
    plain_us: float | None,
) -> Line:
    """Measure one product."""
    is_gated = name == "gate_up"
    values = values_of(weight)
    num_copies = max(2, _ROTATED_BYTES // values.nbytes) if x.is_cuda else 1
    copies = [weight, *(_copy(weight) for _ in range(num_copies - 1))]
    call = partial(_call, is_gated=is_gated, candidate=candidate)
    out_values = len(x) * len(values) // (2 if is_gated else 1)
    num_bytes = values.nbytes + x.nbytes + out_values * (2 if is_gated else 4)
    if not isinstance(weight, torch.Tensor):
        num_bytes += weight.scales.nbytes
    limit_us = num_bytes / bandwidth * 1e6
    try:
        with _splits(candidate):
            us = time_ms([partial(call, x, copy) for copy in copies], x.device) * 1e3
            is_right = _is_right(partial(call, weight=weight), x, weight, is_gated=is_gated)
    except Exception as error:  # of Triton: too much shared memory, too many registers
        progress(f"{candidate}: {type(error).__name__}: {error}")
        us, is_right = -1.0, candidate is not None
    return Line(
        what=name,
        rows=len(x),
        weights=_form_of(weight),
        tiles=candidate.name if candidate else "",
        us=us,
        limit_us=limit_us,
        share=limit_us / us,
        speedup=(plain_us or us) / us,
        is_right=is_right,
    )


def _form_of(weight: GpuWeight) -> str:
    """Return the name of a weight's form, see Line."""
    if isinstance(weight, torch.Tensor):
        return "bfloat16"
    return f"{weight.scaling}-rows" if getattr(weight, "has_fp8_rows", False) else weight.scaling


def _copy(weight: GpuWeight) -> GpuWeight:
    return weight.clone() if isinstance(weight, torch.Tensor) else weight.rearranged(torch.clone)


def _splits(candidate: Candidate | None) -> contextlib.AbstractContextManager[object]:
    """Return what lets products have as many splits as are to be tried."""
    if candidate is None or not candidate.splits:
        return contextlib.nullcontext()
    return mock.patch.object(linear_module, "splits_of", lambda _: candidate.splits)


def _call(
    x: torch.Tensor, weight: GpuWeight, *, is_gated: bool, candidate: Candidate | None
) -> torch.Tensor:
    """Multiply as a layer does, with the candidate's tiles."""
    if candidate is None:
        return linear_swiglu(x, weight) if is_gated else linear_addends(x, weight)
    place = {"device": x.device}
    if is_gated:
        out = torch.empty((len(x), weight.shape[0] // 2), dtype=x.dtype, **place)
        multiply_swiglu(x, weight, None, out, candidate.tiles, None)
        return out
    splits = candidate.splits or splits_of(weight)
    splits = splits if len(x) <= most_split_rows(weight) else 1
    out = torch.empty((splits, len(x), weight.shape[0]), dtype=torch.float32, **place)
    multiply(x, weight, None, out, candidate.tiles, None, is_split=splits > 1)
    return out


def _is_right(
    call: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: GpuWeight,
    *,
    is_gated: bool,
) -> bool:
    """Compare with a product in float32, and rows with their bits alone."""

    def result(x: torch.Tensor) -> torch.Tensor:
        y = call(x)
        return sum_addends(y, None, torch.float32) if y.dim() == 3 else y

    y = result(x)
    dense = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantized()
    has_fp8_rows = wants_fp8_rows(weight)
    want = (_dequantized(x) if has_fp8_rows else x.float()) @ dense.T
    if is_gated:
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    # Tensor cores add the products of e4m3 with some 14 bits.
    tolerance = 0.02 if is_gated else 5e-3 if has_fp8_rows else 1e-3
    error = float((y.float() - want).norm() / want.norm())
    progress(f"relative error {error:.2g}")
    is_close = error < tolerance
    alone = all(torch.equal(y[i : i + 1], result(x[i : i + 1])) for i in {0, len(x) - 1})
    return bool(is_close) and alone


def _dequantized(x: torch.Tensor) -> torch.Tensor:
    """Return what rows are in FP8. [T, K] f32."""
    fp8 = quantize_rows(x)
    return fp8.values.view(torch.float8_e4m3fn).float() * fp8.scales[:, None]


def _steps(args: argparse.Namespace, device: torch.device, bandwidth: float) -> Iterator[Line]:
    """Yield whole forwards of the model, with logits of every row."""
    plain: dict[int, float] = {}
    shape = SHAPES[args.shape]
    with open_pair(args.shape) as pair:
        for form in ("bfloat16", *args.scalings.split(",")):
            if form.startswith("block"):  # as fast as in its products
                continue
            model = _load(pair.target, device, form)
            layer = sum(math.prod(size) for size in _sizes(shape).values()) * _BYTES[form]
            num_bytes = layer * shape.num_layers + 2 * shape.vocab_size * shape.hidden_size
            for rows in args.step_rows:
                us, is_right = _step(model, rows, args.context)
                plain.setdefault(rows, us)
                limit_us = num_bytes / bandwidth * 1e6
                yield Line(
                    what="step",
                    rows=rows,
                    weights=form,
                    tiles="",
                    us=us,
                    limit_us=limit_us,
                    share=limit_us / us,
                    speedup=plain[rows] / us,
                    is_right=is_right,
                )
            del model


def _load(directory: Path, device: torch.device, form: str) -> CausalLM:
    def load_matrix(reader: CheckpointReader, name: str, shape: Sequence[int]) -> GpuWeight:
        return _in_form(reader.load(name, shape), form)

    with mock.patch.object(CheckpointReader, "load_matrix", load_matrix):
        return CausalLM.from_checkpoint(directory, device, DTYPE, context_len=2048)


def _step(model: CausalLM, num_requests: int, context: int) -> tuple[float, bool]:
    """Return the time of a row of each request, and whether the last one has its bits alone."""
    config = model.config
    pool, req_idx = new_pool(
        config.kv_layout,
        num_requests=num_requests,
        num_tokens=context + 1,
        dtype=model.dtype,
        device=model.device,
    )
    fill_noise(pool)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (num_requests, 1))
    rows = build_rows(pool, req_idx, ids, prefix_len=context)
    last = build_rows(pool, req_idx[-1:], ids[-1:], prefix_len=context)
    us = time_ms([lambda: model.logits(model.forward(rows).hidden)], model.device) * 1e3
    together = model.logits(model.forward(rows).hidden)[-1:].clone()
    return us, torch.equal(together, model.logits(model.forward(last).hidden))


if __name__ == "__main__":
    main()
