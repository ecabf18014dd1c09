"""Per draft and tree shape: speed, accept_length, and whether the output is the plain one.
one.

Starts a server for each draft, runs held-out prompts through gRPC one after another (or several at
a time), plain and with every shape, and compares outputs token by token.

    python -m benchmarks.speculation --shapes 3/1/4,4/2/8 --output benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from coppice.client import AsyncClient, Completion
from coppice.stack import Stack
from coppice.stack.config import stack_config
from shared.config import OrchestratorConfig

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
SHAPES = "3/1/4,5/1/6,3/2/6,4/2/8,5/4/16,5/8/32,6/8/64"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        accept_length: Tokens per round, bonus included, over all rounds of all prompts.
        identical: Share of outputs equal to the plain run's, token by token.
        draft_wait_ms, verify_ms: Means over rounds.
    """

    draft: str
    shape: str
    temperature: float
    concurrency: int
    tokens_per_second: float
    accept_length: float
    identical: float
    root_only_rounds: int
    draft_wait_ms: float
    verify_ms: float


def main() -> None:
    """Measure what the flags ask for."""
    args = _parse()
    prompts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()]
    prompts = prompts[: args.num_prompts]
    rows: list[Row] = []
    for name in args.drafts.split(","):
        algorithm, _, directory = name.partition("=")
        given = {
            "target_model": args.target_model,
            "draft_model": directory or "demo",
            "algorithm": algorithm,
            "device": args.device,
            "dtype": args.dtype,
            "draft_dtype": args.dtype,
            "page_size": args.page_size,
            "port": 0,
        }
        # A benchmark wants every tree: no round may give up on a slow machine.
        orchestrator = OrchestratorConfig(draft_timeout_ms=60_000, draft_open_timeout_ms=60_000)
        config = stack_config(given, orchestrator=orchestrator)
        with Stack(config, on_log=_log) as stack:
            rows += asyncio.run(_measure(stack.address, algorithm, prompts, args))
    _print(rows)
    if args.output:
        result = {**describe_machine(), "rows": [dataclasses.asdict(row) for row in rows]}
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    if any(row.identical < 1 for row in rows):
        sys.exit("speculation changed an output: that is a bug")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafts", default="eagle3,standalone", help="ALGORITHM[=DIR], ...")
    parser.add_argument("--target-model", default="demo")
    parser.add_argument("--shapes", default=SHAPES, help="num_steps/topk/num_draft_tokens, ...")
    parser.add_argument("--temperatures", default="0", help="comma-separated")
    parser.add_argument("--concurrency", default="1", help="requests at a time, comma-separated")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", default="", help="file to write, JSON")
    return parser.parse_args()


async def _measure(
    address: str, draft: str, prompts: Sequence[str], args: argparse.Namespace
) -> list[Row]:
    rows = []
    async with AsyncClient(address) as client:
        for concurrency in map(int, args.concurrency.split(",")):
            for temperature in map(float, args.temperatures.split(",")):
                plain: list[Completion] = []
                for shape in ("plain", *args.shapes.split(",")):
                    keywords = _keywords(shape, temperature, args)
                    await _run(client, prompts[:concurrency], concurrency, keywords)  # warm up
                    outputs, seconds = await _run(client, prompts, concurrency, keywords)
                    plain = plain or outputs
                    rows.append(
                        _row(draft, shape, temperature, concurrency, outputs, plain, seconds)
                    )
                    _print(rows[-1:])
    return rows


def _keywords(shape: str, temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 1234,
        "speculation": False,
    }
    if shape != "plain":
        num_steps, topk, num_draft_tokens = map(int, shape.split("/"))
        keywords |= {
            "speculation": True,
            "num_steps": num_steps,
            "topk": topk,
            "num_draft_tokens": num_draft_tokens,
        }
    return keywords


async def _run(
    client: AsyncClient, prompts: Sequence[str], concurrency: int, keywords: dict[str, Any]
) -> tuple[list[Completion], float]:
    """Return the completions in order of prompts, and how long they took together, seconds."""
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: str) -> Completion:
        async with slots:
            return await client.generate(prompt, **keywords)

    started = time.perf_counter()
    outputs = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return list(outputs), time.perf_counter() - started


def _row(
    draft: str,
    shape: str,
    temperature: float,
    concurrency: int,
    outputs: Sequence[Completion],
    plain: Sequence[Completion],
    seconds: float,
) -> Row:
    stats = [output.speculation for output in outputs]
    num_rounds = sum(stat.num_rounds for stat in stats)
    accepted = sum(stat.num_accepted_drafts for stat in stats)
    same = sum(a.token_ids == b.token_ids for a, b in zip(outputs, plain, strict=True))
    is_plain = shape == "plain"
    return Row(
        draft="none" if is_plain else draft,
        shape=shape,
        temperature=temperature,
        concurrency=concurrency,
        tokens_per_second=round(sum(len(o.token_ids) for o in outputs) / seconds, 1),
        accept_length=round(1 + accepted / num_rounds, 3),
        identical=same / len(outputs),
        root_only_rounds=0 if is_plain else sum(stat.num_root_only_rounds for stat in stats),
        draft_wait_ms=_mean([output.timings.mean_draft_wait_ms for output in outputs]),
        verify_ms=_mean([output.timings.mean_verify_ms for output in outputs]),
    )


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2)


def _print(rows: Sequence[Row]) -> None:
    if len(rows) != 1:
        names = [field.name for field in dataclasses.fields(Row)]
        sys.stdout.write("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names) + "\n")
    for row in rows:
        sys.stdout.write("| " + " | ".join(map(str, dataclasses.astuple(row))) + " |\n")
    sys.stdout.flush()


def _log(service: str, line: str) -> None:
    if "ERROR" in line or "WARNING" in line or "self-test" in line:
        sys.stderr.write(f"{service}: {line}\n")


if __name__ == "__main__":
    main()
