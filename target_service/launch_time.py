"""When to launch a step behind the one in flight: late, so that who comes meanwhile is in it.

A device must not wait for its host, but a step that is launched a whole step ahead cannot take a
request that comes in that time. So the host launches when the step in flight is about to end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from target_service.step_costs import StepCosts

_EWMA_WEIGHT = 0.1
# Of the time that launching takes, and beside it: the host may be slower than it was lately.
_SAFETY = 1.5
_SAFETY_S = 0.5e-3


class LaunchTime:
    """Estimates when the steps that are in flight end.

    Args:
        costs: Of a forward, by its rows; None: not known, every step is launched at once.
        clock: Monotonic, seconds.
    """

    def __init__(
        self, costs: StepCosts | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._forwards_s: deque[float] = deque()  # of the steps in flight
        self._began_s = 0.0  # when the first of them began
        self._beside_s = 0.0  # what a step takes beside its forward
        self._launch_s = 0.0  # what it takes until a forward is launched

    def launched(self, num_rows: int, began_s: float) -> None:
        """Take note that the forward of a step is launched.

        Args:
            began_s: When the host began with the step, by the clock.
        """
        if self._costs is None:
            return
        now = self._clock()
        self._launch_s = max(now - began_s, (1 - _EWMA_WEIGHT) * self._launch_s)
        if not self._forwards_s:
            self._began_s = now
        self._forwards_s.append(self._costs.of(num_rows))

    def ended(self, *, was_awaited: bool) -> None:
        """Take note that the first step in flight has ended.

        Args:
            was_awaited: Just now; else some time ago, so that it ended sooner than was thought.
        """
        if self._costs is None:
            return
        ended_s, soonest_s = self._clock(), self._began_s + self._forwards_s.popleft()
        if was_awaited:
            self._beside_s += _EWMA_WEIGHT * (max(0.0, ended_s - soonest_s) - self._beside_s)
        else:  # the device has waited
            ended_s = min(ended_s, soonest_s)
            self._beside_s /= 2
        self._began_s = ended_s

    @property
    def delay_s(self) -> float:
        """Return how long the next launch can wait, seconds; 0: not at all."""
        if self._costs is None:
            return 0.0
        takes_s = sum(self._forwards_s) + len(self._forwards_s) * self._beside_s
        lead_s = _SAFETY * self._launch_s + _SAFETY_S
        return max(0.0, self._began_s + takes_s - lead_s - self._clock())
