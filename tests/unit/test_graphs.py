"""The cache of captured graphs, without a device: what is captured, replayed and dropped, when."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.kernels.dispatch import launch_counts, reset_launch_counts
from shared.step.graphs import GraphCache, _Captured


class Graph:
    """Stands for a captured graph."""

    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Cache(GraphCache):
    """A cache that captures without a device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(torch.device("cpu"), **options)
        self.is_capturing = True
        self.graphs: list[Graph] = []

    def _capture(self, compute: Callable[[], Any], inputs: Any) -> _Captured:
        self.graphs.append(Graph())
        graph: Any = self.graphs[-1]
        return _Captured(graph=graph, outputs=compute(), inputs=inputs, launches={"op": 3})


def test_a_key_is_captured_once_and_replayed_every_time() -> None:
    reset_launch_counts()
    cache, x = Cache(), torch.zeros(3)
    outputs = [cache.run("a", lambda: object(), [x]) for _ in range(3)]
    assert outputs[0] is outputs[1] is outputs[2]
    assert [graph.num_replays for graph in cache.graphs] == [3]
    assert launch_counts() == {"op": 9}
    assert cache.run("b", lambda: 5, [x]) == 5
    assert len(cache) == 2


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(4)[:3], torch.zeros(3, dtype=torch.float64)]
)
def test_an_input_elsewhere_or_of_another_shape_is_refused(other: torch.Tensor) -> None:
    cache, x = Cache(), torch.zeros(3)
    cache.run("a", lambda: None, [x])
    with pytest.raises(AssertionError, match="the inputs of graph a moved"):
        cache.run("a", lambda: None, [other])
    with pytest.raises(AssertionError, match="moved"):
        cache.run("a", lambda: None, [x[:2]])
    with pytest.raises(AssertionError, match="moved"):
        cache.run("a", lambda: None, [x, x])
    cache.run("a", lambda: None, [x])


def test_the_graph_that_was_not_run_for_longest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    cache = Cache(max_graphs=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        cache.run(key, lambda: None, [])
    assert len(cache) == 2
    assert len(cache.graphs) == 4, "a, b, c, and b again"
    assert len(waits) == 2, "nothing is dropped while it may run"


def test_a_cpu_computes_every_time() -> None:
    cache = GraphCache(torch.device("cpu"))
    values = iter(range(3))
    assert [cache.run("a", lambda: next(values), []) for _ in range(3)] == [0, 1, 2]
    assert len(cache) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_graphs_that_became_garbage_break_no_capture() -> None:
    x = torch.ones(8, device="cuda")
    garbage: Any = GraphCache(x.device)
    garbage.run("old", lambda: x + 1, [x])
    garbage.itself, cache, thresholds = garbage, GraphCache(x.device), gc.get_threshold()

    def compute() -> torch.Tensor:
        _ = [[] for _ in range(100)]  # would have everything collected
        return x * 3

    cache.run("first", lambda: x + 2, [x])  # a capture begins with a collection of its own
    gc.set_threshold(1, 1, 1)
    try:
        gc.disable()
        del garbage
        gc.enable()
        outputs = cache.run("second", compute, [x])
    finally:
        gc.set_threshold(*thresholds)
    assert outputs.tolist() == [3.0] * 8
