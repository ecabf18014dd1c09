"""Conversions of the messages of a target's session."""

from __future__ import annotations

from coppice.v1 import peer_pb2, target_pb2
from shared.errors import InvalidArgumentError
from shared.messages import types
from shared.messages.convert_params import (
    sampling_from_proto,
    sampling_to_proto,
    stopping_from_proto,
    stopping_to_proto,
)
from shared.messages.convert_tree import (
    shape_from_proto,
    times_from_proto,
    times_to_proto,
    tree_from_proto,
    tree_to_proto,
)
from shared.messages.fields import Within, require_ids, require_range, require_request_id

MAX_TOP_LOGPROBS = 20


def target_open_to_proto(value: types.TargetOpen) -> target_pb2.TargetOpen:
    """Convert the opening of a request on a target."""
    return target_pb2.TargetOpen(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        token_ids=value.token_ids,
        num_prompt_tokens=value.num_prompt_tokens,
        sampling=sampling_to_proto(value.sampling),
        stopping=stopping_to_proto(value.stopping),
        logprobs=value.logprobs,
        top_logprobs=value.top_logprobs,
        wants_features=value.wants_features,
        priority=value.priority,
        is_timed=value.is_timed,
    )


def target_open_from_proto(message: target_pb2.TargetOpen) -> types.TargetOpen:
    """Convert the opening of a request on a target."""
    request_id = require_request_id(message.request_id)
    token_ids = require_ids(message.token_ids, "token_ids", at_least=1)
    with Within("sampling"):
        sampling = sampling_from_proto(message.sampling)
    with Within("stopping"):
        stopping = stopping_from_proto(message.stopping)
    return types.TargetOpen(
        request_id=request_id,
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        token_ids=token_ids,
        num_prompt_tokens=require_range(
            message.num_prompt_tokens, "num_prompt_tokens", 1, len(token_ids)
        ),
        sampling=sampling,
        stopping=stopping,
        logprobs=message.logprobs,
        top_logprobs=require_range(message.top_logprobs, "top_logprobs", 0, MAX_TOP_LOGPROBS),
        wants_features=message.wants_features,
        priority=message.priority,
        is_timed=message.is_timed,
    )


def target_admitted_to_proto(value: types.TargetAdmitted) -> target_pb2.TargetAdmitted:
    """Convert an admission."""
    return target_pb2.TargetAdmitted(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        num_cached_tokens=value.num_cached_tokens,
        times=None if value.times is None else times_to_proto(value.times),
    )


def target_admitted_from_proto(message: target_pb2.TargetAdmitted) -> types.TargetAdmitted:
    """Convert an admission."""
    return types.TargetAdmitted(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        num_cached_tokens=require_range(message.num_cached_tokens, "num_cached_tokens", 0),
        times=times_from_proto(message.times) if message.HasField("times") else None,
    )


def verify_round_to_proto(value: types.VerifyRound) -> target_pb2.VerifyRound:
    """Convert an order to verify."""
    return target_pb2.VerifyRound(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        round_idx=value.round_idx,
        seq_len=value.seq_len,
        root_token_id=value.root_token_id,
        tree=None if value.tree is None else tree_to_proto(value.tree),
        credit=None if value.credit is None else credit_to_proto(value.credit),
    )


def verify_round_from_proto(message: target_pb2.VerifyRound) -> types.VerifyRound:
    """Convert an order to verify."""
    request_id = require_request_id(message.request_id)
    tree = None
    if message.HasField("tree"):
        with Within("tree"):
            tree = tree_from_proto(message.tree)
    credit = None
    if message.HasField("credit"):
        with Within("credit"):
            credit = credit_from_proto(message.credit)
    return types.VerifyRound(
        request_id=request_id,
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        round_idx=require_range(message.round_idx, "round_idx", 1),  # 0 is the prefill
        seq_len=require_range(message.seq_len, "seq_len", 0),
        root_token_id=require_range(message.root_token_id, "root_token_id", 0),
        tree=tree,
        credit=credit,
    )


def credit_to_proto(value: types.Credit) -> target_pb2.Credit:
    """Convert a credit."""
    trees = value.trees
    if isinstance(trees, types.RootOnly):
        return target_pb2.Credit(
            until_round_idx=value.until_round_idx, root_only=target_pb2.RootOnly()
        )
    return target_pb2.Credit(
        until_round_idx=value.until_round_idx,
        peer=target_pb2.PeerTrees(
            draft_epoch=trees.draft_epoch,
            token_offset=trees.token_offset,
            num_steps=trees.shape.num_steps,
            topk=trees.shape.topk,
            num_draft_tokens=trees.shape.num_draft_tokens,
        ),
    )


def credit_from_proto(message: target_pb2.Credit) -> types.Credit:
    """Convert a credit."""
    trees: types.RootOnly | types.PeerTrees
    match message.WhichOneof("trees"):
        case "root_only":
            trees = types.RootOnly()
        case "peer":
            with Within("peer"):
                trees = types.PeerTrees(
                    draft_epoch=require_range(message.peer.draft_epoch, "draft_epoch", 0),
                    token_offset=require_range(message.peer.token_offset, "token_offset", 0),
                    shape=shape_from_proto(message.peer),
                )
        case _:
            raise InvalidArgumentError(
                "trees is absent or unknown, must be root_only or peer", field="trees"
            )
    return types.Credit(
        until_round_idx=require_range(message.until_round_idx, "until_round_idx", 1), trees=trees
    )


def credit_update_to_proto(value: types.CreditUpdate) -> target_pb2.CreditUpdate:
    """Convert the renewal of a credit."""
    return target_pb2.CreditUpdate(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        credit=credit_to_proto(value.credit),
    )


def credit_update_from_proto(message: target_pb2.CreditUpdate) -> types.CreditUpdate:
    """Convert the renewal of a credit."""
    request_id = require_request_id(message.request_id)
    with Within("credit"):
        credit = credit_from_proto(message.credit)
    return types.CreditUpdate(
        request_id=request_id,
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        credit=credit,
    )


def draft_detached_to_proto(value: types.DraftDetached) -> target_pb2.DraftDetached:
    """Convert the word that the channel to a draft is gone."""
    return target_pb2.DraftDetached(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        draft_epoch=value.draft_epoch,
    )


def draft_detached_from_proto(message: target_pb2.DraftDetached) -> types.DraftDetached:
    """Convert the word that the channel to a draft is gone."""
    return types.DraftDetached(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
    )


def peer_attach_to_proto(value: types.PeerAttach) -> peer_pb2.PeerAttach:
    """Convert the word that a draft holds a request."""
    return peer_pb2.PeerAttach(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        draft_epoch=value.draft_epoch,
        has_mailbox=value.has_mailbox,
    )


def peer_attach_from_proto(message: peer_pb2.PeerAttach) -> types.PeerAttach:
    """Convert the word that a draft holds a request."""
    return types.PeerAttach(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
        has_mailbox=message.has_mailbox,
    )


def peer_detach_to_proto(value: types.PeerDetach) -> peer_pb2.PeerDetach:
    """Convert the word that a draft holds a request no more."""
    return peer_pb2.PeerDetach(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        draft_epoch=value.draft_epoch,
    )


def peer_detach_from_proto(message: peer_pb2.PeerDetach) -> types.PeerDetach:
    """Convert the word that a draft holds a request no more."""
    return types.PeerDetach(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
    )


def target_close_to_proto(value: types.TargetClose) -> target_pb2.TargetClose:
    """Convert the end of a request on a target."""
    return target_pb2.TargetClose(request_id=value.request_id, target_epoch=value.target_epoch)


def target_close_from_proto(message: target_pb2.TargetClose) -> types.TargetClose:
    """Convert the end of a request on a target."""
    return types.TargetClose(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
    )
