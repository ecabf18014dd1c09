"""Conversions of feature streams: what is captured, subscriptions, and chunks of rows."""

from __future__ import annotations

from coppice.v1 import target_pb2, tree_pb2
from shared.errors import InvalidArgumentError
from shared.messages import types
from shared.messages.fields import Within, require_ids, require_range, require_request_id
from shared.peer.shared_files import RINGS

MAX_CHUNK_BYTES = 1 << 20
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_DTYPE_TO_PROTO = {
    "": tree_pb2.TENSOR_DTYPE_UNSPECIFIED,
    "float32": tree_pb2.TENSOR_DTYPE_FLOAT32,
    "float16": tree_pb2.TENSOR_DTYPE_FLOAT16,
    "bfloat16": tree_pb2.TENSOR_DTYPE_BFLOAT16,
}
_DTYPE_FROM_PROTO: dict[int, str] = {number: name for name, number in _DTYPE_TO_PROTO.items()}


def _dtype_from_proto(number: int, *, may_be_absent: bool) -> str:
    name = _DTYPE_FROM_PROTO.get(number)
    if name is None or (not name and not may_be_absent):
        raise InvalidArgumentError(
            f"dtype is {number}, must be FLOAT32, FLOAT16 or BFLOAT16", field="dtype"
        )
    return name


def feature_spec_to_proto(spec: types.FeatureSpec) -> tree_pb2.FeatureSpec:
    """Convert what a target captures or a draft needs."""
    return tree_pb2.FeatureSpec(
        layer_ids=spec.layer_ids,
        width=spec.width,
        dtype=_DTYPE_TO_PROTO[spec.dtype],
        projection=spec.projection,
    )


def feature_spec_from_proto(message: tree_pb2.FeatureSpec) -> types.FeatureSpec:
    """Convert what a target captures or a draft needs; only a target says the dtype."""
    return types.FeatureSpec(
        layer_ids=require_ids(message.layer_ids, "layer_ids"),
        width=require_range(message.width, "width", 0),
        dtype=_dtype_from_proto(message.dtype, may_be_absent=True),
        projection=message.projection,
    )


def feature_subscribe_to_proto(value: types.FeatureSubscribe) -> target_pb2.FeatureSubscribe:
    """Convert a subscription."""
    return target_pb2.FeatureSubscribe(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        from_position=value.from_position,
        draft_epoch=value.draft_epoch,
        ring_nonce=value.ring_nonce,
    )


def feature_subscribe_from_proto(message: target_pb2.FeatureSubscribe) -> types.FeatureSubscribe:
    """Convert a subscription."""
    return types.FeatureSubscribe(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        from_position=require_range(message.from_position, "from_position", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
        ring_nonce=message.ring_nonce,
    )


def feature_ack_to_proto(value: types.FeatureAck) -> target_pb2.FeatureAck:
    """Convert an acknowledgement."""
    return target_pb2.FeatureAck(
        request_id=value.request_id, target_epoch=value.target_epoch, position=value.position
    )


def feature_ack_from_proto(message: target_pb2.FeatureAck) -> types.FeatureAck:
    """Convert an acknowledgement."""
    return types.FeatureAck(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        position=require_range(message.position, "position", 0),
    )


def feature_unsubscribe_to_proto(value: types.FeatureUnsubscribe) -> target_pb2.FeatureUnsubscribe:
    """Convert the end of a subscription."""
    return target_pb2.FeatureUnsubscribe(
        request_id=value.request_id, target_epoch=value.target_epoch
    )


def feature_unsubscribe_from_proto(
    message: target_pb2.FeatureUnsubscribe,
) -> types.FeatureUnsubscribe:
    """Convert the end of a subscription."""
    return types.FeatureUnsubscribe(
        request_id=require_request_id(message.request_id),
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
    )


def feature_chunk_to_proto(chunk: types.FeatureChunk) -> target_pb2.FeatureChunk:
    """Convert consecutive feature rows, or where in the ring they lie."""
    return target_pb2.FeatureChunk(
        request_id=chunk.request_id,
        target_epoch=chunk.target_epoch,
        start=chunk.start,
        handle=_handle(chunk),
    )


def ring_rows_to_proto(rows: types.RingRows) -> tree_pb2.FeatureHandle:
    """Convert the place of rows in a ring."""
    return _handle(rows)


def ring_rows_from_proto(message: tree_pb2.FeatureHandle) -> types.RingRows:
    """Convert the place of rows in a ring.

    Raises: InvalidArgumentError naming the part of the handle that is wrong.
    """
    shape, dtype, data = _check_handle(message)
    if not isinstance(data, types.RingSpan):
        raise InvalidArgumentError("these rows lie in a ring", field="location")
    return types.RingRows(shape=shape, dtype=dtype, data=data)


def _handle(rows: types.FeatureChunk | types.RingRows) -> tree_pb2.FeatureHandle:
    handle = tree_pb2.FeatureHandle(shape=rows.shape, dtype=_DTYPE_TO_PROTO[rows.dtype])
    if isinstance(rows.data, types.RingSpan):
        handle.ring_span.ring = rows.data.ring
        handle.ring_span.begin = rows.data.begin
    else:
        handle.inline_data = rows.data
    return handle


def feature_chunk_from_proto(message: target_pb2.FeatureChunk) -> types.FeatureChunk:
    """Convert feature rows after checking that shape, dtype and bytes agree.

    Raises: InvalidArgumentError naming the part of the handle that is wrong.
    """
    request_id = require_request_id(message.request_id)
    with Within("handle"):
        shape, dtype, data = _check_handle(message.handle)
    return types.FeatureChunk(
        request_id=request_id,
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        start=require_range(message.start, "start", 0),
        shape=shape,
        dtype=dtype,
        data=data,
    )


def _check_handle(
    handle: tree_pb2.FeatureHandle,
) -> tuple[tuple[int, int], str, bytes | types.RingSpan]:
    shape = tuple(handle.shape)
    if len(shape) != 2 or shape[0] < 1 or shape[1] < 1:
        raise InvalidArgumentError(
            f"shape is {list(shape)}, must be [num_rows, feature_width], both >= 1", field="shape"
        )
    dtype = _dtype_from_proto(handle.dtype, may_be_absent=False)
    num_bytes = shape[0] * shape[1] * ITEM_BYTES[dtype]
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


def _check_span(span: tree_pb2.RingSpan, num_bytes: int) -> types.RingSpan:
    if not RINGS.is_name(span.ring):
        raise InvalidArgumentError(f"ring is {span.ring!r}, no name of a ring", field="ring")
    begin = require_range(span.begin, "begin", 0)
    return types.RingSpan(ring=span.ring, begin=begin, num_bytes=num_bytes)
