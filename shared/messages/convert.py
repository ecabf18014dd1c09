"""Protobuf messages <-> the dataclasses of shared/types.py.

Every message has a pair of functions `<name>_to_proto` and `<name>_from_proto` in convert_tree.py,
convert_target.py, convert_draft.py, convert_features.py and convert_params.py; `to_proto` and
`from_proto` pick the pair by type. `*_to_proto` trusts its input. `*_from_proto` checks ranges,
lengths, presence and enum values and raises InvalidArgumentError naming the field relative to its
message; vocabularies, epochs and tree topology are checked by those who know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from coppice.v1 import draft_pb2, generation_pb2, peer_pb2, target_pb2, tree_pb2
from shared.messages import (
    convert_draft,
    convert_features,
    convert_params,
    convert_target,
    convert_tree,
    types,
)

_Pair = tuple[type[Any], type[Message], Callable[[Any], Any], Callable[[Any], Any]]


def _pair(module: Any, name: str, value: type[Any], message: type[Message]) -> _Pair:
    return (
        value,
        message,
        getattr(module, f"{name}_to_proto"),
        getattr(module, f"{name}_from_proto"),
    )


_PAIRS: tuple[_Pair, ...] = (
    _pair(convert_params, "sampling", types.SamplingParams, generation_pb2.SamplingParams),
    _pair(convert_params, "stopping", types.StoppingParams, generation_pb2.StoppingCriteria),
    _pair(convert_tree, "logprob", types.TokenLogprob, generation_pb2.TokenLogprob),
    _pair(convert_tree, "times", types.AnswerTimes, tree_pb2.AnswerTimes),
    _pair(convert_tree, "tree", types.TokenTree, tree_pb2.TokenTree),
    _pair(convert_tree, "tree_batch", types.TreeBatch, peer_pb2.TreeBatch),
    _pair(convert_tree, "accepted_path", types.AcceptedPath, tree_pb2.AcceptedPath),
    _pair(convert_tree, "failure", types.RequestFailure, tree_pb2.RequestFailure),
    _pair(convert_tree, "retracted", types.RequestRetracted, tree_pb2.RequestRetracted),
    _pair(convert_tree, "load", types.WorkerLoad, tree_pb2.WorkerLoad),
    _pair(convert_tree, "info", types.WorkerInfo, tree_pb2.WorkerInfo),
    _pair(convert_target, "target_open", types.TargetOpen, target_pb2.TargetOpen),
    _pair(convert_target, "target_admitted", types.TargetAdmitted, target_pb2.TargetAdmitted),
    _pair(convert_target, "verify_round", types.VerifyRound, target_pb2.VerifyRound),
    _pair(convert_target, "credit", types.Credit, target_pb2.Credit),
    _pair(convert_target, "credit_update", types.CreditUpdate, target_pb2.CreditUpdate),
    _pair(convert_target, "draft_detached", types.DraftDetached, target_pb2.DraftDetached),
    _pair(convert_target, "target_close", types.TargetClose, target_pb2.TargetClose),
    _pair(convert_features, "feature_spec", types.FeatureSpec, tree_pb2.FeatureSpec),
    _pair(convert_features, "feature_chunk", types.FeatureChunk, target_pb2.FeatureChunk),
    _pair(
        convert_features, "feature_subscribe", types.FeatureSubscribe, target_pb2.FeatureSubscribe
    ),
    _pair(convert_features, "feature_ack", types.FeatureAck, target_pb2.FeatureAck),
    _pair(
        convert_features,
        "feature_unsubscribe",
        types.FeatureUnsubscribe,
        target_pb2.FeatureUnsubscribe,
    ),
    _pair(convert_target, "peer_attach", types.PeerAttach, peer_pb2.PeerAttach),
    _pair(convert_target, "peer_detach", types.PeerDetach, peer_pb2.PeerDetach),
    _pair(convert_draft, "draft_open", types.DraftOpen, draft_pb2.DraftOpen),
    _pair(convert_draft, "draft_round", types.DraftRound, draft_pb2.DraftRound),
    _pair(convert_draft, "path_batch", types.PathBatch, peer_pb2.PathBatch),
    _pair(convert_draft, "draft_close", types.DraftClose, draft_pb2.DraftClose),
)
_TO_PROTO = {value: to_proto for value, _, to_proto, _ in _PAIRS}
_FROM_PROTO = {message: from_proto for _, message, _, from_proto in _PAIRS}


def to_proto(value: Any) -> Any:
    """Convert any dataclass of shared/types.py that has a message."""
    return _TO_PROTO[type(value)](value)


def from_proto(message: Any) -> Any:
    """Convert and check any message that has a dataclass.

    Raises: InvalidArgumentError naming the field, relative to the message.
    """
    return _FROM_PROTO[type(message)](message)
