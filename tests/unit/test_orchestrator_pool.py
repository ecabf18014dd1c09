"""Who serves whom: load, priority, sessions, room, and which workers belong together."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from orchestrator.endpoints import Endpoint, WorkerEndpoints, parse_endpoints
from orchestrator.pairing import ModelIdentity, pair_problem
from orchestrator.pool import Need, WorkerPool
from orchestrator.siblings import MAX_WORKERS
from orchestrator.workers import TARGET, WorkerLost, WorkerSession
from shared.access.caller import NOBODY
from shared.errors import ConfigError, UnavailableError
from shared.grammar.compiler import MAX_COMPILED_BYTES
from shared.messages import FeatureSpec, WorkerInfo, WorkerLoad
from shared.messages.batches import Batch
from shared.rpc.channel import MAX_INTERNAL_MESSAGE_BYTES
from tests.contract.driver import target_open
from tests.fakes.in_memory import virtual
from tests.siblings import some_siblings

TARGET_INFO = WorkerInfo(
    incarnation="t",
    model="m",
    model_hash="hash",
    tokenizer_hash="tokens",
    vocab_size=512,
    max_context_len=1000,
    page_size=16,
    dtype="float32",
    device="cuda:0",
    features=FeatureSpec(layer_ids=(1, 2, 3), width=96, dtype="float32"),
    kind="target",
)
DRAFT_INFO = dataclasses.replace(
    TARGET_INFO,
    incarnation="d",
    dtype="float16",
    kind="eagle3",
    features=FeatureSpec(layer_ids=(1, 2, 3), width=96),
)


class Listener:
    """A request that only takes replies."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.waits_since: float | None = None

    def receive(self, message: Any) -> None:
        self.heard.append(message)


def target(name: str, **fields: Any) -> WorkerSession:
    load = fields.pop("load", WorkerLoad(num_free_pages=50, num_pages=100))
    info = dataclasses.replace(TARGET_INFO, incarnation=name, **fields)
    return WorkerSession(address=name, info=info, load=load)


def draft(name: str, **fields: Any) -> WorkerSession:
    load = fields.pop("load", WorkerLoad(num_free_pages=50, num_pages=100))
    return WorkerSession(
        address=name, info=dataclasses.replace(DRAFT_INFO, incarnation=name, **fields), load=load
    )


def need(name: str = "r", **fields: Any) -> Need:
    return Need(**{"request_id": name, "num_tokens": 10, "context_len": 20, **fields})


@virtual
async def test_requests_spread_over_targets_by_load() -> None:
    """Ours count at once; what others put there counts as reported."""
    pool = WorkerPool()
    a, b = target("a"), target("b", load=WorkerLoad(num_running=3))
    assert pool.open_target(a) == pool.open_target(b) == ""
    chosen = [await pool.acquire_target(need(f"r{i}"), patience_s=0) for i in range(8)]
    assert [worker.address for worker in chosen].count("a") == 5
    assert [worker.address for worker in chosen].count("b") == 3


def admit(worker: WorkerSession, names: list[str]) -> None:
    """Let a target admit requests that it was sent, as the end of a step does."""
    worker.last_progress = asyncio.get_running_loop().time()
    for name in names:
        worker.withdraw(name)
    worker.on_load()


async def burst(
    count: int,
) -> tuple[WorkerSession, WorkerSession, list[asyncio.Task[WorkerSession]]]:
    """Return two targets that have been sent as much of a burst as they may, and who waits."""
    pool = WorkerPool()
    a, b = target("a"), target("b")
    assert pool.open_target(a) == pool.open_target(b) == ""
    now = asyncio.get_running_loop().time()
    needs = [need(f"r{i}", arrived_s=now) for i in range(count)]
    tasks = [asyncio.create_task(pool.acquire_target(one, patience_s=60)) for one in needs]
    await asyncio.sleep(0.01)
    assert len(a.opening) == len(b.opening) == 16
    for worker in (a, b):
        for name in worker.opening:
            listener = Listener()
            listener.waits_since = now
            worker.attach(name, listener)
    return a, b, [task for task in tasks if not task.done()]


@virtual
async def test_the_rest_of_a_burst_does_not_go_to_the_target_whose_step_ends_first() -> None:
    a, b, waiting = await burst(40)
    admit(b, list(b.opening))
    await asyncio.sleep(0.03)
    assert len(waiting) == 8 and not any(task.done() for task in waiting)
    admit(a, list(a.opening))
    chosen = [worker.address for worker in await asyncio.gather(*waiting)]
    assert chosen.count("a") == chosen.count("b") == 4


@virtual
async def test_nobody_waits_for_a_target_that_stands_still() -> None:
    _, b, waiting = await burst(40)
    admit(b, list(b.opening))
    began = asyncio.get_running_loop().time()
    assert {worker.address for worker in await asyncio.gather(*waiting)} == {"b"}
    assert asyncio.get_running_loop().time() - began < 0.3


@virtual
async def test_nobody_waits_for_a_target_that_has_stood_still_for_long() -> None:
    a, b, waiting = await burst(32)
    assert not waiting
    admit(b, list(b.opening))
    await asyncio.sleep(1)
    pool = WorkerPool()
    assert pool.open_target(a) == pool.open_target(b) == ""
    b.load = WorkerLoad(num_running=20, num_free_pages=50, num_pages=100)
    began = asyncio.get_running_loop().time()
    assert await pool.acquire_target(need(arrived_s=began), patience_s=60) is b
    assert asyncio.get_running_loop().time() == began


@virtual
async def test_nobody_waits_for_a_target_where_others_wait_for_room() -> None:
    a, b, waiting = await burst(40)
    a.load = WorkerLoad(num_waiting=1, num_free_pages=50, num_pages=100)
    admit(b, list(b.opening))
    await asyncio.sleep(0.01)
    assert all(task.done() for task in waiting)


@virtual
async def test_processes_that_share_a_port_spread_requests_together() -> None:
    """A burst: no worker has reported anything yet. What a process had ends with it."""
    siblings = some_siblings(3)
    pools = [WorkerPool(loads=each.loads) for each in siblings]
    for pool in pools:
        assert pool.open_target(target("a")) == pool.open_target(target("b")) == ""
    chosen = [
        (await pool.acquire_target(need(f"r{i}"), patience_s=0)).address
        for i in range(5)
        for pool in pools
    ]
    assert abs(chosen.count("a") - chosen.count("b")) == 1
    first, second = pools[0].targets
    assert first.num_requests + second.num_requests == 15
    again = target("a2", load=WorkerLoad(num_running=first.num_requests))
    again.address = first.address
    again.share_loads(siblings[0].loads)
    assert again.num_requests == first.num_requests, "what siblings have is in what it reports"
    for each in siblings[1:]:
        each.forget()
    assert first.num_requests + second.num_requests == 5


@virtual
async def test_what_a_sibling_has_just_closed_is_nobodys() -> None:
    """The worker's last report of a batch still counts it, and none follows while it is idle."""
    pools = [WorkerPool(loads=each.loads) for each in some_siblings(2)]
    for pool in pools:
        pool.open_target(target("a"))
        await pool.acquire_target(need("r"), patience_s=0)
    (first,), (second,) = (pool.targets for pool in pools)
    report: Batch[Any] = Batch(messages=[], load=WorkerLoad(num_running=2))
    first.receive(report)
    assert first.num_requests == 2
    second.withdraw("r")
    first.receive(report)
    assert first.num_requests == 1
    first.receive(report)
    assert first.num_requests == 2, "so it is another orchestrator's"


def test_what_processes_have_at_workers_comes_and_goes() -> None:
    own, other = (each.loads for each in some_siblings(2))
    addresses = [f"10.0.0.{i}:50052" for i in range(MAX_WORKERS + 6)]
    for count, address in enumerate(addresses, 1):
        own.note(address, count)
    seen = [other.others(address) for address in addresses]
    assert seen == [*range(1, MAX_WORKERS + 1), *[0] * 6], "more than there are places for"
    assert not any(map(own.others, addresses)), "they are its own"
    for address in addresses[:6]:
        own.note(address, 0)
    for address in addresses[-6:]:
        own.note(address, 9)
    assert [other.others(address) for address in addresses[-6:]] == [9] * 6
    assert not any(map(other.others, addresses[:6]))
    own.forget()
    assert not any(map(other.others, addresses))


@virtual
async def test_ties_go_to_the_emptier_pool() -> None:
    """Equal request counts, more free pages."""
    pool = WorkerPool()
    full, empty = (
        target(name, load=WorkerLoad(num_free_pages=pages, num_pages=100))
        for name, pages in (("full", 10), ("empty", 90))
    )
    pool.open_target(full)
    pool.open_target(empty)
    assert await pool.acquire_target(need(), patience_s=0) is empty


@virtual
async def test_a_session_stays_on_its_target_while_it_can() -> None:
    """Affinity beats load, not availability."""
    pool = WorkerPool()
    a, b = target("a"), target("b")
    pool.open_target(a)
    pool.open_target(b)
    first = await pool.acquire_target(need("r0", session_id="s"), patience_s=0)
    for i in range(1, 5):
        assert await pool.acquire_target(need(f"r{i}", session_id="s"), patience_s=0) is first
    first.is_draining = True
    other = await pool.acquire_target(need("r9", session_id="s"), patience_s=0)
    assert other is (b if first is a else a)


@virtual
async def test_waiting_requests_go_by_priority_then_arrival() -> None:
    """A target takes a bounded number of requests that it has not admitted yet."""
    pool = WorkerPool()
    only = target("a")
    pool.open_target(only)
    for i in range(16):
        await pool.acquire_target(need(f"busy{i}"), patience_s=0)
    order: list[str] = []

    async def wait(name: str, **fields: Any) -> None:
        await pool.acquire_target(need(name, **fields), patience_s=0)
        order.append(name)

    waiting = [
        ("low", {"priority": -1}),
        ("first", {}),
        ("second", {}),
        ("high", {"priority": 5}),
        ("running", {"is_running": True}),
    ]
    tasks = [asyncio.create_task(wait(name, **fields)) for name, fields in waiting]
    await asyncio.sleep(0.01)
    assert order == []
    for i in range(5):
        only.detach(f"busy{i}", Listener())
        await asyncio.sleep(0.01)
    assert order == ["running", "high", "first", "second", "low"]
    await asyncio.gather(*tasks)


@virtual
async def test_what_frees_up_is_kept_for_a_retracted_request() -> None:
    """A newcomer that would fit must wait, or the retracted one never comes back."""
    pool = WorkerPool()
    only = target("a", load=WorkerLoad(num_running=1, num_free_pages=2, num_pages=100))
    ear = Listener()
    pool.open_target(only)
    only.attach("other", ear)
    back = need("back", num_tokens=100, is_running=True, wants_room=True)
    returning = asyncio.create_task(pool.acquire_target(back, patience_s=1))
    await asyncio.sleep(0)
    coming = asyncio.create_task(pool.acquire_target(need("new"), patience_s=1))
    await asyncio.sleep(0.5)
    assert not returning.done() and not coming.done()
    only.load = dataclasses.replace(only.load, num_free_pages=20)
    only.on_load()
    assert await returning is only
    assert await coming is only


@virtual
async def test_a_retracted_request_returns_to_an_idle_target_whatever_it_reports() -> None:
    """An idle engine reports no load: waiting for its news would be for ever."""
    pool = WorkerPool()
    idle = target("a", load=WorkerLoad(num_free_pages=0, num_pages=100))
    pool.open_target(idle)
    assert await pool.acquire_target(need(wants_room=True), patience_s=0) is idle


@virtual
async def test_no_target_at_all_is_unavailable_after_patience() -> None:
    """A new request has none; one that runs waits for a successor."""
    pool = WorkerPool()
    loop = asyncio.get_running_loop()
    for patience_s in (0.0, 3.0):
        started = loop.time()
        with pytest.raises(UnavailableError):
            await pool.acquire_target(need(), patience_s=patience_s)
        assert loop.time() - started == pytest.approx(patience_s, abs=0.3)
    waiting = asyncio.create_task(pool.acquire_target(need(), patience_s=3.0))
    await asyncio.sleep(2.0)
    late = target("late")
    pool.open_target(late)
    assert await waiting is late


@virtual
async def test_a_request_moves_only_to_its_own_model_and_context() -> None:
    """Another model, dtype or a shorter context could not go on exactly."""
    pool = WorkerPool()
    pool.open_target(target("a", model_hash="new"))
    running = need(identity=ModelIdentity.of(TARGET_INFO))
    with pytest.raises(UnavailableError):
        await pool.acquire_target(running, patience_s=0)
    with pytest.raises(UnavailableError):
        await pool.acquire_target(need(context_len=1001), patience_s=0)


@virtual
async def test_cancelling_a_wait_leaves_no_trace() -> None:
    """Neither a waiter nor a reserved place."""
    pool = WorkerPool()
    waiting = asyncio.create_task(pool.acquire_target(need(), patience_s=9.0))
    await asyncio.sleep(0.1)
    worker = target("a")
    pool.open_target(worker)  # chosen, but not taken yet
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert worker.num_own_requests == 0
    assert pool.num_waiting == 0


@virtual
async def test_a_second_address_of_the_same_process_is_not_used_until_the_first_is_lost() -> None:
    """localhost has two addresses; a worker must not count twice."""
    pool = WorkerPool()
    first, second = target("127.0.0.1:1"), target("[::1]:1")
    second.info = dataclasses.replace(second.info, incarnation=first.info.incarnation)
    assert pool.open_target(first) == ""
    assert "same process" in pool.open_target(second)
    pool.lose(first)
    assert await pool.acquire_target(need(), patience_s=0) is second


def test_targets_of_another_model_are_refused_while_the_first_serve() -> None:
    """Requests could not move between them."""
    pool = WorkerPool(tokenizer_hash="tokens")
    old, new = target("old"), target("new", model_hash="other")
    assert pool.open_target(old) == ""
    assert "could not move" in pool.open_target(new)
    assert "tokenizer" in pool.open_target(target("t", tokenizer_hash="other"))
    assert "--targets" in pool.open_draft(target("x"))
    assert "--drafts" in pool.open_target(draft("y"))
    pool.lose(old)
    assert pool.model is not None and pool.model.model_hash == "other"


PAIR_PROBLEMS = {
    "vocabulary": ({"vocab_size": 511}, "vocabulary"),
    "tokenizer": ({"tokenizer_hash": "other"}, "tokenizer"),
    "layers": ({"features": FeatureSpec(layer_ids=(1, 2, 4), width=96)}, "layers"),
    "width": ({"features": FeatureSpec(layer_ids=(1, 2, 3), width=64)}, "64"),
    "K and V": (
        {"features": FeatureSpec(kv_layer_ids=(4, 5), layer_ids=(1, 2, 3), width=96)},
        "K and V of layers [4, 5]",
    ),
    "projection": (
        {"features": FeatureSpec(layer_ids=(1, 2, 3), width=32, projection="cafe")},
        "--project-features",
    ),
    "dtype": (
        {"features": FeatureSpec(layer_ids=(1, 2, 3), width=96, dtype="bfloat16")},
        "bfloat16",
    ),
}


@pytest.mark.parametrize(("fields", "word"), PAIR_PROBLEMS.values(), ids=PAIR_PROBLEMS.keys())
def test_a_draft_that_does_not_fit_is_refused_with_the_reason(
    fields: dict[str, Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The pair is refused, not the worker: another target may fit it."""
    assert word in pair_problem(TARGET_INFO, dataclasses.replace(DRAFT_INFO, **fields))
    pool = WorkerPool()
    a_target = target("t")
    pool.open_target(a_target)
    assert pool.open_draft(draft("bad", **fields)) == ""
    assert pool.pick_draft(a_target) is None
    assert not pool.can_speculate
    assert "bad" in caplog.text and word in caplog.text
    good = draft("good")
    pool.open_draft(good)
    assert pool.pick_draft(a_target) is good
    assert pool.can_speculate


def test_a_draft_that_fits_no_target_is_unpaired_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often workers come and go, until something else is wrong with it."""

    def num_states() -> tuple[int, int]:
        return pool.worker_states["draft", "available"], pool.worker_states["draft", "unpaired"]

    pool = WorkerPool()
    pool.open_draft(draft("bad", vocab_size=511))
    assert num_states() == (1, 0), "without a target nobody knows"
    first, second = target("t1"), target("t2")
    for _ in range(3):
        for each in (first, second):
            pool.open_target(each)
        assert num_states() == (0, 1)
        assert "vocabulary" in pool.pairs.unpaired["bad"]
        pool.open_draft(good := draft("good"))
        assert num_states() == (1, 1)
        for each in (good, first, second):
            pool.lose(each)
        assert num_states() == (1, 0)
    assert caplog.text.count("draft bad fits no target") == 1
    assert "cannot draft for" not in caplog.text
    pool.open_target(target("other", vocab_size=511))
    assert num_states() == (1, 0)
    pool.open_draft(draft("bad too"))
    assert "draft bad too fits no target" in caplog.text


def test_a_draft_that_fits_some_targets_is_paired(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool()
    features = FeatureSpec(layer_ids=(7, 8, 9), width=96, dtype="float32")
    for each in (target("t1"), target("t2", features=features)):
        assert pool.open_target(each) == ""
    pool.open_draft(draft("d"))
    assert pool.worker_states["draft", "available"] == 1 and not pool.pairs.unpaired
    assert "draft d cannot draft for target t2" in caplog.text and "t1" not in caplog.text


def test_a_draft_of_another_dtype_or_without_features_fits() -> None:
    """The draft converts what it gets; a standalone draft gets nothing."""
    assert pair_problem(TARGET_INFO, dataclasses.replace(DRAFT_INFO, dtype="bfloat16")) == ""
    alone = dataclasses.replace(DRAFT_INFO, features=FeatureSpec(), kind="standalone")
    assert pair_problem(TARGET_INFO, alone) == ""
    bare = dataclasses.replace(TARGET_INFO, features=FeatureSpec())
    assert pair_problem(bare, alone) == ""
    assert "no features" in pair_problem(bare, DRAFT_INFO)


def test_drafts_are_picked_by_load_and_full_ones_left_alone() -> None:
    """A draft with a queue would be late from the first round on."""
    pool = WorkerPool()
    a_target = target("t")
    pool.open_target(a_target)
    busy = draft("busy", load=WorkerLoad(num_running=5))
    full = draft("full", load=WorkerLoad(num_waiting=1))
    idle = draft("idle")
    for worker in (busy, full, idle):
        pool.open_draft(worker)
    assert pool.pick_draft(a_target) is idle
    assert pool.pick_draft(a_target, frozenset({"idle"})) is busy


def test_a_draft_beside_its_target_goes_before_an_idle_one_elsewhere() -> None:
    """They share memory; but one that failed the request, or that has no room, is left alone."""
    pool = WorkerPool()
    here, there = target("10.0.0.1:50052"), target("10.0.0.2:50052")
    beside = draft("10.0.0.1:50053", load=WorkerLoad(num_running=5))
    elsewhere = draft("10.0.0.2:50053")
    for a_target in (here, there):
        pool.open_target(a_target)
    for a_draft in (elsewhere, beside):
        pool.open_draft(a_draft)
    assert pool.pick_draft(here) is beside
    assert pool.pick_draft(there) is elsewhere
    assert pool.pick_draft(here, frozenset({beside.address})) is elsewhere
    beside.load = WorkerLoad(num_waiting=1)
    assert pool.pick_draft(here) is elsewhere


def test_a_draft_on_the_targets_gpu_goes_before_an_idle_one_beside() -> None:
    pool = WorkerPool()
    targets = [target(f"t{i}", gpu=f"GPU-{i}") for i in range(2)]
    drafts = [draft(f"d{i}", gpu=f"GPU-{i}", load=WorkerLoad(num_running=i)) for i in range(2)]
    for worker in (*targets, *drafts):
        assert not (pool.open_target if worker in targets else pool.open_draft)(worker)
    assert [pool.pick_draft(each) for each in targets] == drafts
    assert pool.pick_draft(targets[1], frozenset({"d1"})) is drafts[0]


def test_each_target_has_drafts_of_its_own_where_there_are_enough() -> None:
    """A step then waits for one draft, and no draft works for a second target."""
    pool = WorkerPool()
    targets = [target(f"10.0.0.1:{port}") for port in (50002, 50001)]
    drafts = [draft(f"10.0.0.1:{port}", gpu="GPU-9") for port in (50013, 50011, 50012)]
    first, second, third = sorted(drafts, key=lambda worker: worker.address)
    for worker in targets:
        pool.open_target(worker)
    pool.open_draft(second)
    assert [pool.pick_draft(each) for each in targets] == [second, second], "too few"
    for worker in (third, first):
        pool.open_draft(worker)
    assert pool.pick_draft(targets[0]) is second, "whichever process asks, and whoever came first"
    for busy, idle in ((first, third), (third, first)):
        busy.expect("r")
        assert pool.pick_draft(targets[1]) is idle, "of its own the least loaded"
        busy.withdraw("r")
    second.expect("r")
    assert pool.pick_draft(targets[0]) is second
    others = {first, third}
    assert pool.pick_draft(targets[0], frozenset({second.address})) in others
    second.load = WorkerLoad(num_waiting=1)
    assert pool.pick_draft(targets[0]) in others


def test_a_gpu_of_which_nothing_is_known_is_nobodys_own() -> None:
    """As of workers of an older release, or on a CPU: then the host counts."""
    pool = WorkerPool()
    a_target = target("10.0.0.1:50052")
    elsewhere, beside = draft("10.0.0.2:50053"), draft("10.0.0.1:50053", gpu="GPU-1")
    pool.open_target(a_target)
    for worker in (elsewhere, beside):
        assert not pool.open_draft(worker)
    assert pool.pick_draft(a_target) is beside


@virtual
async def test_messages_leave_in_batches_and_reach_their_request_only() -> None:
    """Whatever is queued when the stream is free is one message, within a bound."""
    worker = target("a")
    for i in range(3):
        worker.send(need(f"r{i}"))
    assert [message.request_id for message in await worker.take_outgoing()] == [
        "r0",
        "r1",
        "r2",
    ]
    listener = Listener()
    worker.lose(is_clean=False)
    worker.attach("late", listener)
    assert listener.heard == [WorkerLost(is_clean=True)]
    worker.send(need())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.take_outgoing(), 1.0)


@virtual
async def test_opens_of_large_grammars_never_make_a_message_that_grpc_refuses() -> None:
    """As after a reset, when all requests open anew at once: it would break the session again."""
    worker = target("a")
    names = [f"r{i}" for i in range(32)]
    for name in names:
        message = target_open(name, prompt=(1 << 30,) * 1000)
        grammar = bytes(MAX_COMPILED_BYTES)
        worker.send(dataclasses.replace(message, compiled_grammar=grammar))
    taken: list[str] = []
    while len(taken) < len(names):
        batch = await worker.take_outgoing()
        assert TARGET.pack(batch).ByteSize() < MAX_INTERNAL_MESSAGE_BYTES
        taken += [message.request_id for message in batch]
    assert taken == names


@pytest.mark.parametrize("value", ["host", "host:", ":1", "host:0", "host:70000", "host:x,b:1"])
def test_bad_endpoints_name_the_option(value: str) -> None:
    """Refuse to start."""
    with pytest.raises(ConfigError, match="--targets"):
        parse_endpoints(value, option="--targets")


def test_endpoints_are_lists_of_names_and_addresses() -> None:
    """IPv6 addresses stand in brackets."""
    assert parse_endpoints(" a:1 , [::1]:2,", option="--targets") == (
        Endpoint("a", 1),
        Endpoint("::1", 2),
    )


@virtual
async def test_a_name_is_followed_and_its_failures_end_nothing() -> None:
    """New addresses are dialled, vanished ones let go, and an empty answer is no answer."""
    answers = [{"a:1"}, {"a:1", "b:1"}, set(), {"b:1"}, {"b:1", "c:1"}]
    seen: list[set[str]] = []

    async def lookup(host: str, port: int) -> set[str]:
        seen.append(set(endpoints.addresses))
        return answers[min(len(seen), len(answers)) - 1]

    class Unconnected(WorkerEndpoints):
        async def maintain(self, address: str, host: str) -> None:
            await asyncio.Event().wait()

    endpoints = Unconnected(
        TARGET,
        (Endpoint("name", 1),),
        resolve_interval_s=1.0,
        on_open=lambda worker: "",
        on_lost=lambda worker: None,
        on_loading=lambda address: None,
        lookup=lookup,
        caller=NOBODY,
    )

    running = asyncio.create_task(endpoints.run())
    await asyncio.sleep(4.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert seen == [set(), {"a:1"}, {"a:1", "b:1"}, {"a:1", "b:1"}, {"b:1"}]
    assert endpoints.addresses == {"b:1", "c:1"}
