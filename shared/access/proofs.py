"""Calls between services: whoever calls a worker proves that it knows the deployment's secret.

The proof is in the metadata of a call, once, and is checked once: messages of a stream have none.

    authorization: coppice-v1 TIME.NONCE.MAC

MAC is the HMAC-SHA256 of method, time and nonce. The secret itself is never sent. A proof holds for
one method and for a few minutes, and is taken by a worker once: one that was overheard is of no use
at the worker that it was made for.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence

from shared.errors import UnauthenticatedError

SCHEME = "coppice-v1"
VALID_S = 300
"""How far a proof's time may be from the clock of the worker, before or after."""

_FIX = "give orchestrator and workers the same --secret-file (or COPPICE_SECRET)"
_NONCE_CHARS = 32
_MAC_CHARS = 64


def prove(key: bytes, method: str, *, now: float | None = None) -> str:
    """Return the value of `authorization` for one call.

    Args:
        key: Of the purpose CALLS.
        method: /PACKAGE.SERVICE/METHOD.
        now: Seconds since the epoch; None: the clock's.
    """
    moment = str(int(time.time() if now is None else now))
    nonce = secrets.token_hex(_NONCE_CHARS // 2)
    return f"{SCHEME} {moment}.{nonce}.{_mac(key, method, moment, nonce)}"


class ProofCheck:
    """Takes calls of whoever knows the secret.

    Args:
        keys: One of which a proof must have been made with.
        clock: Seconds since the epoch, which may jump.
        monotonic: Seconds, which never do.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = tuple(keys)
        self._clock = clock
        self._monotonic = monotonic
        self._taken: dict[str, float] = {}
        """Nonce -> monotonic time at which it can be forgotten, oldest first."""

    def check(self, method: str, authorization: str | None) -> str:
        """Return the name of who calls, which is nobody's in particular: "".

        Raises: UnauthenticatedError.
        """
        scheme, _, proof = (authorization or "").partition(" ")
        if scheme != SCHEME:
            raise UnauthenticatedError(
                f"this worker takes calls of its own deployment only; {_FIX}", reason="NO_IDENTITY"
            )
        moment, nonce = self._verified(method, proof)
        now = self._clock()
        if abs(moment - now) > VALID_S:
            raise UnauthenticatedError(
                f"the clocks of the caller and of this worker are {abs(moment - now):.0f} s apart, "
                f"or the proof is that old; {VALID_S} s are allowed: set the clocks of both hosts",
                reason="EXPIRED_IDENTITY",
            )
        self._take(nonce)
        return ""

    def _verified(self, method: str, proof: str) -> tuple[int, str]:
        """Return a proof's time and nonce, once its MAC has been compared with every key's."""
        moment, _, rest = proof.partition(".")
        nonce, _, mac = rest.partition(".")
        is_formed = moment.isdecimal() and len(moment) <= 12 and len(mac) == _MAC_CHARS
        is_formed = is_formed and len(nonce) == _NONCE_CHARS and proof.isascii()
        matches = [
            hmac.compare_digest(mac, _mac(key, method, moment, nonce))
            for key in self._keys
            if is_formed
        ]
        if not any(matches):
            raise UnauthenticatedError(
                f"the caller knows another secret than this worker; {_FIX}", reason="WRONG_IDENTITY"
            )
        return int(moment), nonce

    def _take(self, nonce: str) -> None:
        """Note a nonce that is now used up; forget those whose proofs have expired."""
        now = self._monotonic()
        while self._taken:
            oldest = next(iter(self._taken))
            if self._taken[oldest] > now:
                break
            del self._taken[oldest]
        if nonce in self._taken:
            raise UnauthenticatedError(
                "the proof was used before; make one for each call", reason="WRONG_IDENTITY"
            )
        self._taken[nonce] = now + 2 * VALID_S


def _mac(key: bytes, method: str, moment: str, nonce: str) -> str:
    return hmac.digest(key, f"{SCHEME}\n{method}\n{moment}\n{nonce}".encode(), "sha256").hex()
