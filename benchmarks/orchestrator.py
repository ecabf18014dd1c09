"""How many tokens a second the orchestrator streams, and what a path and a delta cost it.

    python -m benchmarks.orchestrator --streams 1,16,64,256 --modes plain,peer --output FILE

A target without a model answers paths once per --step-ms, clients run in processes of their own;
everything speaks gRPC over the loopback interface. 256 streams in steps of 6.4 ms are 40,000 paths
a second. Clients check that no token is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fake_workers import run_fake_workers
from benchmarks.machine import describe_machine
from coppice.health import HealthProbe
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.config import OrchestratorConfig
from shared.rpc.channel import open_channel
from shared.rpc.health_names import ORCHESTRATOR_SERVICE

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_TIMEOUT_S = 60.0
_TOKENS, _DELTAS, _STREAMS, _WRONG = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured: one cell of the table."""

    mode: str
    num_streams: int
    num_workers: int
    num_clients: int
    path_len: int
    step_ms: float
    with_text: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What was measured; CPU time is that of all processes of the orchestrator."""

    tokens_per_s: float
    paths_per_s: float
    deltas_per_s: float
    cpu_share: float
    cpu_us_per_path: float
    cpu_us_per_delta: float
    cpu_us_per_token: float


def run_orchestrator(config: OrchestratorConfig) -> None:
    """Serve until killed."""
    from orchestrator.server import main

    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(config))


def run_client(address: str, num_streams: int, with_text: bool, counts: Any) -> None:  # noqa: FBT001
    """Read streams for ever.

    Args:
        counts: Of this process: tokens, messages with tokens, streams that have begun, messages
            that did not go on where the one before ended.
    """

    async def read_one(stub: Any) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=range(1, 17)),
            stopping=pb.StoppingCriteria(max_new_tokens=1 << 23, ignore_eos=True),
            output=pb.OutputOptions(omit_text=not with_text),
        )
        num_tokens = 0
        async for response in stub.Generate(request):
            delta = response.delta
            if delta.token_ids:
                counts[_WRONG] += delta.token_offset != num_tokens
                num_tokens += len(delta.token_ids)
                counts[_TOKENS] += len(delta.token_ids)
                counts[_DELTAS] += 1
            counts[_STREAMS] += response.HasField("prompt_info")

    async def read_all() -> None:
        async with open_channel(address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            await asyncio.gather(*(read_one(stub) for _ in range(num_streams)))

    asyncio.run(read_all())


def measure(load: Load, *, warm_up_s: float, duration_s: float) -> Cost:
    """Run one load in processes of its own."""
    has_drafts = load.mode == "peer"
    ports = _free_ports(3)
    with contextlib.ExitStack() as stack:
        config = OrchestratorConfig(
            host="127.0.0.1",
            port=ports[0],
            targets=f"127.0.0.1:{ports[1]}",
            drafts=f"127.0.0.1:{ports[2]}" if has_drafts else "",
            max_num_requests=max(256, load.num_streams),
            workers=load.num_workers,
        )
        step_s = load.step_ms / 1e3
        workers = ports[1 : 2 + has_drafts]
        _spawn(stack, run_fake_workers, workers, load.path_len, step_s, load.num_streams)
        server = _spawn(stack, run_orchestrator, config)
        _wait_ready(f"127.0.0.1:{ports[0]}")
        shared = _start_clients(stack, load, ports[0])
        _wait_streaming(shared, load.num_streams)
        time.sleep(warm_up_s)
        before, cpu_before = _sums(shared), _cpu_s(server)
        began = time.perf_counter()
        time.sleep(duration_s)
        after, cpu_after = _sums(shared), _cpu_s(server)
        took_s = time.perf_counter() - began
    if any(counts[_WRONG] for counts in shared):
        raise AssertionError("tokens are missing or out of order")
    tokens, deltas = after[_TOKENS] - before[_TOKENS], after[_DELTAS] - before[_DELTAS]
    paths = tokens / (load.path_len if has_drafts else 1)
    cpu_us = (cpu_after - cpu_before) * 1e6
    return Cost(
        tokens_per_s=tokens / took_s,
        paths_per_s=paths / took_s,
        deltas_per_s=deltas / took_s,
        cpu_share=(cpu_after - cpu_before) / took_s,
        cpu_us_per_path=cpu_us / max(1, paths),
        cpu_us_per_delta=cpu_us / max(1, deltas),
        cpu_us_per_token=cpu_us / max(1, tokens),
    )


def _start_clients(stack: contextlib.ExitStack, load: Load, port: int) -> list[Any]:
    """Spread the streams over client processes; return their counters."""
    num_clients = min(load.num_clients, load.num_streams)
    shares = [len(range(i, load.num_streams, num_clients)) for i in range(num_clients)]
    shared = [multiprocessing.get_context("spawn").RawArray(c_int64, 4) for _ in shares]
    for share, counts in zip(shares, shared, strict=True):
        _spawn(stack, run_client, f"127.0.0.1:{port}", share, load.with_text, counts)
    return shared


def _spawn(stack: contextlib.ExitStack, function: Any, *arguments: Any) -> int:
    """Start a process that is ended with the stack; return its id."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate if function is run_orchestrator else process.kill)
    assert process.pid is not None
    return process.pid


def _wait_ready(address: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with HealthProbe(address) as probe:
        while probe.status(ORCHESTRATOR_SERVICE) != "SERVING":
            if time.monotonic() > deadline:
                raise TimeoutError("the orchestrator does not become ready")
            time.sleep(0.1)


def _wait_streaming(shared: Sequence[Any], num_streams: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while sum(counts[_STREAMS] for counts in shared) < num_streams:
        if time.monotonic() > deadline:
            raise TimeoutError("a stream has not begun")
        time.sleep(0.1)


def _sums(shared: Sequence[Any]) -> tuple[int, int]:
    return sum(c[_TOKENS] for c in shared), sum(c[_DELTAS] for c in shared)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its children, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return own + sum(_cpu_s(int(child)) for child in children.read_text().split())


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for reserved in sockets:
            reserved.bind(("127.0.0.1", 0))
        return [reserved.getsockname()[1] for reserved in sockets]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default="1,16,64,256", help="streams at once, a list")
    parser.add_argument("--modes", default="plain,peer", help="plain (1 token a path), peer")
    parser.add_argument("--workers", type=int, default=1, help="processes of the orchestrator")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--path-len", type=int, default=3, help="tokens of a path in peer mode")
    parser.add_argument(
        "--step-ms", type=float, default=6.4, help="time of a target's step; 0 = flat out"
    )
    parser.add_argument("--text", action="store_true", help="detokenize, too")
    parser.add_argument("--warm-up-s", type=float, default=1.0)
    parser.add_argument("--duration-s", type=float, default=4.0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def main() -> None:
    """Print a row per load, and write them as JSON if asked to."""
    arguments = _parser().parse_args()
    rows = []
    print("| mode | streams | tokens/s | messages/s | CPU | us per path | per message |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    for mode in arguments.modes.split(","):
        for num_streams in map(int, arguments.streams.split(",")):
            load = Load(
                mode=mode,
                num_streams=num_streams,
                num_workers=arguments.workers,
                num_clients=arguments.clients,
                path_len=arguments.path_len,
                step_ms=arguments.step_ms,
                with_text=arguments.text,
            )
            cost = measure(load, warm_up_s=arguments.warm_up_s, duration_s=arguments.duration_s)
            rows.append(asdict(load) | asdict(cost) | {"is_right": True})
            print(  # noqa: T201
                f"| {mode} | {num_streams} | {cost.tokens_per_s:.0f} | {cost.deltas_per_s:.0f} "
                f"| {cost.cpu_share:.2f} | {cost.cpu_us_per_path:.1f} "
                f"| {cost.cpu_us_per_delta:.1f} |",
                flush=True,
            )
    if arguments.output:
        result = {**describe_machine(), "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
