"""A draft that is accepted far less often than its head is known to be is told of, once."""

from __future__ import annotations

import pytest

from coppice.stack.config import stack_config
from orchestrator.accept_watch import WINDOW_ROUNDS, AcceptWatch
from shared.messages import SpeculationStats


def rounds(
    accept_length: float, count: int = WINDOW_ROUNDS, root_only: int = 0
) -> SpeculationStats:
    return SpeculationStats(
        num_rounds=count + root_only,
        num_root_only_rounds=root_only,
        num_accepted_drafts=round((accept_length - 1) * count),
    )


@pytest.mark.parametrize(
    ("expected", "stats", "is_warned"),
    [
        (3.0, [rounds(1.9)], True),
        (3.0, [rounds(2.1)], False),
        (0.0, [rounds(1.0)], False),
        (1.0, [rounds(1.0)], False),
        (3.0, [rounds(1.2, WINDOW_ROUNDS - 1)], False),
        (3.0, [rounds(1.2, WINDOW_ROUNDS // 2)] * 2, True),
        # Rounds without a tree are no fault of the head.
        (3.0, [rounds(3.0, root_only=20 * WINDOW_ROUNDS)], False),
        # A good day before does not hide it.
        (3.0, [rounds(3.0, 20 * WINDOW_ROUNDS), rounds(1.2)], True),
        (3.0, [rounds(1.2)] * 5, True),
    ],
)
def test_a_mean_far_below_is_said_once(
    caplog: pytest.LogCaptureFixture,
    expected: float,
    stats: list[SpeculationStats],
    *,
    is_warned: bool,
) -> None:
    watch = AcceptWatch(expected)
    for one in stats:
        watch.note(one)
    assert len(caplog.messages) == is_warned
    if is_warned:
        (message,) = caplog.messages
        assert f"--expected-accept-length {expected:.2f}" in message
        for cause in ("which layers", "norm_before_residual", "another target", "chat template"):
            assert cause in message


def test_coppice_up_hands_the_expectation_to_the_orchestrator() -> None:
    stack = stack_config({"expected_accept_length": 3.5})
    assert stack.orchestrator.expected_accept_length == 3.5
    assert stack_config({}).orchestrator.expected_accept_length == 0
