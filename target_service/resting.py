"""Requests that rest: the budget (budgets/) gives them no trees for a while.

How a request rests and wakes:

1. The budget decides on rung 0. After the commit `PeerRounds.order` calls `begin_rest` instead of
   ordering a tree: the draft's progress becomes RESTING, its feature rows are held back
   (`FeatureOutlet.hold_back`), and the orchestrator gets a `DraftRest`. Without this message it
   would take the draft for one that is behind.
2. While the request rests, its rounds have the root alone. Its draft gets neither tokens nor
   feature rows; the rows are kept in one memory for all resting requests (resting_rows.py).
3. The budget decides on a higher rung. `PeerRounds._order_if_ready` releases the rows
   (`FeatureOutlet.wake`), which go out with the next steps, and orders one tree: progress ASKED.
   Rounds still have the root alone.
4. The tree comes (`PeerRounds.take`): the draft has caught up, and later rounds wait for trees. The
   orchestrator gets another `DraftRest`.
"""

from __future__ import annotations

from shared.messages import DraftRest
from target_service.draft_peer import DraftPeer, Progress
from target_service.engine_state import EngineState
from target_service.request import TargetRequest


def begin_rest(state: EngineState, request: TargetRequest, peer: DraftPeer) -> None:
    """Let a request rest: no more tokens, feature rows or orders go to its draft."""
    peer.progress = Progress.RESTING
    state.features.hold_back(request)
    report_rest(state, request, peer, is_resting=True)


def report_rest(
    state: EngineState, request: TargetRequest, peer: DraftPeer, *, is_resting: bool
) -> None:
    """Tell the orchestrator whether a request's draft rests, unless the last message said so."""
    if peer.is_reported_resting is not is_resting:
        peer.is_reported_resting = is_resting
        state.outbox.append(
            DraftRest(
                request_id=request.request_id,
                target_epoch=request.target_epoch,
                draft_epoch=peer.draft_epoch,
                is_resting=is_resting,
            )
        )
