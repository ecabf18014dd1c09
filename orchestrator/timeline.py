"""Where the time of one request's rounds went, put together from what its workers say."""

from __future__ import annotations

from dataclasses import replace

from shared.messages import AnswerTimes, RoundTimes

MAX_TIMED_ROUNDS = 4096


class Timeline:
    """The rounds of a timed request; of another one it stays empty.

    A round goes from the order to verify a tree to the next such order: what the target did, what
    the orchestrator did, what the draft did for the round after. Rounds of the root alone have no
    orders: they begin in the target's engine and may overlap. A peer round goes from one commit to
    the next, a device round from the end of one step on the target's device to that of the next.
    """

    def __init__(self) -> None:
        self._rounds: list[RoundTimes] = []
        self._last: tuple[int, AnswerTimes, int] | None = None  # round_idx, path, now_ns

    @property
    def rounds(self) -> tuple[RoundTimes, ...]:
        """Return what is known so far."""
        self._close(None, None)
        return tuple(self._rounds)

    def add(
        self, round_idx: int, *, tree: AnswerTimes | None, path: AnswerTimes | None, now_ns: int
    ) -> None:
        """Take a round.

        Args:
            tree: Of the draft's answer, if there was a tree.
            path: Of the target's answer.
            now_ns: When the round was over: tokens sent on, the next tree ordered.
        """
        self._close(tree, path)
        if path is None:
            return
        if any(stage.name.startswith("draft: ") for stage in path.stages):
            self._append(round_idx, _without_answer(path))
        else:
            self._last = (round_idx, path, now_ns)

    def _close(self, tree: AnswerTimes | None, path: AnswerTimes | None) -> None:
        """Complete the round before by what came of its end: the tree and the order of the next."""
        if self._last is None:
            return
        round_idx, times, now_ns = self._last
        self._last = None
        if tree is None or path is None:
            times = times.then("orchestrator: commit", now_ns)
        else:
            times = times.then("orchestrator: commit", tree.begin_ns)
            times = replace(times, stages=(*times.stages, *tree.stages))
            times = times.then("orchestrator: order", path.begin_ns)
        self._append(round_idx, times)

    def _append(self, round_idx: int, times: AnswerTimes) -> None:
        if len(self._rounds) < MAX_TIMED_ROUNDS:
            self._rounds.append(
                RoundTimes(round_idx=round_idx, begin_ns=times.begin_ns, stages=times.stages)
            )


def _without_answer(path: AnswerTimes) -> AnswerTimes:
    """Return a round without the answer's way, during which the next one runs."""
    names = [stage.name for stage in path.stages]
    # A round that the devices did by themselves ends before its commit.
    last = "target: commit" if "target: commit" in names else "target: sample"
    return replace(path, stages=path.stages[: names.index(last) + 1])
