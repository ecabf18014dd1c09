"""Expect how long a round takes, from the rows of its step, its requests, and its trees.

    round = forward(rows) + host[requests] + draft[largest rung, trees]

- `forward` was measured at start-up.
- `host` (sampling, the reading of KV, transport) is learned from rounds without trees.
- `draft` (the draft's growth, and the hosts' additional work for trees) is learned from rounds with
  trees.

An entry of a table is one of the faster times of the last few rounds of its kind, because a round
that had to wait for something else says nothing. For rungs and numbers of trees without
measurements, the first guess (`_first_growth`) is scaled by the ratio of measurement to first guess
at the nearest measured entries, and exceeds the time of smaller trees by as much as the first
guesses do, or more. First guesses are rather too low than too high: a kind of round that looks
cheap is tried, and then its time is known.

"Bucket" below: numbers of requests and of trees are rounded up to BATCH_BUCKETS.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape
from shared.step.buckets import BATCH_BUCKETS
from target_service.budgets.samples import RoundSamples
from target_service.step_costs import StepCosts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
Place = tuple[int, int]

# First guess of the time of trees, in forwards of one row of the target. On a GPU each step of the
# draft is a forward of its own, which takes twice as long with _DOUBLING_ROWS rows. On a CPU trees
# cost a fixed time (processes wait for each other) and a time per row (with KV a row takes longer
# than in the forwards measured at start-up). The numbers are below those of the bundled models, so
# that trees of a few requests are tried.
_FIRST_GROWTH = 0.1
_FIRST_GROWTH_PER_STEP = 0.037
_DOUBLING_ROWS = 48
_FIRST_TREES_CPU, _FIRST_ROW_CPU = 0.76, 0.04

# First guess of the host's time per request beside a GPU, in forwards of one row.
_FIRST_HOST = 0.005
# The fixed part of the host's time for a step, in requests.
_HOST_REQUESTS = 16
# Trees took at least this share of their first guess, or of the time of a round with trees beside
# its forward, whichever is less.
_LEAST_GROWTH = 0.5
# On a GPU a round without trees takes at least this share of the known host time.
_LEAST_HOST = 0.5
# If an entry changes by this share, or by so many seconds, the guesses from it are computed anew.
_CHANGE, _CHANGE_S = 0.1, 20e-6
# If an entry changes by this share, the draft is another one or has become busy: old entries of
# trees are forgotten.
_MUCH_CHANGE = 0.5
# Trees that took more than so many times their first guess had to wait for something else.
_PLAUSIBLE = 3.0
# A change of less than this share of the round's time does not count as much: the time of few trees
# beside many requests is a small difference of large numbers.
_MUCH_OF_ROUND = 0.05

_BATCHES = np.array(BATCH_BUCKETS)
# Index of the bucket of every number of requests or trees.
_BUCKETS = np.searchsorted(_BATCHES, np.arange(1 + BATCH_BUCKETS[-1]))
_BUCKET_OF: list[int] = _BUCKETS.tolist()


class RoundKind(NamedTuple):
    """What the time of a round depends on.

    Args:
        num_requests: Running requests.
        num_rows: Rows of a step of all these requests.
        rung: Rung of the largest tree that the round waits for; 0: it waits for none.
        num_trees: Trees that the round waits for.
    """

    num_requests: int
    num_rows: float
    rung: int = 0
    num_trees: int = 0


class RoundCosts:
    """Learns how long rounds take, and says how long a round is expected to take.

    Args:
        forward: Measured times of the target's forwards.
        ladder: Shapes of rungs 1, 2, ...; rung 0 is the root alone.
        is_padded: Steps are padded up to the row counts that were measured: on a GPU.
        most_rows: Most rows of trees in a step.
    """

    def __init__(
        self,
        forward: StepCosts,
        ladder: Sequence[TreeShape],
        *,
        is_padded: bool,
        most_rows: int,
    ) -> None:
        sizes, seconds = zip(*forward.sizes, strict=True)
        self._sizes: tuple[int, ...] = sizes
        self._seconds: tuple[float, ...] = seconds
        self._marginal_s = min(s / size for size, s in zip(sizes, seconds, strict=True))
        self.is_padded, self.most_rows = is_padded, most_rows
        self.num_targets = 1
        """Targets that the draft grows trees for."""
        self._limits = [*(size for size in sizes if size < most_rows), most_rows]
        self._limit_rows: Floats = np.array(self._limits, dtype=np.float64)
        most = max(most_rows, BATCH_BUCKETS[-1])
        self._forward_of: Floats = np.array([self.forward_s(rows) for rows in range(1 + most)])
        self.rows: Ints = np.array([1, *(shape.num_draft_tokens for shape in ladder)])
        """[rungs], rows of a request's tree."""
        growths = [_first_growth(shape, is_gpu=is_padded) for shape in ladder]
        self._growth = seconds[0] * np.array([np.zeros(len(_BATCHES)), *growths])
        # Host time is proportional to this: on a CPU to requests, beside a GPU to requests plus a
        # fixed part.
        self._host_unit = _HOST_REQUESTS + _BATCHES if is_padded else _BATCHES
        roots_s = self.forwards_s(_BATCHES)
        self._samples = RoundSamples(self._growth.shape, roots_s, is_gpu=is_padded)
        # `_host`: time of a round without trees beside its forward, by the bucket of requests.
        # `_draft`: time of trees beside forward and host, by rung and the bucket of trees.
        self._first_host = _FIRST_HOST * seconds[0] * is_padded * self._host_unit
        self._host = self._first_host.copy()
        self._most_host = np.full(len(_BATCHES), np.inf)
        self._draft = self._growth.copy()
        self._most_plausible = _PLAUSIBLE * self._growth
        self._guessed_from = np.full_like(self._growth, np.nan)

    def forward_s(self, num_rows: float) -> float:
        """Return the time of a forward of `num_rows` rows."""
        sizes, seconds = self._sizes, self._seconds
        if num_rows > sizes[-1]:
            return seconds[-1] * num_rows / sizes[-1]
        if self.is_padded:
            return seconds[bisect_left(sizes, num_rows)]
        return float(np.interp(num_rows, sizes, seconds))

    def forwards_s(self, num_rows: Ints) -> Floats:
        """Return `forward_s` by numbers of rows, [P]; none is above `most_rows` and the largest
        bucket.
        """
        forwards_s: Floats = self._forward_of.take(num_rows)
        return forwards_s

    def marginal_s(self, num_rows: Number) -> Number:
        """Return the time of `num_rows` rows in steps that rows of prompts fill up."""
        return num_rows * self._marginal_s

    def sizes_above(self, num_rows: int) -> Floats:
        """Return the captured sizes of steps above `num_rows`.

        Such a size is worth filling up: one more row would cost the time of the next size.
        """
        return self._limit_rows[bisect_right(self._limits, num_rows) :]

    def host_s(self, num_requests: int) -> float:
        """Return the time of a round without trees beside its forward."""
        return float(self._host[_bucket(num_requests)])

    def draft_s(self, kind: RoundKind) -> float:
        """Return the time of the trees of a round beside forward and host."""
        return float(self._draft[kind.rung, _bucket(kind.num_trees)]) * self._share(kind)

    def drafts_s(self, rung: Ints, num_trees: Ints, num_requests: int, num_rows: Ints) -> Floats:
        """Return `draft_s` of P rounds, [P].

        Args:
            rung: [P]. Of the largest tree.
            num_trees: [P].
            num_requests: The same in all rounds.
            num_rows: [P].
        """
        drafts_s: Floats = self._draft[rung, _BUCKETS.take(num_trees, mode="clip")]
        if self.is_padded:
            return drafts_s
        trees = num_trees.astype(np.float64)
        part = _growth_cpu((num_rows - num_requests).astype(np.float64), trees)
        whole = _growth_cpu(trees * (self.rows[rung] - 1), trees)
        return drafts_s * np.minimum(part / whole, 1.0)

    def delay_s(self, rung: int, num_trees: int) -> float:
        """Return how long the other targets of the draft wait while these trees grow: each of them
        waits for the first guess of their growth.

        This makes each target ask for smaller trees than would be best for it alone, which is
        better for all targets together.

        Args:
            rung: Rung of the largest tree.
            num_trees: Number of trees.
        """
        if self.num_targets == 1:
            return 0.0
        return (self.num_targets - 1) * float(self._growth[rung, _bucket(num_trees)])

    def delays_s(self, rung: Ints, num_trees: Ints) -> Floats:
        """Return `delay_s` of P rounds; args [P] each."""
        growth: Floats = self._growth[rung, _BUCKETS.take(num_trees, mode="clip")]
        return (self.num_targets - 1) * growth

    def round_s(self, kind: RoundKind, forward_s: float | None = None) -> float:
        """Return the expected time of a round.

        Args:
            forward_s: Time of its forward; None: look it up.
        """
        if forward_s is None:
            forward_s = self.forward_s(kind.num_rows)
        seconds = forward_s + self.host_s(kind.num_requests)
        return seconds + self.draft_s(kind) if kind.rung else seconds

    def plain_is_worth_a_try(self, num_requests: int, tokens_per_s: float, now_s: float) -> bool:
        """Return whether rounds without trees should be tried: there was none for long, and they
        might bring more tokens per second than the trees of now.

        The known time of rounds without trees may have been measured while other processes used the
        machine.

        Args:
            num_requests: Running requests.
            tokens_per_s: What rounds with trees bring.
            now_s: Monotonic time.
        Mutates: forgets the times of rounds without trees, if it returns True.
        """
        least_s = self.forward_s(num_requests)
        if self.is_padded:
            least_s += _LEAST_HOST * self.host_s(num_requests)
        might_bring = num_requests / least_s
        return might_bring > tokens_per_s and self._samples.forget_plain(
            _bucket(num_requests), now_s
        )

    def note_round(self, kind: RoundKind, took_s: float, now_s: float) -> None:
        """Learn from the time of a round.

        Args:
            took_s: Measured time of the round.
            now_s: Monotonic time.
        """
        batch = _bucket(kind.num_requests)
        place, share = (0, batch), 1.0
        if kind.rung:
            place, share = (kind.rung, _bucket(kind.num_trees)), self._share(kind)
        forward_s = self.forward_s(kind.num_rows)
        self._samples.note(place, took_s, forward_s, batch=batch, share=share, now_s=now_s)
        # Entries of as many trees or more that were not measured for long are forgotten.
        has_changed = kind.rung > 0 and self._samples.try_again(
            now_s, place[1], batch, self._draft <= self._most_plausible
        )
        entry_s = self._samples.entry(place, self._host)
        if entry_s is not None and kind.rung:
            known_s = float(self._draft[place])
            is_much = abs(entry_s - known_s) > _MUCH_OF_ROUND * took_s
            if is_much and _differs(entry_s, known_s, _MUCH_CHANGE):
                has_changed |= self._samples.forget_trees(now_s)
            self._draft[place] = entry_s
        elif entry_s is not None:
            self._host[batch] = min(entry_s, self._most_host[batch])
            has_changed = self._host[batch] < entry_s and self._samples.has_many(batch)
        guessed_from_s = float(self._guessed_from[place])
        if has_changed or (entry_s is not None and _differs(entry_s, guessed_from_s, _CHANGE)):
            self._guess()

    def forget_implausible(self, num_trees: int) -> None:
        """Forget the times of trees of so many requests or fewer that are far above their first
        guess: they may be of a moment when other processes used the cores.
        """
        is_implausible = self._draft > self._most_plausible
        if self._samples.forget_few(is_implausible, _bucket(num_trees)):
            self._guess()

    def _share(self, kind: RoundKind) -> float:
        """Return the share of the table's time that the trees of a round take if some of them are
        smaller than the largest: on a CPU what fewer nodes are expected to take of it, on a GPU all
        of it.
        """
        if self.is_padded:
            return 1.0
        trees = float(kind.num_trees)
        part = _growth_cpu(kind.num_rows - kind.num_requests, trees)
        whole = _growth_cpu(trees * (float(self.rows[kind.rung]) - 1.0), trees)
        return min(part / whole, 1.0)

    def _guess(self) -> None:
        """Fill the entries of `_host` and `_draft` that were not measured from those that were."""
        host = self._samples.entries(self._host)[0]
        places = np.flatnonzero(~np.isnan(host))
        self._host = self._first_host.copy()
        if len(places):
            batches = np.arange(len(host))
            per_unit = np.interp(batches, places, (host / self._host_unit)[places])
            guess = per_unit * self._host_unit
            # Two guesses: the same factor of the unit, or the same difference to the first guess.
            step = np.interp(batches, places, (host - self._first_host)[places])
            guess = np.minimum(guess, np.maximum(step + self._first_host, 0.0))
            self._host = np.where(np.isnan(host), guess, host)
        if self.is_padded:
            self._most_host = self._host_bounds(~np.isnan(host))
            self._host = np.minimum(self._host, self._most_host)
        known = self._samples.entries(self._host)
        self._guessed_from = known
        known, growth = known[1:], self._growth[1:]
        if np.isnan(known).all():
            self._draft = self._growth.copy()
            return
        guess = growth * _filled(known / growth)
        is_known = ~np.isnan(known)
        draft = np.where(is_known, known, guess)
        more = np.diff(growth, axis=0)
        for rung, is_measured in enumerate(is_known[1:]):
            least = draft[rung] + more[rung]
            draft[rung + 1, ~is_measured] = np.maximum(draft[rung + 1], least)[~is_measured]
        self._draft[1:] = draft

    def _host_bounds(self, is_known: NDArray[np.bool_]) -> Floats:
        """Return upper bounds of `_host`, from rounds with trees: these take longer. There is none
        where many rounds without trees were measured.

        Bounds are needed because the few rounds without trees, at the end of a request or while its
        draft was busy, may have been slow for other reasons. Where no round without trees was
        measured, the first guesses say which share of a round with trees is the host's.

        Args:
            is_known: [buckets], whether rounds without trees were measured.
        """
        totals, batches = self._samples.totals()
        rung, bucket = np.nonzero(~np.isnan(totals[1:]))
        rung += 1
        most = np.full(len(self._host), np.inf)
        total, batch = totals[rung, bucket], batches[rung, bucket]
        growth = self._growth[rung, bucket]
        trees_s = _LEAST_GROWTH * np.minimum(growth, total)
        expected_s = total * growth / (growth + self._first_host[batch])
        trees_s = np.where(is_known[batch], trees_s, np.maximum(trees_s, expected_s))
        np.minimum.at(most, batch, total - trees_s)
        most[[self._samples.has_many(batch) for batch in range(len(most))]] = np.inf
        return np.maximum(most, 0.0)


def _filled(table: Floats) -> Floats:
    """Return a table whose NaN are interpolated: first within each rung, then between rungs."""
    rungs, batches = np.arange(table.shape[0]), np.arange(table.shape[1])
    is_known = ~np.isnan(table)
    tried = np.flatnonzero(is_known.any(axis=1))
    by_batch = np.array(
        [np.interp(batches, batches[is_known[rung]], table[rung, is_known[rung]]) for rung in tried]
    )
    return np.array([np.interp(rungs, tried, column) for column in by_batch.T]).T


def _differs(seconds: float, from_s: float, part: float) -> bool:
    """Return whether an entry has changed by more than a share `part`, or was not known (NaN)."""
    return not abs(seconds - from_s) <= max(part * abs(from_s), _CHANGE_S)


def _first_growth(shape: TreeShape, *, is_gpu: bool) -> Floats:
    """Return the first guess of the time of trees of a shape, by the bucket of trees, in forwards
    of one row.
    """
    if not is_gpu:
        return _growth_cpu(_BATCHES * (shape.num_draft_tokens - 1.0), _BATCHES.astype(np.float64))
    per_step = 1.0 + _BATCHES * shape.topk / _DOUBLING_ROWS
    return _FIRST_GROWTH + _FIRST_GROWTH_PER_STEP * shape.num_steps * per_step


def _growth_cpu(num_nodes: Number, num_trees: Number) -> Number:
    """Return the first guess of the time of trees on a CPU, in forwards of one row.

    Args:
        num_nodes: Of all trees, roots excluded.
    """
    return _FIRST_TREES_CPU + _FIRST_ROW_CPU * (num_nodes + 3 * num_trees)


def _bucket(count: int) -> int:
    return _BUCKET_OF[min(count, BATCH_BUCKETS[-1])]


def bucket_size(count: int) -> int:
    """Return the size of the bucket that a number of requests or trees belongs to."""
    return BATCH_BUCKETS[_bucket(count)]
