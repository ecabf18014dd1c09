"""What the last rounds of each kind took beside their forwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Rounds of which one of the faster ones counts, of a few the fastest, and fewer say nothing: after
# many requests have begun a few rounds are slow, whatever trees they have.
_NUM_SAMPLES = 9
_LEAST_SAMPLES = 3
_FEW_SAMPLES = 6
# Which part of them is faster; more on a CPU, whose rounds scatter because others use it as well.
_FASTER, _FASTER_CPU = 4, 2
# What was learned so long ago is no better than a guess from what was learned since.
_STALE_S = 10.0
# A kind of which there was no round for so many others, and seconds, is tried again; after twice as
# many if that did not pay, which is when fewer rounds than these follow.
_FIRST_PATIENCE, _FIRST_PATIENCE_CPU, _LAST_PATIENCE = 64, 256, 1024
_LEAST_PATIENCE_S = 0.3
_HAS_PAID_AFTER = 16


class RoundSamples:
    """Rounds by their place in a table: (rung, bucket of trees), or (0, bucket of requests).

    Args:
        shape: Of the table.
        is_gpu: Rounds of a kind take the same time.
    """

    def __init__(self, shape: tuple[int, int], *, is_gpu: bool) -> None:
        # By the number of rounds, which of them counts, the fastest one first.
        part = _FASTER if is_gpu else _FASTER_CPU
        counted = [(n - 1) // part if n >= _FEW_SAMPLES else 0 for n in range(1 + _NUM_SAMPLES)]
        self._counted = np.array(counted)
        self._first_patience = _FIRST_PATIENCE if is_gpu else _FIRST_PATIENCE_CPU
        self._patience = np.full(shape, self._first_patience)
        self._beside_s = np.full((*shape, _NUM_SAMPLES), np.nan)
        self._batch = np.zeros(self._beside_s.shape, dtype=np.int64)
        self._share = np.ones(self._beside_s.shape)
        self._num_rounds = np.zeros(shape, dtype=np.int64)
        self._noted_at_s = np.zeros(shape)
        self._noted_round = np.zeros(shape, dtype=np.int64)
        self._round = 0

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
        if self._num_rounds[place] >= _HAS_PAID_AFTER:
            self._patience[place] = self._first_patience
        self._noted_at_s[place] = now_s
        self._noted_round[place] = self._round
        self._round += 1

    def forget_trees(self, now_s: float) -> bool:
        """Forget what was learned long ago of rounds with trees; return whether there was any."""
        return bool(self._forget(self._noted_at_s < now_s - _STALE_S, slice(None)).any())

    def forget_plain(self, batch: int, *, patience: int) -> bool:
        """Forget what rounds of so many requests take without trees, if there was none for many
        others; return whether it is forgotten now.
        """
        place = (0, batch)
        if not self._num_rounds[place] or self._noted_round[place] >= self._round - patience:
            return False
        self._num_rounds[place] = 0
        self._beside_s[place] = np.nan
        return True

    def try_again(self, now_s: float, buckets: slice) -> bool:
        """Forget, of these numbers of trees, which rounds were not tried for many others; return
        whether there was any.
        """
        is_old = self._noted_at_s < now_s - _LEAST_PATIENCE_S
        is_old &= self._noted_round < self._round - self._patience
        is_tried = self._forget(is_old, buckets)
        self._patience[is_tried] = np.minimum(2 * self._patience[is_tried], _LAST_PATIENCE)
        return bool(is_tried.any())

    def _forget(self, is_stale: NDArray[np.bool_], buckets: slice) -> NDArray[np.bool_]:
        is_meant = np.zeros_like(is_stale)
        is_meant[1:, buckets] = True
        is_stale = is_stale & is_meant & (self._num_rounds > 0)
        self._num_rounds[is_stale] = 0
        self._beside_s[is_stale] = np.nan
        return is_stale

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
        return max(float(np.sort(beside_s)[self._counted[count]]), 0.0)

    def entries(self, host_s: Floats) -> Floats:
        """Return what is known of all places, as `entry` does; NaN: nothing yet."""
        counts = np.minimum(self._num_rounds, _NUM_SAMPLES)
        beside_s = (self._beside_s - host_s[self._batch]) / self._share
        beside_s[0] = self._beside_s[0]
        ordered = np.sort(beside_s, axis=2)  # NaN comes last
        median = np.take_along_axis(ordered, self._counted[counts][..., None], axis=2)[..., 0]
        return np.where(counts >= _LEAST_SAMPLES, np.maximum(median, 0.0), np.nan)
