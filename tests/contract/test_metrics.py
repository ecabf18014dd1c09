"""/metrics of an orchestrator and of workers, over real sockets; engines are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from coppice import (
    AsyncClient,
    DeadlineExceededError,
    InvalidArgumentError,
    TokenDelta,
    UnavailableError,
)
from shared.errors import ConfigError
from shared.metrics.catalog import METRICS, metric_of
from tests.contract.serving import freed, serving, write_model
from tests.contract.test_slow_readers import small_server, unread
from tests.fakes import eventually, fake_draft, fake_target
from tests.scrape import Scrape, free_ports, scrape

pytestmark = pytest.mark.asyncio

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def read(url: str) -> Scrape:
    return await asyncio.to_thread(scrape, url)


async def test_requests_are_counted_by_how_they_end(model: Path) -> None:
    port = free_ports(1)
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft], metrics_port=port) as server,
        AsyncClient(server.address, max_retries=0) as client,
    ):
        url = f"http://127.0.0.1:{port}/metrics"
        before = await read(url)
        assert before.value("coppice_ready") == 1
        assert before.value("coppice_workers", state="available") == 2
        assert before.value("coppice_requests_total") == 0
        long: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 4000}
        completions = [
            await client.generate(token_ids=PROMPT, max_new_tokens=count) for count in (1, 7, 40)
        ]
        num_late, has_output = 0, False
        while not has_output:  # it may begin later than that
            num_late += 1
            with pytest.raises(DeadlineExceededError):
                async for event in client.stream(**long, timeout_s=2.0):
                    has_output = has_output or isinstance(event, TokenDelta)
        await freed(target, draft)
        seen = await read(url)
        assert seen.value("coppice_requests_running") == 0
        assert seen.value("coppice_generation_tokens_total") > 48, "of the one that was cut, too"
        task = asyncio.create_task(client.generate(**long))
        await eventually(lambda: bool(draft.engine.requests))
        assert (await read(url)).value("coppice_requests_running") == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(InvalidArgumentError):
            await client.generate(token_ids=PROMPT, temperature=-1.0)
        await freed(target, draft)
        seen = await read(url)
    for code, reason, count in (
        ("OK", "length", 3),
        ("DEADLINE_EXCEEDED", "", num_late),
        ("CANCELLED", "", 1),
        ("INVALID_ARGUMENT", "", 1),
    ):
        labels = {"code": code, "finish_reason": reason}
        assert seen.value("coppice_requests_total", **labels) == count, labels
    assert seen.value("coppice_requests_total") == 5 + num_late
    assert seen.value("coppice_refusals_total", reason="INVALID_ARGUMENT") == 1
    assert seen.value("coppice_refusals_total") == 1
    for name in ("time_to_first_token", "request_duration", "request_queue", "request_prefill"):
        assert seen.value(f"coppice_{name}_seconds_count") == 3
    total_s = sum(completion.timings.total_ms for completion in completions) / 1e3
    assert seen.value("coppice_request_duration_seconds_sum") == pytest.approx(total_s)
    num_admitted = 4 + num_late
    assert seen.value("coppice_prompt_tokens_total") == num_admitted * len(PROMPT)
    assert seen.value("coppice_accept_length_count") == 2, "the first one had no rounds"


async def test_who_never_reads_the_end_has_not_finished(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text may be generated: how a request ends is decided by its client."""
    caplog.set_level(logging.INFO)
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}/metrics"
    async with (
        small_server(model, read_timeout_s=3.0, metrics_port=port) as (server, _),
        unread(server.address, 2, 400),
    ):
        async with asyncio.timeout(60):
            while (await read(url)).value("coppice_requests_total") < 2:
                await asyncio.sleep(0.05)
        seen = await read(url)
    assert seen.value("coppice_requests_total", code="UNAVAILABLE") == 2
    assert seen.value("coppice_generation_tokens_total") > 400
    assert seen.value("coppice_refusals_total") == 0
    ends = [r for r in caplog.records if getattr(r, "event", "") == "request_end"]
    assert [getattr(record, "reason", "") for record in ends] == ["SLOW_READER"] * 2


async def test_counts_of_speculation_are_those_of_finish_info(model: Path) -> None:
    """Rounds by depth, trees and why there was none; live, and once the requests have ended."""
    port = free_ports(1)
    async with (
        fake_target(step_s=0.01) as target,
        fake_draft() as draft,
        serving(model, [target], [draft], metrics_port=port) as server,
        AsyncClient(server.address) as client,
    ):
        asked: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 60}
        stats = [(await client.generate(**asked, seed=3, speculation=False)).speculation]
        # Trees come in time or not, which is up to the machine.
        while len(stats) < 3 or not any(each.num_accepted_drafts for each in stats):
            done = await client.generate(**asked, seed=len(stats), speculation=True)
            stats.append(done.speculation)
        seen = await read(f"http://127.0.0.1:{port}/metrics")

    def total(field: str) -> int:
        return sum(getattr(each, field) for each in stats)

    assert seen.value("coppice_rounds_total") == total("num_rounds")
    assert seen.value("coppice_draft_tokens_total") == total("num_draft_tokens")
    assert seen.value("coppice_accepted_tokens_total") == total("num_accepted_drafts")
    assert seen.value("coppice_moved_rounds_total") == total("num_moved_rounds")
    assert seen.value("coppice_root_only_rounds_total") == total("num_root_only_rounds")
    assert seen.value("coppice_root_only_rounds_total", reason="off") == stats[0].num_rounds
    per_depth = "coppice_accepted_tokens_per_depth_total"
    assert seen.value(per_depth) == total("num_accepted_drafts")
    for depth in (1, 2, 3):
        at_depth = sum(sum(each.accept_length_histogram[depth:]) for each in stats)
        assert seen.value(per_depth, depth=str(depth)) == at_depth
    assert seen.value("coppice_inter_token_latency_seconds_count") == len(stats) * 59


async def test_workers_say_what_they_hold_and_what_their_engines_count(model: Path) -> None:
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{ports + i}/metrics" for i in range(3)]
    async with (
        fake_target(step_s=0.005, metrics_port=ports + 1) as target,
        fake_draft(metrics_port=ports + 2) as draft,
        serving(model, [target], [draft], metrics_port=ports) as server,
        AsyncClient(server.address) as client,
    ):
        task = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4000))
        await eventually(lambda: bool(target.engine.requests and draft.engine.requests))
        async with asyncio.timeout(60):  # a front's counts are as old as its engine's last report
            for url in urls[1:]:
                while not _is_busy(await read(url)):
                    await asyncio.sleep(0.05)
        orchestrator, on_target, on_draft = [await read(url) for url in urls]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for seen, role in ((orchestrator, "orchestrator"), (on_target, "target"), (on_draft, "draft")):
        ours = [sample for sample in seen.samples if sample[0].startswith("coppice_")]
        own = [s for s in ours if not s[0].startswith("coppice_engine_process_")]
        assert {labels["role"] for _, labels, _ in own} == {role}
        for name, labels, _ in own:
            metric = metric_of(name)
            assert role in metric.roles, name
            assert set(labels) - {"role", "le"} == set(metric.labels), name
        for family in seen.families.values():
            if family.name.startswith("coppice_") and "_process_" not in family.name:
                total = family.name + "_total"
                assert family.type == METRICS[total if total in METRICS else family.name].kind
        assert "process_resident_memory_bytes" in seen.names
    for seen in (on_target, on_draft):
        assert seen.value("coppice_ready") == seen.value("coppice_sessions") == 1
        assert seen.value("coppice_requests_running") == 1
        pages = [seen.value("coppice_kv_pages", state=state) for state in ("free", "used")]
        assert pages == [999, 1]
        assert seen.value("coppice_engine_steps_total") > 0
        assert "coppice_retractions_total" in seen.names, "what only the engine counts"
    assert on_target.value("coppice_worker_info", incarnation="fake-target", kind="target") == 1


def _is_busy(seen: Scrape) -> bool:
    has_page = seen.value("coppice_kv_pages", state="used") == 1
    return has_page and seen.value("coppice_engine_steps_total") > 0


async def test_a_port_that_is_taken_is_said_before_anything_is_served(model: Path) -> None:
    async with fake_target() as target:
        port = free_ports(1)
        async with serving(model, [target], metrics_port=port):
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*--metrics-port"):
                async with serving(model, [target], metrics_port=port, waits=False):
                    pass
            with pytest.raises(ConfigError, match="--metrics-port"):
                async with fake_draft(metrics_port=port):
                    pass


async def test_http_that_is_no_scrape_is_answered_or_ended(model: Path) -> None:
    async def ask(port: int, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionResetError):
                return await reader.read()
            return b""
        finally:
            writer.close()

    port = free_ports(1)
    async with fake_target(metrics_port=port):
        assert (await ask(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await ask(port, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert await ask(port, b"\x16\x03\x01" + b"x" * 20_000) == b""
        head, _, body = (await ask(port, b"HEAD /metrics HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and not body
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n"
        answer = await ask(port, b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n")
        assert b"application/openmetrics-text" in answer and answer.endswith(b"# EOF\n")
        for _, writer in idle:
            writer.close()


async def test_a_server_without_workers_says_so(model: Path) -> None:
    port = free_ports(1)
    async with (
        serving(model, ["127.0.0.1:1"], waits=False, metrics_port=port) as server,
        AsyncClient(server.address, max_retries=0) as client,
    ):
        with pytest.raises(UnavailableError):
            await client.generate(token_ids=PROMPT)
        seen = await read(f"http://127.0.0.1:{port}/metrics")
    assert seen.value("coppice_ready") == seen.value("coppice_workers") == 0
    assert seen.value("coppice_refusals_total", reason="NO_TARGET") == 1
    assert seen.value("coppice_requests_total", code="UNAVAILABLE") == 1
