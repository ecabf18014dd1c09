"""The states of a draft: a complete table, and a handle that keeps to it whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.draft_handle import DraftHandle
from orchestrator.draft_states import TRANSITIONS, DraftEvent, DraftState, Effect
from orchestrator.peer_watch import PeerTrust
from orchestrator.pool import WorkerPool
from orchestrator.request_log import RequestLog
from orchestrator.workers import WorkerSession
from shared.errors import StatusCode
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    PeerTrees,
    RequestFailure,
    RequestRetracted,
    SamplingParams,
    TokenTree,
)
from tests.fakes import FakeDraft, FakeTarget
from tests.fakes.in_memory import virtual
from tests.unit.scene import CONFIG, PROMPT, SHAPE

State, Event = DraftState, DraftEvent


def after(state: DraftState, *events: DraftEvent) -> list[DraftState]:
    """Return the states that a sequence of events leads through."""
    states = []
    for event in events:
        state = TRANSITIONS[state, event].state
        states.append(state)
    return states


def test_every_event_has_an_answer_in_every_state() -> None:
    assert set(TRANSITIONS) == set(itertools.product(State, Event))


CREDITED = {State.BEHIND, State.PEER}
"""States in which the target may have credit for trees, and may wait for one."""


def test_effects_belong_to_what_changes() -> None:
    """Credit for trees is revoked with the state; what a draft holds is freed when it is ABSENT."""
    for (before, event), (state, effect) in TRANSITIONS.items():
        loses_credit = before in CREDITED and state not in CREDITED
        assert (Effect.REVOKE in effect) == loses_credit, (before, event)
        becomes_absent = state is State.ABSENT and before is not State.ABSENT
        assert (Effect.CLOSE in effect) == becomes_absent, (before, event)


@pytest.mark.parametrize("state", State)
def test_a_request_without_speculation_has_no_other_state(state: DraftState) -> None:
    for event in Event:
        reached = TRANSITIONS[state, event].state
        assert (reached is State.OFF) == (state is State.OFF)


def test_any_draft_can_be_closed_lost_and_opened() -> None:
    for state in set(State) - {State.OFF}:
        for event in (Event.CLOSED, Event.LOST):
            assert after(state, event, Event.OPENED) == [State.ABSENT, State.BEHIND]


def test_peer_rounds_begin_with_a_path_that_shows_them() -> None:
    entries = [
        (before, event)
        for (before, event), (state, _) in TRANSITIONS.items()
        if state is State.PEER and before is not State.PEER
    ]
    assert entries == [(State.BEHIND, Event.PEER_TREE)]


@pytest.mark.parametrize("state", [State.BEHIND, State.MISSED])
def test_any_tree_that_comes_here_shows_that_a_draft_has_caught_up(state: DraftState) -> None:
    assert after(state, Event.TREE) == [State.RELAYED]


def test_no_round_waits_twice_for_the_same_draft() -> None:
    """After a round has waited in vain none waits until a tree came."""
    for state in (State.RELAYED, State.PEER):
        (late,) = after(state, Event.OVERDUE)
        assert late not in (State.RELAYED, State.PEER)
        for event in set(Event) - {Event.TREE, Event.PEER_TREE}:
            assert TRANSITIONS[late, event].state not in (State.RELAYED, State.PEER)


def test_the_life_of_a_draft() -> None:
    """From the prompt to peer rounds, a missed one, and back; or to relayed ones."""
    steps = {
        Event.OPENED: State.BEHIND,
        Event.PEER_TREE: State.PEER,
        Event.OVERDUE: State.MISSED,
        Event.ORDERED: State.BEHIND,
        Event.TREE: State.RELAYED,
    }
    assert after(State.ABSENT, *steps) == list(steps.values())
    # The target was late, not the draft; and a round without a tree is no wait.
    assert after(State.MISSED, Event.PEER_TREE) == [State.BEHIND]
    assert after(State.PEER, Event.NO_TREE, Event.PEER_TREE) == [State.BEHIND, State.PEER]
    assert after(State.PEER, Event.DETACHED) == [State.BEHIND]
    assert after(State.RELAYED, Event.OVERDUE) == [State.BEHIND]


def test_trust_ends_with_three_misses_and_is_earned_again() -> None:
    trust = PeerTrust()
    for _ in range(2):
        trust.miss()
    trust.excuse()
    trust.miss()
    assert trust.allows_peer_rounds
    trust.miss()
    assert not trust.allows_peer_rounds
    for _ in range(64):
        trust.note_round()
    assert trust.allows_peer_rounds
    trust.excuse()
    assert trust.allows_peer_rounds, "an excuse without a miss is worth nothing"
    trust.detach()
    assert not trust.allows_peer_rounds
    assert not PeerTrust(is_detached=True).allows_peer_rounds


# Most of what happens is good, or no state but the first ones would be reached.
GOOD = st.one_of(
    st.tuples(st.sampled_from(["keep_up", "reopen"])),
    st.tuples(st.just("run_peer_rounds"), st.integers(0, 3)),
    st.tuples(st.just("run_peer_rounds"), st.integers(0, 3)),
    st.tuples(st.just("sleep"), st.sampled_from([0.001, 0.03])),
    st.tuples(st.just("end_round"), st.booleans()),
    st.tuples(st.sampled_from(["order", "wait"])),
)
BAD = st.one_of(
    st.tuples(st.just("answer"), st.sampled_from([0, 0, 0, 1]), st.integers(-2, 1)),
    st.tuples(st.just("sleep"), st.sampled_from([0.3, 6.0])),
    st.tuples(st.sampled_from(["detach", "retract", "fail", "lose", "refuse", "rebuild", "close"])),
)
ACTIONS = st.lists(st.one_of(GOOD, GOOD, GOOD, GOOD, BAD), min_size=5, max_size=40)


class Stage:
    """A handle between a pool of two drafts and a request that does anything in any order."""

    def __init__(self) -> None:
        self._indices = itertools.count()
        self.pool = WorkerPool()
        self.num_revoked = 0
        self.handle = DraftHandle(
            request_id="r",
            shape=SHAPE,
            sampling=SamplingParams(),
            pool=self.pool,
            config=CONFIG,
            log=RequestLog(logging.getLogger(__name__), "r"),
            on_revoke=self._revoke,
        )
        info = FakeTarget(has_features=False).info
        self.target = WorkerSession(address="t:1", info=info)
        self.target_epoch = 0
        self.drafts: list[WorkerSession] = []
        self.sent: list[Any] = []
        self.round_idx = 0
        self.tokens = list(PROMPT)
        for _ in range(2):
            self.add_draft()
        self.open()

    def _revoke(self) -> None:
        self.num_revoked += 1

    def add_draft(self) -> None:
        index = next(self._indices)
        info = FakeDraft(incarnation=f"d{index}", needs_features=False).info
        self.drafts.append(WorkerSession(address=f"d:{index}", info=info))
        assert self.pool.open_draft(self.drafts[-1]) == ""

    def open(self) -> None:
        self.target_epoch += 1
        self.round_idx = 0
        self.handle.open(self.target, self.target_epoch, self.tokens)

    async def collect(self) -> None:
        """Take what the handle has sent."""
        for draft in self.drafts:
            draft.send("end")
            self.sent += await draft.take_outgoing()
            assert self.sent.pop() == "end"

    @property
    def epoch(self) -> int:
        """Return the draft_epoch that was opened last."""
        return max((m.draft_epoch for m in self.sent if isinstance(m, DraftOpen)), default=0)

    async def order(self) -> None:
        self.round_idx += 1
        self.tokens.append(self.round_idx)
        num_tokens = len(self.tokens)
        self.handle.order(round_idx=self.round_idx, seq_len=num_tokens - 1, tokens=self.tokens)

    async def answer(self, epochs_ago: int, rounds_off: int) -> None:
        """Answer the last order, more or less."""
        orders = [message for message in self.sent if isinstance(message, DraftRound)]
        if not orders:
            return
        order = orders[-1]
        self.handle.receive(
            TokenTree(
                request_id="r",
                target_epoch=order.target_epoch,
                draft_epoch=order.draft_epoch - epochs_ago,
                round_idx=order.round_idx + rounds_off,
                seq_len=order.seq_len,
                token_ids=(order.token_ids[-1], 1),
                parent_index=(-1, 0),
            )
        )

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def keep_up(self) -> None:
        """Order a tree, unless it is for the target to do so, and let it come at once."""
        if not self.handle.is_peer:
            await self.order()
            await self.collect()
            await self.answer(0, 0)

    async def run_peer_rounds(self, num_rounds: int) -> None:
        self.handle.note_credit()
        for _ in range(num_rounds):
            await asyncio.sleep(0.001)
            await self.end_round(True)  # noqa: FBT003

    async def end_round(self, had_tree: bool) -> None:  # noqa: FBT001
        self.handle.note_path(had_tree=had_tree)

    async def reopen(self) -> None:
        """Order a tree when the draft is sure to be opened again if it is absent."""
        await asyncio.sleep(6.0 if self.handle.state is State.ABSENT else 0.0)
        await self.order()

    async def detach(self) -> None:
        self.handle.lose_channel(self.epoch)

    async def retract(self) -> None:
        self.handle.receive(RequestRetracted(request_id="r", draft_epoch=self.epoch))

    async def fail(self) -> None:
        code = int(StatusCode.INTERNAL)
        self.handle.receive(
            RequestFailure(
                request_id="r", code=code, reason="TEST", message="x", draft_epoch=self.epoch
            )
        )

    async def lose(self) -> None:
        """End the process of the draft; another one starts."""
        for draft in [draft for draft in self.drafts if draft.num_own_requests]:
            draft.lose(is_clean=False)
            self.pool.lose(draft)
            self.drafts.remove(draft)
            self.add_draft()

    async def refuse(self) -> None:
        self.handle.refuse("as the test wants it")

    async def rebuild(self) -> None:
        self.open()

    async def close(self) -> None:
        self.handle.close()

    async def wait(self) -> None:
        """Wait as a round does: only in states that say so, and no longer than is allowed."""
        loop = asyncio.get_running_loop()
        before, began = self.handle.state, loop.time()
        num_revoked = self.num_revoked
        async with asyncio.timeout(60):
            tree = await self.handle.tree(self.round_idx)
        waited_s = loop.time() - began
        if before is not State.RELAYED:
            assert waited_s < 1e-6
        if waited_s > 1e-6 and tree is None:
            assert self.handle.state is State.BEHIND
        assert self.num_revoked == num_revoked, "nothing by credit is waited for"


@given(actions=ACTIONS)
@settings(max_examples=300)
@virtual
async def test_whatever_happens_a_draft_keeps_to_its_states(actions: list[tuple[Any, ...]]) -> None:
    """Nothing raises, or waits without end; what is opened is closed; no credit is forgotten."""
    stage = Stage()
    await stage.collect()
    for name, *arguments in actions:
        before, num_revoked = stage.handle.state, stage.num_revoked
        await getattr(stage, name)(*arguments)
        state = stage.handle.state
        await stage.collect()
        if before in CREDITED and state not in CREDITED:
            assert stage.num_revoked > num_revoked
        trees = stage.handle.trees
        if isinstance(trees, PeerTrees):
            assert state in CREDITED and trees.draft_epoch == stage.epoch
        assert stage.handle.is_peer == (state is State.PEER)
        assert stage.handle.is_relayed == (state is State.RELAYED)
        holders = [draft for draft in stage.drafts if draft.num_own_requests]
        assert len(holders) == (state is not State.ABSENT)
    stage.handle.close()
    assert stage.handle.state is State.ABSENT
    await stage.collect()
    epochs = [m.draft_epoch for m in stage.sent if isinstance(m, DraftOpen)]
    assert epochs == list(range(1, len(epochs) + 1))
    closed = {m.draft_epoch for m in stage.sent if isinstance(m, DraftClose)}
    num_lost = actions.count(("lose",))
    assert len(set(epochs) - closed) <= num_lost, "a worker that is gone needs no DraftClose"
