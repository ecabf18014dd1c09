"""How many of a target's rounds have rows of prompts beside those of trees."""

from __future__ import annotations

from target_service.budgets.costs import RoundCosts, RoundKind

# Of a round in the means of how many have rows of prompts, and of their tokens.
_MIXED_WEIGHT = 0.15
# Fewer are none: some dozens of rounds ago there were prompts.
_LEAST_MIXED = 0.01
# Where more have, requests begin all the time: what they have was decided for fewer of them, and
# once the prompts have been read, for other rows.
_MOSTLY_MIXED = 0.3
# So many rounds without prompts, and none being read, and the next ones have none either.
_PROMPTS_ENDED_AFTER = 3
# While prompts of so many requests are read that take as long as so many rounds without trees,
# requests rest where trees bring less than none beside prompts; until those that are left take so
# many. A long prompt of one is no reason to keep others without trees.
_MANY_COMING, _LONG_READING, _READING_ENDS = 8, 60, 5


class PromptRounds:
    """What is expected of the next rounds: how many have rows of prompts, and for how long.

    Attributes:
        expected: Part of the next rounds that have rows of prompts, as of the last decision.
        are_long: Prompts of many requests are being read that take many rounds.
        are_rare: Few rounds have rows of prompts: what was decided holds for those that come.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.expected = 0.0
        self.are_long = False
        self.are_rare = True
        self._costs = costs
        # Means of rounds: which part has rows of prompts, and tokens of a round.
        self._mixed, self._tokens = 0.0, 1.0
        self._num_clear = 0  # rounds since one had rows of prompts

    def note_step(self, num_tokens: int, *, has_prompts: bool) -> bool:
        """Learn from a step that has ended.

        Args:
            num_tokens: Of requests that decode.
        Returns: Whether prompts have come to an end with it.
        """
        self._mixed += _MIXED_WEIGHT * (has_prompts - self._mixed)
        self._num_clear = 0 if has_prompts else self._num_clear + 1
        if num_tokens:
            self._tokens += _MIXED_WEIGHT * (num_tokens - self._tokens)
        return self._num_clear == _PROMPTS_ENDED_AFTER

    def expect(self, num_coming: int, num_prompt_rows: int, num_requests: int) -> None:
        """Take note of what is being read while a decision is made.

        Args:
            num_coming: Requests whose prompts are being read.
            num_prompt_rows: Of theirs that are left.
            num_requests: That run.
        Mutates: `expected`, `are_long`, `are_rare`.
        """
        has_ended = not num_coming and self._num_clear >= _PROMPTS_ENDED_AFTER
        before, self.expected = self.expected, 0.0 if has_ended else self._mixed
        self.are_rare = max(before, self.expected) < _MOSTLY_MIXED
        round_s = self._costs.round_s(RoundKind(num_requests, num_requests))
        num_rounds = self._costs.marginal_s(float(num_prompt_rows)) / round_s
        if self.are_long:
            self.are_long = num_rounds > _READING_ENDS
        elif self._costs.is_padded and num_coming >= _MANY_COMING:  # on a CPU rows cost no less
            self.are_long = num_rounds > _LONG_READING

    @property
    def are_expected(self) -> bool:
        """Return whether some of the next rounds have rows of prompts."""
        return self.expected >= _LEAST_MIXED

    @property
    def per_token(self) -> float:
        """Return how many of the rounds with prompts fall to a token."""
        return self.expected / self._tokens
