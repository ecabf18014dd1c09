"""Captured graphs without a device: what is captured once is computed again at every replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from shared.step.graphs import GraphCache, _Captured


class EmulatedGraph:
    """Replays the very computation that was captured, into the tensors that it returned then.

    So a key that does not name everything that shapes a computation, and an output that nobody
    keeps, show as they would on a GPU.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self.outputs = compute()

    @torch.inference_mode()
    def replay(self) -> None:
        for old, new in zip(tensors_of(self.outputs), tensors_of(self._compute()), strict=True):
            assert old.shape == new.shape and old.dtype == new.dtype
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class EmulatedGraphs(GraphCache):
    """A cache that captures on a CPU.

    Args:
        keys: Takes the key of every capture.
    """

    def __init__(self, keys: list[Hashable]) -> None:
        super().__init__(torch.device("cpu"))
        self.is_capturing = True
        self._keys = keys

    def run(self, key: Hashable, compute: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Any:
        if key not in self._captured:
            self._keys.append(key)
        return super().run(key, compute, inputs)

    def _capture(self, compute: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> _Captured:
        graph: Any = EmulatedGraph(compute)
        return _Captured(graph=graph, outputs=graph.outputs, inputs=inputs, launches={})


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a computation returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif hasattr(value, "_tensors"):  # NodeOutputs
        yield from value._tensors.values()
    elif value is not None:
        raise TypeError(f"a graph returned {type(value).__name__}")
