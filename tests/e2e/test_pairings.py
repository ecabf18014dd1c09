"""Targets and drafts that differ: in dtype, in context length, in room. None changes the output."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from coppice import Completion
from shared.messages import FinishReason
from tests.e2e.serving import (
    Server,
    checkpoint_config,
    generate_all,
    generate_alone,
    generate_plain,
    running,
)
from tests.e2e.streaming import has_trees_to_the_end, streams
from tests.processes import wait_for

pytestmark = pytest.mark.slow

VOCAB_SIZE = 262
CONTEXT_LEN = 512
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "min_p": 0.02}]


def make_requests(
    *, count: int, prompt_len: int, max_new_tokens: int, seed: int
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len + index)],
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "speculation": True,
            "seed": index,
            **TREE,
            **SAMPLINGS[index % len(SAMPLINGS)],
        }
        for index in range(count)
    ]


@contextlib.contextmanager
def serving(
    directory: Path, kind: str, *, window: int = CONTEXT_LEN, **parts: Any
) -> Iterator[Server]:
    """Serve a tiny target and a draft that agrees with it more often than not.

    Args:
        kind: "eagle" or "mtp".
        window: The draft's max_position_embeddings.
        parts: As in `stack_config`.
    """
    from tests.checkpoints import write_agreeable_target, write_eagle, write_mimo

    if kind == "mtp":
        target = draft = write_mimo(directory / "mimo", branch_scale=0.3)
    else:
        target = write_agreeable_target(directory / "agreeable")
        draft = write_eagle(
            directory / f"eagle-{window}",
            target,
            branch_scale=0.3,
            max_position_embeddings=window,
        )
    with running(checkpoint_config(target, draft, kind, **parts)) as server:
        yield server


def check(server: Server, requests: list[dict[str, Any]]) -> list[Completion]:
    """Check that outputs equal solo plain runs, all at once and with trees."""
    plain = generate_alone(server.address, requests)
    completions = generate_all(server.address, requests)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert [c.finish_reason for c in completions] == [c.finish_reason for c in plain]
    return completions


def accept_lengths(server: Server, requests: list[dict[str, Any]], *, last: int) -> list[float]:
    """Return the mean tokens per round over the last tokens, of which all had trees; check outputs.

    Whoever has no tree by then, as on a machine that does other things, is served again.
    """
    plain = generate_plain(server.address, requests)
    timed = [{**request, "round_times": True} for request in requests]
    lengths: list[float] = []

    def have_trees() -> bool:
        lengths.clear()
        with streams(server.address, timed) as running:
            for stream, alone in zip(running, plain, strict=True):
                finish = stream.result()
                assert stream.token_ids == alone.token_ids
                if has_trees_to_the_end(finish, num_rounds=stream.num_rounds(last=last)):
                    lengths.append(stream.accept_length(last=last))
        return len(lengths) == len(requests)

    wait_for(have_trees, describe=lambda: f"{len(lengths)} of {len(requests)} had trees in time")
    return lengths


def accepted_per_tree(completions: list[Completion]) -> float:
    """Return the accepted drafts of a tree; how many rounds had one depends on the machine."""
    stats = [completion.speculation for completion in completions]
    num_trees = sum(s.num_rounds - s.num_root_only_rounds for s in stats)
    return sum(s.num_accepted_drafts for s in stats) / num_trees


@pytest.mark.parametrize(
    ("kind", "dtype", "draft_dtype"),
    [
        pytest.param("eagle", "float32", "bfloat16", marks=pytest.mark.exhaustive),
        ("mtp", "bfloat16", "float32"),
    ],
)
def test_draft_and_target_may_differ_in_dtype(
    checkpoint_dir: Path, kind: str, dtype: str, draft_dtype: str
) -> None:
    """Features arrive in the target's dtype; either way the rounds are exact."""
    with serving(
        checkpoint_dir, kind, target={"dtype": dtype}, draft={"dtype": draft_dtype}
    ) as server:
        assert (server.info("target-0").dtype, server.info("draft-0").dtype) == (dtype, draft_dtype)
        requests = make_requests(count=6, prompt_len=9, max_new_tokens=90, seed=1)
        assert mean(accept_lengths(server, requests, last=30)) > 1.3


def test_a_draft_goes_on_in_its_window(checkpoint_dir: Path) -> None:
    """Its context is a tenth of the conversation's, and it drops pages as it goes."""
    window = 40
    with serving(checkpoint_dir, "eagle", window=window, draft={"page_size": 4}) as server:
        assert server.info("draft-0").draft_window == window
        assert server.info("draft-0").max_context_len >= 10 * window
        requests = make_requests(count=2, prompt_len=60, max_new_tokens=180, seed=2)
        assert min(accept_lengths(server, requests, last=100)) > 1.3
        # To the very end of the context; the prompt is prefilled in chunks.
        to_the_end = make_requests(count=2, prompt_len=420, max_new_tokens=500, seed=4)
        for request, completion in zip(to_the_end, check(server, to_the_end), strict=True):
            assert completion.finish_reason is FinishReason.CONTEXT_LENGTH
            assert len(completion.token_ids) == CONTEXT_LEN - len(request["token_ids"])
            stats = completion.speculation
            # The draft reads the prompt meanwhile; on a busy machine that may take all rounds.
            with_trees = stats.num_rounds - stats.num_root_only_rounds
            assert stats.num_accepted_drafts >= 0.5 * with_trees


def test_small_pools_retract_and_lose_nothing(checkpoint_dir: Path) -> None:
    """Each worker holds a few of the requests at most; what it drops comes back."""
    with serving(
        checkpoint_dir,
        "eagle",
        target={"page_size": 4, "num_pages": 190},
        draft={"page_size": 2, "num_pages": 290},
    ) as server:
        completions: list[Completion] = []
        for seed in range(3, 20):  # how many requests a draft holds at once depends on the machine
            requests = make_requests(count=8, prompt_len=24, max_new_tokens=120, seed=seed)
            completions += check(server, requests)
            if server.logged("its worker needed the room", service="orchestrator"):
                break
        server.wait_logged("the worker needed the room", service="orchestrator")
        server.wait_logged("its worker needed the room", service="orchestrator")
        assert sum(completion.retries for completion in completions) > 1
        assert accepted_per_tree(completions) > 0.5
