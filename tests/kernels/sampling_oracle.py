"""Sampling in plain Python, one row at a time, with exact sums of probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from shared.kernels.sampling import sample, sample_ref
from tests.kernels.noise_seeds import int64
from tests.reference.noise import gumbel


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The arguments of one row; seed and position as the unsigned and signed integers they are."""

    logits: Sequence[float]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    def scaled(self) -> list[float]:
        """Return logits / T in float32, NaN as -inf."""
        logits = np.array(self.logits, dtype=np.float32)
        logits[np.isnan(logits)] = -np.inf
        with np.errstate(over="ignore"):
            return (logits / np.float32(self.temperature or 1)).tolist()

    def ranking(self) -> list[int]:
        """Return all ids, best first."""
        x = self.scaled()
        return sorted(range(len(x)), key=lambda i: (-x[i], i))

    def kept(self) -> list[int]:
        """Return the ids that survive, best first, by exact sums of the weights."""
        return list(_kept(self._filtered()))

    def token(self) -> int:
        """Return the token to sample."""
        if self.temperature == 0:
            return self.ranking()[0]
        return _token(self._filtered(), self.seed, self.position)

    def _filtered(self) -> Row:
        """Return what decides which ids survive: rows that differ in their noise share it."""
        return replace(self, logits=tuple(self.logits), seed=0, position=0)


@lru_cache(maxsize=64)
def _kept(row: Row) -> tuple[int, ...]:
    x, order = row.scaled(), row.ranking()
    largest = x[order[0]]
    weight = [Fraction(1 if v == largest else math.exp(v - largest)) for v in x]
    if row.top_k:
        order = order[: row.top_k]
    if row.top_p < 1:
        needed = Fraction(np.float32(row.top_p).item()) * sum(weight[i] for i in order)
        total, count = Fraction(0), 0
        while count == 0 or total < needed:
            total += weight[order[count]]
            count += 1
        order = order[:count]
    return tuple(i for i in order if weight[i] >= Fraction(np.float32(row.min_p).item()))


@lru_cache(maxsize=64)
def _token(row: Row, seed: int, position: int) -> int:
    x = row.scaled()
    noisy = {i: np.float32(x[i]) + np.float32(gumbel(seed, position, i)) for i in _kept(row)}
    return max(noisy, key=lambda i: (noisy[i], -i))


def arguments(rows: Sequence[Row], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `sample`; shorter rows are padded with -inf."""
    logits = torch.full((len(rows), max(len(row.logits) for row in rows)), -torch.inf)
    for index, row in enumerate(rows):
        logits[index, : len(row.logits)] = torch.tensor(row.logits)
    return (
        logits.to(device),
        torch.tensor([row.temperature for row in rows]).to(device),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32).to(device),
        torch.tensor([row.top_p for row in rows]).to(device),
        torch.tensor([row.min_p for row in rows]).to(device),
        int64([row.seed for row in rows], device),
        torch.tensor([row.position for row in rows], dtype=torch.int64).to(device),
    )


def check_rows(rows: Sequence[Row], device: torch.device) -> None:
    """Compare the batch with the oracle, and with the reference given one row at a time."""
    args = arguments(rows, device)
    out = sample(*args)
    assert out.dtype == torch.int32 and out.device == args[0].device
    wrong = [
        (row, token, row.token())
        for row, token in zip(rows, out.tolist(), strict=True)
        if token != row.token()
    ]
    assert not wrong
    on_cpu = [argument.cpu() for argument in args]
    for index, token in enumerate(out.tolist()):
        assert sample_ref(*(column[index : index + 1] for column in on_cpu)).tolist() == [token]
