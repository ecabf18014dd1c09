"""Requests that rest: no trees are wanted of them for a while.

Their rounds go on with the root alone, and nothing is sent to their drafts: neither tokens nor
feature rows. When trees are wanted again, drafts get all of it at once, a few requests with each
step, and rounds go on with the root alone until a tree comes. The orchestrator is told: otherwise
it would take a draft without trees for one that is behind.
"""

from __future__ import annotations

from shared.messages import DraftRest
from target_service.draft_peer import DraftPeer, Progress
from target_service.engine_state import EngineState
from target_service.request import TargetRequest


def begin_rest(state: EngineState, request: TargetRequest, peer: DraftPeer) -> None:
    """Let a request rest."""
    peer.progress = Progress.RESTING
    state.features.hold_back(request)
    report_rest(state, request, peer, is_resting=True)


def report_rest(
    state: EngineState, request: TargetRequest, peer: DraftPeer, *, is_resting: bool
) -> None:
    """Tell the orchestrator, unless it knows, whether a draft rests."""
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
