"""The states of one request's draft, as the orchestrator sees them: one table, no clock.

Nothing here can change the output of a request, or fail it: a draft only decides whether a round
has a tree.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class DraftState(enum.Enum):
    """What a draft does for a request, and whether a round waits for its tree."""

    OFF = "the request never speculates"
    ABSENT = "no draft holds the request; it is opened again after a while"
    OPENING = "the first draft reads the prompt; the first round waits until it has"
    JOINING = "a later draft reads the tokens so far; rounds go on without a tree"
    RELAYED = "a round waits for its tree, which the orchestrator puts into the order to verify"
    ATTACHED = "as RELAYED; the draft is attached to the target: they may run peer rounds"
    PEER = "target and draft run rounds by credit; the orchestrator takes paths and watches"
    MISSED = "the tree of a peer round did not come in time; nothing was ordered since"
    LATE = "rounds go on without a tree; the draft hears of every token, and catches up"


WAITING = frozenset({DraftState.OPENING, DraftState.RELAYED, DraftState.ATTACHED})
"""States in which a round waits for its tree."""


class DraftEvent(enum.Enum):
    """What happens to a draft."""

    OPENED = "DraftOpen was sent, for the first time"
    REOPENED = "DraftOpen was sent with a later draft_epoch"
    ORDERED = "DraftRound was sent"
    TREE = "a tree came; the draft is not attached to the target, or not trusted with peer rounds"
    ATTACHED_TREE = "a tree came from a draft that is attached to the target"
    CREDITED = "the target got credit for peer rounds"
    OVERDUE = "a round has waited long enough"
    DETACHED = "the target says that its channel to the draft is lost"
    EXCUSED = "the path of a missed peer round came with its tree: not the draft was late"
    SILENT = "orders have been without an answer for very long"
    LOST = "the worker is gone, needed the room, failed, or sent a wrong tree"
    CLOSED = "the request is over, or its target is gone"


class Effect(enum.Flag):
    """What a change of state does to the outside."""

    NONE = 0
    REVOKE = enum.auto()
    """End the target's credit: it runs the round that is waited for with the root alone."""
    CLOSE = enum.auto()
    """Free what the draft holds, and let no round wait any longer."""


class Transition(NamedTuple):
    """Where an event leads."""

    state: DraftState
    effect: Effect


# A dot: the state stays. Any tree, even of a past round, shows that the draft keeps up again.
_TABLE = """
              OFF ABSENT  OPENING  JOINING  RELAYED  ATTACHED PEER    MISSED   LATE
OPENED        .   OPENING OPENING  OPENING  OPENING  OPENING  OPENING OPENING  OPENING
REOPENED      .   JOINING JOINING  JOINING  JOINING  JOINING  JOINING JOINING  JOINING
ORDERED       .   .       .        .        .        .        .       LATE     .
TREE          .   .       RELAYED  RELAYED  .        RELAYED  .       RELAYED  RELAYED
ATTACHED_TREE .   .       ATTACHED ATTACHED ATTACHED .        .       ATTACHED ATTACHED
CREDITED      .   .       .        .        .        PEER     .       .        .
OVERDUE       .   .       LATE     .        LATE     LATE     MISSED  .        .
DETACHED      .   .       .        .        .        RELAYED  LATE    LATE     .
EXCUSED       .   .       .        .        .        .        .       ATTACHED .
SILENT        .   .       ABSENT   ABSENT   .        .        .       .        ABSENT
LOST          .   .       ABSENT   ABSENT   ABSENT   ABSENT   ABSENT  ABSENT   ABSENT
CLOSED        .   .       ABSENT   ABSENT   ABSENT   ABSENT   ABSENT  ABSENT   ABSENT
"""


def _effect(before: DraftState, after: DraftState) -> Effect:
    """Return what a change does: PEER is never left, nor ABSENT entered, without saying so."""
    effect = Effect.NONE
    if before is DraftState.PEER and after is not DraftState.PEER:
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
