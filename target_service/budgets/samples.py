"""Keep the measured times of the last rounds of each kind, and forget those out of date."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Rounds that are kept of each kind, and the least number that says something: after many requests
# have begun, some rounds are slow whatever trees they have.
_NUM_SAMPLES = 9
_LEAST_SAMPLES = 3
# The entry of n rounds is the time at rank (n - 1) // this, the fastest first: the third fastest of
# nine, on a CPU the median, because other processes use the cores as well.
_FASTER, _FASTER_CPU = 4, 2
# Older entries are no better than a guess from newer entries.
_STALE_S = 10.0
# The entry of a kind that had no round among so many others (and in so many seconds) is forgotten,
# so that the kind is tried again. If the kind then does not pay, that is, fewer than
# _HAS_PAID_AFTER rounds follow, its patience is doubled.
_FIRST_PATIENCE, _FIRST_PATIENCE_CPU, _LAST_PATIENCE = 64, 256, 1024
# The same for rounds without trees.
_PLAIN_PATIENCE, _PLAIN_PATIENCE_CPU = 256, 64
_LEAST_PATIENCE_S = 0.3
# On a GPU a plausible entry of more trees than there are now is kept for so long at least, then for
# twice as long: to try it, all requests must have trees again, and drafts have much to read first.
_FIRST_MANY_S, _LAST_MANY_S = 10.0, 160.0
_HAS_PAID_AFTER = 16
_NEVER = 1 << 62


class RoundSamples:
    """Times of rounds by their place in a table: (rung, bucket of trees) for rounds with trees, and
    (0, bucket of requests) for rounds without trees.

    On a CPU all rounds take longer while other processes use the cores. There the time of a round
    with trees is scaled by what a round without trees takes now, over what it took at that time;
    and trees take less if some of them are smaller than the largest (`RoundCosts._share`).

    Args:
        shape: Shape of the table.
        forwards_s: Time of a forward of the roots, by the bucket of requests.
        is_gpu: Rounds of one kind take the same time.
    """

    def __init__(self, shape: tuple[int, int], forwards_s: Floats, *, is_gpu: bool) -> None:
        # By the number of kept rounds: the rank of the round that counts, the fastest first.
        part = _FASTER if is_gpu else _FASTER_CPU
        counted = [max(n - 1, 0) // part for n in range(1 + _NUM_SAMPLES)]
        self._counted = np.array(counted)
        self._first_patience = np.full(shape, _FIRST_PATIENCE if is_gpu else _FIRST_PATIENCE_CPU)
        self._first_patience[0] = _PLAIN_PATIENCE if is_gpu else _PLAIN_PATIENCE_CPU
        self._patience = self._first_patience.copy()
        self._first_many_s = _FIRST_MANY_S if is_gpu else _LEAST_PATIENCE_S
        self._many_s = np.full(shape, self._first_many_s)
        self._is_gpu = is_gpu
        self._forwards_s = forwards_s
        self._took_s = np.full((*shape, _NUM_SAMPLES), np.nan)
        self._forward_s = np.zeros(self._took_s.shape)
        self._plain_s = np.full(self._took_s.shape, np.nan)  # a plain round, as of then
        self._batch = np.zeros(self._took_s.shape, dtype=np.int64)
        self._share = np.ones(self._took_s.shape)
        self._num_rounds = np.zeros(shape, dtype=np.int64)
        self._noted_at_s = np.zeros(shape)
        # After which round an entry has not been measured for long; no entry: never.
        self._old_after = np.full(shape, _NEVER)
        self._round = 0

    def note(
        self,
        place: tuple[int, int],
        took_s: float,
        forward_s: float,
        *,
        batch: int,
        share: float,
        now_s: float,
    ) -> None:
        """Keep the time of a round; old times of its place are forgotten.

        Args:
            place: Of the table.
            took_s: Time of the round.
            forward_s: Time of its forward.
            batch: Bucket of its requests.
            share: See `RoundCosts._share`.
            now_s: Monotonic time.
        """
        if self._noted_at_s[place] < now_s - _STALE_S:
            self._num_rounds[place] = 0
            self._took_s[place] = np.nan
        num_rounds = int(self._num_rounds[place])
        at = (*place, num_rounds % _NUM_SAMPLES)
        self._took_s[at], self._forward_s[at], self._batch[at] = took_s, forward_s, batch
        if not self._is_gpu:
            self._share[at] = share
            plain_s = self.entry((0, batch), self._forwards_s)
            self._plain_s[at] = np.nan if plain_s is None else plain_s + self._forwards_s[batch]
        self._num_rounds[place] = num_rounds + 1
        if num_rounds + 1 >= _HAS_PAID_AFTER:
            self._patience[place] = self._first_patience[place]
            self._many_s[place] = self._first_many_s
        self._noted_at_s[place] = now_s
        self._old_after[place] = self._round + self._patience[place]
        self._round += 1

    def forget_trees(self, now_s: float) -> bool:
        """Forget old entries of rounds with trees; return whether there were any."""
        return bool(self._forget(self._noted_at_s < now_s - _STALE_S, slice(None)).any())

    def forget_plain(self, batch: int, now_s: float) -> bool:
        """Forget the entry of rounds without trees of a bucket of requests, if there was no such
        round among many others, and on a GPU no round without trees at all for long.

        Returns: Whether the entry was forgotten.
        """
        place = (0, batch)
        if self._round <= self._old_after[place]:
            return False
        if self._is_gpu and self._noted_at_s[0].max() >= now_s - _STALE_S:
            return False
        self._patience[place] = min(2 * self._patience[place], _LAST_PATIENCE)
        self._old_after[place] = _NEVER
        self._num_rounds[place] = 0
        self._took_s[place] = np.nan
        return True

    def try_again(
        self, now_s: float, first: int, last: int, is_plausible: NDArray[np.bool_]
    ) -> bool:
        """Forget entries of rounds with trees that were not measured for many rounds.

        Args:
            now_s: Monotonic time.
            first: Bucket of the present number of trees; entries of fewer trees are kept.
            last: Bucket of the present number of requests; entries of more trees are kept.
            is_plausible: By place, whether the entry can be right.
        Returns: Whether any entry was forgotten.
        """
        buckets = slice(first, last + 1)
        is_old = self._old_after < self._round
        if not is_old[1:, buckets].any():
            return False
        is_old &= self._noted_at_s < now_s - _LEAST_PATIENCE_S
        is_settled = is_plausible & (self._noted_at_s >= now_s - self._many_s)
        is_settled[:, : first + 1] = False
        is_old &= ~is_settled
        is_tried = self._forget(is_old, buckets)
        self._patience[is_tried] = np.minimum(2 * self._patience[is_tried], _LAST_PATIENCE)
        has_any = bool(is_tried.any())
        if self._is_gpu:
            is_tried[:, : first + 1] = False  # as many trees as now
            self._many_s[is_tried] = np.minimum(2 * self._many_s[is_tried], _LAST_MANY_S)
        return has_any

    def forget_few(self, is_meant: NDArray[np.bool_], last: int) -> bool:
        """Forget rounds with few trees; return whether there was any.

        Args:
            is_meant: By place, whether its rounds are meant.
            last: The largest bucket of trees.
        """
        return bool(self._forget(is_meant, slice(last + 1)).any())

    def _forget(self, is_stale: NDArray[np.bool_], buckets: slice) -> NDArray[np.bool_]:
        is_meant = np.zeros_like(is_stale)
        is_meant[1:, buckets] = True
        is_stale = is_stale & is_meant & (self._num_rounds > 0)
        self._num_rounds[is_stale] = 0
        self._old_after[is_stale] = _NEVER
        self._took_s[is_stale] = np.nan
        return is_stale

    def entry(self, place: tuple[int, int], host_s: Floats) -> float | None:
        """Return the entry of a place: at rung 0 the time beside the forward, else beside forward
        and host. None: too few rounds.

        Args:
            host_s: Time of rounds without trees beside their forwards, by the bucket of requests;
                not used at rung 0.
        """
        count = min(int(self._num_rounds[place]), _NUM_SAMPLES)
        if count < _LEAST_SAMPLES:
            return None
        samples = (*place, slice(count))
        beside_s = self._beside_s(samples, host_s) if place[0] else self._host_s(samples)
        return max(sorted(beside_s.tolist())[self._counted[count]], 0.0)

    def entries(self, host_s: Floats) -> Floats:
        """Return the entries of all places, see `entry`; NaN: too few rounds."""
        counts = np.minimum(self._num_rounds, _NUM_SAMPLES)
        beside_s = self._beside_s(..., host_s)
        beside_s[0] = self._host_s(0)
        ordered = np.sort(beside_s, axis=2)  # NaN comes last
        median = np.take_along_axis(ordered, self._counted[counts][..., None], axis=2)[..., 0]
        return np.where(counts >= _LEAST_SAMPLES, np.maximum(median, 0.0), np.nan)

    def totals(self) -> tuple[Floats, Ints]:
        """Return the time beside the forward for all places, from the rounds with as many requests
        as the newest round of the place, NaN: too few rounds; and the bucket of these requests.
        """
        newest = ((self._num_rounds - 1) % _NUM_SAMPLES)[..., None]
        batches = np.take_along_axis(self._batch, newest, axis=2)
        totals_s = np.where(self._batch == batches, self._host_s(...), np.nan)
        counts = np.count_nonzero(~np.isnan(totals_s), axis=2)
        ordered = np.sort(totals_s, axis=2)  # NaN comes last
        counted = np.take_along_axis(ordered, self._counted[counts][..., None], axis=2)[..., 0]
        return np.where(counts >= _LEAST_SAMPLES, counted, np.nan), batches[..., 0]

    def has_many(self, batch: int) -> bool:
        """Return whether as many rounds without trees of a bucket of requests are kept as can be.
        A few may have been slow for other reasons.
        """
        return bool(self._num_rounds[0, batch] >= _NUM_SAMPLES)

    def _host_s(self, samples: Any) -> Floats:
        """Return the time beside the forward: without trees, the hosts' work."""
        beside_s: Floats = self._took_s[samples] - self._forward_s[samples]
        return beside_s

    def _beside_s(self, samples: Any, host_s: Floats) -> Floats:
        """Return the time of trees beside forward and host, as if all had the largest rung."""
        batch = self._batch[samples]
        took_s = self._took_s[samples]
        if self._is_gpu:
            beside_s: Floats = took_s - self._forward_s[samples] - host_s.take(batch)
            return beside_s
        plain_s = self._plain_s[samples]
        now_s = host_s[batch] + self._forwards_s[batch]
        took_s = np.where(np.isnan(plain_s), took_s, took_s * now_s / plain_s)
        return (took_s - self._forward_s[samples] - host_s[batch]) / self._share[samples]
