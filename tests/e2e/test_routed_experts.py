"""Experts of tokens from real processes: of two targets, one of which dies midway."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shared.messages.routed_experts import join_routed
from tests.e2e.serving import checkpoint_config, generate_alone, running
from tests.e2e.streaming import streams

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}


def test_each_token_has_its_experts_once_though_its_target_dies(checkpoint_dir: Path) -> None:
    from tests.checkpoints import write_qwen3_moe

    path = write_qwen3_moe(checkpoint_dir / "qwen3-moe")
    asked: list[dict[str, Any]] = [
        {
            "token_ids": [3, 1, 4 + i],
            "max_new_tokens": 300,
            "ignore_eos": True,
            "temperature": 0.8 * i,
            "seed": i,
            "routed_experts": True,
        }
        for i in range(2)
    ]
    with running(checkpoint_config(path, path, "standalone", num_targets=2)) as server:
        plain = generate_alone(server.address, asked)
        trees = [{**request, **TREE, "speculation": True} for request in asked]
        with streams(server.address, trees) as going:
            for stream in going:
                stream.reaches(10)
            os.kill(server.engine("target-0"), signal.SIGKILL)
            finishes = [stream.result() for stream in going]
        assert sum(finish.retries for finish in finishes) > 0, "no request was on that target"
        for stream, alone in zip(going, plain, strict=True):
            assert stream.token_ids == alone.token_ids
            routed = join_routed(delta.routed_experts for delta in stream.deltas)
            assert routed is not None and routed == alone.routed_experts
            assert routed.shape == (300, 3, 2)
        assert sum(finish.speculation.num_accepted_drafts for finish in finishes) > 100
