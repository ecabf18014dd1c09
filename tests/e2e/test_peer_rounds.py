"""Direct rounds between processes: the default on one host, the same outputs, no socket left."""

from __future__ import annotations

from typing import Any

import pytest

from shared.peer.ring import RING_DIR
from tests.e2e.serving import PlainOutputs, Server, generate_all
from tests.e2e.streaming import share_of_peer_rounds

pytestmark = pytest.mark.slow

REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": "def merge(left, right):\n",
        "max_new_tokens": 90,
        "ignore_eos": True,
        "speculation": True,
    },
    {
        "prompt": "import asyncio\n\n\nasync def main",
        "max_new_tokens": 90,
        "ignore_eos": True,
        "speculation": True,
        "temperature": 0.8,
        "seed": 3,
    },
]


def test_rounds_are_the_peers_on_one_host(pair: Server, plain_outputs: PlainOutputs) -> None:
    """After a worker was killed as well: test_feature_ring.py."""
    pair.wait_paired()
    assert (RING_DIR / pair.info("target-0").peer_socket).is_socket()
    assert share_of_peer_rounds(pair, REQUESTS, plain_outputs) > 0.5


def test_whatever_trees_a_server_chooses_its_output_is_the_plain_one(
    pair: Server, plain_outputs: PlainOutputs
) -> None:
    """In mode AUTO, with more and more requests at once."""
    pair.wait_paired()
    auto = [{**request, "speculation": None} for request in REQUESTS]
    for count in (1, 8):
        requests = (auto * count)[:count]
        plain = plain_outputs.of(pair, requests)
        completions = generate_all(pair.address, requests)
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
        for completion in completions:
            stats = completion.speculation
            assert sum(stats.tree_size_histogram) == stats.num_rounds
            assert stats.tree_size_histogram[1] == stats.num_root_only_rounds
            assert stats.num_resting_rounds <= stats.num_root_only_rounds
