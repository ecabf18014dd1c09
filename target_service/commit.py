"""Turn accepted paths into replies: cut at stops, advance requests. The only place that does."""

from __future__ import annotations

from dataclasses import dataclass

from shared.types import AcceptedPath, FinishReason, TokenLogprob
from target_service.batch import SampledTree
from target_service.request import Phase, TargetRequest
from target_service.runner import PathOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a path ends.

    Args:
        num_tokens: Tokens kept, the stopping one included.
    """

    num_tokens: int
    reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None


def cut_path(request: TargetRequest, token_ids: list[int], max_context_len: int) -> Cut:
    """Find the first token at which the request ends: stop id, then length, then context.

    Args:
        token_ids: The path's tokens, bonus last.
    """
    stopping = request.open.stopping
    for kept, token_id in enumerate(token_ids, start=1):
        num_output = request.num_output_tokens + kept
        if token_id in stopping.stop_token_ids and num_output > stopping.min_new_tokens:
            return Cut(num_tokens=kept, reason=FinishReason.STOP, stop_token_id=token_id)
        if num_output >= stopping.max_new_tokens:
            return Cut(num_tokens=kept, reason=FinishReason.LENGTH)
        if len(request.tokens) + kept >= max_context_len:
            return Cut(num_tokens=kept, reason=FinishReason.CONTEXT_LENGTH)
    return Cut(num_tokens=len(token_ids))


def commit_path(
    tree: SampledTree, paths: PathOutputs, row: int, *, max_context_len: int
) -> AcceptedPath:
    """Advance a request by its accepted path.

    Args:
        row: The request's row in `paths`.
    Returns: The reply; `finish_reason` is set when the request is over.
    Mutates: the request's tokens, seq_len, phase, round_idx, last_reply and num_in_flight.
    """
    request = tree.request
    length = int(paths.accept_length[row])
    token_ids = paths.token_ids[row, :length].tolist()
    cut = cut_path(request, token_ids, max_context_len)
    token_ids = token_ids[: cut.num_tokens]
    reply = AcceptedPath(
        request_id=request.request_id,
        target_epoch=request.open.target_epoch,
        round_idx=request.round_idx + 1,
        seq_len=tree.seq_len + cut.num_tokens,
        accept_index=tuple(paths.accept_index[row, : cut.num_tokens].tolist()),
        token_ids=tuple(token_ids),
        num_accepted_drafts=length - 1,
        num_draft_tokens=len(tree.token_ids),
        logprobs=_logprobs(request, paths, row, token_ids),
        finish_reason=cut.reason,
        matched_stop_token_id=cut.stop_token_id,
    )
    request.tokens.extend(token_ids)
    request.seq_len = reply.seq_len
    request.phase = Phase.RUNNING
    request.round_idx = reply.round_idx
    request.last_reply = reply
    request.num_in_flight -= 1
    return reply


def _logprobs(
    request: TargetRequest, paths: PathOutputs, row: int, token_ids: list[int]
) -> tuple[TokenLogprob, ...]:
    if not request.open.logprobs or paths.logprobs is None:
        return ()
    assert paths.top_ids is not None and paths.top_logprobs is not None
    num_top = request.open.top_logprobs
    return tuple(
        TokenLogprob(
            token_id=token_id,
            logprob=float(paths.logprobs[row, i]),
            top=tuple(
                zip(
                    paths.top_ids[row, i, :num_top].tolist(),
                    paths.top_logprobs[row, i, :num_top].tolist(),
                    strict=True,
                )
            ),
        )
        for i, token_id in enumerate(token_ids)
    )
