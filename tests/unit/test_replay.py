"""Steps by replayed graphs, imitated on a CPU: what is captured once must serve every later step.

The imitation keeps what a capture keeps: the computation of a key's first step, with the tensors
that it read and returned. A later step finds its inputs only if they lie in that same memory, and
its outputs overwrite those of the step before.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest
import torch

from draft_service.engine import DraftEngine
from shared.kernels import tree_attention
from shared.kernels.tree_attention_cpu import tree_attention_cpu
from shared.messages import SamplingParams, TreeShape
from shared.step.graphs import GraphCache
from shared.step.staging import Staging
from target_service.engine import TargetEngine
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
from tests.local_pair import LocalPair, LocalRequest


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


class ReplayedGraphs(GraphCache):
    """Runs the computation that a key came with first, into the outputs that it gave first."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_replays = 0
        self._kept: dict[Hashable, tuple[Callable[[], Any], Any, list[Any]]] = {}

    def run(self, key: Hashable, compute: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Any:
        places = [(t.data_ptr(), t.dtype, t.shape) for t in inputs]
        if key not in self._kept:
            self._kept[key] = compute, compute(), places
            return self._kept[key][1]
        captured, outputs, at_capture = self._kept[key]
        assert places == at_capture, f"the inputs of {key} moved"
        self.num_replays += 1
        with torch.inference_mode():  # as a device, it writes to whatever tensor is there
            for old, new in zip(tensors_of(outputs), tensors_of(captured()), strict=True):
                old.copy_(new)
        return outputs


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


@pytest.fixture(autouse=True)
def _plans_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps its plan of a step with the metadata; on a GPU there is none to go stale."""

    def attend(
        q: Any, k: Any, v: Any, metadata: Any, scale: float, *, products: Any
    ) -> torch.Tensor:
        metadata.plans.clear()
        return tree_attention_cpu(q, k, v, metadata, scale, products=products)

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
        engine.scheduler.overlaps_steps = True
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_give_the_plain_output(models: Models, kind: str) -> None:
    """Requests come and go, batches grow and shrink, shapes and samplings mix."""
    pairing = models.pairing(kind)
    rng = random.Random(21)
    shapes: list[TreeShape | None] = [*SHAPES, None, SHAPES[2], None, SHAPES[3]]
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, 1 + 11 * (i % 7)),
            max_new_tokens=12 + 9 * (i % 4),
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
    expected = run_plain(make_target(pairing, page_size=4), requests, alone=True)
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
