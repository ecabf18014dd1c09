"""Answers to the paths of a step."""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import MAX_TREE_NODES, AcceptedPath, RoutedExperts, TokenLogprob
from shared.messages.tree import restore_path
from target_service.commit import CommittedPath
from target_service.engine_state import EngineState
from target_service.feature_log import FeatureRows
from target_service.nodes import SampledTrees
from target_service.phases import PathOutputs
from target_service.request import TargetRequest
from target_service.resting_rows import RestedPath
from target_service.round_trees import round_tree

_IN_ORDER = tuple(range(MAX_TREE_NODES))


def answer_paths(
    state: EngineState,
    committed: Sequence[CommittedPath],
    trees: SampledTrees,
    paths: PathOutputs,
) -> None:
    """Queue the answers to the paths of a step, and keep the features of these paths.

    Args:
        trees: Of the step.
        paths: What the step computed.
    """
    num_moved = 0
    for path in committed:
        reply = _answer_path(path, trees, paths, state.info.num_experts)
        state.outbox.append(reply)
        num_moved += reply.accept_index != _IN_ORDER[: len(reply.token_ids)]
    state.counts.moved_rounds += num_moved
    _keep_features(state, committed, paths.features)


def _keep_features(
    state: EngineState, committed: Sequence[CommittedPath], features: FeatureRows | None
) -> None:
    """Keep the features of paths, but of those that end a request or a prompt.

    Nor are rows kept that have been sent with the order of the next tree: a copy of every row would
    cost the host more than a replay of those few that a draft asks for again.

    Args:
        features: None: of no request were any wanted at the launch.
    """
    rested = []
    for request, row, path, cut, round_idx, _ in committed:
        log = request.features
        if log is None or log.is_dormant or cut.reason or not round_idx:
            continue
        num_rows = len(path.token_ids)
        if features is None or log.has_sent(path.seq_len):
            log.skip_to(path.seq_len + num_rows)  # None: it has woken since
        elif log.rested_since is None:
            log.append(path.seq_len, features[row, :num_rows].copy())
        else:
            rested.append(RestedPath(row, request.req_idx, path.seq_len, num_rows))
    if rested and features is not None:
        state.features.keep_rested(rested, features)


def _answer_path(
    committed: CommittedPath, trees: SampledTrees, paths: PathOutputs, num_experts: int
) -> AcceptedPath:
    """Return the answer to a round; `finish_reason` is set when the request is over.

    Args:
        num_experts: Of a layer; 0: the model has none.
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
        round_tree(trees, paths, committed),
        _routed_experts(request, paths, row, len(token_ids), num_experts),
        request.is_forced,
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


def _routed_experts(
    request: TargetRequest, paths: PathOutputs, row: int, num_tokens: int, num_experts: int
) -> RoutedExperts | None:
    """Return the experts of the rows that tokens were sampled from; None: nobody asked."""
    if not request.open.wants_routed_experts or paths.routed_experts is None:
        return None
    ids = paths.routed_experts[row, :num_tokens]
    return RoutedExperts(
        ids=ids.tobytes(), num_layers=ids.shape[1], top_k=ids.shape[2], num_experts=num_experts
    )
