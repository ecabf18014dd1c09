"""Connections that do nothing, or read nothing: each ends by itself, and takes nobody's place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coppice.gateway import server as gateway_server
from coppice.gateway.connections import ConnectionLimits
from coppice.gateway.proxies import TrustedProxies
from coppice.gateway.server import GatewayServer
from shared.config import GatewayConfig
from shared.errors import ConfigError
from tests.contract.serving import freed, write_model
from tests.contract.test_gateway import Front, gateway, one
from tests.fakes import eventually

pytestmark = pytest.mark.asyncio

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the server closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), timeout=30.0)
    except ConnectionError:
        return b""


@contextlib.asynccontextmanager
async def listening(**fields: Any) -> AsyncIterator[Front]:
    """Serve HTTP in front of nobody."""
    async with gateway("127.0.0.1:1", waits=False, **fields) as front:
        socket.create_connection(("127.0.0.1", front.port)).close()  # at once, before it accepts
        yield front


@pytest.mark.parametrize("said", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\nx: "])
async def test_a_head_that_does_not_come_is_not_waited_for(said: bytes) -> None:
    async with listening(read_timeout_s=1.0) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(said)
        assert await ended(reader) == b""
        writer.close()


@pytest.mark.parametrize("rest", [b"GET /hea", b"x"])
async def test_the_next_head_is_not_waited_for_either(rest: bytes) -> None:
    """Nor the rest of a body that nobody reads any more."""
    body = b"content-length: 100\r\n" if rest == b"x" else b""
    async with listening(read_timeout_s=1.0) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + body + b"\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 503")
        writer.write(rest)
        assert await ended(reader) == b""
        writer.close()


async def test_a_head_that_trickles_is_not_waited_for() -> None:
    async with listening(read_timeout_s=1.0) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /health HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert await ended(reader) == b""
        trickling.cancel()
        writer.close()


async def test_an_address_has_half_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "_MAX_CONNECTIONS", 6)
    async with listening(max_num_requests=2) as front:
        held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(4)]
        refused, writer = await asyncio.open_connection("127.0.0.1", front.port)
        assert await ended(refused) == b""
        writer.close()
        for _, other in held:
            other.close()

        async def answer() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            try:
                return await ended(reader)
            finally:
                writer.close()

        async with asyncio.timeout(30):  # the places come back
            while not (await answer()).startswith(b"HTTP/1.1 503"):
                await asyncio.sleep(0.01)


async def test_files_that_a_process_may_open_are_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1024, 704), (100, 50), (1 << 20, 5000), (-1, 5000)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        limits = ConnectionLimits.of(5000, read_timeout_s=1.0, proxies=TrustedProxies(""))
        assert limits.connections == most


async def test_a_proxy_may_have_all_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "_MAX_CONNECTIONS", 6)
    async with listening(max_num_requests=2, trusted_proxies="127.0.0.0/8") as front:
        held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(7)]
        reader, writer = held[-1]
        writer.write(b"GET /v1/none HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await ended(reader)).startswith(b"HTTP/1.1 404")
        for _, other in held:
            other.close()


async def test_clients_behind_a_proxy_are_told_apart(model: Path) -> None:
    """By what a trusted proxy says last; what its clients say before that counts for nothing."""
    asked = {"model": model.name, "prompt": [3, 1, 4], "max_tokens": 3000, "stream": True}

    async def statuses(front: Front, *clients: str) -> list[int]:
        """Return the status of each request while all before it are answered."""
        async with contextlib.AsyncExitStack() as running:
            found = []
            for client in clients:
                headers = {"x-forwarded-for": client} if client else {}
                call = front.http.stream("POST", "/v1/completions", json=asked, headers=headers)
                found.append((await running.enter_async_context(call)).status_code)
            return found

    one_client = ("10.0.0.1", "10.9.9.9, 10.0.0.1", "10.0.0.1:80", "10.0.0.2", "")
    for proxies, expected in (
        ("127.0.0.1", [200, 200, 429, 200, 200]),
        ("10.0.0.1", [200, 200, 429, 429, 429]),
    ):
        fields: dict[str, Any] = {"step_s": 0.01, "max_num_requests": 5}
        async with one(model, trusted_proxies=proxies, **fields) as (front, _, target, draft):
            assert await statuses(front, *one_client) == expected
            await freed(target, draft)


@pytest.mark.parametrize(
    ("text", "trusted", "others"),
    [
        ("", [], ["127.0.0.1", "::1", "", "testclient"]),
        ("10.0.0.7", ["10.0.0.7", "::ffff:10.0.0.7"], ["10.0.0.8", "::ffff:10.0.0.8", "x"]),
        ("10.1.2.3/8, fd00::/8", ["10.255.0.1", "::ffff:10.0.0.1", "fd00::1"], ["11.0.0.1", "::1"]),
    ],
)
async def test_proxies_are_named_by_networks(
    text: str, trusted: list[str], others: list[str]
) -> None:
    proxies = TrustedProxies(text)
    assert [name for name in (*trusted, *others) if name in proxies] == trusted


@pytest.mark.parametrize("text", ["*", "proxy.example", "10.0.0.1/33"])
async def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxies has .*no network"):
        GatewayServer(GatewayConfig(orchestrators="a:1", trusted_proxies=text))


async def narrow(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection that takes little without being read."""
    bare = socket.socket()
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    bare.connect(("127.0.0.1", port))
    return await asyncio.open_connection(sock=bare, limit=1024)


def takes_little(connection: Any) -> None:
    """Let the kernel keep little of what a connection of the gateway sends."""
    sending = connection.transport.get_extra_info("socket")
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


async def ask_and_read_nothing(front: Any, model: Path, target: Any, **options: Any) -> Any:
    """Ask for a long answer; return what was written to, its connection, and all of them."""
    asked = {"model": model.name, "prompt": [3, 1, 4], "ignore_eos": True, "logprobs": 20}
    body = json.dumps({**asked, **options}).encode()
    _, writer = await narrow(front.port)
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    connections = front.server._http.server_state.connections
    await eventually(lambda: bool(target.engine.requests), what="a request")
    held = next(iter(connections))
    takes_little(held)
    return writer, held, connections


async def test_a_whole_answer_that_is_not_read_holds_no_connection(model: Path) -> None:
    async with one(model, step_s=0.001, read_timeout_s=0.5) as (front, _, target, draft):
        writer, held, connections = await ask_and_read_nothing(front, model, target, max_tokens=500)
        await freed(target, draft)
        await eventually(lambda: held not in connections, what="the end of its connection")
        writer.close()


async def test_requests_that_follow_closely_are_all_answered() -> None:
    async with listening() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        asked = b"GET /health HTTP/1.1\r\nhost: x\r\n"
        writer.write(20 * (asked + b"\r\n") + asked + b"connection: close\r\n\r\n")
        assert (await ended(reader)).count(b'{"status":"not ready"}') == 21
        writer.close()


async def test_who_reads_nothing_is_cut_whatever_it_sends(model: Path) -> None:
    async with one(model, read_timeout_s=0.3) as (front, _, target, draft):
        options = {"max_tokens": 3500, "n": 4, "stream": True}
        writer, held, connections = await ask_and_read_nothing(front, model, target, **options)
        await eventually(lambda: held.flow.write_paused, what="an answer that waits")
        writer.write(b"GET /health")
        await freed(target, draft)
        await eventually(lambda: held not in connections, what="the end of its connection")
        writer.close()
