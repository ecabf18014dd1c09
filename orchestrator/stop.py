"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Where a stop string lies: `[start, end)` in characters of the output text."""

    stop_string: str
    start: int
    end: int


class StopMatcher:
    """Finds the stop string that is completed first; of two completed together, the longer.

    Args:
        stop_strings: Non-empty strings.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._window = ""
        self.safe_len = 0
        """Characters from the start that no later match can touch."""

    def feed(self, text: str) -> StopMatch | None:
        """Append text; return the first match in it, which may have begun in earlier text."""
        window = self._window + text
        matches = [
            StopMatch(
                stop_string=stop,
                start=self.safe_len + index,
                end=self.safe_len + index + len(stop),
            )
            for stop in self._stop_strings
            if (index := window.find(stop)) >= 0
        ]
        if matches:
            return min(matches, key=lambda match: (match.end, match.start))
        num_held = max((_overlap(window, stop) for stop in self._stop_strings), default=0)
        self._window = window[len(window) - num_held :]
        self.safe_len += len(window) - num_held
        return None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without completing it."""
    index = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while index >= 0:
        if stop.startswith(text[index:]):
            return len(text) - index
        index = text.find(stop[0], index + 1)
    return 0
