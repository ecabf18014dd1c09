"""Per draft and tree shape: speed, accept_length, and whether the output is the plain one.

Starts a server for each draft, or takes a running one, and sends held-out prompts through gRPC in
waves of one or several, plain and with every shape. Outputs are compared token by token with the
first of the same prompt at the same temperature, which is plain. The file is written after every
line.

    python -m benchmarks.speculation --shapes 3/1/4,4/2/8 --output benchmarks/results/cpu.json
    python -m benchmarks.speculation --server 127.0.0.1:50051 --drafts eagle3 --prompt-len 256 \\
        --cells plain@1,5/4/16@1,plain@8@1.0,5/4/16@8@1.0
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.machine import describe_machine
from coppice.bench.request import RequestResult, TimedClient
from coppice.bench.schedule import Arrival, Prompt
from coppice.stack import Stack
from coppice.stack.config import stack_config
from shared.config import OrchestratorConfig
from shared.messages import SpeculationStats
from shared.models.checkpoint_names import resolve_model

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
SEED = 1234
SHAPES = "3/1/4,5/1/6,3/2/6,4/2/8,5/4/16,5/8/32,6/8/64"
# Tokens of a warm-up: of the first request, and how many more each further one has. So a batch of
# every size is seen, for which kernels are compiled and graphs captured.
WARM_UP_TOKENS, WARM_UP_SPREAD = 32, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What one line measures.

    Args:
        shape: num_steps/topk/num_draft_tokens, or plain.
        concurrency: Requests of a wave.
    """

    shape: str
    concurrency: int
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        tokens_per_second: All output over the time that the waves took, prompts included.
        decode_tokens_per_second: While all requests of a wave were decoding: from the last one's
            first token to the first one's last.
        first_token_ms: Mean over requests.
        round_ms: Mean over requests, from the first token to the last, per round.
        accept_length: Tokens per round, bonus included, over all rounds of all prompts.
        identical: Share of outputs equal to the plain ones, token by token.
        draft_wait_ms, verify_ms: Means over rounds.
    """

    draft: str
    shape: str
    temperature: float
    concurrency: int
    num_requests: int
    tokens_per_second: float
    decode_tokens_per_second: float
    first_token_ms: float
    round_ms: float
    accept_length: float
    identical: float
    root_only_rounds: int
    draft_wait_ms: float
    verify_ms: float


class Report:
    """Lines as they come: on the terminal, and in the file."""

    def __init__(self, path: str) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._machine = describe_machine() if path else {}

    def add(self, row: Row) -> None:
        """Print a line and write the file."""
        self.rows.append(row)
        _print([row])
        if self._path:
            rows = [dataclasses.asdict(row) for row in self.rows]
            text = json.dumps({**self._machine, "rows": rows}, indent=1)
            Path(self._path).write_text(text + "\n")


def main() -> None:
    """Measure what the flags ask for."""
    args = _parse()
    cells = _cells(args)
    prompts = _prompts(args, max(_num_waves(cell, args) * cell.concurrency for cell in cells))
    report = Report(args.output)
    for name in args.drafts.split(","):
        algorithm, _, directory = name.partition("=")
        if args.server:
            asyncio.run(_measure(args.server, algorithm, cells, prompts, args, report))
            break
        given = {
            "target_model": args.target_model,
            "draft_model": directory or "demo",
            "algorithm": algorithm,
            "device": args.device,
            "target_gpus": args.target_gpus,
            "draft_gpus": args.draft_gpus,
            "dtype": args.dtype,
            "draft_dtype": args.dtype,
            "page_size": args.page_size,
            "port": 0,
        }
        # A benchmark wants every tree: no round may give up on a slow machine.
        orchestrator = OrchestratorConfig(draft_timeout_ms=60_000, draft_open_timeout_ms=60_000)
        config = stack_config(given, orchestrator=orchestrator)
        with Stack(config, on_log=_log) as stack:
            asyncio.run(_measure(stack.address, algorithm, cells, prompts, args, report))
    _print(report.rows)
    if any(row.identical < 1 for row in report.rows):
        sys.exit("speculation changed an output: that is a bug")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafts", default="eagle3,standalone", help="ALGORITHM[=DIR], ...")
    parser.add_argument("--target-model", default="demo")
    parser.add_argument("--server", default="", help="HOST:PORT of a running one; start none")
    parser.add_argument("--shapes", default=SHAPES, help="num_steps/topk/num_draft_tokens, ...")
    parser.add_argument("--temperatures", default="0", help="comma-separated")
    parser.add_argument("--concurrency", default="1", help="requests at a time, comma-separated")
    parser.add_argument(
        "--cells",
        default="",
        help="SHAPE@CONCURRENCY[@TEMPERATURE], ... in this order instead of all combinations; "
        "plain before the shapes to compare with it",
    )
    parser.add_argument("--num-prompts", type=int, default=16, help="per line, at least")
    parser.add_argument("--waves", type=int, default=1, help="per line, at least")
    parser.add_argument("--prompt-len", type=int, default=0, help="tokens; 0 = texts as they are")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--target-gpus", default="")
    parser.add_argument("--draft-gpus", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", default="", help="file to write, JSON")
    return parser.parse_args()


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.cells:
        parts = [text.split("@") for text in args.cells.split(",")]
        return [
            Cell(shape=shape, concurrency=int(count), temperature=float(rest[0] if rest else 0))
            for shape, count, *rest in parts
        ]
    return [
        Cell(shape=shape, concurrency=concurrency, temperature=temperature)
        for concurrency in map(int, args.concurrency.split(","))
        for temperature in map(float, args.temperatures.split(","))
        for shape in ("plain", *args.shapes.split(","))
    ]


def _num_waves(cell: Cell, args: argparse.Namespace) -> int:
    return max(args.waves, -(-args.num_prompts // cell.concurrency))


def _prompts(args: argparse.Namespace, count: int) -> list[Prompt]:
    """Return held-out texts, or pieces of one length cut from them; as many as there are."""
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()]
    if not args.prompt_len:
        return texts[:count]
    directory = resolve_model(args.target_model, "target")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = [token for text in texts for token in tokenizer.encode(text).ids]
    starts = [i * args.prompt_len % (len(tokens) - args.prompt_len) for i in range(count)]
    return [tuple(tokens[start : start + args.prompt_len]) for start in starts]


async def _measure(
    address: str,
    draft: str,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    report: Report,
) -> None:
    first: dict[tuple[float, int], tuple[int, ...]] = {}  # outputs
    async with TimedClient(address) as client:
        for cell in cells:
            keywords = _keywords(cell.shape, cell.temperature)
            lengths = [WARM_UP_TOKENS + WARM_UP_SPREAD * i for i in range(cell.concurrency)]
            await _wave(client, prompts, lengths, keywords)
            waves, seconds, num_same = [], 0.0, 0
            for wave in range(_num_waves(cell, args)):
                begin = wave * cell.concurrency
                indices = [i % len(prompts) for i in range(begin, begin + cell.concurrency)]
                started = time.perf_counter()
                results = await _wave(
                    client,
                    [prompts[i] for i in indices],
                    [args.max_new_tokens] * cell.concurrency,
                    keywords,
                )
                seconds += time.perf_counter() - started
                waves.append(results)
                num_same += sum(
                    first.setdefault((cell.temperature, i), result.token_ids) == result.token_ids
                    for i, result in zip(indices, results, strict=True)
                )
            report.add(_row(draft, cell, waves, seconds, num_same))


def _keywords(shape: str, temperature: float) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "ignore_eos": True,
        "temperature": temperature,
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


async def _wave(
    client: TimedClient,
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    keywords: dict[str, Any],
) -> list[RequestResult]:
    """Send a request for each of `lengths` at once, of the prompts in turn."""

    def one(prompt: Prompt, length: int) -> Any:
        arrival = Arrival(at_s=0.0, prompt=prompt, max_new_tokens=length, seed=SEED)
        return client.run(arrival.request(keywords))

    pairs = zip(itertools.cycle(prompts), lengths, strict=False)
    return list(await asyncio.gather(*(one(*pair) for pair in pairs)))


def _row(
    draft: str,
    cell: Cell,
    waves: Sequence[Sequence[RequestResult]],
    seconds: float,
    num_same: int,
) -> Row:
    requests = list(itertools.chain(*waves))
    stats = [request.finish.speculation for request in requests]
    timings = [request.finish.timings for request in requests]
    is_plain = cell.shape == "plain"
    num_root_only = 0 if is_plain else sum(stat.num_root_only_rounds for stat in stats)
    return Row(
        draft="none" if is_plain else draft,
        shape=cell.shape,
        temperature=cell.temperature,
        concurrency=cell.concurrency,
        num_requests=len(requests),
        tokens_per_second=round(sum(len(r.token_ids) for r in requests) / seconds, 1),
        decode_tokens_per_second=decode_rate(waves),
        first_token_ms=_mean([1e3 * request.time_to_first_token_s for request in requests]),
        round_ms=_mean([_round_ms(request) for request in requests]),
        accept_length=_accept_length(stats),
        identical=num_same / len(requests),
        root_only_rounds=num_root_only,
        draft_wait_ms=_mean([each.mean_draft_wait_ms for each in timings]),
        verify_ms=_mean([each.mean_verify_ms for each in timings]),
    )


def _accept_length(stats: Sequence[SpeculationStats]) -> float:
    num_accepted = sum(stat.num_accepted_drafts for stat in stats)
    return round(1 + num_accepted / sum(stat.num_rounds for stat in stats), 3)


def decode_rate(waves: Sequence[Sequence[RequestResult]]) -> float:
    """Return tokens per second while all requests of a wave were decoding; 0 if they never were.

    Args:
        waves: Requests of each were sent at the same time.
    """
    num_tokens, seconds = 0, 0.0
    for wave in waves:
        begin = max(request.arrivals[0][0] for request in wave)
        end = min(request.arrivals[-1][0] for request in wave)
        seconds += max(0.0, end - begin)
        arrivals = itertools.chain(*(request.arrivals for request in wave))
        num_tokens += sum(count for at, count in arrivals if begin < at <= end)
    return round(num_tokens / seconds, 1) if seconds else 0.0


def _round_ms(request: RequestResult) -> float:
    decoding_s = request.time_to_last_token_s - request.time_to_first_token_s
    return 1e3 * decoding_s / max(1, request.finish.speculation.num_rounds)


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
