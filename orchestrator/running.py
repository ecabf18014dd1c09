"""The requests that this process serves now, and the sums of those that have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.figures import Figures, Stage
from orchestrator.readers import Reader
from orchestrator.rounds import Generation
from shared.errors import CoppiceError


@dataclass(slots=True, eq=False)
class Held:
    """A request: the task that generates its output, the client that reads it.

    `error` is why it was ended after what it had generated, None: it was not.
    """

    generation: Generation
    task: asyncio.Task[None]
    reader: Reader | None = None
    error: CoppiceError | None = None


class Running:
    """Knows every request by its id, and what operators want to know of all of them."""

    def __init__(self) -> None:
        self._requests: dict[str, Held] = {}
        self._ended = Figures()
        self.num_ended: Counter[str] = Counter()
        """Requests that were served, by how they ended; refused ones are not here."""

    @contextmanager
    def holds(
        self, request_id: str, generation: Generation, task: asyncio.Task[None]
    ) -> Iterator[Held]:
        """Know a request while it is served.

        Args:
            task: Runs it.
        Raises: the error that it was ended with, instead of CancelledError.
        """
        held = self._requests[request_id] = Held(generation, task)
        reason = "cancelled"
        try:
            yield held
            reason = generation.status.end_reason or reason
        except asyncio.CancelledError:
            if held.error is None:
                raise
            reason = held.error.reason
            raise held.error from None
        except CoppiceError as error:
            reason = error.reason
            raise
        except Exception:
            reason = "INTERNAL"
            raise
        finally:
            if self._requests.get(request_id) is held:  # else one of the same id has followed
                del self._requests[request_id]
            self._ended += generation.status.figures
            self.num_ended[reason] += 1

    def end(self, request_id: str, error: CoppiceError) -> bool:
        """End a request with an error, whatever its client has not read; return whether there is
        one of this id.
        """
        held = self._requests.get(request_id)
        if held is None:
            return False
        if held.reader is not None:
            held.reader.end(error)
        return True

    def end_all(self, error: CoppiceError) -> None:
        """End every request with an error, after what it has generated."""
        for held in self._held:
            held.error = error
            held.task.cancel()

    @property
    def figures(self) -> Figures:
        """Return the sums over all requests so far, running ones included."""
        return sum((held.generation.status.figures for held in self._held), self._ended)

    @property
    def num_by_stage(self) -> Counter[Stage]:
        """Return how many requests run, by how far they are."""
        return Counter(held.generation.status.stage for held in self._held)

    @property
    def _held(self) -> list[Held]:
        return list(self._requests.values())
