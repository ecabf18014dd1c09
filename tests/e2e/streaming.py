"""A request that runs in a thread, and what has come of it so far."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from coppice import Client, FinishInfo, TokenDelta
from tests.e2e.serving import PlainOutputs, Server
from tests.processes import wait_for

TOKENS_TIMEOUT_S = 180.0
LEAST_TREES = 10
"""That say something of how the rounds of requests are made."""


class Stream:
    """A streamed request; deltas are checked to be gapless as they come.

    Args:
        options: Keywords of `Client.stream`.
    """

    def __init__(self, client: Client, options: dict[str, Any]) -> None:
        self.deltas: list[TokenDelta] = []
        self.finish: FinishInfo | None = None
        self._error: BaseException | None = None
        self._offset = 0
        self._events = client.stream(**options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the output so far."""
        return tuple(token_id for delta in list(self.deltas) for token_id in delta.token_ids)

    def reaches(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        wait_for(
            lambda: len(self.token_ids) >= num_tokens or not self._thread.is_alive(),
            TOKENS_TIMEOUT_S,
            lambda: f"only {len(self.token_ids)} tokens came",
        )
        if self._error is not None:
            raise self._error
        assert len(self.token_ids) >= num_tokens

    def goes_on(self, num_tokens: int) -> None:
        """Wait for so many more tokens."""
        self.reaches(len(self.token_ids) + num_tokens)

    def result(self) -> FinishInfo:
        """Wait for the end."""
        self._thread.join(TOKENS_TIMEOUT_S)
        assert not self._thread.is_alive(), f"stuck after {len(self.token_ids)} tokens"
        if self._error is not None:
            raise self._error
        assert self.finish is not None
        return self.finish

    def accept_length(self, *, last: int) -> float:
        """Return the mean tokens per round over the last tokens."""
        lengths = self._lengths(last)
        return sum(lengths) / len(lengths)

    def num_rounds(self, *, last: int) -> int:
        """Return the rounds that the last tokens took."""
        return len(self._lengths(last))

    def drafted_lengths(self, *, since: int = 0) -> list[int]:
        """Return the tokens of each round in which drafts were accepted, from a round on.

        How many rounds get their trees in time depends on what else the machine does.
        """
        lengths = [len(delta.token_ids) for delta in list(self.deltas)[since:]]
        return [length for length in lengths if length > 1]

    def drafted_rounds(self) -> list[tuple[int, int]]:
        """Return (token offset, tokens) of each round in which drafts were accepted."""
        rounds = [(delta.token_offset, len(delta.token_ids)) for delta in list(self.deltas)]
        return [(offset, length) for offset, length in rounds if length > 1]

    def _lengths(self, last: int) -> list[int]:
        lengths: list[int] = []
        for delta in reversed(self.deltas):
            if sum(lengths) >= last:
                break
            lengths.append(len(delta.token_ids))
        return lengths

    def awaits_drafts(self, num_rounds: int = 1) -> None:
        """Wait until drafts are accepted in so many rounds that have not been heard of yet."""
        num_known = len(self.deltas)
        self._awaits(
            lambda: len(self.drafted_lengths(since=num_known)) >= num_rounds,
            lambda: f"drafts were accepted in too few rounds after {num_known} rounds",
        )

    def awaits_rounds_alone(self, num_rounds: int) -> None:
        """Wait until so many rounds in a row, not heard of yet, bring a token each."""
        num_known = len(self.deltas)
        self._awaits(
            lambda: (
                len(last := list(self.deltas)[num_known:][-num_rounds:]) == num_rounds
                and all(len(delta.token_ids) == 1 for delta in last)
            ),
            lambda: f"drafts are accepted all the time after {num_known} rounds",
        )

    def _awaits(self, condition: Callable[[], bool], describe: Callable[[], object]) -> None:
        """Wait until a condition holds; it must before the stream ends."""
        has_held = False

        def is_over() -> bool:
            nonlocal has_held
            has_held = condition()
            return has_held or not self._thread.is_alive()

        wait_for(is_over, TOKENS_TIMEOUT_S, describe)
        if self._error is not None:
            raise self._error
        assert has_held or condition(), describe()

    def _run(self) -> None:
        try:
            for event in self._events:
                if isinstance(event, TokenDelta):
                    assert event.token_offset == self._offset, "tokens were lost or repeated"
                    self._offset += len(event.token_ids)
                    self.deltas.append(event)
                elif isinstance(event, FinishInfo):
                    self.finish = event
        except BaseException as error:
            self._error = error


def has_trees_to_the_end(finish: FinishInfo, *, num_rounds: int) -> bool:
    """Check that the rounds of a timed request have trees from some round on, every one of them.

    Returns: whether so many have.
    """
    had_tree = [
        any(stage.name.startswith("draft: ") for stage in times.stages)
        for times in finish.round_times
    ]
    assert had_tree == sorted(had_tree), had_tree
    return sum(had_tree) >= num_rounds


@contextlib.contextmanager
def streams(
    address: str, requests: list[dict[str, Any]], *, max_retries: int = 0
) -> Iterator[list[Stream]]:
    """Stream requests all at once; whatever still runs when the block ends is cancelled."""
    with Client(address, max_retries=max_retries) as client:
        yield [Stream(client, request) for request in requests]


def share_of_peer_rounds(
    server: Server, requests: list[dict[str, Any]], plain_outputs: PlainOutputs
) -> float:
    """Serve requests, check their outputs, and return the share of peer rounds.

    Of rounds that a draft had a part in: before the first tree, and where trees are late, which is
    more often on a loaded machine, it has none; then requests are served again. Where rounds are
    relayed, none is a peer round.
    """
    plain = plain_outputs.of(server, requests)
    timed = [{**request, "round_times": True} for request in requests]
    drafted: list[set[str]] = []

    def have_trees() -> bool:
        with streams(server.address, timed) as running:
            for stream, expected in zip(running, plain, strict=True):
                for times in stream.result().round_times:
                    names = {stage.name for stage in times.stages}
                    if any(name.startswith("draft: ") for name in names):
                        drafted.append(names)
                assert stream.token_ids == expected.token_ids
        return len(drafted) >= LEAST_TREES

    wait_for(have_trees, describe=lambda: f"only {len(drafted)} rounds had a tree")
    return sum("draft: channel" in stages for stages in drafted) / len(drafted)
