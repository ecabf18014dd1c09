"""Workers that die, hang, come late or share the load: clients see a pause, or nothing at all."""

from __future__ import annotations

import os
import signal
import time
from statistics import mean
from typing import Any

import pytest

from coppice import Client, Completion, DeadlineExceededError, FinishInfo, TokenLogprob
from tests.e2e.serving import READY_TIMEOUT_S, PlainOutputs, Server
from tests.e2e.streaming import Stream, streams
from tests.e2e.test_feature_ring import LINKED
from tests.processes import wait_for

pytestmark = pytest.mark.slow

NUM_TOKENS = 260
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": "def read_config(path):\n",
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "speculation": True,
    },
    {
        "prompt": "class Queue:\n",
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "speculation": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "presence_penalty": 0.1,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
    },
]
NUM_DRAFTED = 6
"""Rounds whose drafts are accepted, at least, over which the trees of a draft that came back must
be as good as ever."""
LAST_TOKENS = 60
"""Of an output, in which an undisturbed draft has more accepted rounds than those."""
NUM_ALONE = 8
"""Rounds without a draft while it hangs: after 5 s without an answer its connection is lost."""
BRIEF_S = 3.0
Rounds = list[tuple[int, int]]
"""(token offset, tokens) of each."""


@pytest.fixture(scope="module")
def plain(pair: Server, plain_outputs: PlainOutputs) -> list[Completion]:
    """Return the outputs without speculation."""
    return plain_outputs.of(pair, REQUESTS)


@pytest.fixture(scope="module")
def undisturbed(pair: Server) -> list[Rounds]:
    """Return the drafted rounds of each output when nothing happens."""
    rounds: list[Rounds] = [[] for _ in REQUESTS]

    def are_known() -> bool:
        """Return whether trees came in time, which is up to the machine."""
        with streams(pair.address, REQUESTS) as undisturbed:
            for stream, known in zip(undisturbed, rounds, strict=True):
                stream.result()
                known += stream.drafted_rounds()
        last = [lengths_from(NUM_TOKENS - LAST_TOKENS, known) for known in rounds]
        return min(map(len, last)) >= NUM_DRAFTED

    wait_for(are_known, describe=lambda: rounds)
    return rounds


def lengths_from(token_offset: int, rounds: Rounds) -> list[int]:
    """Return the lengths of rounds that begin at a token, or after it."""
    return [length for offset, length in rounds if offset >= token_offset]


def check_outputs(running: list[Stream], plain: list[Completion]) -> list[FinishInfo]:
    """Wait for the ends; nothing may differ from the plain runs, logprobs included."""
    finishes = [stream.result() for stream in running]
    for stream, alone in zip(running, plain, strict=True):
        assert stream.token_ids == alone.token_ids
        assert "".join(delta.text for delta in stream.deltas) == alone.text
        logprobs: list[TokenLogprob] = []
        for delta in stream.deltas:
            logprobs += delta.logprobs
        assert tuple(logprobs) == alone.logprobs
    return finishes


def await_recovery(pair: Server, running: list[Stream]) -> list[int]:
    """Wait until drafts are accepted again, in several rounds; return where these rounds begin.

    The outputs do not end before.
    """
    with pair.slowed("target-0", pause_s=0.1):
        since = [len(stream.deltas) for stream in running]
        for stream in running:
            stream.awaits_drafts(NUM_DRAFTED)
    return since


def check_recovered(running: list[Stream], since: list[int], undisturbed: list[Rounds]) -> None:
    """Check that the draft was of as much use as ever, from the round of its recovery on.

    Some texts are easier than others: it is compared from where it came back.
    """
    for stream, begin, usual in zip(running, since, undisturbed, strict=True):
        assert mean(lengths_from(0, usual)) > 3
        begins = stream.deltas[begin].token_offset
        came_back, *_ = (offset for offset, _ in stream.drafted_rounds() if offset >= begins)
        there = lengths_from(came_back, usual) or lengths_from(NUM_TOKENS - LAST_TOKENS, usual)
        assert mean(stream.drafted_lengths(since=begin)) > 0.6 * mean(there)


def test_a_killed_draft_changes_nothing_and_its_successor_catches_up(
    pair: Server, plain: list[Completion], undisturbed: list[Rounds]
) -> None:
    """The stream goes on at once, without a draft; the restarted one replays what it missed.

    It finds the target's ring and channel as they were.
    """
    pair.wait_paired()
    ring, num_linked = pair.info("target-0").feature_ring, pair.logged(LINKED, service="draft-0")
    num_restarts = pair.services["draft-0"].num_restarts
    with streams(pair.address, REQUESTS) as running:
        for stream in running:
            stream.reaches(30)
        pair.kill("draft-0")
        for stream in running:
            stream.goes_on(10)
        with pair.slowed("target-0"):  # so that the outputs do not end before the draft is back
            wait_for(lambda: pair.services["draft-0"].num_restarts > num_restarts)
            pair.wait_paired()
        since = await_recovery(pair, running)
        finishes = check_outputs(running, plain)
        check_recovered(running, since, undisturbed)
    assert ring and pair.info("target-0").feature_ring == ring
    wait_for(lambda: pair.logged(LINKED, service="draft-0") > num_linked)
    for finish in finishes:
        assert finish.retries >= 1
        assert 0 < finish.speculation.num_root_only_rounds < finish.speculation.num_rounds


def test_a_hung_draft_costs_one_wait_and_catches_up(
    pair: Server, plain: list[Completion], undisturbed: list[Rounds]
) -> None:
    """Its rounds are late, the next ones do not wait for it; nothing is opened anew."""
    with streams(pair.address, REQUESTS) as running:
        for stream in running:
            stream.reaches(30)
        pair.kill("draft-0", signal.SIGSTOP)
        stopped_at = time.monotonic()
        for stream in running:
            stream.awaits_rounds_alone(NUM_ALONE)
        pair.kill("draft-0", signal.SIGCONT)
        is_brief = time.monotonic() - stopped_at < BRIEF_S
        since = await_recovery(pair, running)
        finishes = check_outputs(running, plain)
        check_recovered(running, since, undisturbed)
    for finish in finishes:
        assert finish.retries == 0 or not is_brief
        assert 5 < finish.speculation.num_root_only_rounds < finish.speculation.num_rounds


def test_a_draft_that_comes_late_catches_up(
    pair: Server, plain: list[Completion], undisturbed: list[Rounds]
) -> None:
    """It has seen neither the prompt nor the first tokens: both are replayed for it."""
    pair.stop_service("draft-0")
    with streams(pair.address, REQUESTS) as running:
        for stream in running:
            stream.reaches(30)
        with pair.slowed("target-0"):
            pair.start_service("draft-0")
            pair.wait_paired()
        since = await_recovery(pair, running)
        finishes = check_outputs(running, plain)
        check_recovered(running, since, undisturbed)
    for finish in finishes:
        assert finish.retries == 0
        assert 29 <= finish.speculation.num_root_only_rounds < finish.speculation.num_rounds


def test_a_target_whose_engine_is_killed_costs_a_pause(
    pair: Server, plain: list[Completion], undisturbed: list[Rounds]
) -> None:
    """No token is lost, repeated or changed, and speculation goes on on the restarted one."""
    num_restarts = pair.services["target-0"].num_restarts
    with streams(pair.address, REQUESTS) as running:
        for stream in running:
            stream.reaches(30)
        os.kill(pair.engine("target-0"), signal.SIGKILL)
        wait_for(lambda: pair.services["target-0"].num_restarts > num_restarts)
        pair.wait_ready("target-0", timeout_s=READY_TIMEOUT_S)
        since = await_recovery(pair, running)
        finishes = check_outputs(running, plain)
        check_recovered(running, since, undisturbed)
    assert pair.services["target-0"].num_restarts == num_restarts + 1
    assert all(finish.retries >= 1 for finish in finishes)


def test_a_killed_orchestrator_is_resumed_by_the_client(
    pair: Server, plain: list[Completion]
) -> None:
    """The workers free what its streams held; the clients go on exactly where they were."""
    with streams(pair.address, REQUESTS, max_retries=100) as running:
        for stream in running:
            stream.reaches(30)
        pair.kill("orchestrator")
        check_outputs(running, plain)
    pair.wait_paired()


def test_a_cancelled_request_frees_both_workers(pair: Server) -> None:
    """So does a client that hangs up."""
    for hangs_up in (False, True):
        with Client(pair.address) as client:
            # They go on for as long as anybody looks.
            endless = [{**request, "max_new_tokens": 1800} for request in REQUESTS]
            events = [client.stream(**request) for request in endless]
            for stream in events:
                for _ in range(5):
                    next(stream)
            for name in pair.workers:
                wait_for(lambda name=name: pair.info(name).load.num_running == len(REQUESTS))
            if not hangs_up:
                for stream in events:
                    stream.close()
                pair.check_idle()
        pair.check_idle()


def test_a_deadline_frees_both_workers(pair: Server) -> None:
    with Client(pair.address) as client:
        with pytest.raises(DeadlineExceededError):
            client.generate("import os\n", max_new_tokens=1800, ignore_eos=True, timeout_s=0.7)
    pair.check_idle()


def test_one_of_two_targets_and_one_of_two_drafts_die(
    quartet: Server, plain: list[Completion]
) -> None:
    """Requests spread over both pairs and move to what is left."""
    with streams(quartet.address, REQUESTS * 2) as running:
        for stream in running:
            stream.reaches(20)
        with quartet.slowed("target-0"), quartet.slowed("target-1"):  # drafts may attach later
            for name in quartet.workers:
                wait_for(
                    lambda name=name: quartet.info(name).load.num_running > 0,
                    describe=lambda name=name: f"{name} has nothing to do",
                )
            quartet.kill("target-1")
            quartet.kill("draft-0")
        finishes = check_outputs(running, plain * 2)
    assert sum(finish.retries > 0 for finish in finishes) >= 2
    quartet.wait_paired()


@pytest.mark.exhaustive
def test_workers_that_are_told_to_stop_end_in_order(
    quartet: Server, plain: list[Completion]
) -> None:
    """As in a rolling restart: what they hold ends there or moves, well before they are killed."""
    with streams(quartet.address, REQUESTS * 2) as running:
        for stream in running:
            stream.reaches(20)
        for name in ("target-0", "draft-1"):
            quartet.stop_service(name)
            assert not quartet.logged("requests still run", service=name)
        check_outputs(running, plain * 2)
    for name in ("target-0", "draft-1"):
        quartet.start_service(name)
    quartet.wait_paired()
