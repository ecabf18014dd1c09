"""The states of one request's draft, as the orchestrator sees them: one table, no clock.

Nothing here can change the output of a request, or fail it: a draft only decides whether a round
has a tree.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class DraftState(enum.Enum):
    """What a draft does for a request, and who runs the rounds."""

    OFF = "the request never speculates; the target runs rounds of the root alone by credit"
    ABSENT = "no draft holds the request, it is opened again after a while; rounds as in OFF"
    BEHIND = "a draft reads the tokens so far; rounds as in OFF until it has caught up"
    RELAYED = "a round waits for its tree, which the orchestrator puts into the order to verify"
    PEER = "target and draft run rounds by credit; the orchestrator takes paths and watches"
    MISSED = "the path of a round by credit did not come in time; nothing was ordered since"


ROOT_ONLY_REASONS = {
    DraftState.OFF: "off",
    DraftState.ABSENT: "absent",
    DraftState.BEHIND: "behind",
    DraftState.RELAYED: "missed",
    DraftState.PEER: "late",
    DraftState.MISSED: "missed",
}
"""Why a round that is done in a state has no tree, if it has none."""


class DraftEvent(enum.Enum):
    """What happens to a draft."""

    OPENED = "DraftOpen was sent"
    ORDERED = "DraftRound was sent"
    TREE = "a tree came here"
    PEER_TREE = "a path came, of a round whose tree the target had ordered"
    NO_TREE = "a path came, of a round by credit without a tree"
    OVERDUE = "a round has waited long enough"
    DETACHED = "the target says that its channel to the draft is lost"
    SILENT = "orders have been without an answer for very long"
    LOST = "the worker is gone, needed the room, failed, or sent a wrong tree"
    CLOSED = "the request is over, or its target is gone"


class Effect(enum.Flag):
    """What a change of state does to the outside."""

    NONE = 0
    REVOKE = enum.auto()
    """End the target's credit; it runs the round that is waited for with the root alone."""
    CLOSE = enum.auto()
    """Free what the draft holds, and let no round wait any longer."""


class Transition(NamedTuple):
    """Where an event leads."""

    state: DraftState
    effect: Effect


# A dot: the state stays. Any tree, even of a past round, shows that the draft has caught up.
_TABLE = """
              OFF ABSENT  BEHIND   RELAYED  PEER    MISSED
OPENED        .   BEHIND  BEHIND   BEHIND   BEHIND  BEHIND
ORDERED       .   .       .        .        .       BEHIND
TREE          .   .       RELAYED  .        .       RELAYED
PEER_TREE     .   .       PEER     .        .       BEHIND
NO_TREE       .   .       .        .        BEHIND  .
OVERDUE       .   .       MISSED   BEHIND   MISSED  .
DETACHED      .   .       .        .        BEHIND  .
SILENT        .   .       ABSENT   .        .       ABSENT
LOST          .   .       ABSENT   ABSENT   ABSENT  ABSENT
CLOSED        .   .       ABSENT   ABSENT   ABSENT  ABSENT
"""

CREDITED = (DraftState.BEHIND, DraftState.PEER)
"""States in which rounds by credit may have trees."""


def _effect(before: DraftState, after: DraftState) -> Effect:
    """Return what a change does: no credit for trees outlives it, nothing is held by an absent
    draft.
    """
    effect = Effect.NONE
    if before in CREDITED and after not in CREDITED:
        effect |= Effect.REVOKE
    if after is DraftState.ABSENT and before is not DraftState.ABSENT:
        effect |= Effect.CLOSE
    return effect


def _read(table: str) -> dict[tuple[DraftState, DraftEvent], Transition]:
    header, *rows = (line.split() for line in table.strip().splitlines())
    transitions = {}
    for event_name, *names in rows:
        for before_name, name in zip(header, names, strict=True):
            before = DraftState[before_name]
            after = before if name == "." else DraftState[name]
            transitions[before, DraftEvent[event_name]] = Transition(after, _effect(before, after))
    return transitions


TRANSITIONS = _read(_TABLE)
"""(state, event) -> what follows; complete."""
