"""Deltas on their way to clients: when rounds leave together, and when each leaves by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.outgoing import (
    LEAST_WRITES_PER_S,
    MAX_ALLOWANCE,
    MAX_MERGED,
    MAX_UNREAD,
    MAX_UNREAD_BYTES,
    WRITES_PER_PASS,
    WRITES_PER_S,
    Outgoing,
    WriteTurns,
)
from orchestrator.target_handle import CREDIT_ROUNDS
from shared.messages import (
    AcceptedPath,
    CreditUpdate,
    FinishInfo,
    FinishReason,
    GenerateEvent,
    PromptInfo,
    RoundTree,
    RoutedExperts,
    TokenDelta,
    TokenLogprob,
)
from tests.fakes import generate
from tests.fakes.in_memory import pass_on, run_virtual, virtual
from tests.unit.scene import CONFIG, PROMPT, Scene, check_stream, read

INFO = PromptInfo(request_id="r", model="m", num_prompt_tokens=1, num_cached_tokens=0, seed=0)
FINISH = FinishInfo(reason=FinishReason.LENGTH)
UNLIMITED = 1e12
"""Writes per second that nothing reaches, for tests in which no time passes."""


def delta(index: int) -> TokenDelta:
    return TokenDelta(token_offset=index, token_ids=(index,))


class Client:
    """Takes the events of a stream and notes in which pass of the loop each message left."""

    def __init__(self, turns: WriteTurns, clock: list[int], *, write_passes: int = 2) -> None:
        self.outgoing = Outgoing(turns)
        self.messages: list[list[GenerateEvent]] = []
        self.left_at: list[int] = []
        self._clock = clock
        self._write_passes = write_passes

    @property
    def events(self) -> list[GenerateEvent]:
        return [event for message in self.messages for event in message]

    async def run(self) -> None:
        while message := await self.outgoing.take():
            self.messages.append(message)
            self.left_at.append(self._clock[0])
            for _ in range(self._write_passes):
                await asyncio.sleep(0)


async def ticking(clock: list[int], until: Sequence[asyncio.Task[Any]]) -> None:
    """Count the passes of the loop until all tasks are done."""
    while not all(task.done() for task in until):
        clock[0] += 1
        await asyncio.sleep(0)


async def stream_all(
    num_streams: int,
    num_rounds: int,
    *,
    passes_per_step: int = 1,
    step_s: float = 0.0,
    per_s: float = UNLIMITED,
    idle_s: Callable[[], float] | None = None,
) -> tuple[list[Client], int]:
    """Give every stream a round per step; return the streams, and passes until all have ended."""
    turns, clock = WriteTurns(per_s, idle_s=idle_s), [0]
    clients = [Client(turns, clock) for _ in range(num_streams)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    ticker = asyncio.create_task(asyncio.sleep(0) if step_s else ticking(clock, tasks))
    for client in clients:
        client.outgoing.put(INFO)
    for index in range(num_rounds):
        for client in clients:
            client.outgoing.put(delta(index))
        for _ in range(passes_per_step):
            await asyncio.sleep(0)
        if step_s:
            await asyncio.sleep(step_s)
    for client in clients:
        client.outgoing.put(FINISH)
        client.outgoing.put(None)
    await asyncio.gather(*tasks, ticker)
    return clients, clock[0]


@pytest.mark.parametrize("num_streams", [1, WRITES_PER_PASS])
def test_with_few_streams_every_round_leaves_at_once_by_itself(num_streams: int) -> None:
    clients, _ = run_virtual(stream_all(num_streams, 50, passes_per_step=10))
    for client in clients:
        assert client.messages == [[INFO], *([delta(i)] for i in range(50)), [FINISH]]
        steps = client.left_at[2:-1]
        assert all(later - sooner == 10 for sooner, later in zip(steps, steps[1:], strict=False))


def test_a_process_that_lags_sends_rounds_together_and_loses_nothing() -> None:
    """Thirty times as many streams as may write in a pass, and a step in every pass."""
    num_streams = 30 * WRITES_PER_PASS
    clients, _ = run_virtual(stream_all(num_streams, 200, passes_per_step=1))
    for client in clients:
        assert client.events == [INFO, *map(delta, range(200)), FINISH]
        assert len(client.messages) < 30
        assert max(map(len, client.messages)) <= MAX_MERGED
    # Turns go round: nobody gets many more writes than others.
    counts = [len(client.messages) for client in clients]
    assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize(("num_streams", "step_s"), [(1, 0.0002), (64, 0.0085), (128, 0.017)])
def test_rounds_leave_by_themselves_as_long_as_the_allowance_lasts(
    num_streams: int, step_s: float
) -> None:
    """However many streams have a round at the same time."""
    clients, _ = run_virtual(stream_all(num_streams, 300, step_s=step_s, per_s=WRITES_PER_S))
    for client in clients:
        assert client.messages == [[INFO], *([delta(i)] for i in range(300)), [FINISH]]


def test_writes_of_many_streams_come_out_of_one_allowance() -> None:
    """Six times as many rounds as may leave by themselves, for a second and more."""
    num_streams, num_rounds, step_s = 256, 250, 0.005
    clients, _ = run_virtual(stream_all(num_streams, num_rounds, step_s=step_s, per_s=WRITES_PER_S))
    for client in clients:
        assert client.events == [INFO, *map(delta, range(num_rounds)), FINISH]
    # Information, first deltas and ends are free; the last delta leaves with its end at the latest.
    counts = [len(client.messages) - 4 for client in clients]
    took_s = num_rounds * step_s
    assert 0.8 * WRITES_PER_S * took_s < sum(counts) < WRITES_PER_S * took_s + MAX_ALLOWANCE
    assert max(counts) < 1.3 * min(counts), "turns go round"


def test_writes_become_fewer_while_the_loop_is_never_idle() -> None:
    num_streams, num_rounds, step_s = 256, 600, 0.005
    load = stream_all(
        num_streams, num_rounds, step_s=step_s, per_s=WRITES_PER_S, idle_s=lambda: 0.0
    )
    clients, _ = run_virtual(load)
    for client in clients:
        assert client.events == [INFO, *map(delta, range(num_rounds)), FINISH]
    # It takes half a second until there are as few as may be.
    took_s = num_rounds * step_s
    count = sum([len(client.messages) - 4 for client in clients])
    assert count < LEAST_WRITES_PER_S * took_s + 0.5 * WRITES_PER_S


async def fitted(idle_shares: Sequence[float]) -> list[float]:
    """Return the turns per second after each of some times that the loop was idle for a share."""
    idle, fitted = [0.0], []
    turns = WriteTurns(idle_s=lambda: idle[0])
    for share in idle_shares:
        await asyncio.sleep(0.1)
        idle[0] += 0.1 * share
        turns.ask(asyncio.get_running_loop().create_future())
        fitted.append(turns.per_s)
    return fitted


def test_writes_fit_the_time_that_the_loop_has_left() -> None:
    shares = [0.5] + 20 * [0.0] + [0.08] + 40 * [0.5]
    fit = run_virtual(fitted(shares))
    assert fit[0] == fit[-1] == WRITES_PER_S
    assert fit[1:21] == sorted(fit[1:21], reverse=True)
    assert fit[20] == fit[21] == LEAST_WRITES_PER_S, "a share between the two changes nothing"
    assert fit[21:] == sorted(fit[21:])


@virtual
async def test_what_begins_or_ends_an_output_waits_for_no_turn() -> None:
    """However many streams wait."""
    turns, clock = WriteTurns(UNLIMITED), [0]
    crowd = [Client(turns, clock, write_passes=0) for _ in range(20 * WRITES_PER_PASS)]
    tasks = [asyncio.create_task(client.run()) for client in crowd]
    for client in crowd:
        client.outgoing.put(delta(0))
    await asyncio.sleep(0)
    for client in crowd:
        client.outgoing.put(delta(1))
    newcomer = Client(turns, clock)
    tasks.append(asyncio.create_task(newcomer.run()))
    newcomer.outgoing.put(INFO)
    newcomer.outgoing.put(delta(0))
    leaver = crowd[-1]  # the last one in line
    leaver.outgoing.put(FINISH)
    for _ in range(6):
        await asyncio.sleep(0)
    assert newcomer.events == [INFO, delta(0)]
    assert leaver.events == [delta(0), delta(1), FINISH]
    assert crowd[-2].events == [delta(0)], "others still wait for their turn"
    for client in [*crowd, newcomer]:
        client.outgoing.put(None)
    await asyncio.gather(*tasks)
    assert crowd[-2].events == [delta(0), delta(1)]


@virtual
async def test_a_stream_that_is_cancelled_gives_its_turn_to_others() -> None:
    turns, clock = WriteTurns(UNLIMITED), [0]
    clients = [Client(turns, clock, write_passes=0) for _ in range(5 * WRITES_PER_PASS)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    for index in range(2):
        for client in clients:
            client.outgoing.put(delta(index))
        await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    for client in clients:
        client.outgoing.put(None)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(c.events == [delta(0), delta(1)] for c in clients[1::2])


@virtual
async def test_rounds_of_a_request_that_its_client_reads_late_are_complete() -> None:
    """Everything waits, and then leaves in a few messages."""
    scene = Scene()
    scene.add_target()
    generation = scene.generation(shape=None, max_new_tokens=200)
    await generation.run()
    assert len(generation.events) == 203
    check_stream(await read(generation), generate(PROMPT, 200))


@pytest.mark.parametrize("has_peer", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
@virtual
async def test_a_client_that_does_not_read_holds_only_its_own_request_up(
    *, has_peer: bool, speculates: bool
) -> None:
    """Its request gets no more credit, and no draft or target is found late; then it goes on."""
    scene = Scene(has_peer=has_peer)
    paths: list[tuple[str, int]] = []

    def note(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, AcceptedPath):
            paths.append((message.request_id, message.round_idx))
        return pass_on(message)

    target = scene.add_target(on_reply=note)
    if speculates:
        scene.add_draft()
    num_tokens = 3000
    fields = {"max_new_tokens": num_tokens} | ({} if speculates else {"shape": None})
    slow = scene.generation("slow", **fields)
    running = asyncio.create_task(slow.run())
    await asyncio.sleep(10 * CONFIG.step_timeout_s)
    num_rounds = max(round_idx for request_id, round_idx in paths if request_id == "test.slow")
    assert num_rounds <= MAX_UNREAD + CREDIT_ROUNDS + 1
    assert not slow.events.has_room and not running.done()
    # Others are served meanwhile, from end to end.
    events = await scene.serve("quick", **fields | {"max_new_tokens": 600})
    check_stream(events, generate(PROMPT, 600))
    assert num_rounds == max(r for request_id, r in paths if request_id == "test.slow")
    finish = check_stream(await read(slow), generate(PROMPT, num_tokens))
    await running
    assert finish.retries == 0
    if has_peer and speculates:
        assert finish.speculation.num_root_only_rounds < 8, "peer rounds go on"
    await scene.check_free()
    credits_of_slow = [
        message.credit.until_round_idx
        for message in target.engine.received
        if isinstance(message, CreditUpdate) and message.request_id == "test.slow"
    ]
    assert credits_of_slow == sorted(credits_of_slow)


@pytest.mark.parametrize("what", ["logprobs", "tree", "routed experts"])
@virtual
async def test_unread_bytes_are_counted_until_they_are_taken_or_dropped(
    what: str,
) -> None:
    """What tokens bring with them takes a stream's bytes long before it has too many events."""
    turns = WriteTurns(UNLIMITED)
    top = tuple((i, -1.0) for i in range(20))
    logprobs = tuple(TokenLogprob(token_id=i, logprob=-1.0, top=top) for i in range(8))
    tree = RoundTree(
        token_ids=tuple(range(64)),
        parent_index=tuple(range(-1, 63)),
        accept_index=(0,),
        bonus_token_id=1,
    )
    ids = bytes(2 * 8 * 48 * 8)
    weights: dict[str, Any] = {
        "logprobs": {"logprobs": logprobs},
        "tree": {"tree": tree},
        "routed experts": {
            "routed_experts": RoutedExperts(ids=ids, num_layers=48, top_k=8, num_experts=512)
        },
    }
    weight = weights[what]
    heavy = TokenDelta(token_offset=0, token_ids=tuple(range(8)), **weight)
    first, second = Outgoing(turns), Outgoing(turns)
    num_events = 0
    while first.has_room:
        first.put(heavy)
        num_events += 1
    assert 8 < num_events < MAX_UNREAD
    assert first.num_bytes >= MAX_UNREAD_BYTES
    second.put(delta(0))
    assert turns.num_unread_bytes == first.num_bytes + second.num_bytes
    while not first.has_room:
        assert await first.take()
    first.discard()
    second.discard()
    first.put(heavy)  # which came too late
    assert not first and first.num_bytes == turns.num_unread_bytes == 0
