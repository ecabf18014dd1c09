"""Says once that drafts are accepted far less often than their head is known to be."""

from __future__ import annotations

import logging

from shared.messages import SpeculationStats

logger = logging.getLogger(__name__)

WINDOW_ROUNDS = 500
"""Rounds with a tree that a mean is taken of."""
LEAST_SHARE = 0.5
"""Of the drafts that should be accepted per round; fewer are far below."""


class AcceptWatch:
    """Compares accept_length, over rounds with a tree, with what is expected of the draft.

    Args:
        expected: accept_length, bonus included, at 1 or more; 0: nothing is expected.
    """

    def __init__(self, expected: float) -> None:
        self._expected = expected
        self._is_over = expected <= 1  # the bonus token alone
        self._num_rounds = self._num_accepted_drafts = 0

    def note(self, stats: SpeculationStats) -> None:
        """Count the rounds of a request that has ended."""
        if self._is_over:
            return
        self._num_rounds += stats.num_rounds - stats.num_root_only_rounds
        self._num_accepted_drafts += stats.num_accepted_drafts
        if self._num_rounds < WINDOW_ROUNDS:
            return
        mean = self._num_accepted_drafts / self._num_rounds
        if mean < LEAST_SHARE * (self._expected - 1):
            self._is_over = True
            logger.warning(
                "accept_length is %.2f in %d rounds with a tree, and --expected-accept-length "
                "%.2f: outputs are right, but slow. Likely the head and its config.json disagree "
                "(which layers it reads: the draft's log says them; norm_before_residual), it was "
                "trained for another target, prompts lack the chat template that it was trained "
                "with, or trees are smaller; see 'When accept_length falls' in docs/operations.md",
                *(mean + 1, self._num_rounds, self._expected),
            )
        self._num_rounds = self._num_accepted_drafts = 0
