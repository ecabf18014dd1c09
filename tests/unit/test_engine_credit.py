"""Rounds on credit: the target runs on by itself, before results are read, and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import StatusCode
from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    FinishReason,
    RequestFailure,
    SamplingParams,
    StoppingParams,
    TargetClose,
    TargetOpen,
    VerifyRound,
)
from shared.step.read_back import PendingRead
from target_service.engine import TargetEngine
from target_service.phases import ExtendInput
from tests.engines import (
    SHAPES,
    Models,
    make_draft,
    make_target,
    plain_of,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalPair, LocalRequest
from tests.marks import EXHAUSTIVE

STOPS = tuple(range(5, 250, 9))


def overlapped(target: TargetEngine) -> TargetEngine:
    """Make an engine launch steps before it reads, as on a GPU."""
    target.scheduler.overlaps_steps = True
    return target


def as_it_is(target: TargetEngine) -> TargetEngine:
    return target


SLOW = pytest.mark.slow
PACES = pytest.mark.parametrize("pace", [as_it_is, overlapped])
Pace = Callable[[TargetEngine], TargetEngine]


def roots_in_flight(target: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, per step, the rows whose token only the device knew."""
    counts: list[int] = []
    extend = target.runner.extend

    def count(inputs: ExtendInput) -> Any:
        counts.append(int((inputs.root_idx >= 0).sum()))
        return extend(inputs)

    monkeypatch.setattr(target.runner, "extend", count)
    return counts


def requests_of(rng: random.Random) -> list[LocalRequest]:
    samplings = [
        {"sampling": SamplingParams()},
        {"sampling": SamplingParams(temperature=1.0, seed=3)},
        {"sampling": SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=4)},
        {"sampling": SamplingParams(temperature=1.0, seed=5), "min_new_tokens": 9},
        {"sampling": SamplingParams(logit_bias=((3, 8.0), (17, -100.0)))},
        {},
    ]
    samplings[3]["stop_token_ids"] = samplings[5]["stop_token_ids"] = STOPS
    return [
        LocalRequest(prompt=random_tokens(rng, 1 + 9 * i), max_new_tokens=5 + 7 * i, **sampling)
        for i, sampling in enumerate(samplings)
    ]


@pytest.mark.parametrize(
    ("credit_rounds", "pace"),
    [
        (7, as_it_is),
        pytest.param(1, as_it_is, marks=SLOW),
        pytest.param(2, overlapped, marks=SLOW),
        pytest.param(100, overlapped, marks=SLOW),
        pytest.param(1, overlapped, marks=EXHAUSTIVE),
        pytest.param(2, as_it_is, marks=EXHAUSTIVE),
        pytest.param(7, overlapped, marks=EXHAUSTIVE),
        pytest.param(100, as_it_is, marks=EXHAUSTIVE),
    ],
)  # fmt: skip
def test_rounds_on_credit_give_the_ordered_output(
    models: Models, monkeypatch: pytest.MonkeyPatch, pace: Pace, credit_rounds: int
) -> None:
    target = make_target(models.pairing("standalone"), page_size=2)
    requests = requests_of(random.Random(1))
    expected = plain_of(target, requests)
    in_flight = roots_in_flight(target, monkeypatch)
    LocalPair(pace(target), credit_rounds=credit_rounds).run(requests)
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
        assert request.finish_reason == plain.finish_reason
        assert [path.round_idx for path in request.paths] == list(range(len(request.paths)))
        assert [path.seq_len for path in request.paths] == [path.seq_len for path in plain.paths]
    assert (max(in_flight) > 0) == (pace is overlapped and credit_rounds > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pace"),
    [
        ("eagle3", overlapped), ("standalone", as_it_is),
        pytest.param("eagle3", as_it_is, marks=EXHAUSTIVE),
        pytest.param("standalone", overlapped, marks=EXHAUSTIVE),
    ],
)  # fmt: skip
def test_rounds_on_credit_beside_trees(models: Models, kind: str, pace: Pace) -> None:
    pairing = models.pairing(kind)
    target = make_target(pairing, page_size=4)
    rng = random.Random(2)
    requests = requests_of(rng)
    for i, shape in enumerate(SHAPES):
        requests.append(
            LocalRequest(
                prompt=random_tokens(rng, 4 + i),
                max_new_tokens=20,
                shape=shape,
                sampling=SamplingParams(temperature=i % 2, seed=i),
            )
        )
    expected = plain_of(target, requests)
    LocalPair(pace(target), make_draft(pairing, page_size=2), credit_rounds=5).run(requests)
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output


def test_what_is_past_a_stop_is_thrown_away(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the stop was under way already: one row in vain, and not a word of it."""
    target = make_target(models.pairing("standalone"))
    [plain] = run_plain(target, [LocalRequest(prompt=[9, 8, 7], max_new_tokens=30)])
    stop = plain.output[11]
    end = plain.output.index(stop)
    before = target.load.num_rows
    in_flight = roots_in_flight(target, monkeypatch)
    request = LocalRequest(prompt=[9, 8, 7], max_new_tokens=30, stop_token_ids=(stop,))
    LocalPair(overlapped(target), credit_rounds=100).run([request])
    assert request.output == plain.output[: end + 1]
    assert request.finish_reason is FinishReason.STOP
    assert sum(in_flight) > 0
    assert target.load.num_rows - before == 3 + end + 1


@PACES
def test_no_row_is_computed_past_a_length(models: Models, pace: Pace) -> None:
    target = pace(make_target(models.pairing("standalone")))
    LocalPair(target, credit_rounds=100).run([LocalRequest(prompt=[1, 2, 3], max_new_tokens=8)])
    assert target.load.num_rows == 3 + 7


@pytest.mark.slow
@pytest.mark.parametrize("pace", [overlapped, pytest.param(as_it_is, marks=EXHAUSTIVE)])
def test_retraction_and_scarce_pages(models: Models, pace: Pace) -> None:
    """Requests are thrown out and rebuilt while rounds of theirs are in flight."""
    pairing = models.pairing("standalone")
    rng = random.Random(3)
    requests = [
        LocalRequest(prompt=random_tokens(rng, 20 + i), max_new_tokens=60) for i in range(6)
    ]
    expected = plain_of(make_target(pairing), requests)
    target = pace(make_target(pairing, page_size=4, num_pages=1 + 70))
    pair = LocalPair(target, credit_rounds=9)
    pair.run(requests)
    assert pair.num_retracted > 0
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output


def open_message(**changes: Any) -> TargetOpen:
    return TargetOpen(
        request_id="r", target_epoch=3, token_ids=(1, 2, 3), num_prompt_tokens=3,
        sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=20), **changes,
    )  # fmt: skip


def credit(until_round_idx: int, *, target_epoch: int = 3) -> CreditUpdate:
    return CreditUpdate(
        request_id="r",
        target_epoch=target_epoch,
        credit=Credit(until_round_idx=until_round_idx),
    )


def answers(target: TargetEngine, *messages: Any) -> list[Any]:
    """Submit messages, step until nothing is left to do, return what came."""
    for message in messages:
        target.submit(message)
    outputs = []
    while target.has_work:
        outputs += target.step()
        target.check_integrity()
    return outputs


@PACES
def test_a_credit_never_shrinks_and_orders_go_on_after_it(models: Models, pace: Pace) -> None:
    target = pace(make_target(models.pairing("standalone")))
    _, first = answers(target, open_message())
    paths = answers(target, credit(4), credit(2))
    assert [path.round_idx for path in paths] == [1, 2, 3, 4]
    assert [path.round_idx for path in answers(target, credit(6))] == [5, 6]
    last = answers(target, credit(7))[-1]
    order = VerifyRound(
        request_id="r", target_epoch=3, round_idx=8, seq_len=last.seq_len,
        root_token_id=last.token_ids[-1],
    )  # fmt: skip
    [path] = answers(target, order)
    assert isinstance(path, AcceptedPath) and path.round_idx == 8
    assert first.seq_len + 8 == path.seq_len


def test_credits_that_name_no_request(models: Models) -> None:
    target = make_target(models.pairing("standalone"))
    [failure] = answers(target, credit(4))
    assert isinstance(failure, RequestFailure) and failure.code == StatusCode.NOT_FOUND
    answers(target, open_message())
    [failure] = answers(target, credit(4, target_epoch=2))
    assert isinstance(failure, RequestFailure)
    assert failure.code == StatusCode.FAILED_PRECONDITION


@PACES
def test_a_close_with_rounds_in_flight_frees_everything(models: Models, pace: Pace) -> None:
    target = pace(make_target(models.pairing("standalone")))
    answers(target, open_message())
    target.submit(credit(15))
    for _ in range(3):
        target.step()
    target.submit(TargetClose(request_id="r", target_epoch=3))
    assert answers(target) == []
    assert target.load.num_free_pages == target.load.num_pages
    paths = answers(target, open_message())
    assert isinstance(paths[-1], AcceptedPath)


def test_a_repeated_order_is_not_run_twice_while_it_is_in_flight(models: Models) -> None:
    target = overlapped(make_target(models.pairing("standalone")))
    _, first = answers(target, open_message())
    order = VerifyRound(
        request_id="r", target_epoch=3, round_idx=1, seq_len=first.seq_len,
        root_token_id=first.token_ids[-1],
    )  # fmt: skip
    target.submit(order)
    assert target.step() == []
    [path] = answers(target, order)
    assert isinstance(path, AcceptedPath) and path.round_idx == 1


def test_the_next_step_is_launched_before_what_is_computed_is_answered(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device would wait for the host."""
    target = overlapped(make_target(models.pairing("eagle3")))
    for request_id in ("a", "b"):
        target.submit(
            TargetOpen(
                request_id=request_id, target_epoch=1, token_ids=(5, 6, 7), num_prompt_tokens=3,
                sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=20),
            )
        )  # fmt: skip
        while target.has_work:
            outputs = target.step()
        [path] = [output for output in outputs if isinstance(output, AcceptedPath)]
    order = VerifyRound(
        request_id="a", target_epoch=1, round_idx=1, seq_len=3, root_token_id=path.token_ids[-1]
    )
    target.submit(order)
    assert target.step() == []
    target.submit(replace(order, request_id="b"))
    monkeypatch.setattr(PendingRead, "is_done", True)
    counts = roots_in_flight(target, monkeypatch)
    [answer] = target.step()
    assert (answer.request_id, answer.round_idx, len(counts)) == ("a", 1, 1)
    [answer] = target.step()
    assert (answer.request_id, answer.round_idx, len(counts)) == ("b", 1, 1)
    assert not target.has_work
