"""What a round takes: by the rows of its step, its requests, and the trees that it waits for.

    round = forward(rows) + host[requests] + draft[largest rung, trees]

Forwards were measured at start-up. The rest is learned from rounds: the host's part (sampling, the
reading of KV, transport) from those without trees; what trees take beside it (the draft, and what
they make both hosts do) from those with trees. An entry is one of the faster ones of the last few
rounds of its kind: one that had to wait for something else says nothing. Rungs and numbers of trees
that were never tried take as many times what was expected of their growth as the nearest ones do,
but no less than smaller trees do. What is expected is rather too cheap than too dear, so that it is
tried, and known then.
"""

from __future__ import annotations

from bisect import bisect_left
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

# Of a forward of one row: what a draft takes until somebody has measured it. On a GPU each of its
# steps is a forward of its own, and twice as long where it has so many rows; on a CPU it is
# processes that wait for each other, and rows, for which the target takes more than in a forward
# without KV. As the bundled models do, but less, so that trees of a few requests are tried.
_FIRST_GROWTH = 0.1
_FIRST_GROWTH_PER_STEP = 0.037
_DOUBLING_ROWS = 48
_FIRST_TREES_CPU, _FIRST_ROW_CPU = 0.76, 0.04

# Of a forward of one row, what a GPU takes beside the forward for a request, until it was measured.
_FIRST_HOST = 0.005
# What a host does for a step takes it about as long as for so many requests.
_HOST_REQUESTS = 16
# Of what a draft is expected to take, or of what a round with trees took beside its forward,
# whichever is less: what the trees took at least.
_LEAST_GROWTH = 0.5
# Of what rounds without trees are known to take beside the forward on a GPU, where KV is read:
# what they take at least.
_LEAST_HOST = 0.5
# An entry that has changed by such a part, or so many seconds, changes the guesses from it; by so
# much, and it is another draft, or a busy one: what was learned long ago of it is void.
_CHANGE, _CHANGE_S = 0.1, 20e-6
_MUCH_CHANGE = 0.5
# Many trees that took more than so many times what was expected of them had to wait for something.
_PLAUSIBLE = 3.0
# .. unless it is less than such a part of the round: what few trees take beside many requests is a
# small difference of large numbers.
_MUCH_OF_ROUND = 0.05

# Of what trees take on a CPU: what few rows of them take at least.
_LEAST_SHARE = 0.05

_BATCHES = np.array(BATCH_BUCKETS)
# Of every number of requests, or of trees, the place of its bucket.
_BUCKETS = np.searchsorted(_BATCHES, np.arange(1 + BATCH_BUCKETS[-1]))
_BUCKET_OF: list[int] = _BUCKETS.tolist()


class RoundKind(NamedTuple):
    """What decides how long a round takes.

    Args:
        num_requests: That run.
        num_rows: Of a step of all of them.
        rung: Of the largest tree that is waited for; 0: there is none.
        num_trees: That are waited for.
    """

    num_requests: int
    num_rows: float
    rung: int = 0
    num_trees: int = 0


class RoundCosts:
    """Learns what rounds take.

    Args:
        forward: Of the target.
        is_padded: Steps are padded up to the row counts that were measured.
        most_rows: Of a step's trees.
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
        self._size_rows, self._size_seconds = np.array(sizes, float), np.array(seconds)
        self._marginal_s = min(s / size for size, s in zip(sizes, seconds, strict=True))
        self.is_padded, self.most_rows = is_padded, most_rows
        self.num_targets = 1
        """That the draft grows trees for."""
        limits = [*(size for size in sizes if size < most_rows), most_rows]
        self._limits: Floats = np.array(limits, dtype=np.float64)
        self._limits_s: Floats = np.array([self.forward_s(limit) for limit in limits])
        self.rows: Ints = np.array([1, *(shape.num_draft_tokens for shape in ladder)])
        """Of a request, by its rung."""
        growths = [_first_growth(shape, is_gpu=is_padded) for shape in ladder]
        self._growth = seconds[0] * np.array([np.zeros(len(_BATCHES)), *growths])
        # A CPU computes row by row, a GPU's host request by request and some.
        self._host_unit = _HOST_REQUESTS + _BATCHES if is_padded else _BATCHES
        roots_s = self.forwards_s(_BATCHES.astype(float))
        self._samples = RoundSamples(self._growth.shape, roots_s, is_gpu=is_padded)
        # What rounds without trees take beside the forward, by the bucket of requests; and what
        # trees take beside that, by rung and the bucket of trees.
        self._first_host = _FIRST_HOST * seconds[0] * is_padded * self._host_unit
        self._host = self._first_host.copy()
        self._most_host = np.full(len(_BATCHES), np.inf)
        self._draft = self._growth.copy()
        self._guessed_from = np.full_like(self._growth, np.nan)

    def forward_s(self, num_rows: float) -> float:
        """Return what a forward of so many rows takes."""
        sizes, seconds = self._sizes, self._seconds
        if num_rows > sizes[-1]:
            return seconds[-1] * num_rows / sizes[-1]
        if self.is_padded:
            return seconds[bisect_left(sizes, num_rows)]
        return float(np.interp(num_rows, sizes, seconds))

    def forwards_s(self, num_rows: Floats) -> Floats:
        """Return what forwards of so many rows take, each."""
        if self.is_padded:
            places = self._size_rows.searchsorted(num_rows)
            forwards_s: Floats = self._size_seconds.take(places, mode="clip")
        else:
            forwards_s = np.interp(num_rows, self._size_rows, self._size_seconds)
        most = self._sizes[-1]
        return np.maximum(forwards_s, self._seconds[-1] * num_rows / most * (num_rows > most))

    def marginal_s(self, num_rows: Number) -> Number:
        """Return what so many rows take in steps that prompts fill up."""
        return num_rows * self._marginal_s

    def sizes_above(self, num_rows: int) -> tuple[Floats, Floats]:
        """Return the sizes of steps that are worth filling, and what a forward of each takes.

        One more row than these costs a whole size more.
        """
        first = int(np.searchsorted(self._limits, num_rows, side="right"))
        return self._limits[first:], self._limits_s[first:]

    def host_s(self, num_requests: int) -> float:
        """Return what a round takes beside its forward where there are no trees."""
        return float(self._host[_bucket(num_requests)])

    def draft_s(self, kind: RoundKind) -> float:
        """Return what the trees of a round take beside the forward and the host."""
        return float(self._draft[kind.rung, _bucket(kind.num_trees)]) * self._share(kind)

    def drafts_s(self, rung: Ints, num_trees: Ints, num_requests: int, num_rows: Floats) -> Floats:
        """Return what trees take in each of P rounds, which differ in these: [P] each."""
        drafts_s: Floats = self._draft[rung, _BUCKETS.take(num_trees, mode="clip")]
        if self.is_padded:
            return drafts_s
        most_rows = np.maximum(num_trees * (self.rows[rung] - 1), 1)
        return drafts_s * np.clip((num_rows - num_requests) / most_rows, _LEAST_SHARE, 1.0)

    def delay_s(self, rung: int, num_trees: int) -> float:
        """Return how long the other targets of the draft wait for trees, as far as that is known:
        each of them would be faster with larger trees, and all of them with smaller ones.

        Args:
            rung: Of the largest.
        """
        return (self.num_targets - 1) * float(self._growth[rung, _bucket(num_trees)])

    def delays_s(self, rung: Ints, num_trees: Ints) -> Floats | float:
        """Return the same of P rounds, [P] each."""
        if self.num_targets == 1:
            return 0.0
        growth: Floats = self._growth[rung, _BUCKETS.take(num_trees, mode="clip")]
        return (self.num_targets - 1) * growth

    def round_s(self, kind: RoundKind, forward_s: float | None = None) -> float:
        """Return what a round is expected to take.

        Args:
            forward_s: What its forward takes; None: not looked up yet.
        """
        if forward_s is None:
            forward_s = self.forward_s(kind.num_rows)
        seconds = forward_s + self.host_s(kind.num_requests)
        return seconds + self.draft_s(kind) if kind.rung else seconds

    def plain_is_worth_a_try(self, num_requests: int, tokens_per_s: float, now_s: float) -> bool:
        """Return whether rounds without trees, of which there was none for long, might bring more.

        What is known of them may be of a moment when others used the machine.

        Args:
            tokens_per_s: That rounds with trees bring.
            now_s: By a monotonic clock.
        Mutates: what is known of them, which is forgotten.
        """
        least_s = self.forward_s(num_requests)
        if self.is_padded:
            least_s += _LEAST_HOST * self.host_s(num_requests)
        might_bring = num_requests / least_s
        return might_bring > tokens_per_s and self._samples.forget_plain(
            _bucket(num_requests), now_s
        )

    def note_round(self, kind: RoundKind, took_s: float, now_s: float) -> None:
        """Learn from a round.

        Args:
            now_s: By a monotonic clock.
        """
        batch = _bucket(kind.num_requests)
        place, share = (0, batch), 1.0
        if kind.rung:
            place, share = (kind.rung, _bucket(kind.num_trees)), self._share(kind)
        forward_s = self.forward_s(kind.num_rows)
        self._samples.note(place, took_s, forward_s, batch=batch, share=share, now_s=now_s)
        # Other rungs of as many trees, or of more, are known no better if they were not tried for
        # long.
        has_forgotten = kind.rung > 0 and self._samples.try_again(
            now_s, place[1], batch, self._draft <= _PLAUSIBLE * self._growth
        )
        entry_s = self._samples.entry(place, self._host)
        if entry_s is not None and kind.rung:
            known_s = float(self._draft[place])
            is_much = abs(entry_s - known_s) > _MUCH_OF_ROUND * took_s
            if is_much and _differs(entry_s, known_s, _MUCH_CHANGE):
                has_forgotten |= self._samples.forget_trees(now_s)
            self._draft[place] = entry_s
        elif entry_s is not None:
            self._host[batch] = min(entry_s, self._most_host[batch])
        guessed_from_s = float(self._guessed_from[place])
        if has_forgotten or (entry_s is not None and _differs(entry_s, guessed_from_s, _CHANGE)):
            self._guess()

    def _share(self, kind: RoundKind) -> float:
        """Return which part of a number of trees' time a round takes if not all of these are of the
        rung: on a CPU by their rows, on a GPU all of it.
        """
        if self.is_padded:
            return 1.0
        most_rows = max(kind.num_trees * (int(self.rows[kind.rung]) - 1), 1)
        return min(max((kind.num_rows - kind.num_requests) / most_rows, _LEAST_SHARE), 1.0)

    def _guess(self) -> None:
        """Guess what is not known from what is."""
        host = self._samples.entries(self._host)[0]
        places = np.flatnonzero(~np.isnan(host))
        self._host = self._first_host.copy()
        if len(places):
            batches = np.arange(len(host))
            per_unit = np.interp(batches, places, (host / self._host_unit)[places])
            guess = per_unit * self._host_unit
            # By the request or row, or by the step and what was expected of more of them.
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
        for smaller, larger, is_measured in zip(draft, draft[1:], is_known[1:], strict=False):
            larger[~is_measured] = np.maximum(larger, smaller)[~is_measured]
        self._draft[1:] = draft

    def _host_bounds(self, is_known: NDArray[np.bool_]) -> Floats:
        """Return what rounds without trees take at most beside their forwards, by the bucket of
        requests: those with trees take more. Few rounds without any, at a request's end or while
        its draft was busy, may have been slow for other reasons; where there was none, the host has
        the part of a round with trees that was expected first.

        Args:
            is_known: [buckets], there were some.
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
        return np.maximum(most, 0.0)


def _filled(table: Floats) -> Floats:
    """Return a table without its NaN: between what is known of a rung, then between rungs."""
    rungs, batches = np.arange(table.shape[0]), np.arange(table.shape[1])
    is_known = ~np.isnan(table)
    tried = np.flatnonzero(is_known.any(axis=1))
    by_batch = np.array(
        [np.interp(batches, batches[is_known[rung]], table[rung, is_known[rung]]) for rung in tried]
    )
    return np.array([np.interp(rungs, tried, column) for column in by_batch.T]).T


def _differs(seconds: float, from_s: float, part: float) -> bool:
    """Return whether an entry is not about what it was, or was not known (NaN)."""
    return not abs(seconds - from_s) <= max(part * abs(from_s), _CHANGE_S)


def _first_growth(shape: TreeShape, *, is_gpu: bool) -> Floats:
    """Return what trees of a shape take beside the forward, by the bucket of trees; 1: a forward
    of one row.
    """
    if not is_gpu:
        return _FIRST_TREES_CPU + _FIRST_ROW_CPU * _BATCHES * (shape.num_draft_tokens + 2)
    per_step = 1.0 + _BATCHES * shape.topk / _DOUBLING_ROWS
    return _FIRST_GROWTH + _FIRST_GROWTH_PER_STEP * shape.num_steps * per_step


def _bucket(count: int) -> int:
    return _BUCKET_OF[min(count, BATCH_BUCKETS[-1])]


def bucket_size(count: int) -> int:
    """Return the number of requests, or of trees, that so many are taken for."""
    return BATCH_BUCKETS[_bucket(count)]
