"""Digests of outputs, and whether requests that are alike got the same ones."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence

from coppice.bench.clients import Outcome
from coppice.bench.request import RequestResult
from coppice.bench.schedule import Arrival

_DIGITS = 16


def key_of(arrival: Arrival, temperature: float) -> str:
    """Return what an output depends on, as a digest; equal keys on one model: equal outputs.

    Args:
        temperature: Of the run.
    """
    if arrival.temperature is not None:
        temperature = arrival.temperature
    seed = arrival.seed if temperature else None
    return _digest(json.dumps([arrival.prompt, arrival.max_new_tokens, temperature, seed]).encode())


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a digest of an output."""
    return _digest(array("q", token_ids).tobytes())


class OutputLog:
    """The outputs of a benchmark, the first one of each key.

    Args:
        temperature: Of requests that have none of their own.
        reference: Key -> digest of another benchmark; None: there is none to compare with.
    """

    def __init__(self, temperature: float, reference: Mapping[str, str] | None = None) -> None:
        self.digests: dict[str, str] = {}
        self._temperature = temperature
        self._reference = reference

    def compare(
        self, repeats: Sequence[tuple[Sequence[Arrival], Sequence[Outcome]]]
    ) -> dict[str, float | None]:
        """Return the shares of the outputs that equal earlier ones, and the reference's.

        Args:
            repeats: Of one run: what arrived and what came out of it; failed requests have none.
        Returns: "identical" and, with a reference, "identical_to_file"; None where no output had
            a counterpart.
        """
        earlier: list[bool] = []
        others: list[bool] = []
        for arrivals, outcomes in repeats:
            for arrival, outcome in zip(arrivals, outcomes, strict=True):
                if not isinstance(outcome, RequestResult):
                    continue
                key, digest = key_of(arrival, self._temperature), digest_of(outcome.token_ids)
                if key in self.digests:
                    earlier.append(digest == self.digests[key])
                self.digests.setdefault(key, digest)
                if self._reference is not None and key in self._reference:
                    others.append(digest == self._reference[key])
        shares = {"identical": _share(earlier)}
        if self._reference is not None:
            shares["identical_to_file"] = _share(others)
        return shares

    def digest(self) -> str:
        """Return one digest of all outputs, whatever their order."""
        return _digest(json.dumps(sorted(self.digests.items())).encode())


def _share(are_equal: Sequence[bool]) -> float | None:
    return round(sum(are_equal) / len(are_equal), 4) if are_equal else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
