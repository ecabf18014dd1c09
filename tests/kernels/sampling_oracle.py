"""Sampling in plain Python, one row at a time, with exact sums of probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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
        x, order = self.scaled(), self.ranking()
        largest = x[order[0]]
        weight = [Fraction(1 if v == largest else math.exp(v - largest)) for v in x]
        if self.top_k:
            order = order[: self.top_k]
        if self.top_p < 1:
            needed = Fraction(np.float32(self.top_p).item()) * sum(weight[i] for i in order)
            total, count = Fraction(0), 0
            while count == 0 or total < needed:
                total += weight[order[count]]
                count += 1
            order = order[:count]
        return [i for i in order if weight[i] >= Fraction(np.float32(self.min_p).item())]

    def token(self) -> int:
        """Return the token to sample."""
        if self.temperature == 0:
            return self.ranking()[0]
        x = self.scaled()
        noisy = {
            i: np.float32(x[i]) + np.float32(gumbel(self.seed, self.position, i))
            for i in self.kept()
        }
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
