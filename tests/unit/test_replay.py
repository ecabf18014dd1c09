"""Steps by replayed graphs, imitated on a CPU: what is captured once must serve every later step.

The imitation keeps what a capture keeps: the computation of a key's first step, with the tensors
that it read and returned. A later step finds its inputs only if they lie in that same memory, and
its outputs overwrite those of the step before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch

from draft_service.engine import DraftEngine
from shared.kernels import tree_attention
from shared.kernels.tree_attention_cpu import tree_attention_cpu
from shared.messages import SamplingParams, TreeShape
from shared.step.staging import Staging
from target_service.engine import TargetEngine
from target_service.start_up import capture_verifies
from tests.checkpoints import EOS_ID
from tests.emulated_graphs import EmulatedGraphs
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    keep_table_apart,
    make_draft,
    make_target,
    poison,
    pool_of,
    random_tokens,
    run_plain,
)
from tests.grammars import CASES, compiled_for
from tests.local_pair import LocalPair, LocalRequest
from tests.marks import first_fast


class Event:
    """Of a stream whose work is done at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class RemoteStaging(Staging):
    """Staging to memory of its own, as a device's is; nothing of the step before is left in it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(torch.device("cpu"), num_bytes)
        self._is_cpu = False
        self._on_host = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(3)]
        self._copied: list[Any] = [Event() for _ in self._on_host]

    def begin(self) -> None:
        """Start a step."""
        super().begin()
        self._on_device.fill_(0x55)
        self._on_host[self._turn].fill_(0x55)


class ReplayedGraphs(EmulatedGraphs):
    """Counts the replays."""

    def __init__(self) -> None:
        super().__init__([])
        self.num_replays = 0

    def run(self, key: Hashable, compute: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Any:
        self.num_replays += key in self._captured
        return super().run(key, compute, inputs)


@pytest.fixture(autouse=True)
def _plans_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps its plan of a step with the metadata; on a GPU there is none to go stale."""

    def attend(q: Any, k: Any, v: Any, metadata: Any, *rest: Any, **named: Any) -> torch.Tensor:
        metadata.plans.clear()
        return tree_attention_cpu(q, k, v, metadata, *rest, **named)

    monkeypatch.setattr(tree_attention, "tree_attention_cpu", attend)


def replaying(engine: TargetEngine | DraftEngine) -> ReplayedGraphs:
    """Let an engine run as on a GPU; return its graphs."""
    runner: Any = engine.runner
    graphs = ReplayedGraphs()
    runner.graphs = graphs
    runner.pads_rows = True
    for owner, name in (
        (runner, "extend_staging"), (runner, "verify_staging"),
        (getattr(runner, "packer", None), "staging"), (runner, "_growth_staging"),
    ):  # fmt: skip
        if hasattr(owner, name):
            setattr(owner, name, RemoteStaging(1 << 22))
    pool = pool_of(engine)
    keep_table_apart(pool)
    if isinstance(engine, TargetEngine):
        runner._verifier._graphs = graphs
        # As at the start: a capture computes twice, and a path can be moved but once.
        capture_verifies(runner, engine.source, progress=lambda *_: None)
        engine.scheduler.overlaps_steps = True
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "shared-kv"])
def test_replayed_steps_give_the_plain_output(models: Models, kind: str) -> None:
    """Requests come and go, batches grow and shrink, shapes and samplings mix."""
    pairing = models.pairing(kind)
    rng = random.Random(21)
    shapes: list[TreeShape | None] = [*SHAPES, None, SHAPES[2], None, SHAPES[3]]
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, 1 + 11 * (i % 7)),
            max_new_tokens=10 + 6 * (i % 4),
            shape=shape,
            sampling=SamplingParams(
                temperature=(0.0, 1.0, 0.7)[i % 3],
                top_p=0.9 if i % 5 == 4 else 1.0,
                repetition_penalty=1.2 if i % 6 == 5 else 1.0,
                seed=i,
            ),
            joins_at=3 * (i % 2),
        )
        for i, shape in enumerate(shapes)
    ]
    expected = run_plain(make_target(pairing, page_size=4), requests)
    target, draft = make_target(pairing, page_size=4), make_draft(pairing, page_size=2)
    graphs = replaying(target), replaying(draft)
    for engine in (target, draft):
        poison(pool_of(engine))
    pair = LocalPair(target, draft, credit_rounds=3)
    for request in requests[::2]:
        pair.open(request)
    for _ in range(6):
        pair.step()
    for request in requests[1::2]:
        pair.open(request)
    pair.finish()
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
    accepted = sum(path.num_accepted_drafts for request in requests for path in request.paths)
    assert accepted > 0
    assert all(cache.num_replays > 10 for cache in graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("patient_grammars")
@pytest.mark.parametrize("kind", first_fast(["eagle3", "standalone"]))
def test_trees_with_grammars_grow_by_replays(models: Models, kind: str) -> None:
    """Depth by depth: each reads what the graph of the depth before has left."""
    pairing = models.pairing(kind)
    rng = random.Random(5)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, 5 + 9 * i),
            max_new_tokens=40,
            shape=SHAPES[i % len(SHAPES)],
            sampling=SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i),
            stop_token_ids=(EOS_ID,),
            compiled_grammar=compiled_for(pairing.target, name) if name else b"",
        )
        for i, name in enumerate([*CASES, "", ""])
    ]
    expected = run_plain(make_target(pairing, page_size=4), requests)
    target, draft = make_target(pairing, page_size=4), make_draft(pairing, page_size=2)
    graphs = replaying(draft)
    poison(pool_of(draft))
    LocalPair(target, draft).run(requests)
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
    constrained = requests[: len(CASES)]
    assert sum(p.num_accepted_drafts for request in constrained for p in request.paths) > 0
    assert graphs.num_replays > 10
    assert {key[0] for key in graphs._captured} >= {
        "begin growth",
        "deepen growth",
        "finish growth",
    }
