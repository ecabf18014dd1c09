"""Conversions of what both workers exchange: trees, paths, failures, load, identity."""

from __future__ import annotations

from coppice.v1 import draft_pb2, generation_pb2, peer_pb2, target_pb2, tree_pb2
from shared.errors import InvalidArgumentError, InvalidTreeError
from shared.messages import types
from shared.messages.convert_features import feature_spec_from_proto, feature_spec_to_proto
from shared.messages.fields import Within, require_ids, require_range, require_request_id
from shared.tree import check_shape

_FINISH_REASONS = {int(reason): reason for reason in types.FinishReason}


def stage_to_proto(stage: types.StageTime) -> generation_pb2.StageTime:
    """Convert the end of a stage."""
    return generation_pb2.StageTime(name=stage.name, end_ns=stage.end_ns)


def stage_from_proto(message: generation_pb2.StageTime) -> types.StageTime:
    """Convert the end of a stage."""
    return types.StageTime(name=message.name, end_ns=message.end_ns)


def times_to_proto(times: types.AnswerTimes) -> tree_pb2.AnswerTimes:
    """Convert the times of an answer."""
    return tree_pb2.AnswerTimes(
        clock_id=times.clock_id,
        begin_ns=times.begin_ns,
        stages=map(stage_to_proto, times.stages),
    )


def times_from_proto(message: tree_pb2.AnswerTimes) -> types.AnswerTimes:
    """Convert the times of an answer."""
    return types.AnswerTimes(
        clock_id=message.clock_id,
        begin_ns=message.begin_ns,
        stages=tuple(map(stage_from_proto, message.stages)),
    )


def shape_from_proto(
    message: draft_pb2.DraftRound | target_pb2.PeerTrees | peer_pb2.PathBatch,
) -> types.TreeShape:
    """Return the tree shape of an order."""
    shape = types.TreeShape(
        num_steps=message.num_steps,
        topk=message.topk,
        num_draft_tokens=message.num_draft_tokens,
    )
    check_shape(shape, prefix="")
    return shape


def tree_to_proto(tree: types.TokenTree) -> tree_pb2.TokenTree:
    """Convert a token tree."""
    return tree_pb2.TokenTree(
        request_id=tree.request_id,
        target_epoch=tree.target_epoch,
        draft_epoch=tree.draft_epoch,
        round_idx=tree.round_idx,
        seq_len=tree.seq_len,
        token_ids=tree.token_ids,
        parent_index=tree.parent_index,
        scores=tree_pb2.TopkScores(cumulative_logprobs=tree.cumulative_logprobs),
        times=None if tree.times is None else times_to_proto(tree.times),
        has_peer=tree.has_peer,
    )


def tree_from_proto(message: tree_pb2.TokenTree) -> types.TokenTree:
    """Convert a token tree; sizes are checked here, topology by whoever uses it.

    Raises: InvalidTreeError if the node arrays differ in length, are empty or too long.
    """
    token_ids = tuple(message.token_ids)
    parent_index = tuple(message.parent_index)
    scores = tuple(message.scores.cumulative_logprobs)
    if not 1 <= len(token_ids) <= types.MAX_TREE_NODES:
        raise InvalidTreeError(
            f"token_ids has {len(token_ids)} nodes, must be 1..{types.MAX_TREE_NODES}",
            field="token_ids",
        )
    if len(parent_index) != len(token_ids):
        raise InvalidTreeError(
            f"parent_index has {len(parent_index)} entries for {len(token_ids)} nodes",
            field="parent_index",
        )
    if scores and len(scores) != len(token_ids):
        raise InvalidTreeError(
            f"scores.cumulative_logprobs has {len(scores)} entries for {len(token_ids)} nodes",
            field="scores.cumulative_logprobs",
        )
    return types.TokenTree(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
        round_idx=require_range(message.round_idx, "round_idx", 0),
        seq_len=require_range(message.seq_len, "seq_len", 0),
        token_ids=token_ids,
        parent_index=parent_index,
        cumulative_logprobs=scores,
        times=times_from_proto(message.times) if message.HasField("times") else None,
        has_peer=message.has_peer,
    )


def tree_batch_to_proto(batch: types.TreeBatch) -> peer_pb2.TreeBatch:
    """Convert the trees of a step."""
    return peer_pb2.TreeBatch(
        request_ids=batch.request_ids,
        target_epochs=batch.target_epochs,
        draft_epochs=batch.draft_epochs,
        round_idx=batch.round_idx,
        seq_lens=batch.seq_lens,
        num_nodes=batch.num_nodes,
        token_ids=batch.token_ids,
        parent_index=batch.parent_index,
        times={i: times_to_proto(times) for i, times in batch.times.items()},
        is_ahead=batch.is_ahead,
    )


def tree_batch_from_proto(message: peer_pb2.TreeBatch) -> types.TreeBatch:
    """Convert the trees of a step after checking that the arrays agree; the rest is the engine's.

    Raises: InvalidTreeError naming the field that is wrong.
    """
    num_nodes = message.num_nodes[:]
    columns = (
        message.request_ids[:],
        message.target_epochs[:],
        message.draft_epochs[:],
        message.round_idx[:],
        message.seq_lens[:],
    )
    lengths = [len(column) for column in (num_nodes, *columns)]
    if not num_nodes or len(set(lengths)) > 1:
        raise InvalidTreeError(
            f"the arrays have {lengths} entries, expected as many in each", field="request_ids"
        )
    if not 1 <= min(num_nodes) <= max(num_nodes) <= types.MAX_TREE_NODES:
        raise InvalidTreeError(
            f"num_nodes is {num_nodes}, must be 1..{types.MAX_TREE_NODES}", field="num_nodes"
        )
    token_ids, parent_index = message.token_ids[:], message.parent_index[:]
    for name, nodes in (("token_ids", token_ids), ("parent_index", parent_index)):
        if len(nodes) != sum(num_nodes):
            raise InvalidTreeError(
                f"{name} has {len(nodes)} entries for {sum(num_nodes)} nodes", field=name
            )
    request_ids, target_epochs, draft_epochs, round_idx, seq_lens = columns
    return types.TreeBatch(
        request_ids=request_ids,
        target_epochs=target_epochs,
        draft_epochs=draft_epochs,
        round_idx=round_idx,
        seq_lens=seq_lens,
        num_nodes=num_nodes,
        token_ids=token_ids,
        parent_index=parent_index,
        times={i: times_from_proto(times) for i, times in message.times.items()},
        is_ahead=message.is_ahead,
    )


def logprob_to_proto(value: types.TokenLogprob) -> generation_pb2.TokenLogprob:
    """Convert a token's logprob and its alternatives."""
    return generation_pb2.TokenLogprob(
        token_id=value.token_id,
        logprob=value.logprob,
        top=[generation_pb2.TopLogprob(token_id=i, logprob=p) for i, p in value.top],
    )


def logprob_from_proto(message: generation_pb2.TokenLogprob) -> types.TokenLogprob:
    """Convert a token's logprob and its alternatives."""
    return types.TokenLogprob(
        token_id=require_range(message.token_id, "token_id", 0),
        logprob=message.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
    )


def accepted_path_to_proto(path: types.AcceptedPath) -> tree_pb2.AcceptedPath:
    """Convert an accepted path."""
    return tree_pb2.AcceptedPath(
        request_id=path.request_id,
        target_epoch=path.target_epoch,
        round_idx=path.round_idx,
        seq_len=path.seq_len,
        accept_index=path.accept_index,
        token_ids=path.token_ids,
        num_accepted_drafts=path.num_accepted_drafts,
        num_draft_tokens=path.num_draft_tokens,
        logprobs=map(logprob_to_proto, path.logprobs),
        finish_reason=int(path.finish_reason),  # type: ignore[arg-type]
        matched_stop_token_id=path.matched_stop_token_id,
        times=None if path.times is None else times_to_proto(path.times),
    )


def accepted_path_from_proto(message: tree_pb2.AcceptedPath) -> types.AcceptedPath:
    """Convert an accepted path."""
    accept_index = require_ids(message.accept_index, "accept_index")
    token_ids = require_ids(message.token_ids, "token_ids")
    logprobs = tuple(map(logprob_from_proto, message.logprobs))
    if len(accept_index) != len(token_ids):
        raise InvalidArgumentError(
            f"accept_index has {len(accept_index)} entries for {len(token_ids)} token_ids",
            field="accept_index",
        )
    if logprobs and len(logprobs) != len(token_ids):
        raise InvalidArgumentError(
            f"logprobs has {len(logprobs)} entries for {len(token_ids)} token_ids",
            field="logprobs",
        )
    finish_reason = _FINISH_REASONS.get(message.finish_reason)
    if finish_reason is None:
        raise InvalidArgumentError(
            f"finish_reason has the unknown value {message.finish_reason}", field="finish_reason"
        )
    has_stop = message.HasField("matched_stop_token_id")
    return types.AcceptedPath(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        round_idx=require_range(message.round_idx, "round_idx", 0),
        seq_len=require_range(message.seq_len, "seq_len", 0),
        accept_index=accept_index,
        token_ids=token_ids,
        num_accepted_drafts=require_range(message.num_accepted_drafts, "num_accepted_drafts", 0),
        num_draft_tokens=require_range(message.num_draft_tokens, "num_draft_tokens", 1),
        logprobs=logprobs,
        finish_reason=finish_reason,
        matched_stop_token_id=message.matched_stop_token_id if has_stop else None,
        times=times_from_proto(message.times) if message.HasField("times") else None,
    )


def failure_to_proto(failure: types.RequestFailure) -> tree_pb2.RequestFailure:
    """Convert a request-level failure."""
    return tree_pb2.RequestFailure(
        request_id=failure.request_id,
        target_epoch=failure.target_epoch,
        draft_epoch=failure.draft_epoch,
        round_idx=failure.round_idx,
        code=failure.code,
        reason=failure.reason,
        message=failure.message,
        field=failure.field,
    )


def failure_from_proto(message: tree_pb2.RequestFailure) -> types.RequestFailure:
    """Convert a request-level failure; its request_id is empty if the culprit had none."""
    return types.RequestFailure(
        request_id=message.request_id,
        code=require_range(message.code, "code", 1, 16),
        reason=message.reason,
        message=message.message,
        field=message.field,
        target_epoch=message.target_epoch,
        draft_epoch=message.draft_epoch,
        round_idx=message.round_idx,
    )


def retracted_to_proto(value: types.RequestRetracted) -> tree_pb2.RequestRetracted:
    """Convert a retraction."""
    return tree_pb2.RequestRetracted(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        draft_epoch=value.draft_epoch,
    )


def retracted_from_proto(message: tree_pb2.RequestRetracted) -> types.RequestRetracted:
    """Convert a retraction."""
    return types.RequestRetracted(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
    )


def load_to_proto(load: types.WorkerLoad) -> tree_pb2.WorkerLoad:
    """Convert a worker's load."""
    return tree_pb2.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_pages=load.num_free_pages,
        num_pages=load.num_pages,
        num_steps=load.num_steps,
        num_rows=load.num_rows,
        num_request_steps=load.num_request_steps,
        num_moved_rounds=load.num_moved_rounds,
        kernel_launches=dict(load.kernel_launches),
    )


def load_from_proto(message: tree_pb2.WorkerLoad) -> types.WorkerLoad:
    """Convert a worker's load."""
    return types.WorkerLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_free_pages=message.num_free_pages,
        num_pages=message.num_pages,
        num_steps=message.num_steps,
        num_rows=message.num_rows,
        num_request_steps=message.num_request_steps,
        num_moved_rounds=message.num_moved_rounds,
        kernel_launches=tuple(sorted(message.kernel_launches.items()))
        if message.kernel_launches
        else (),
    )


def info_to_proto(info: types.WorkerInfo) -> tree_pb2.WorkerInfo:
    """Convert a worker's identity and limits."""
    return tree_pb2.WorkerInfo(
        incarnation=info.incarnation,
        model=info.model,
        model_hash=info.model_hash,
        tokenizer_hash=info.tokenizer_hash,
        vocab_size=info.vocab_size,
        max_context_len=info.max_context_len,
        page_size=info.page_size,
        dtype=info.dtype,
        device=info.device,
        features=feature_spec_to_proto(info.features),
        kind=info.kind,
        load=load_to_proto(info.load),
        eos_token_ids=info.eos_token_ids,
        draft_window=info.draft_window,
        feature_ring=info.feature_ring,
        peer_socket=info.peer_socket,
        device_model=info.device_model,
        versions=info.versions,
        cpu_threads=info.cpu_threads,
        logits_hash=info.logits_hash,
    )


def info_from_proto(message: tree_pb2.WorkerInfo) -> types.WorkerInfo:
    """Convert a worker's identity and limits."""
    if not message.incarnation:
        raise InvalidArgumentError("incarnation is empty", field="incarnation")
    with Within("features"):
        features = feature_spec_from_proto(message.features)
    return types.WorkerInfo(
        incarnation=message.incarnation,
        model=message.model,
        model_hash=message.model_hash,
        tokenizer_hash=message.tokenizer_hash,
        vocab_size=require_range(message.vocab_size, "vocab_size", 1),
        max_context_len=require_range(message.max_context_len, "max_context_len", 1),
        page_size=require_range(message.page_size, "page_size", 1),
        dtype=message.dtype,
        device=message.device,
        features=features,
        kind=message.kind,
        load=load_from_proto(message.load),
        eos_token_ids=require_ids(message.eos_token_ids, "eos_token_ids"),
        draft_window=require_range(message.draft_window, "draft_window", 0),
        feature_ring=message.feature_ring,
        peer_socket=message.peer_socket,
        device_model=message.device_model,
        versions=message.versions,
        cpu_threads=message.cpu_threads,
        logits_hash=message.logits_hash,
    )
