"""Answers to the paths of a step: made after the next step was launched, if that was urgent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import MAX_TREE_NODES, AcceptedPath, TokenLogprob
from shared.messages.tree import restore_path
from target_service.commit import CommittedPath
from target_service.engine_state import EngineState
from target_service.phases import PathOutputs
from target_service.request import TargetRequest

_IN_ORDER = tuple(range(MAX_TREE_NODES))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredStep:
    """Paths by which requests have advanced, and what the step computed of them."""

    committed: Sequence[CommittedPath]
    paths: PathOutputs

    def answer(self, state: EngineState) -> None:
        """Queue the answers, and keep the features of paths."""
        num_moved = 0
        for committed in self.committed:
            reply = _answer_path(committed, self.paths)
            state.outbox.append(reply)
            num_moved += reply.accept_index != _IN_ORDER[: len(reply.token_ids)]
            if not committed.cut.reason and committed.round_idx:
                self._keep_features(committed)
        state.counts.moved_rounds += num_moved

    def _keep_features(self, committed: CommittedPath) -> None:
        log, features = committed.request.features, self.paths.features
        if log is not None and features is not None:
            rows = features[committed.row, : len(committed.path.token_ids)]
            log.append(committed.path.seq_len, rows.copy())


def _answer_path(committed: CommittedPath, paths: PathOutputs) -> AcceptedPath:
    """Return the answer to a round; `finish_reason` is set when the request is over.

    Mutates: the request's last_reply.
    """
    request, row, path, cut, round_idx, times = committed
    token_ids = path.token_ids[: cut.num_tokens]
    request.last_reply = reply = restore_path(
        request.request_id,
        request.open.target_epoch,
        round_idx,
        path.seq_len + cut.num_tokens,
        tuple(path.accept_index[: cut.num_tokens]),
        tuple(token_ids),
        len(path.token_ids) - 1,
        path.num_nodes,
        _logprobs(request, paths, row, token_ids),
        cut.stop_token_id,
        times,
        cut.reason,
    )
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
