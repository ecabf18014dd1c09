"""The draft engine's round: extend of the accepted rows and growth of the next tree.

Features and tokens are made up; what a tree costs does not depend on them. A line counts only with
its check: the trees of the first request are those that it gets alone.

    python -m benchmarks.draft --output benchmarks/results/draft.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.models import add_model_flags, open_pair, resolve_flags
from benchmarks.timing import add_output_flag, integers, progress, report, synchronize
from draft_service.engine import DraftEngine
from shared.config.check import parse_shape
from shared.device import DTYPES
from shared.messages import (
    MAX_TREE_NODES,
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureChunk,
    SamplingParams,
    TokenTree,
    TreeShape,
)

_NUM_ROUNDS = 12
_CHUNK_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        shape: num_steps/topk/num_draft_tokens.
        rows: Rows extended per request and round.
        round_ms: Wall time of extend and growth, the read of the trees included.
        depth_ms: Of it, per further depth: this shape against one of num_steps 1.
        is_exact: The first request's trees are those that it gets alone.
    """

    shape: str
    requests: int
    context: int
    rows: int
    round_ms: float
    depth_ms: float | None
    is_exact: bool


def main() -> None:
    """Measure what the flags ask for."""
    args = _parse()
    lines = []
    with open_pair(args.model, args.draft_model) as pair:
        engine = pair.draft_engine(
            args,
            max_num_requests=max(args.requests),
            max_context_len=args.context + _NUM_ROUNDS * args.rows + MAX_TREE_NODES,
        )
        for text in args.shapes.split(","):
            _, alone = _run(engine, parse_shape(text), 1, args)
            for count in args.requests:
                line = _measure(engine, text, count, args, alone)
                progress(str(line))
                lines.append(line)
    report(lines, args, extra={"model": args.model})
    if not all(line.is_exact for line in lines):
        sys.exit("a tree depends on the batch: that is a bug")


def _parse() -> argparse.Namespace:
    """Return the flags, with the device's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_flags(parser)
    parser.add_argument("--shapes", help="num_steps/topk/num_draft_tokens, ...")
    parser.add_argument("--requests", type=integers, help="at a time, comma-separated")
    parser.add_argument("--context", type=int, help="tokens before the measured rounds")
    parser.add_argument("--rows", type=int, default=4, help="accepted tokens per round")
    parser.add_argument("--temperature", type=float, default=0.0)
    add_output_flag(parser)
    args = parser.parse_args()
    is_gpu = resolve_flags(args).type == "cuda"
    args.shapes = args.shapes or ("5/4/16,5/8/32,6/10/60" if is_gpu else "4/2/8")
    args.requests = args.requests or ([1, 8, 32] if is_gpu else [1, 2])
    args.context = args.context or (1024 if is_gpu else 64)
    return args


def _measure(
    engine: DraftEngine, text: str, count: int, args: argparse.Namespace, alone: list[object]
) -> Line:
    """Measure rounds of a shape.

    Args:
        alone: The first request's trees when it is alone.
    """
    shape = parse_shape(text)
    round_ms, trees = _run(engine, shape, count, args)
    depth_ms = None
    if shape.num_steps > 1:
        shallow = TreeShape(num_steps=1, topk=shape.topk, num_draft_tokens=1 + shape.topk)
        shallow_ms, _ = _run(engine, shallow, count, args)
        depth_ms = (round_ms - shallow_ms) / (shape.num_steps - 1)
    return Line(
        shape=text,
        requests=count,
        context=args.context,
        rows=args.rows,
        round_ms=round_ms,
        depth_ms=depth_ms,
        is_exact=trees == alone,
    )


def _run(
    engine: DraftEngine, shape: TreeShape, count: int, args: argparse.Namespace
) -> tuple[float, list[object]]:
    """Return the median time of a round, milliseconds, and the first request's trees."""
    requests = [
        MadeUpRequest(engine, i, args.context, args.rows, args.temperature) for i in range(count)
    ]
    trees: list[object] = []
    seconds = []
    for _ in range(_NUM_ROUNDS):
        for request in requests:
            request.submit_round(shape)
        synchronize(engine.runner.pool.device)
        started = time.perf_counter()
        grown: list[TokenTree] = []
        while len(grown) < count:
            grown += [answer for answer in engine.step() if isinstance(answer, TokenTree)]
        seconds.append(time.perf_counter() - started)
        first = next(tree for tree in grown if tree.request_id == requests[0].request_id)
        trees.append((first.token_ids, first.parent_index, first.cumulative_logprobs))
    for request in requests:
        engine.submit(DraftClose(request_id=request.request_id, draft_epoch=1))
    engine.step()
    engine.check_integrity()
    return statistics.median(seconds[_NUM_ROUNDS // 3 :]) * 1e3, trees


class MadeUpRequest:
    """A request whose tokens and features come from a seed.

    Args:
        context: Tokens that it opens with, all but the last extended.
        num_new: Tokens that every round accepts.
    """

    def __init__(
        self,
        engine: DraftEngine,
        index: int,
        context: int,
        num_new: int,
        temperature: float = 0.0,
    ) -> None:
        self.request_id = f"bench-{index}"
        self._engine = engine
        self._num_new = num_new
        self._rng = np.random.default_rng(index)
        self._generator = torch.Generator().manual_seed(index)
        self._num_tokens = context
        self._num_features = 0
        engine.submit(
            DraftOpen(
                request_id=self.request_id,
                target_epoch=1,
                draft_epoch=1,
                target_address="local",
                token_ids=self._tokens(context),
                sampling=SamplingParams(temperature=temperature, seed=index),
            )
        )
        while self._num_features < context - 1:
            self._submit_features(min(_CHUNK_ROWS, context - 1 - self._num_features))
            engine.step()

    def submit_round(self, shape: TreeShape) -> None:
        """Queue the features and the tokens of a round."""
        token_ids = self._tokens(self._num_new)
        self._submit_features(self._num_new)
        self._num_tokens += self._num_new
        self._engine.submit(
            DraftRound(
                request_id=self.request_id,
                target_epoch=1,
                draft_epoch=1,
                round_idx=1,
                seq_len=self._num_tokens - 1,
                token_offset=self._num_tokens - self._num_new,
                token_ids=token_ids,
                shape=shape,
            )
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        ids: Sequence[int] = self._rng.integers(0, self._engine.info.vocab_size, count).tolist()
        return tuple(ids)

    def _submit_features(self, count: int) -> None:
        dtype, width = self._engine.info.dtype, self._engine.info.features.width
        rows = torch.randn((count, width), generator=self._generator).to(DTYPES[dtype])
        self._engine.submit(
            FeatureChunk(
                request_id=self.request_id,
                target_epoch=1,
                start=self._num_features,
                shape=(count, width),
                dtype=dtype,
                data=rows.view(torch.uint8).numpy().tobytes(),
            )
        )
        self._num_features += count


if __name__ == "__main__":
    main()
