"""How many rows of a step are for prompts while other requests decode.

A prompt's rows make everybody's step longer; fewer rows per step make its own first token later. So
a step with rows of prompts brings tokens after twice the time that it would take without, and after
more than that the longer a prompt has waited: where prompts come faster than that leaves room for,
larger steps, which cost less per row, catch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from target_service.step_costs import StepCosts

# The time from token to token with rows of prompts is so many times that without them, at most ..
_MOST_DELAY = 2.0
# .. and once more of it for each time that the oldest prompt has waited so long.
_PATIENCE_S = 0.1
# So that prompts get on beside any trees.
_LEAST_ROWS = 16
_EWMA_WEIGHT = 0.1


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

    def note_step(self, num_rows: int, *, has_prompts: bool) -> None:
        """Take note that a step has ended."""
        now = self._clock()
        took_s, self._ended_s = now - self._ended_s, now
        forward_s = self._costs.of(num_rows)
        if not has_prompts and took_s < 2 * forward_s:  # else nobody was decoding before
            beside_s = max(0.0, took_s - forward_s)
            self._beside_s += _EWMA_WEIGHT * (beside_s - self._beside_s)

    def num_rows(self, num_decoding_rows: int, num_waiting_rows: int, oldest_s: float) -> int:
        """Return the rows for prompts in a step.

        Steps are padded up to sizes that were measured: of those that are short enough, the one
        that reads most prompt rows per second, so that few rows never cost a whole size more.

        Args:
            num_decoding_rows: Of the step, or of the next one, whose requests wait for this one.
            num_waiting_rows: Of all prompts.
            oldest_s: When the prompt that has waited longest came, by the clock.
        """
        patience = _MOST_DELAY + max(0.0, self._clock() - oldest_s) / _PATIENCE_S
        without_s = self._costs.of(num_decoding_rows) + self._beside_s
        limit_s = patience * without_s - self._beside_s
        num_wanted = num_decoding_rows + num_waiting_rows
        num_rows, best = 0, 0.0
        for size, seconds in self._costs.sizes:
            speed = (min(size, num_wanted) - num_decoding_rows) / (seconds + self._beside_s)
            if seconds <= limit_s and speed > best:
                num_rows, best = size, speed
        return max(num_rows - num_decoding_rows, _LEAST_ROWS)
