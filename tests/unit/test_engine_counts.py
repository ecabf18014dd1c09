"""What engines count of their rounds, trees, rows and bytes is what happened."""

from __future__ import annotations

import pytest

from tests.device_pair import DevicePair, Make, check, num_rounds, requests_of
from tests.engines import Models, make_draft, make_target, plain_of
from tests.local_pair import LocalPair, LocalRequest
from tests.peer_pair import PeerPair, close_channels

ROUNDS = 'coppice_engine_rounds_total{source="%s"}'
TREES = 'coppice_draft_trees_total{order="%s"}'
BYTES = 'coppice_feature_bytes_total{carrier="%s"}'


def run(pair: LocalPair, requests: list[LocalRequest]) -> tuple[dict[str, float], dict[str, float]]:
    """Serve requests; return what target and draft have counted meanwhile."""
    assert pair.draft is not None
    expected = plain_of(pair.target, requests)
    before, num_steps = dict(pair.target.counts), pair.target.load.num_steps
    pair.run(requests)
    check(requests, expected)
    counts = {name: value - before[name] for name, value in pair.target.counts.items()}
    check_steps(counts, pair.target.load.num_steps - num_steps)
    return counts, pair.draft.counts


def num_with_tree(requests: list[LocalRequest]) -> int:
    return sum(path.num_draft_tokens > 1 for request in requests for path in request.paths)


def check_steps(counts: dict[str, float], num_steps: int) -> None:
    """Check what holds of all steps of a target."""
    for name in ("batch_rows", "batch_requests", "step_seconds"):
        assert counts[f"coppice_{name}_count"] == num_steps > 0
    stages = [v for k, v in counts.items() if k.startswith("coppice_step_stage_seconds_total")]
    assert 0 < sum(stages) == pytest.approx(counts["coppice_engine_busy_seconds_total"])
    assert 0 < counts["coppice_device_busy_seconds_total"] <= sum(stages)


def test_relayed_rounds(models: Models) -> None:
    pairing = models.pairing("eagle3")
    target, draft = make_target(pairing), make_draft(pairing)
    requests = requests_of(3, 0)
    pair = LocalPair(target, draft)
    counts, drafted = run(pair, requests)
    num_trees = num_with_tree(requests)
    assert counts[ROUNDS % "relayed"] == num_trees > 0
    assert counts[ROUNDS % "peer"] == counts[ROUNDS % "device"] == 0
    assert counts[ROUNDS % "root_only"] == num_rounds(requests) - len(requests) - num_trees
    assert drafted[TREES % "relayed"] >= num_trees
    assert counts[BYTES % "front"] > 0 == counts[BYTES % "ring"]


def test_peer_rounds(models: Models) -> None:
    pairing = models.pairing("eagle")
    target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
    requests = requests_of(3, 1)
    counts, drafted = run(PeerPair(target, draft), requests)
    close_channels(target, draft)
    num_trees = num_with_tree(requests)
    assert counts[ROUNDS % "peer"] >= num_trees > 0, "one past the end is thrown away"
    assert counts[ROUNDS % "relayed"] == counts[ROUNDS % "device"] == 0
    assert drafted[TREES % "peer"] >= num_trees
    assert counts[BYTES % "ring"] > 0 == counts[BYTES % "mailbox"]


def test_device_rounds(make: Make) -> None:
    target, draft, _ = make("eagle3")
    requests = requests_of(3, 2)
    pair = DevicePair(target, draft)
    counts, drafted = run(pair, requests)
    num_trees = num_with_tree(requests)
    assert counts[ROUNDS % "device"] == pair.num_device_trees > 0
    assert counts[ROUNDS % "device"] + counts[ROUNDS % "peer"] >= num_trees
    assert counts["coppice_late_trees_total"] <= counts[ROUNDS % "device"]
    assert drafted[TREES % "overlapped"] > 0
    assert counts[BYTES % "mailbox"] > 0
