"""What the last rounds of each kind took beside their forwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Rounds whose median counts; of a few the fastest does, and fewer say nothing: the first rounds of
# a kind are slow as a rule.
_NUM_SAMPLES = 9
_LEAST_SAMPLES = 3
_FEW_SAMPLES = 6
# By the number of rounds, which of them counts, the fastest one first.
_MIDDLES = np.array([(n - 1) // 2 if n >= _FEW_SAMPLES else 0 for n in range(1 + _NUM_SAMPLES)])
# What was learned so long ago is no better than a guess from what was learned since.
_STALE_S = 10.0


class RoundSamples:
    """Rounds by their place in a table: (rung, bucket of trees), or (0, bucket of requests).

    Args:
        shape: Of the table.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._beside_s = np.full((*shape, _NUM_SAMPLES), np.nan)
        self._batch = np.zeros(self._beside_s.shape, dtype=np.int64)
        self._share = np.ones(self._beside_s.shape)
        self._num_rounds = np.zeros(shape, dtype=np.int64)
        self._noted_at_s = np.zeros(shape)

    def note(
        self, place: tuple[int, int], beside_s: float, batch: int, share: float, now_s: float
    ) -> None:
        """Take note of a round; what was learned long ago of its place is forgotten.

        Args:
            beside_s: That it took beside its forward.
            batch: Bucket of its requests.
            share: Part of its trees' time that it took.
        """
        if self._noted_at_s[place] < now_s - _STALE_S:
            self._num_rounds[place] = 0
            self._beside_s[place] = np.nan
        at = (*place, int(self._num_rounds[place]) % _NUM_SAMPLES)
        self._beside_s[at], self._batch[at], self._share[at] = beside_s, batch, share
        self._num_rounds[place] += 1
        self._noted_at_s[place] = now_s

    def forget_trees(self, now_s: float, *, bucket: int | None = None) -> bool:
        """Forget what was learned long ago of rounds with trees; return whether there was any.

        Args:
            bucket: Of so many trees only; None: of any number.
        """
        is_stale = (self._noted_at_s < now_s - _STALE_S) & (self._num_rounds > 0)
        is_stale[0] = False
        if bucket is not None:
            is_stale[:, :bucket] = is_stale[:, bucket + 1 :] = False
        self._num_rounds[is_stale] = 0
        self._beside_s[is_stale] = np.nan
        return bool(is_stale.any())

    def entry(self, place: tuple[int, int], host_s: Floats) -> float | None:
        """Return what is known of a place; None: nothing yet.

        Args:
            host_s: By the bucket of requests, what rounds take without trees; of rung 0 left out.
        """
        count = min(int(self._num_rounds[place]), _NUM_SAMPLES)
        if count < _LEAST_SAMPLES:
            return None
        beside_s = self._beside_s[place][:count]
        if place[0]:
            beside_s = (beside_s - host_s[self._batch[place][:count]]) / self._share[place][:count]
        return max(float(np.sort(beside_s)[_MIDDLES[count]]), 0.0)

    def entries(self, host_s: Floats) -> Floats:
        """Return what is known of all places, as `entry` does; NaN: nothing yet."""
        counts = np.minimum(self._num_rounds, _NUM_SAMPLES)
        beside_s = (self._beside_s - host_s[self._batch]) / self._share
        beside_s[0] = self._beside_s[0]
        ordered = np.sort(beside_s, axis=2)  # NaN comes last
        median = np.take_along_axis(ordered, _MIDDLES[counts][..., None], axis=2)[..., 0]
        return np.where(counts >= _LEAST_SAMPLES, np.maximum(median, 0.0), np.nan)
