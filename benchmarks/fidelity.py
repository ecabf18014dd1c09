"""How close an inflated pair is to the bundled one, on this device and in this dtype.

Logits of held-out prompts, then speculative decoding of the same requests by both pairs. Where the
device adds longer products in another order, logits differ by rounding, and a text may part from
the other one at a near tie; acceptance must stay the same within chance.

    python -m benchmarks.fidelity --output benchmarks/results/fidelity.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.calibration import read_prompts
from benchmarks.decode import mean_accept_length
from benchmarks.models import Pair, add_model_flags, open_pair, resolve_flags
from benchmarks.rows import acquire, build_rows
from benchmarks.timing import add_output_flag, report
from shared.config.check import parse_shape
from shared.messages import MAX_TREE_NODES, SamplingParams
from target_service.engine import TargetEngine
from tests.local_pair import LocalPair, LocalRequest


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        accept_length, small_accept_length: Of the inflated and of the bundled pair.
        identical_outputs, identical_trees: Shares; trees are compared up to the first difference.
    """

    temperature: float
    requests: int
    accept_length: float
    small_accept_length: float
    identical_outputs: float
    identical_trees: float


def main() -> None:
    """Compare what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_flags(parser)
    parser.add_argument("--num-prompts", type=int, default=0, help="0 = 32 on a GPU, else 2")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--shape", default="5/4/16", help="num_steps/topk/num_draft_tokens")
    add_output_flag(parser)
    args = parser.parse_args()
    is_gpu = resolve_flags(args).type == "cuda"
    count = args.num_prompts or (32 if is_gpu else 2)
    name = args.model if args.model != "demo" else "small"
    with open_pair("demo") as pair:
        prompts = read_prompts(pair.target, count)
        small, small_logits = _serve(pair, prompts, args)
    with open_pair(name, args.draft_model) as pair:
        large, logits = _serve(pair, prompts, args)
    width = small_logits.shape[1]
    unused = logits[:, width:].amax(1) - logits.logsumexp(1) if logits.shape[1] > width else None
    equal_argmax = float((logits.argmax(1) == small_logits.argmax(1)).float().mean())
    extra = {
        "model": name,
        "rows": len(logits),
        "max_logit_difference": float((logits[:, :width] - small_logits).abs().max()),
        "max_logit": float(small_logits.abs().max()),
        "equal_argmax": equal_argmax,
        "largest_unused_logprob": None if unused is None else float(unused.max()),
    }
    lines = [_compare(small[heat], large[heat], heat) for heat in small]
    report(lines, args, extra=extra)
    if equal_argmax < 0.99:
        sys.exit("the inflated model says something else: that is a bug")


def _serve(
    pair: Pair, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> tuple[dict[float, list[LocalRequest]], torch.Tensor]:
    """Return the served requests by temperature, and the logits of all prompts on the host."""
    options = {
        "max_num_requests": len(prompts),
        "max_context_len": max(map(len, prompts)) + args.max_new_tokens + MAX_TREE_NODES,
    }
    target = pair.target_engine(args, kv_memory_fraction=0.4, **options)
    draft = pair.draft_engine(args, **options)
    logits = torch.cat([_logits(target, prompt) for prompt in prompts])
    served = {}
    for temperature in (0.0, 1.0):
        served[temperature] = [
            LocalRequest(
                prompt=prompt,
                max_new_tokens=args.max_new_tokens,
                shape=parse_shape(args.shape),
                sampling=SamplingParams(temperature=temperature, seed=i),
            )
            for i, prompt in enumerate(prompts)
        ]
        LocalPair(target, draft).run(served[temperature])
    return served, logits


@torch.inference_mode()
def _logits(engine: TargetEngine, prompt: Sequence[int]) -> torch.Tensor:
    model, pool = engine.runner.model, engine.runner.pool
    req_idx = acquire(pool, len(prompt))
    rows = build_rows(pool, [req_idx], np.array([prompt]))
    logits = model.logits(model.forward(rows).hidden).cpu()
    pool.release(req_idx)
    return logits


def _compare(
    small: Sequence[LocalRequest], large: Sequence[LocalRequest], temperature: float
) -> Line:
    same_outputs = [a.output == b.output for a, b in zip(small, large, strict=True)]
    same_trees = []
    for a, b in zip(small, large, strict=True):
        for mine, other in zip(a.trees, b.trees, strict=False):
            if mine.seq_len != other.seq_len or mine.token_ids[0] != other.token_ids[0]:
                break
            same_trees.append(
                (mine.token_ids, mine.parent_index) == (other.token_ids, other.parent_index)
            )
    return Line(
        temperature=temperature,
        requests=len(small),
        accept_length=mean_accept_length(large),
        small_accept_length=mean_accept_length(small),
        identical_outputs=sum(same_outputs) / len(same_outputs),
        identical_trees=sum(same_trees) / len(same_trees),
    )


if __name__ == "__main__":
    main()
