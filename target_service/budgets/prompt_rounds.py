"""Expect how many of a target's next rounds share their step with rows of prompts."""

from __future__ import annotations

import math

from target_service.budgets.costs import RoundCosts, RoundKind

# Weight of a new round in the running means: the share of rounds with rows of prompts, and the
# tokens of a round.
_MIXED_WEIGHT = 0.15
# A smaller share counts as none: the last prompts were some dozens of rounds ago.
_LEAST_MIXED = 0.01
# More than nearly all rounds cannot be told apart.
_MOST_MIXED = 0.98
# A larger share means that requests begin all the time. The rungs that requests hold were then
# decided for fewer requests and for other rows, so there is no hysteresis in favour of them.
_MOSTLY_MIXED = 0.3
# After so many rounds without rows of prompts, and if no prompt is being read, none is expected.
_PROMPTS_ENDED_AFTER = 3
# Reading is long when prompts of at least _MANY_COMING requests are read and take as long as more
# than _LONG_READING rounds without trees; it stays long until what is left takes _READING_ENDS
# rounds. One long prompt is no reason to keep other requests without trees.
_MANY_COMING, _LONG_READING, _READING_ENDS = 8, 60, 5


class PromptRounds:
    """Expects how many of the next rounds have rows of prompts, and whether for long.

    Attributes:
        expected: Share of the next rounds with rows of prompts, as of the last decision.
        are_long: Prompts of many requests are being read, which takes many rounds.
        are_rare: Few rounds have rows of prompts, so decisions of before still hold.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.expected = 0.0
        self.are_long = False
        self.are_rare = True
        self._costs = costs
        # Running means: the share of rounds with rows of prompts, and the tokens of a round.
        self._mixed, self._tokens = 0.0, 1.0
        self._num_clear = 0  # rounds since the last one with rows of prompts

    def note_step(self, num_tokens: int, *, has_prompts: bool) -> bool:
        """Learn from a step that has ended.

        Args:
            num_tokens: Tokens that the step brought to requests that decode.
            has_prompts: The step had rows of prompts.
        Returns: Whether the reading of prompts has just ended, as far as rounds tell.
        """
        self._mixed += _MIXED_WEIGHT * (has_prompts - self._mixed)
        self._num_clear = 0 if has_prompts else self._num_clear + 1
        if num_tokens:
            self._tokens += _MIXED_WEIGHT * (num_tokens - self._tokens)
        return self._num_clear == _PROMPTS_ENDED_AFTER

    def expect(self, num_coming: int, num_prompt_rows: int, num_requests: int) -> None:
        """Note which prompts are being read while a decision is made.

        Args:
            num_coming: Requests whose prompts are being read.
            num_prompt_rows: Rows of these prompts that have not been read yet.
            num_requests: Running requests.
        Mutates: `expected`, `are_long`, `are_rare`.
        """
        has_ended = not num_coming and self._num_clear >= _PROMPTS_ENDED_AFTER
        before, self.expected = self.expected, 0.0 if has_ended else self._mixed
        self.are_rare = max(before, self.expected) < _MOSTLY_MIXED
        # A CPU has no cheaper rows.
        may_be_long = self._costs.is_padded and num_coming >= _MANY_COMING
        if self.are_long or may_be_long:
            round_s = self._costs.round_s(RoundKind(num_requests, num_requests))
            num_rounds = self._costs.marginal_s(float(num_prompt_rows)) / round_s
            self.are_long = num_rounds > (_READING_ENDS if self.are_long else _LONG_READING)

    @property
    def are_expected(self) -> bool:
        """Return whether some of the next rounds have rows of prompts."""
        return self.expected >= _LEAST_MIXED

    @property
    def per_token(self) -> float:
        """Return how often prompts come per token that requests get, as of FixedRounds.

        Where nearly all rounds have rows of prompts they wait: rounds of half as many tokens would
        nearly all have some, too.
        """
        return -math.log1p(-min(self.expected, _MOST_MIXED)) / self._tokens
