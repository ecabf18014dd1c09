"""How many rows of a step are for prompts while others wait for its end.

A prompt's rows make everybody's step longer; fewer rows per step make its own first token later. So
a step with rows of prompts brings tokens after twice the time that it would take without, and after
more than that where a prompt waits long, or would before all that are here are read: where prompts
come faster than that leaves room for, larger steps, which cost less per row, catch up.

Where several prompts wait, many such steps follow each other, so they take one and a half times as
long at first. No step is larger then than it must be to read them nearly as fast as they can be
read, nor takes many times as long as one without prompts: a short prompt that comes next waits for
the step in flight, and passes the others in the one behind it.

Times are those of the table, and what is learned beside it: of a round, and of a prompt's row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from target_service.step_costs import StepCosts

# The time from token to token is so many times that without prompts at most, with rows of one of
# them or of one of several ..
_MOST_DELAY, _MOST_CROWDED_DELAY = 2.0, 1.5
# .. and once more of it for each time that the oldest prompt waits so long again: until now, and
# where several prompts wait, until all of them are read.
_SOON_S = 0.1
# Where several prompts wait: of the most rows per second that any size of a step reads ..
_FULL_SPEED = 0.9
# .. and of the time that a forward of the rows that decode takes, of one row if none does; the
# delay above holds beside it.
_MOST_CROWDED = 6.0
# So that prompts get on beside any trees.
_LEAST_ROWS = 16
_EWMA_WEIGHT = 0.1
# Prompts make a forward longer than the table says by so many times that at most: what takes longer
# had to wait for something else.
_MOST_MORE = 2.0


class PromptBudget:
    """Rows of prompts and replays per step.

    Args:
        costs: Of a forward, by its rows.
        clock: Monotonic, seconds.
    """

    def __init__(self, costs: StepCosts, clock: Callable[[], float] = time.monotonic) -> None:
        self._costs = costs
        self._clock = clock
        self._ended_s = 0.0
        self._beside_s = 0.0  # what a round takes beside the forward: sampling, trees, hosts
        # What a row of a prompt takes beyond the table: to read the context, which on a CPU is as
        # much again, and for a draft that reads it on the same device.
        self._context_s = 0.0
        self._crowded_size = self._fast_size()

    def note_step(
        self, num_rows: int, *, num_chain_rows: int = 0, began_s: float = -math.inf
    ) -> None:
        """Take note that a step has ended.

        Args:
            num_rows: Of the step.
            num_chain_rows: How many of them were those of prompts and replays.
            began_s: When the host began with it, by the clock.
        """
        now = self._clock()
        took_s, ended_s, self._ended_s = now - self._ended_s, self._ended_s, now
        forward_s = self._costs.of(num_rows)
        if num_chain_rows >= _LEAST_ROWS:
            more_s = now - max(began_s, ended_s) - forward_s - self._beside_s
            more_s = min(max(0.0, more_s), _MOST_MORE * forward_s) / num_chain_rows
            self._context_s += _EWMA_WEIGHT * (more_s - self._context_s)
        if not num_chain_rows and took_s < 2 * forward_s:  # else nobody was decoding before
            beside_s = max(0.0, took_s - forward_s)
            self._beside_s += _EWMA_WEIGHT * (beside_s - self._beside_s)

    def num_rows(
        self,
        num_decoding_rows: int,
        num_waiting_rows: int,
        oldest_s: float,
        *,
        is_crowded: bool = False,
    ) -> int:
        """Return the rows for prompts in a step.

        Steps are padded up to sizes that were measured: of those that are short enough, the one
        that reads most prompt rows per second, so that few rows never cost a whole size more.

        Args:
            num_decoding_rows: Of the step, or of the next one, whose requests wait for this one.
            num_waiting_rows: Of all prompts.
            oldest_s: When the prompt that has waited longest came, by the clock.
            is_crowded: There are several prompts.
        """
        waits_s = max(0.0, self._clock() - oldest_s)
        limit_s = self._limit_s(num_decoding_rows, waits_s, is_crowded=is_crowded)
        size, speed = self._fastest(
            num_decoding_rows, num_waiting_rows, limit_s, is_crowded=is_crowded
        )
        if is_crowded and num_decoding_rows:
            least_s = self._costs.of(num_decoding_rows + _LEAST_ROWS) + self._beside_s
            waits_s += num_waiting_rows / (speed or _LEAST_ROWS / least_s)
            limit_s = self._limit_s(num_decoding_rows, waits_s, is_crowded=True)
            size, _ = self._fastest(num_decoding_rows, num_waiting_rows, limit_s, is_crowded=True)
        return max(size - num_decoding_rows, _LEAST_ROWS)

    def _fastest(
        self, num_decoding_rows: int, num_waiting_rows: int, limit_s: float, *, is_crowded: bool
    ) -> tuple[int, float]:
        """Return the size of a step that reads prompts fastest, and how many rows of them a second.

        Args:
            limit_s: That its forward may take.
        Returns: 0 and 0 if none is short enough.
        """
        most_rows = num_decoding_rows + self._crowded_size if is_crowded else math.inf
        num_wanted = num_decoding_rows + num_waiting_rows
        fastest, best = 0, 0.0
        for size, seconds in self._costs.sizes:
            num_prompt_rows = min(size, num_wanted) - num_decoding_rows
            seconds += max(0, num_prompt_rows) * self._context_s
            speed = num_prompt_rows / (seconds + self._beside_s)
            if seconds <= limit_s and size <= most_rows and speed > best:
                fastest, best = size, speed
        return fastest, best

    def _limit_s(self, num_decoding_rows: int, waits_s: float, *, is_crowded: bool) -> float:
        """Return how long the forward of a step with prompts may take.

        Args:
            waits_s: How long the oldest prompt waits.
        """
        limit_s = math.inf
        if num_decoding_rows:
            patience = _MOST_CROWDED_DELAY if is_crowded else _MOST_DELAY
            patience += max(0.0, waits_s / _SOON_S - 1)
            without_s = self._costs.of(num_decoding_rows) + self._beside_s
            limit_s = patience * without_s - self._beside_s
        if is_crowded:
            limit_s = min(limit_s, _MOST_CROWDED * self._costs.of(max(1, num_decoding_rows)))
        return limit_s

    def _fast_size(self) -> int:
        """Return the smallest size of a step that reads prompts at nearly full speed."""
        speeds = {size: size / seconds for size, seconds in self._costs.sizes}
        full = _FULL_SPEED * max(speeds.values())
        return min(size for size, speed in speeds.items() if speed >= full)
