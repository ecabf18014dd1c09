"""Speculation over the wire: every output equals its solo plain run, whatever the draft and trees.

One server per draft kind; in each, 16 requests at once mix tree shapes, ways to sample and prompt
lengths around the edges of a page. What the rounds were like is compared, request by request, with
the same engines driven in this process: a server that did not speculate as it should cannot pass by
falling back to plain decoding. No message names a page: all page sizes with all kinds are proved on
the engines (tests/unit/test_engine_exactness.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from coppice import Completion, SpeculationStats
from coppice.v1 import tree_pb2
from shared.messages import SamplingParams, TreeShape
from shared.models.checkpoint_names import resolve_model
from tests.e2e.serving import (
    PlainOutputs,
    Server,
    checkpoint_config,
    generate_all,
    generate_plain,
    running,
)
from tests.processes import wait_for

pytestmark = pytest.mark.slow

ACCEPT_LENGTHS = {
    (3, 1, 4): 2.5,
    (3, 2, 2): 1.7,
    (3, 2, 6): 2.5,
    (5, 4, 16): 3.8,
    (5, 8, 32): 3.5,
    (6, 8, 64): 4.1,
    (5, 16, 64): 4.0,
}
"""num_steps, topk, num_draft_tokens -> about what the bundled drafts reach here."""
ACCEPT_TOLERANCE = 0.3
LEAST_USE = 0.4
"""Of the drafts that are usually accepted, in the few rounds of a shape that had a tree in time."""
SHAPES = {
    TreeShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens): accept_length
    for (num_steps, topk, num_draft_tokens), accept_length in ACCEPT_LENGTHS.items()
}
CATCH_UP_TOKENS = 12
"""Rounds of the root alone that a request usually may run until its draft has read all prompts."""
LEAST_TREES = 7
"""Of each shape, of its two or three requests: where trees are late, all are served again."""
LEAST_OF_REQUEST = 4
"""Trees of a request that say something: the last rounds alone are short, whatever the trees."""
NUM_ROUNDS = 7
"""About how long each request runs, so that all of them run at once to the end."""
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    {"temperature": 1.0, "min_p": 0.05},
]
# Around the edges of pages of every size, and shorter than the larger ones.
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129)
NUM_REQUESTS = len(PROMPT_LENGTHS)
LOCAL_STRIDE = 2
"""Of the requests whose rounds are compared with those of engines in this process."""
SOURCE = '''import json
import os
from collections import defaultdict


class Inventory:
    """Items of a shop, by name."""

    def __init__(self, path):
        self.path = path
        self.items = defaultdict(int)

    def load(self):
        if not os.path.exists(self.path):
            return
        with open(self.path) as stream:
            for name, count in json.load(stream).items():
                self.items[name] += count

    def save(self):
        with open(self.path, "w") as stream:
            json.dump(self.items, stream, indent=4)

    def add(self, name, count=1):
        if count < 1:
            raise ValueError("count must be positive")
        self.items[name] += count
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A request's output, and the use of its trees, as the engines have them in one process."""

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one server differs in: the draft, and the page sizes of target and draft."""

    kind: str
    page_size: int
    draft_page_size: int

    def __str__(self) -> str:
        return self.kind


CELLS = [
    Cell(kind="eagle3", page_size=16, draft_page_size=2),
    Cell(kind="standalone", page_size=4, draft_page_size=64),
]


@cache
def make_requests() -> list[dict[str, Any]]:
    """Return one request for each prompt length; neighbours share neither shape nor sampling."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model("demo", "target") / "tokenizer.json"))
    source = tokenizer.encode(SOURCE).ids
    assert len(source) >= NUM_REQUESTS + max(PROMPT_LENGTHS)
    requests = []
    for index, length in enumerate(PROMPT_LENGTHS):
        shape, accept_length = list(SHAPES.items())[index % len(SHAPES)]
        requests.append(
            {
                "token_ids": source[index : index + length],
                "max_new_tokens": CATCH_UP_TOKENS + round(NUM_ROUNDS * accept_length),
                "ignore_eos": True,
                "seed": 1000 + index,
                "speculation": True,
                "num_steps": shape.num_steps,
                "topk": shape.topk,
                "num_draft_tokens": shape.num_draft_tokens,
                **SAMPLINGS[(index + index // 4) % len(SAMPLINGS)],
            }
        )
    return requests


@cache
def run_locally(kind: str) -> list[Expected]:
    """Run every other request on a pair of engines in this process; page sizes do not matter."""
    from tests.engines import Pairing, make_draft, make_target
    from tests.local_pair import LocalPair, LocalRequest

    target, draft = (resolve_model("demo", role) for role in ("target", kind))
    pairing = Pairing(target=target, draft=draft, algorithm=kind)
    local = [
        LocalRequest(
            prompt=request["token_ids"],
            max_new_tokens=request["max_new_tokens"],
            sampling=SamplingParams(
                **{k: v for k, v in request.items() if k in SamplingParams.__annotations__}
            ),
            shape=shape_of(request),
        )
        for request in make_requests()[::LOCAL_STRIDE]
    ]
    LocalPair(make_target(pairing), make_draft(pairing)).run(local)
    return [
        Expected(
            token_ids=tuple(request.output),
            num_draft_tokens=sum(path.num_draft_tokens - 1 for path in request.paths[1:]),
            num_accepted_drafts=sum(  # those that a stop cut off do not count
                min(path.num_accepted_drafts, len(path.token_ids) - 1) for path in request.paths[1:]
            ),
        )
        for request in local
    ]


@pytest.fixture(scope="module", params=CELLS, ids=str)
def cell(request: pytest.FixtureRequest) -> Cell:
    assert isinstance(request.param, Cell)
    return request.param


@pytest.fixture(scope="module")
def server(cell: Cell) -> Iterator[Server]:
    config = checkpoint_config(
        resolve_model("demo", "target"),
        resolve_model("demo", cell.kind),
        cell.kind,
        target={"page_size": cell.page_size},
        draft={"page_size": cell.draft_page_size},
    )
    with running(config) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: Server, plain_outputs: PlainOutputs) -> list[Completion]:
    """Return solo plain runs, made on the first server: they hold on all of them."""
    return plain_outputs.of(server, make_requests(), alone=True)


def shape_of(request: dict[str, Any]) -> TreeShape:
    return TreeShape(
        num_steps=request["num_steps"],
        topk=request["topk"],
        num_draft_tokens=request["num_draft_tokens"],
    )


def load(server: Server) -> tree_pb2.WorkerLoad:
    return server.info("target-0").load


def test_the_mix_covers_what_it_should() -> None:
    """Each shape, each sampling; for the targets' page sizes each kind of prompt length."""
    requests = make_requests()
    assert {shape_of(request) for request in requests} == SHAPES.keys()
    names = set().union(*SAMPLINGS)
    used = [{name: r[name] for name in names if name in r} for r in requests]
    assert all(used.count(sampling) == NUM_REQUESTS // len(SAMPLINGS) for sampling in SAMPLINGS)
    lengths = [len(request["token_ids"]) for request in requests]
    for page_size in {cell.page_size for cell in CELLS}:
        residues = {length % page_size for length in lengths if length >= page_size}
        assert {0, 1 % page_size, page_size - 1} <= residues
        assert min(lengths) < page_size


def test_outputs_equal_solo_plain_runs(cell: Cell, server: Server, plain: list[Completion]) -> None:
    """All at once and with trees, which are of as much use as among engines in one process."""
    requests, expected = make_requests(), run_locally(cell.kind)
    before, has_shared_steps, is_again, num_moved = load(server), False, False, 0
    stats: list[list[SpeculationStats]] = [[] for _ in requests]

    def have_trees() -> bool:
        """Return whether enough rounds had a tree: the first one comes when the draft has read.

        And whether requests were together in steps, for which they must come about together.
        """
        nonlocal has_shared_steps, is_again, num_moved
        first = load(server)
        with contextlib.ExitStack() as stack:
            if is_again:  # a draft that has to wait for a core reads prompts meanwhile
                stack.enter_context(server.slowed("target-0", pause_s=0.1))
            completions = generate_all(server.address, requests)
        is_again, last = True, load(server)
        num_request_steps = last.num_request_steps - first.num_request_steps
        has_shared_steps |= num_request_steps > 2 * (last.num_steps - first.num_steps)
        for request, completion, alone in zip(requests, completions, plain, strict=True):
            assert completion.token_ids == alone.token_ids, request
            assert completion.text == alone.text
            assert len(completion.token_ids) == request["max_new_tokens"]
            assert alone.speculation.num_draft_tokens == 0
        for request, completion, local in zip(
            requests[::LOCAL_STRIDE], completions[::LOCAL_STRIDE], expected, strict=True
        ):
            assert local.token_ids == completion.token_ids, request
        for of_request, completion in zip(stats, completions, strict=True):
            num_moved += completion.speculation.num_moved_rounds
            if num_trees([completion.speculation]) >= LEAST_OF_REQUEST:
                of_request.append(completion.speculation)
        has_trees = min(num_trees(of_shape(stats, shape)) for shape in SHAPES) >= LEAST_TREES
        return has_trees and has_shared_steps

    wait_for(
        have_trees,
        describe=lambda: (
            has_shared_steps,
            [num_trees(of_shape(stats, shape)) for shape in SHAPES],
        ),
    )
    compared = [one for of_request in stats[::LOCAL_STRIDE] for one in of_request]
    num_drafts = sum(one.num_draft_tokens for one in compared)
    found_rate = sum(one.num_accepted_drafts for one in compared) / num_drafts
    num_drafts = sum(local.num_draft_tokens for local in expected)
    local_rate = sum(local.num_accepted_drafts for local in expected) / num_drafts
    assert found_rate == pytest.approx(local_rate, rel=ACCEPT_TOLERANCE)
    check_usefulness(stats)
    wait_for(lambda: load(server).num_moved_rounds - before.num_moved_rounds == num_moved)


def of_shape(stats: list[list[SpeculationStats]], shape: TreeShape) -> list[SpeculationStats]:
    """Return what the rounds of requests with a tree shape were like."""
    pairs = zip(make_requests(), stats, strict=True)
    return [one for request, each in pairs if shape_of(request) == shape for one in each]


def num_trees(stats: list[SpeculationStats]) -> int:
    """Return the rounds that had a tree."""
    return sum(one.num_rounds - one.num_root_only_rounds for one in stats)


def check_usefulness(stats: list[list[SpeculationStats]]) -> None:
    """Check that trees of every shape were accepted, and that the bushy ones moved KV."""
    for shape, usual in SHAPES.items():
        found = of_shape(stats, shape)
        accept_length = 1 + sum(s.num_accepted_drafts for s in found) / num_trees(found)
        assert accept_length > 1 + LEAST_USE * (usual - 1), (shape, accept_length)
        # With one draft node there is nothing to move.
        is_bushy = shape.topk > 1 and shape.num_draft_tokens > 2
        assert (sum(s.num_moved_rounds for s in found) > 0) == is_bushy, shape


def test_plain_runs_are_the_same_on_every_server(server: Server, plain: list[Completion]) -> None:
    """Page size, draft and company change nothing without speculation either."""
    again = generate_plain(server.address, make_requests())
    assert [c.token_ids for c in again] == [c.token_ids for c in plain]
    assert [c.speculation.num_draft_tokens for c in again] == [0] * NUM_REQUESTS
