"""Advance requests by what a step computed: the only place that changes committed state.

Accepted paths are cut at stops; prompt chunks and replays become feature rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shared.messages import MAX_TREE_NODES, AnswerTimes, FinishReason
from target_service.batch import StepBatch
from target_service.engine_state import EngineState
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.phases import PathOutputs, StepOutputs
from target_service.request import Phase, TargetRequest
from target_service.scheduler import PrefillWork


class Cut(NamedTuple):
    """Where a path ends.

    Args:
        num_tokens: Tokens kept, the stopping one included.
    """

    num_tokens: int
    reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None


_WHOLE = [Cut(num_tokens) for num_tokens in range(MAX_TREE_NODES + 1)]


class CommittedPath(NamedTuple):
    """A path by which a request has advanced, until it is answered.

    Args:
        row: The request's row in the step's PathOutputs.
        path: As it was accepted, before the cut.
        round_idx: The round that it ends; 0: the prefill.
        times: Of a timed request.
    """

    request: TargetRequest
    row: int
    path: AcceptedNodes
    cut: Cut
    round_idx: int
    times: AnswerTimes | None


def accepted_nodes(trees: SampledTrees, paths: PathOutputs) -> Iterator[AcceptedNodes]:
    """Yield the path of every tree of a step."""
    taken = [] if paths.num_nodes is None else paths.num_nodes.tolist()
    for request, num_nodes, length, index, token_ids in zip(
        trees.requests,
        [*taken, *trees.num_nodes[len(taken) :]],
        paths.accept_length.tolist(),
        paths.accept_index.tolist(),
        paths.token_ids.tolist(),
        strict=True,
    ):
        seq_len = len(request.tokens) - 1  # what was in flight before is committed
        yield AcceptedNodes(seq_len, num_nodes, index[:length], token_ids[:length])


def rows_with_nonfinite(paths: PathOutputs) -> set[int]:
    """Return the rows of a step with a token on their path whose logits were not all finite."""
    is_past_path = np.arange(paths.is_finite.shape[1]) >= paths.accept_length[:, None]
    is_sound = (paths.is_finite.astype(bool) | is_past_path).all(axis=1)
    return set() if is_sound.all() else set(np.flatnonzero(~is_sound).tolist())


def commit_chains(state: EngineState, batch: StepBatch, outputs: StepOutputs) -> None:
    """Advance requests by their prefill chunks; give the features of chunks and replays on."""
    for chain, rows in zip(batch.chains, outputs.chain_features, strict=True):
        work, request = chain.work, chain.work.request
        log = request.features
        if isinstance(work, PrefillWork):
            request.committed_len = work.stop
        elif log is not None:
            log.is_replaying = False
        if log is None or not state.is_held(request):
            continue
        if isinstance(work, PrefillWork):
            if rows is None or log.is_dormant:  # as it is, or was at the launch
                log.skip_to(work.stop)
            elif log.is_held_back:
                state.features.keep_rested_chunk(request, work.start, rows)
            else:
                log.append(work.start, rows)  # of a buffer that no other step writes to
        else:
            assert rows is not None
            state.features.commit_replay(request, work.start, rows)


def cut_path(request: TargetRequest, token_ids: list[int], max_context_len: int) -> Cut:
    """Find the first token at which the request ends: stop id, then length, then context.

    Args:
        token_ids: The path's tokens, bonus last.
    """
    held = len(request.tokens)
    if held + len(token_ids) < request.token_limit and request.stop_ids.isdisjoint(token_ids):
        return _WHOLE[len(token_ids)]
    stopping, held_output = request.open.stopping, request.num_output_tokens
    for kept, token_id in enumerate(token_ids, start=1):
        num_output = held_output + kept
        if token_id in stopping.stop_token_ids and num_output > stopping.min_new_tokens:
            return Cut(num_tokens=kept, reason=FinishReason.STOP, stop_token_id=token_id)
        if num_output >= stopping.max_new_tokens:
            return Cut(num_tokens=kept, reason=FinishReason.LENGTH)
        if held + kept >= max_context_len:
            return Cut(num_tokens=kept, reason=FinishReason.CONTEXT_LENGTH)
    return _WHOLE[len(token_ids)]


def commit_path(request: TargetRequest, path: AcceptedNodes, max_context_len: int) -> Cut:
    """Advance a request by its accepted path; return where the path was cut.

    Mutates: the request's tokens, committed_len, launched_len, phase, round_idx and num_in_flight.
    """
    cut = cut_path(request, path.token_ids, max_context_len)
    request.tokens += path.token_ids[: cut.num_tokens] if cut.reason else path.token_ids
    request.phase = Phase.RUNNING
    request.round_idx += 1
    request.num_in_flight -= 1
    request.committed_len = path.seq_len + cut.num_tokens
    request.launched_len = request.committed_len + request.num_in_flight
    return cut


def follows_grammar(request: TargetRequest, path: AcceptedNodes, cut: Cut) -> bool:
    """Return whether the output, with what was committed of a path, has the request's grammar: it
    has, unless no token of the vocabulary could follow.

    Mutates: where the output stands in it.
    """
    matcher = request.matcher
    return matcher is None or matcher.accept(path.token_ids[: cut.num_tokens])
