"""Which rounds of a request a trace has, and whose time each was."""

from __future__ import annotations

import pytest

from orchestrator.metrics import RequestEnd
from orchestrator.tracing import MAX_ROUND_SPANS, Tracing, parts_of, sampled_rounds
from shared.messages import RoundTimes, StageTime

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def times(*stages: tuple[str, int], round_idx: int = 1, begin_ns: int = 0) -> RoundTimes:
    return RoundTimes(
        round_idx=round_idx,
        begin_ns=begin_ns,
        stages=tuple(StageTime(name=name, end_ns=end_ns) for name, end_ns in stages),
    )


def test_a_round_is_the_drafts_then_the_targets_then_the_commits() -> None:
    relayed = times(
        ("target: queue", 12),
        ("target: forward", 20),
        ("target: commit", 21),
        ("target: hop back", 23),
        ("orchestrator: commit", 24),
        ("draft: hop to it", 24),
        ("draft: grow", 30),
        ("orchestrator: order", 31),
        begin_ns=10,
    )
    assert list(parts_of(relayed)) == [
        ("verify", 10, 20),
        ("commit", 20, 24),
        ("draft", 24, 30),
        ("commit", 30, 31),
    ]
    peer = times(("draft: extend", 3), ("draft: grow", 5), ("channel", 5), ("target: forward", 9))
    assert list(parts_of(peer)) == [("draft", 0, 5), ("verify", 5, 9)]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 65, 4096])
def test_spans_of_rounds_are_few_and_spread_evenly(count: int) -> None:
    rounds = [times(("target: forward", 1), round_idx=i) for i in range(count)]
    chosen, stride = sampled_rounds(rounds)
    assert len(chosen) <= MAX_ROUND_SPANS
    assert [each.round_idx for each in chosen] == list(range(0, count, stride))
    assert count <= MAX_ROUND_SPANS or len(chosen) > MAX_ROUND_SPANS // 2


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE_ID}-00f067aa0ba902b7-01", TRACE_ID),
        (f"cc-{TRACE_ID}-00f067aa0ba902b7-00-what-the-future-may-bring", TRACE_ID),
        (f"00-{TRACE_ID[:-1]}g-00f067aa0ba902b7-01", ""),
        (TRACE_ID, ""),
        ("00--\n-", ""),
    ],
)
def test_without_a_collector_a_traceparent_names_the_trace_in_the_log(
    traceparent: str, trace_id: str
) -> None:
    trace = Tracing("", sample_rate=1.0).begin((("traceparent", traceparent),))
    assert (trace.trace_id, trace.is_sampled) == (trace_id, False)
    trace.end(RequestEnd(code="OK"))
