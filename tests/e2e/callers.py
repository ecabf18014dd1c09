"""Clients that send one request after the other, whatever happens, and check every output."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from coppice import Client, Completion, TokenDelta

END_TIMEOUT_S = 180.0
# Between two requests of a client: there are streams all the time, and time for what recovers.
PAUSE_S = 0.3
# A client that resumes tries again every 2 s at most.
MAX_RETRIES = 100
HANG_UP_SHARE = 0.15
NUM_DELTAS = 3
"""Until a client goes on: the first may have been on its way, the second may be of a prefill. Only
with the round after that is its request no suspect any more of having brought its target down."""


class Caller:
    """A client in a thread. Its streams are resumed when they break; some it gives up midway.

    Args:
        plain: What each request gives without speculation.
    """

    def __init__(
        self,
        address: str,
        requests: Sequence[dict[str, Any]],
        plain: Sequence[Completion],
        rng: random.Random,
    ) -> None:
        self._address = address
        self._requests = requests
        self._plain = plain
        self._rng = rng
        self._is_over = threading.Event()
        self._hangs_up = False
        self._error: BaseException | None = None
        self.num_deltas = 0
        """Received in all: rounds, prefills included."""
        self.num_outputs = 0
        """That were compared, to the end or up to where it was given up."""
        self.doing = "nothing yet"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Return whether an output was wrong, or a request ended with an error."""
        return self._error is not None

    def hang_up(self) -> None:
        """Give up the current output, if there is one, and begin no other one."""
        self._is_over.set()
        self._hangs_up = True
        self._thread.join(END_TIMEOUT_S)

    def finish(self) -> None:
        """Let the current output end, and no other one begin.

        Raises: what went wrong.
        """
        self._is_over.set()
        self._thread.join(END_TIMEOUT_S)
        assert not self._thread.is_alive(), f"stuck: {self.doing}"
        if self._error is not None:
            raise AssertionError(f"{self.doing}: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            with Client(self._address, max_retries=MAX_RETRIES) as client:
                while not self._is_over.is_set():
                    self._call(client)
                    self._is_over.wait(PAUSE_S)
        except BaseException as error:
            self._error = error

    def _call(self, client: Client) -> None:
        index = self._rng.randrange(len(self._requests))
        plain = self._plain[index]
        wanted = len(plain.token_ids)
        if self._rng.random() < HANG_UP_SHARE:
            wanted = self._rng.randrange(wanted)
        token_ids: list[int] = []
        logprobs: list[Any] = []
        text = ""
        stream = client.stream(**self._requests[index])
        for event in stream:
            if not isinstance(event, TokenDelta):
                continue
            assert event.token_offset == len(token_ids), "tokens were lost or repeated"
            token_ids += event.token_ids
            logprobs += event.logprobs
            text += event.text
            self.num_deltas += 1
            self.doing = f"request {index}, {len(token_ids)} of {len(plain.token_ids)} tokens"
            if len(token_ids) > wanted or self._hangs_up:
                break
        stream.close()
        if self._hangs_up:
            return
        expected = list(plain.token_ids)
        if wanted < len(expected):
            expected = expected[: len(token_ids)]
        else:
            assert text == plain.text
        assert token_ids == expected
        assert logprobs == list(plain.logprobs)[: len(token_ids)]
        self.num_outputs += 1


@contextlib.contextmanager
def calling(callers: Sequence[Caller]) -> Iterator[None]:
    """Let clients call for the length of the block, and finish what they do then.

    Raises: what went wrong with one of them.
    """
    try:
        yield
        for caller in callers:
            caller.finish()
    finally:
        for caller in callers:
            caller.hang_up()


def go_on(callers: Sequence[Caller], *, timeout_s: float) -> bool:
    """Wait until each of these clients has new rounds, or has failed; return whether it was so."""
    before = [caller.num_deltas for caller in callers]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(0.02)
        counts = zip(callers, before, strict=True)
        if all(
            caller.num_deltas >= count + NUM_DELTAS or caller.has_failed for caller, count in counts
        ):
            return True
    return False
