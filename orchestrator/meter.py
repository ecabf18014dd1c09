"""What one request reports at its end: speculation statistics and timings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from orchestrator.figures import Figures
from shared.messages import MAX_TREE_NODES, AcceptedPath, AnswerTimes, SpeculationStats, Timings
from shared.metrics.tally import Tally
from shared.times import seen_from

_FIRST_NODES = tuple(range(MAX_TREE_NODES))


class Stopwatch:
    """Adds up the time of the blocks that it is used around; one that raises does not count."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.total_s = 0.0
        self._now = now
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self.lap()

    def lap(self) -> None:
        """Count the time so far within a block; what follows may still raise."""
        now = self._now()
        self.total_s += now - self._started
        self._started = now


class Moments(NamedTuple):
    """When a request came, when it had a place on a target, and when output left; nanoseconds of
    the monotonic clock, 0 = not yet.
    """

    started_ns: int
    admitted_ns: int
    first_token_ns: int


class Meter:
    """Counts the rounds of one request and the time that they take.

    `draft_wait` goes around the wait for a tree, `verify` around a verification.

    Args:
        inter_token: Takes the time of each token after the first, seconds.
    """

    def __init__(self, inter_token: Tally | None = None) -> None:
        self._inter_token = inter_token
        self._last_path = 0.0
        self.root_only_reasons: Counter[str] = Counter()
        """Rounds without a tree, by why."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self.draft_wait = Stopwatch(self._loop.time)
        self.verify = Stopwatch(self._loop.time)
        self._accepted: Counter[int] = Counter()
        self._num_draft_tokens = 0
        self._num_moved = 0
        self._num_relayed = 0
        self._num_output_tokens = 0
        self._tree_sizes: Counter[int] = Counter()

    def admitted(self, times: AnswerTimes | None = None) -> None:
        """Note the end of queueing; later calls change nothing.

        Args:
            times: From that end to the answer which came now; None: it ended now.
        """
        if self._admitted is not None:
            return
        self._admitted = now = self._loop.time()
        if times is not None:
            seen = seen_from(times, kind="target", sent_ns=None, arrived_ns=int(now * 1e9))
            self._admitted = min(max(seen.begin_ns / 1e9, self._started), now)

    def sent(self) -> None:
        """Note that output left; later calls change nothing."""
        self._first_token = self._first_token or self._loop.time()

    def count(
        self,
        path: AcceptedPath,
        *,
        num_tokens: int,
        is_resting: bool = False,
        root_only_reason: str = "",
        is_relayed: bool = False,
    ) -> None:
        """Count a verify round; prefills (round 0) are not counted.

        Args:
            num_tokens: Tokens of the path up to the one that ends the output. The last of them
                stands for the bonus token, so that drafts that a stop cut off do not count.
            is_resting: The target wants no trees for now.
            root_only_reason: Why there was no tree, if there was none.
            is_relayed: The tree came through this process.
        """
        self._num_output_tokens += num_tokens
        before, now = self._last_path, self._loop.time()
        self._last_path = now
        if self._inter_token is not None and before and num_tokens:
            self._inter_token.add((now - before) / num_tokens, num_tokens)
        if path.round_idx == 0:
            return
        if path.num_draft_tokens == 1:
            self.root_only_reasons["resting" if is_resting else root_only_reason] += 1
        self._accepted[min(path.num_accepted_drafts, num_tokens - 1)] += 1
        self._num_draft_tokens += path.num_draft_tokens - 1
        self._num_relayed += is_relayed
        self._tree_sizes[path.num_draft_tokens] += 1
        self._num_moved += path.accept_index != _FIRST_NODES[: len(path.accept_index)]

    @property
    def has_output(self) -> bool:
        """Return whether output has left."""
        return self._first_token is not None

    @property
    def moments(self) -> Moments:
        """Return when what began."""
        times = (self._started, self._admitted or 0.0, self._first_token or 0.0)
        return Moments(*(int(at_s * 1e9) for at_s in times))

    @property
    def speculation(self) -> SpeculationStats:
        """Return the statistics of all rounds so far."""
        accepted = self._accepted
        return SpeculationStats(
            num_rounds=accepted.total(),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_drafts=sum(drafts * rounds for drafts, rounds in accepted.items()),
            accept_length_histogram=_histogram(accepted),
            num_root_only_rounds=self.root_only_reasons.total(),
            num_moved_rounds=self._num_moved,
            num_resting_rounds=self.root_only_reasons["resting"],
            tree_size_histogram=_histogram(self._tree_sizes),
        )

    @property
    def figures(self) -> Figures:
        """Return what operators add up over requests, so far."""
        stats = self.speculation
        return Figures(
            num_output_tokens=self._num_output_tokens,
            num_rounds=stats.num_rounds,
            num_root_only_rounds=stats.num_root_only_rounds - stats.num_resting_rounds,
            num_resting_rounds=stats.num_resting_rounds,
            num_relayed_rounds=self._num_relayed,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_drafts=stats.num_accepted_drafts,
            draft_wait_s=self.draft_wait.total_s,
            verify_s=self.verify.total_s,
        )

    @property
    def timings(self) -> Timings:
        """Return where the time went so far."""
        now = self._loop.time()
        num_rounds = max(1, self._accepted.total())
        return Timings(
            queue_ms=((now if self._admitted is None else self._admitted) - self._started) * 1e3,
            time_to_first_token_ms=((self._first_token or now) - self._started) * 1e3,
            total_ms=(now - self._started) * 1e3,
            mean_draft_wait_ms=self.draft_wait.total_s / num_rounds * 1e3,
            mean_verify_ms=self.verify.total_s / num_rounds * 1e3,
        )


def _histogram(counts: Counter[int]) -> tuple[int, ...]:
    """Return how often each number came, from 0 to the largest."""
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))
