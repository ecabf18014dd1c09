"""Features between processes, through shared memory or as bytes: the same trees, no file left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from coppice import Completion
from shared.peer.ring import RING_DIR
from tests.e2e.serving import (
    PlainOutputs,
    Server,
    generate_all,
    running,
    stack_config,
)
from tests.e2e.streaming import LEAST_TREES, share_of_peer_rounds, streams
from tests.e2e.test_peer_rounds import REQUESTS
from tests.marks import exhaustive
from tests.processes import wait_for

pytestmark = pytest.mark.slow

BY_RING = "come through shared memory"
LINKED = "rounds and features go from engine to engine"
Places = list[dict[int, int]]
"""Of each request: token offset of a round with a tree -> accepted drafts."""


def is_there(ring: str) -> bool:
    return bool(ring) and (RING_DIR / ring).exists()


def num_trees(completions: list[Completion]) -> int:
    """Return the rounds with a tree: which round has the first is chance."""
    stats = [completion.speculation for completion in completions]
    return sum(s.num_rounds - s.num_root_only_rounds for s in stats)


def accepted_per_tree(completions: list[Completion]) -> float:
    """Return the accepted drafts per round with a tree."""
    num_accepted = sum(completion.speculation.num_accepted_drafts for completion in completions)
    return num_accepted / num_trees(completions)


def serve_alone(server: Server, places: Places) -> list[tuple[int, ...]]:
    """Serve requests one after the other, and note what was accepted where; return outputs.

    How much that is depends on the text, and where trees begin to come in time on the machine.
    """
    found = []
    for request, accepted in zip(REQUESTS, places, strict=True):
        with streams(server.address, [{**request, "round_times": True}]) as (stream,):
            finish = stream.result()
        _, *rounds = (delta for delta in stream.deltas if delta.token_ids)
        for delta, times in zip(rounds, finish.round_times, strict=True):
            if any(stage.name.startswith("draft: ") for stage in times.stages):
                accepted[delta.token_offset] = len(delta.token_ids) - 1
        found.append(stream.token_ids)
    return found


@pytest.fixture(scope="module")
def by_bytes() -> tuple[list[tuple[int, ...]], Places]:
    """What comes of raw features as bytes, one request after the other."""
    places: Places = [{} for _ in REQUESTS]
    found: list[tuple[int, ...]] = []

    def have_trees() -> bool:
        found[:] = serve_alone(server, places)
        return min(map(len, places)) >= LEAST_TREES

    plain_ways = {"project_features": False}
    target = {**plain_ways, "feature_ring_mb": 0, "peer_rounds": False}
    config = stack_config(target=target, draft=plain_ways)
    with running(config) as server:
        server.wait_paired()
        assert server.info("target-0").feature_ring == ""
        wait_for(have_trees, describe=lambda: places)
        assert server.logged("come as bytes: it has no ring", service="draft-0") == 1
    return found, places


def alone(server: Server) -> list[Completion]:
    """Serve one after the other, again as long as hardly any trees came in time."""
    completions: list[Completion] = []

    def have_trees() -> bool:
        completions.extend(generate_all(server.address, [request])[0] for request in REQUESTS)
        return num_trees(completions) >= 2 * LEAST_TREES

    wait_for(have_trees, describe=lambda: f"only {num_trees(completions)} rounds had a tree")
    return completions


def outputs(completions: list[Completion]) -> list[tuple[int, ...]]:
    """Return the output of each request: it is the same however often it was served."""
    found = [completion.token_ids for completion in completions[: len(REQUESTS)]]
    assert [c.token_ids for c in completions] == found * (len(completions) // len(REQUESTS))
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="raw", marks=pytest.mark.exhaustive),
        pytest.param(True, id="projected"),
    ],
)
def relayed(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Serve with the orchestrator between the engines, and features that are projected or not."""
    ways = {"project_features": request.param}
    with running(stack_config(target={**ways, "peer_rounds": False}, draft=ways)) as server:
        server.wait_paired()
        yield server


def test_speculation_is_the_same_by_ring_and_by_bytes(
    by_bytes: tuple[list[tuple[int, ...]], Places], relayed: Server
) -> None:
    assert is_there(relayed.info("target-0").feature_ring)
    expected, places = by_bytes
    found: Places = [{} for _ in REQUESTS]

    def both() -> list[tuple[int, int]]:
        """Return what was accepted at each place where both had a tree."""
        return [
            (ours[offset], theirs[offset])
            for ours, theirs in zip(found, places, strict=True)
            for offset in ours.keys() & theirs.keys()
        ]

    def have_places() -> bool:
        assert serve_alone(relayed, found) == expected
        return len(both()) >= LEAST_TREES

    wait_for(have_places, describe=lambda: (found, places))
    by_ring, as_bytes = map(sum, zip(*both(), strict=True))
    assert by_ring == pytest.approx(as_bytes, rel=0.4) and by_ring > 0
    assert relayed.logged(BY_RING, service="draft-0") == 1
    projection = relayed.info("target-0").features.projection
    assert bool(projection) == relayed.config.draft.project_features
    assert projection == relayed.info("draft-0").features.projection


def test_without_peer_rounds_the_orchestrator_relays_them(
    relayed: Server, plain_outputs: PlainOutputs
) -> None:
    assert relayed.info("target-0").peer_socket == ""
    assert share_of_peer_rounds(relayed, REQUESTS, plain_outputs) == 0.0


@pytest.mark.parametrize("killed", ["target-0", *exhaustive(["engine", "draft-0"])])
def test_a_worker_that_is_killed_comes_back_to_the_ring(
    pair: Server, plain_outputs: PlainOutputs, killed: str
) -> None:
    """Nothing changes for clients; rings of dead targets are swept by their successors."""
    pair.wait_paired()
    expected = [c.token_ids for c in plain_outputs.of(pair, REQUESTS)]
    name = "target-0" if killed == "engine" else killed
    num_restarts = pair.services[name].num_restarts
    num_linked = pair.logged(LINKED, service="draft-0")
    first, socket = pair.info("target-0").feature_ring, pair.info("target-0").peer_socket
    with streams(pair.address, REQUESTS) as running_streams:
        for stream in running_streams:
            stream.reaches(20)
        if killed == "engine":
            os.kill(pair.engine("target-0"), signal.SIGKILL)
        else:
            pair.kill(killed)
        for stream, token_ids in zip(running_streams, expected, strict=True):
            stream.result()
            assert stream.token_ids == token_ids
    wait_for(lambda: pair.services[name].num_restarts == num_restarts + 1)
    pair.wait_paired()
    again = alone(pair)
    assert outputs(again) == expected
    assert accepted_per_tree(again) > 0.5
    ring = pair.info("target-0").feature_ring
    assert (ring == first) == (killed == "draft-0")
    assert is_there(ring)
    assert is_there(first) == (killed == "draft-0")
    wait_for(lambda: pair.logged(LINKED, service="draft-0") > num_linked)
    second = pair.info("target-0").peer_socket
    assert is_there(second) and is_there(socket) == (killed == "draft-0")
    assert share_of_peer_rounds(pair, REQUESTS, plain_outputs) > 0.5
