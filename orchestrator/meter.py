"""What one request reports at its end: speculation statistics and timings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from shared.messages import AcceptedPath, AnswerTimes, SpeculationStats, Timings
from shared.times import seen_from


class Stopwatch:
    """Adds up the time of the blocks that it is used around; one that raises does not count."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.total_s = 0.0
        self._now = now
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if error_type is None:
            self.total_s += self._now() - self._started


class Meter:
    """Counts the rounds of one request and the time that they take.

    `draft_wait` goes around the wait for a tree, `verify` around a verification.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self.draft_wait = Stopwatch(self._loop.time)
        self.verify = Stopwatch(self._loop.time)
        self._accepted: Counter[int] = Counter()
        self._num_draft_tokens = 0
        self._num_root_only = 0
        self._num_moved = 0

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

    def count(self, path: AcceptedPath, *, num_tokens: int) -> None:
        """Count a verify round; prefills (round 0) are not counted.

        Args:
            num_tokens: Tokens of the path up to the one that ends the output. The last of them
                stands for the bonus token, so that drafts that a stop cut off do not count.
        """
        if path.round_idx == 0:
            return
        self._accepted[min(path.num_accepted_drafts, num_tokens - 1)] += 1
        self._num_draft_tokens += path.num_draft_tokens - 1
        self._num_root_only += path.num_draft_tokens == 1
        self._num_moved += path.accept_index != tuple(range(len(path.accept_index)))

    @property
    def speculation(self) -> SpeculationStats:
        """Return the statistics of all rounds so far."""
        accepted = self._accepted
        return SpeculationStats(
            num_rounds=accepted.total(),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_drafts=sum(drafts * rounds for drafts, rounds in accepted.items()),
            accept_length_histogram=tuple(
                accepted[drafts] for drafts in range(max(accepted, default=-1) + 1)
            ),
            num_root_only_rounds=self._num_root_only,
            num_moved_rounds=self._num_moved,
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
