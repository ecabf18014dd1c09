"""Messages that are converted by hand: columns of a step's requests, and rows of features.

As in codec.py: `*_arguments` trust their input and give the keyword arguments of the message,
`*_from_proto` check and raise errors that name the field.
"""

from __future__ import annotations

from typing import Any

from coppice.v1 import peer_pb2, target_pb2, tree_pb2
from shared.errors import InvalidArgumentError, InvalidTreeError
from shared.messages.codec import Codec, arguments_of, from_proto, register, to_proto
from shared.messages.features import (
    MAX_CHUNK_BYTES,
    FeatureChunk,
    PathRows,
    RingSpan,
    dtype_from_wire,
    dtype_to_wire,
)
from shared.messages.fields import (
    Within,
    require_ids,
    require_range,
    require_request_id,
    require_same_lengths,
    split_column,
)
from shared.messages.peer import PathBatch, PathEntry
from shared.messages.tree import MAX_TREE_NODES, TreeBatch, TreeShape, check_shape
from shared.peer.shared_files import RINGS

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PATH_COLUMNS = (
    "request_ids",
    "target_epochs",
    "draft_epochs",
    "round_idx",
    "seq_lens",
    "mailbox_slots",
    "round_tags",
)
_SINGLE_TREE_COLUMNS = ("request_ids", "target_epochs", "draft_epochs", "round_idx", "seq_lens")
_TREE_COLUMNS = (*_SINGLE_TREE_COLUMNS, "num_nodes", "token_ids", "parent_index")


def _tree_batch_arguments(batch: TreeBatch) -> dict[str, Any]:
    arguments = {name: getattr(batch, name) for name in _TREE_COLUMNS}
    arguments["times"] = {i: to_proto(times) for i, times in batch.times.items()}
    arguments["is_overlapped"] = batch.is_overlapped
    arguments["num_targets"] = batch.num_targets
    return arguments


def _tree_batch_from_proto(message: peer_pb2.TreeBatch) -> TreeBatch:
    """Return the trees of a step after checking that the arrays agree; the rest is the engine's."""
    columns = {name: getattr(message, name)[:] for name in _TREE_COLUMNS}
    num_nodes = columns["num_nodes"]
    per_tree = [columns[name] for name in _SINGLE_TREE_COLUMNS]
    require_same_lengths(num_nodes, *per_tree, at_least=1, error=InvalidTreeError)
    if not 1 <= min(num_nodes) <= max(num_nodes) <= MAX_TREE_NODES:
        raise InvalidTreeError(
            f"num_nodes is {num_nodes}, must be 1..{MAX_TREE_NODES}", field="num_nodes"
        )
    for name in ("token_ids", "parent_index"):
        if len(columns[name]) != sum(num_nodes):
            raise InvalidTreeError(
                f"{name} has {len(columns[name])} entries for {sum(num_nodes)} nodes", field=name
            )
    return TreeBatch(
        **columns,
        times={i: from_proto(times) for i, times in message.times.items()},
        is_overlapped=message.is_overlapped,
        num_targets=message.num_targets,
    )


def _path_batch_arguments(batch: PathBatch) -> dict[str, Any]:
    *begin, tokens, mailbox_slots, round_tags = zip(*batch.parts, strict=True)
    return {
        **dict(zip(_PATH_COLUMNS, (*begin, mailbox_slots, round_tags), strict=True)),
        "num_tokens": list(map(len, tokens)),
        "token_ids": [token_id for token_ids in tokens for token_id in token_ids],
        "num_steps": batch.shape.num_steps,
        "topk": batch.shape.topk,
        "num_draft_tokens": batch.shape.num_draft_tokens,
        **_following_arguments(batch.following),
        "handle": None if batch.rows is None else arguments_of(batch.rows),
    }


def _path_batch_from_proto(message: peer_pb2.PathBatch) -> PathBatch:
    """Return the orders of a step's trees after checking that the arrays agree."""
    num_tokens = message.num_tokens[:]
    columns = [getattr(message, name)[:] for name in _PATH_COLUMNS]
    require_same_lengths(num_tokens, *columns, at_least=1)
    token_ids = require_ids(message.token_ids[:], "token_ids")
    if min(num_tokens) < 1 or sum(num_tokens) != len(token_ids):
        raise InvalidArgumentError(
            f"num_tokens is {num_tokens}, token_ids has {len(token_ids)} entries",
            field="num_tokens",
        )
    for name, column in zip(_PATH_COLUMNS[1:], columns[1:], strict=True):
        require_range(min(column), name, 0)
    paths = split_column(token_ids, num_tokens)
    shape = TreeShape(
        num_steps=message.num_steps, topk=message.topk, num_draft_tokens=message.num_draft_tokens
    )
    check_shape(shape, prefix="")
    return PathBatch(
        parts=tuple(map(PathEntry, *columns[:5], paths, *columns[5:])),
        shape=shape,
        following=_following_of(message),
        rows=_rows_of(message, len(token_ids)),
    )


def _following_arguments(shape: TreeShape | None) -> dict[str, int]:
    if shape is None:
        return {}
    return {
        "following_num_steps": shape.num_steps,
        "following_topk": shape.topk,
        "following_num_draft_tokens": shape.num_draft_tokens,
    }


def _following_of(message: peer_pb2.PathBatch) -> TreeShape | None:
    shape = TreeShape(
        num_steps=message.following_num_steps,
        topk=message.following_topk,
        num_draft_tokens=message.following_num_draft_tokens,
    )
    if not (shape.num_steps or shape.topk or shape.num_draft_tokens):
        return None
    check_shape(shape, prefix="following_")
    return shape


def _rows_of(message: peer_pb2.PathBatch, num_tokens: int) -> PathRows | None:
    if not message.HasField("handle"):
        return None
    with Within("handle"):
        rows: PathRows = from_proto(message.handle)
    if rows.shape[0] != num_tokens:
        raise InvalidArgumentError(
            f"the handle has {rows.shape[0]} rows for {num_tokens} tokens", field="handle"
        )
    return rows


def _chunk_arguments(chunk: FeatureChunk) -> dict[str, Any]:
    return {
        "request_id": chunk.request_id,
        "target_epoch": chunk.target_epoch,
        "start": chunk.start,
        "handle": _handle_arguments(chunk),
    }


def _chunk_from_proto(message: target_pb2.FeatureChunk) -> FeatureChunk:
    """Return feature rows after checking that shape, dtype and bytes agree."""
    with Within("handle"):
        shape, dtype, data = _check_handle(message.handle)
    return FeatureChunk(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        start=require_range(message.start, "start", 0),
        shape=shape,
        dtype=dtype,
        data=data,
    )


def _handle_arguments(rows: FeatureChunk | PathRows) -> dict[str, Any]:
    handle: dict[str, Any] = {"shape": rows.shape, "dtype": dtype_to_wire(rows.dtype)}
    if isinstance(rows.data, RingSpan):
        handle["ring_span"] = {"ring": rows.data.ring, "begin": rows.data.begin}
    else:
        handle["inline_data"] = rows.data
    return handle


def _path_rows_from_proto(message: tree_pb2.FeatureHandle) -> PathRows:
    """Return the rows of paths, or their place in a ring."""
    shape, dtype, data = _check_handle(message)
    return PathRows(shape=shape, dtype=dtype, data=data)


def _check_handle(
    handle: tree_pb2.FeatureHandle,
) -> tuple[tuple[int, int], str, bytes | RingSpan]:
    shape = tuple(handle.shape[:])
    if len(shape) != 2 or min(shape) < 1:
        raise InvalidArgumentError(
            f"shape is {list(shape)}, must be [num_rows, feature_width], both >= 1", field="shape"
        )
    dtype = dtype_from_wire(handle.dtype, may_be_absent=False)
    num_bytes = shape[0] * shape[1] * _ITEM_BYTES[dtype]
    location = handle.WhichOneof("location")
    if location == "ring_span":
        with Within("ring_span"):
            return shape, dtype, _check_span(handle.ring_span, num_bytes)
    if location != "inline_data":
        raise InvalidArgumentError(
            f"location is {location or 'absent'}, must be inline_data or ring_span",
            field="location",
        )
    data = handle.inline_data  # one copy per access
    if len(data) != num_bytes:
        raise InvalidArgumentError(
            f"inline_data has {len(data)} bytes, shape {list(shape)} of {dtype} needs {num_bytes}",
            field="inline_data",
        )
    if len(data) > MAX_CHUNK_BYTES:
        raise InvalidArgumentError(
            f"inline_data has {len(data)} bytes, at most {MAX_CHUNK_BYTES} per chunk",
            field="inline_data",
        )
    return shape, dtype, data


def _check_span(span: tree_pb2.RingSpan, num_bytes: int) -> RingSpan:
    if not RINGS.is_name(span.ring):
        raise InvalidArgumentError(f"ring is {span.ring!r}, no name of a ring", field="ring")
    begin = require_range(span.begin, "begin", 0)
    return RingSpan(ring=span.ring, begin=begin, num_bytes=num_bytes)


register(TreeBatch, Codec(peer_pb2.TreeBatch, _tree_batch_arguments, _tree_batch_from_proto))
register(PathBatch, Codec(peer_pb2.PathBatch, _path_batch_arguments, _path_batch_from_proto))
register(FeatureChunk, Codec(target_pb2.FeatureChunk, _chunk_arguments, _chunk_from_proto))
register(PathRows, Codec(tree_pb2.FeatureHandle, _handle_arguments, _path_rows_from_proto))
