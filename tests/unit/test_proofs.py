"""Proofs of identity under clocks that differ or jump."""

from __future__ import annotations

import pytest

from shared.access.proofs import VALID_S, ProofCheck, prove
from shared.errors import UnauthenticatedError

pytestmark = pytest.mark.timeout(120)

KEY, METHOD = b"k" * 32, "/coppice.v1.TargetService/Session"
HOUR_S = 3600.0


class Host:
    """A worker's host, with a wall clock that may be set and one that may not."""

    def __init__(self) -> None:
        self.clock_s = 1_800_000_000.0
        self.monotonic_s = 50.0
        self.check = ProofCheck(
            [KEY], clock=lambda: self.clock_s, monotonic=lambda: self.monotonic_s
        )

    def wait(self, length_s: float) -> None:
        """Let time pass."""
        self.clock_s += length_s
        self.monotonic_s += length_s

    def reason(self, proof: str) -> str:
        """Return why a proof is refused, "" if it is taken."""
        try:
            self.check.check(METHOD, proof)
        except UnauthenticatedError as error:
            return error.reason
        return ""

    def prove(self, ahead_s: float = 0.0) -> str:
        """Return a new proof by a clock that is ahead of this host's."""
        return prove(KEY, METHOD, now=self.clock_s + ahead_s)


@pytest.mark.parametrize("sign", [1, -1])
def test_clocks_may_differ_by_as_much_as_a_proof_holds(sign: int) -> None:
    host = Host()
    assert host.reason(host.prove(sign * (VALID_S - 1))) == ""
    with pytest.raises(UnauthenticatedError, match=r"600 s apart.*set the clocks") as caught:
        host.check.check(METHOD, host.prove(sign * 600))
    assert caught.value.reason == "EXPIRED_IDENTITY"


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_jumps_and_comes_back_lets_no_proof_be_used_twice(jump_s: float) -> None:
    host = Host()
    used = host.prove()
    assert host.reason(used) == ""
    host.clock_s += jump_s
    assert host.reason(host.prove()) == "", "whoever has the new time gets in"
    host.wait(20.0)
    host.clock_s -= jump_s
    assert host.reason(used) == "WRONG_IDENTITY"
    assert host.reason(host.prove()) == ""


def test_a_proof_stays_used_up_for_as_long_as_it_holds() -> None:
    """Whichever clock is ahead; what is older has expired."""
    host = Host()
    used = host.prove(VALID_S - 1)
    for _ in range(2 * VALID_S // 100):
        assert host.reason(host.prove()) == ""
        assert host.reason(used) in ("", "WRONG_IDENTITY")
        host.wait(99.0)
    assert host.reason(used) == "WRONG_IDENTITY"
    host.wait(100.0)
    assert host.reason(used) == "EXPIRED_IDENTITY"
