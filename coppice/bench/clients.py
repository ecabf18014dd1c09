"""Processes that send requests, so that measuring takes no time from what is measured.

Each is an asyncio client with connections of its own. Arrivals are dealt to them in turn; they
begin together, at a time of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from coppice.bench.request import RequestResult, TimedClient
from coppice.credentials import NO_CREDENTIALS, Credentials
from shared.errors import CoppiceError, InternalError
from shared.messages import RequestFailure
from shared.rpc.status import failure_of

Outcome = RequestResult | RequestFailure
HEAD_START_S = 0.05
"""From the order to begin until the first arrival: the order has reached all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """What a client process sends, and when.

    Args:
        at_s: Seconds from the beginning of the run.
        request: A GenerateRequest, serialized.
    """

    at_s: float
    request: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run as the client processes saw it.

    Args:
        outcomes: In the order of what was sent.
        lateness_s: How much later than planned each was sent.
        elapsed_s: From the beginning to the end of the last request.
        cpu_shares: Of each process: CPU seconds per second of the run.
    """

    outcomes: Sequence[Outcome]
    lateness_s: Sequence[float]
    elapsed_s: float
    cpu_shares: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one process did of a run; `ended_s` by the monotonic clock."""

    outcomes: list[Outcome]
    lateness_s: list[float]
    ended_s: float
    cpu_s: float


def default_num_processes() -> int:
    """Return a quarter of the cores; a server on the same machine needs the others."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


class ClientProcesses:
    """Client processes that stay for several runs.

    Args:
        address: HOST:PORT of the orchestrator.
        num_processes: How many.
        num_connections: Of each; a server of several processes gets a share of the connections.
        credentials: What they show to the server.
    """

    def __init__(
        self,
        address: str,
        num_processes: int,
        *,
        num_connections: int = 1,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self._connections: list[Connection] = []
        self._processes = []
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, address, num_connections, credentials)
            process = context.Process(
                target=_serve, args=arguments, name=f"client-{index}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def play(self, sends: Sequence[Send]) -> Played:
        """Send everything at its time and wait until all has ended.

        Args:
            sends: In the order of their times.
        Raises: InternalError if a process ended.
        """
        count = len(self._connections)
        try:
            for index, connection in enumerate(self._connections):
                connection.send(sends[index::count])
            for connection in self._connections:
                connection.recv()  # it holds its share
            begin_s = time.monotonic() + HEAD_START_S
            for connection in self._connections:
                connection.send(begin_s)
            shares: list[_Share] = [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionError) as error:
            raise InternalError("a client process of the benchmark ended; nothing to show") from (
                error
            )
        elapsed_s = max(share.ended_s for share in shares) - begin_s
        dealt = [(shares[index % count], index // count) for index in range(len(sends))]
        return Played(
            outcomes=[share.outcomes[place] for share, place in dealt],
            lateness_s=[share.lateness_s[place] for share, place in dealt],
            elapsed_s=elapsed_s,
            cpu_shares=[share.cpu_s / elapsed_s for share in shares],
        )

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
            connection.close()
        for process in self._processes:
            if error_type is not None:  # it may be in the middle of a run
                process.terminate()
            process.join()


def _serve(
    connection: Connection, address: str, num_connections: int, credentials: Credentials
) -> None:
    """Be a client process until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter hears it and ends us
    with contextlib.suppress(EOFError, ConnectionError):
        asyncio.run(_take_orders(connection, address, num_connections, credentials))


async def _take_orders(
    connection: Connection, address: str, num_connections: int, credentials: Credentials
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(TimedClient(address, credentials=credentials))
            for _ in range(num_connections)
        ]
        while (sends := await asyncio.to_thread(connection.recv)) is not None:
            connection.send(None)
            begin_s = await asyncio.to_thread(connection.recv)
            connection.send(await _play(clients, sends, begin_s))


async def _play(clients: Sequence[TimedClient], sends: Sequence[Send], begin_s: float) -> _Share:
    gc.collect()
    gc.disable()  # a collection would be a gap that the server did not make
    cpu_s = time.process_time()
    tasks = []
    for client, send in zip(itertools.cycle(clients), sends, strict=False):
        due_s = begin_s + send.at_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(_run(client, send.request, due_s)))
    ended = await asyncio.gather(*tasks)
    share = _Share(
        outcomes=[outcome for outcome, _ in ended],
        lateness_s=[lateness_s for _, lateness_s in ended],
        ended_s=time.monotonic(),
        cpu_s=time.process_time() - cpu_s,
    )
    gc.enable()
    return share


async def _run(client: TimedClient, request: bytes, due_s: float) -> tuple[Outcome, float]:
    """Return what became of a request, and how late it was sent."""
    lateness_s = time.monotonic() - due_s
    try:
        return await client.run(request), lateness_s
    except CoppiceError as error:
        return failure_of(error), lateness_s
