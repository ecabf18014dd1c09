"""Capture a computation of fixed shapes as a CUDA graph once, replay it from then on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shared.kernels.dispatch import add_launches, forget_launches, launch_counts
from shared.progress import note_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: Any
    inputs: Sequence[torch.Tensor]
    launches: dict[str, int]


class GraphCache:
    """The captured computations of one device, which share their intermediate memory.

    On a CPU every call just computes.

    Args:
        max_graphs: The one that was not run for longest makes room for another.
    """

    def __init__(self, device: torch.device, *, max_graphs: int = 1024) -> None:
        self.is_capturing = device.type == "cuda"
        self._max_graphs = max_graphs
        self._device = device
        self._pool: Any = None
        self._captured: dict[Hashable, _Captured] = {}
        self.num_captures = 0
        self.is_serving = False
        """Whether requests may be under way: what must not run twice is not captured any more."""

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def run(self, key: Hashable, compute: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Any:
        """Compute, by replaying the graph of `key` once there is one. A replay needs no inference
        mode: `compute` enters it itself.

        Args:
            key: Everything that shapes the computation. Another computation needs another key.
            compute: Reads `inputs` and tensors that never move; launches only, no reading back. Run
                twice the first time, so it must not depend on what it wrote.
            inputs: What differs from call to call, at the same addresses every time.
        Returns: What `compute` returns; valid until the next run of the same key.
        Raises: AssertionError when an input is elsewhere, or of another shape, than at capture.
        """
        if not self.is_capturing:
            return compute()
        captured = self._captured.pop(key, None)
        if captured is None:
            if len(self._captured) >= self._max_graphs:
                self._drop_oldest()
            captured = self._capture(compute, inputs)
            self.num_captures += 1
        self._captured[key] = captured  # the newest is last
        assert _are_same(captured.inputs, inputs), f"the inputs of graph {key} moved"
        captured.graph.replay()
        add_launches(captured.launches)
        return captured.outputs

    def _drop_oldest(self) -> None:
        torch.cuda.synchronize(self._device)  # it may be running
        del self._captured[next(iter(self._captured))]

    def _capture(self, compute: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> _Captured:
        note_progress(is_slow=True)
        compute()  # compiles what is not compiled yet, which a capture could not
        before = launch_counts()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # torch writes, at every capture, to tensors that it made at the first one: had that been in
        # inference mode, all the others would have to be.
        inference = torch.inference_mode(mode=False)
        with inference, torch.cuda.graph(graph, pool=self._pool), _no_collection():
            outputs = compute()
        launches = {
            name: count - before.get(name, 0)
            for name, count in launch_counts().items()
            if count > before.get(name, 0)
        }
        forget_launches(launches)
        return _Captured(graph=graph, outputs=outputs, inputs=inputs, launches=launches)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: to free another graph breaks the capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _are_same(captured: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    return len(captured) == len(inputs) and all(map(_is_same, captured, inputs))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are one, as they mostly are, or lie in one place alike."""
    if a is b:
        return True
    return (a.data_ptr(), a.dtype, a.shape) == (b.data_ptr(), b.dtype, b.shape)
