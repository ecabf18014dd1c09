"""Decoding by the engines in one process, without gRPC: plain, and speculating with trees.

Prompts are held-out text, served twice: the first pass compiles every kernel and captures every
graph that the second meets. In that one the clock runs, from the moment when every request has its
first tokens until all have `--max-new-tokens`. A line counts only with its
check: every output equal to the plain one, token by token, whatever the concurrency.

    python -m benchmarks.decode --output benchmarks/results/decode.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calibration import read_prompts
from benchmarks.models import add_model_flags, open_pair, resolve_flags
from benchmarks.timing import add_output_flag, integers, progress, report, synchronize
from draft_service.engine import DraftEngine
from shared.config.check import parse_shape
from shared.messages import MAX_TREE_NODES, SamplingParams
from target_service.engine import TargetEngine
from tests.local_pair import LocalPair, LocalRequest


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        shape: num_steps/topk/num_draft_tokens, or plain.
        tokens_per_s: Of all requests together, prefill excluded.
        accept_length: Mean tokens per round, bonus included.
        round_ms, target_ms, draft_ms: Per round of the longest request: wall time, and time in the
            steps of either engine.
        identical: Share of outputs equal to the plain ones.
    """

    shape: str
    requests: int
    temperature: float
    tokens_per_s: float
    accept_length: float
    round_ms: float
    target_ms: float
    draft_ms: float
    identical: float


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Prompts served together; tokens, rounds of the longest request and times while all decode."""

    requests: Sequence[LocalRequest]
    num_tokens: int
    num_rounds: int
    seconds: float
    target_s: float
    draft_s: float


class TimedPair(LocalPair):
    """Rounds of both engines, and the time that each takes."""

    target_s = draft_s = 0.0

    def step(self) -> bool:
        """Step both engines once; return whether anything is left to do."""
        started = time.perf_counter()
        self.wait_for_target()
        if self.target.has_work:
            for message in self.target.step():
                self.on_target(message)
        if self.draft is not None:
            # Both share a device: a draft that waits for a step in flight did not take that long.
            synchronize(self.target.runner.pool.device)
        middle = time.perf_counter()
        if self.draft is not None and self.draft.has_work:
            for message in self.draft.step():
                self.on_draft(message)
        self.target_s += middle - started
        self.draft_s += time.perf_counter() - middle
        return self.has_work


def main() -> None:
    """Measure what the flags ask for."""
    args = _parse()
    options = {
        "max_num_requests": max(args.requests),
        "max_context_len": args.prompt_len + args.max_new_tokens + MAX_TREE_NODES,
    }
    lines = []
    with open_pair(args.model, args.draft_model) as pair:
        prompts = _prompts(pair.target, args.prompt_len, max(args.requests))
        # The target takes what it is told, the draft what is then free.
        target = pair.target_engine(args, kv_memory_fraction=0.4, **options)
        draft = pair.draft_engine(args, **options)
        for temperature in map(float, args.temperatures.split(",")):
            plain: dict[int, list[int]] = {}
            for count, shape in itertools.product(args.requests, ("plain", *args.shapes)):
                line = _measure(target, draft, prompts[:count], shape, temperature, args, plain)
                progress(str(line))
                lines.append(line)
    report(lines, args, extra={"model": args.model, "prompt_len": args.prompt_len})
    if any(line.identical < 1 for line in lines):
        sys.exit("an output is not the plain one: that is a bug")


def _parse() -> argparse.Namespace:
    """Return the flags, with the device's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_flags(parser)
    parser.add_argument("--requests", type=integers, help="at a time, comma-separated")
    parser.add_argument("--shapes", help="num_steps/topk/num_draft_tokens, ...; plain comes first")
    parser.add_argument("--temperatures", default="0", help="comma-separated")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, help="per request")
    add_output_flag(parser)
    args = parser.parse_args()
    is_gpu = resolve_flags(args).type == "cuda"
    args.requests = args.requests or ([1, 8, 32] if is_gpu else [1, 2])
    shapes = args.shapes or ("3/1/4,5/4/16,5/8/32,6/10/60" if is_gpu else "4/2/8")
    args.shapes = shapes.split(",")
    args.max_new_tokens = args.max_new_tokens or (256 if is_gpu else 24)
    return args


def _prompts(target_dir: Path, length: int, count: int) -> list[list[int]]:
    """Cut held-out text into prompts of one length."""
    text = [token for prompt in read_prompts(target_dir, 1000) for token in prompt]
    starts = [i * length % (len(text) - length) for i in range(count)]
    return [text[start : start + length] for start in starts]


def _measure(
    target: TargetEngine,
    draft: DraftEngine,
    prompts: Sequence[Sequence[int]],
    shape: str,
    temperature: float,
    args: argparse.Namespace,
    plain: dict[int, list[int]],
) -> Line:
    """Serve the prompts together.

    Mutates: `plain`, outputs by prompt: the first run of a prompt, which is plain, puts its own.
    """
    for _ in range(2):
        run = _serve(target, draft, prompts, shape, temperature, args)
    requests = run.requests
    if not run.num_rounds:
        sys.exit("all tokens came before the clock started; raise --max-new-tokens")
    for i, request in enumerate(requests):
        plain.setdefault(i, request.output)
    num_same = sum(request.output == plain[i] for i, request in enumerate(requests))
    return Line(
        shape=shape,
        requests=len(requests),
        temperature=temperature,
        tokens_per_s=run.num_tokens / run.seconds,
        accept_length=mean_accept_length(requests),
        round_ms=run.seconds / run.num_rounds * 1e3,
        target_ms=run.target_s / run.num_rounds * 1e3,
        draft_ms=run.draft_s / run.num_rounds * 1e3,
        identical=num_same / len(requests),
    )


def _serve(
    target: TargetEngine,
    draft: DraftEngine,
    prompts: Sequence[Sequence[int]],
    shape: str,
    temperature: float,
    args: argparse.Namespace,
) -> _Run:
    tree = None if shape == "plain" else parse_shape(shape)
    # As long as nothing is drafted, nobody need order rounds one by one.
    pair = TimedPair(target, draft if tree else None, credit_rounds=args.max_new_tokens)
    requests = [
        LocalRequest(
            prompt=prompt,
            max_new_tokens=args.max_new_tokens,
            shape=tree,
            sampling=SamplingParams(temperature=temperature, seed=i),
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        pair.open(request)
    while not all(len(request.paths) > 1 for request in requests):
        pair.step()
    num_tokens = sum(len(request.output) for request in requests)
    num_rounds = max(len(request.paths) for request in requests)
    pair.target_s = pair.draft_s = 0.0
    started = time.perf_counter()
    while pair.step():
        pass
    seconds = time.perf_counter() - started
    pair.finish()
    return _Run(
        requests=requests,
        num_tokens=sum(len(request.output) for request in requests) - num_tokens,
        num_rounds=max(len(request.paths) for request in requests) - num_rounds,
        seconds=seconds,
        target_s=pair.target_s,
        draft_s=pair.draft_s,
    )


def mean_accept_length(requests: Sequence[LocalRequest]) -> float:
    """Return tokens per round after the first, bonus included, over all requests."""
    paths = [path for request in requests for path in request.paths[1:]]
    return sum(path.num_accepted_drafts + 1 for path in paths) / len(paths)


if __name__ == "__main__":
    main()
