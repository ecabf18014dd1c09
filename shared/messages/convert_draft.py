"""Conversions of the messages of a draft's session."""

from __future__ import annotations

from itertools import accumulate

from coppice.v1 import draft_pb2, peer_pb2
from shared.errors import InvalidArgumentError
from shared.messages import types
from shared.messages.convert_features import ring_rows_from_proto, ring_rows_to_proto
from shared.messages.convert_params import sampling_from_proto, sampling_to_proto
from shared.messages.convert_tree import shape_from_proto
from shared.messages.fields import Within, require_ids, require_range, require_request_id

_PATH_COLUMNS = (
    "target_epochs",
    "draft_epochs",
    "round_idx",
    "seq_lens",
    "mailbox_slots",
    "round_tags",
)


def draft_open_to_proto(value: types.DraftOpen) -> draft_pb2.DraftOpen:
    """Convert the opening of a request on a draft."""
    return draft_pb2.DraftOpen(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        draft_epoch=value.draft_epoch,
        target_address=value.target_address,
        token_ids=value.token_ids,
        sampling=sampling_to_proto(value.sampling),
        is_timed=value.is_timed,
        target_socket=value.target_socket,
    )


def draft_open_from_proto(message: draft_pb2.DraftOpen) -> types.DraftOpen:
    """Convert the opening of a request on a draft."""
    request_id = require_request_id(message.request_id)
    if not message.target_address:
        raise InvalidArgumentError("target_address is empty", field="target_address")
    with Within("sampling"):
        sampling = sampling_from_proto(message.sampling)
    return types.DraftOpen(
        request_id=request_id,
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
        target_address=message.target_address,
        token_ids=require_ids(message.token_ids, "token_ids", at_least=1),
        sampling=sampling,
        is_timed=message.is_timed,
        target_socket=message.target_socket,
    )


def draft_round_to_proto(value: types.DraftRound) -> draft_pb2.DraftRound:
    """Convert the order of a tree."""
    return draft_pb2.DraftRound(
        request_id=value.request_id,
        target_epoch=value.target_epoch,
        draft_epoch=value.draft_epoch,
        round_idx=value.round_idx,
        seq_len=value.seq_len,
        token_offset=value.token_offset,
        token_ids=value.token_ids,
        num_steps=value.shape.num_steps,
        topk=value.shape.topk,
        num_draft_tokens=value.shape.num_draft_tokens,
    )


def draft_round_from_proto(message: draft_pb2.DraftRound) -> types.DraftRound:
    """Convert the order of a tree."""
    request_id = require_request_id(message.request_id)
    return types.DraftRound(
        request_id=request_id,
        target_epoch=require_range(message.target_epoch, "target_epoch", 0),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
        round_idx=require_range(message.round_idx, "round_idx", 0),
        seq_len=require_range(message.seq_len, "seq_len", 0),
        token_offset=require_range(message.token_offset, "token_offset", 0),
        token_ids=require_ids(message.token_ids, "token_ids"),
        shape=shape_from_proto(message),
    )


def path_batch_to_proto(value: types.PathBatch) -> peer_pb2.PathBatch:
    """Convert the orders of a step's trees."""
    request_ids, target_epochs, draft_epochs, round_idx, seq_lens, _, mailbox_slots, round_tags = (
        zip(*value.parts, strict=True)
    )
    return peer_pb2.PathBatch(
        request_ids=request_ids,
        target_epochs=target_epochs,
        draft_epochs=draft_epochs,
        round_idx=round_idx,
        seq_lens=seq_lens,
        num_tokens=[len(part.token_ids) for part in value.parts],
        token_ids=[token_id for part in value.parts for token_id in part.token_ids],
        num_steps=value.shape.num_steps,
        topk=value.shape.topk,
        num_draft_tokens=value.shape.num_draft_tokens,
        handle=None if value.rows is None else ring_rows_to_proto(value.rows),
        mailbox_slots=mailbox_slots,
        round_tags=round_tags,
    )


def path_batch_from_proto(message: peer_pb2.PathBatch) -> types.PathBatch:
    """Convert the orders of a step's trees after checking that the arrays agree.

    Raises: InvalidArgumentError naming the field that is wrong.
    """
    columns = (
        message.request_ids,
        message.target_epochs,
        message.draft_epochs,
        message.round_idx,
        message.seq_lens,
        message.mailbox_slots,
        message.round_tags,
    )
    num_tokens = list(message.num_tokens)
    lengths = [len(num_tokens), *[len(column) for column in columns]]
    if not num_tokens or len(set(lengths)) > 1:
        raise InvalidArgumentError(
            f"the arrays have {lengths} entries, expected as many in each", field="request_ids"
        )
    token_ids = require_ids(message.token_ids, "token_ids")
    if min(num_tokens) < 1 or sum(num_tokens) != len(token_ids):
        raise InvalidArgumentError(
            f"num_tokens is {num_tokens}, token_ids has {len(token_ids)} entries",
            field="num_tokens",
        )
    for name, column in zip(_PATH_COLUMNS, columns[1:], strict=True):
        require_range(min(column), name, 0)
    rows = None
    if message.HasField("handle"):
        with Within("handle"):
            rows = ring_rows_from_proto(message.handle)
        if rows.shape[0] != len(token_ids):
            raise InvalidArgumentError(
                f"the handle has {rows.shape[0]} rows for {len(token_ids)} tokens", field="handle"
            )
    stops = list(accumulate(num_tokens))
    paths = [token_ids[stop - count : stop] for stop, count in zip(stops, num_tokens, strict=True)]
    return types.PathBatch(
        parts=tuple(map(types.PathEntry, *columns[:5], paths, *columns[5:])),
        shape=shape_from_proto(message),
        rows=rows,
    )


def draft_close_to_proto(value: types.DraftClose) -> draft_pb2.DraftClose:
    """Convert the end of a request on a draft."""
    return draft_pb2.DraftClose(request_id=value.request_id, draft_epoch=value.draft_epoch)


def draft_close_from_proto(message: draft_pb2.DraftClose) -> types.DraftClose:
    """Convert the end of a request on a draft."""
    return types.DraftClose(
        request_id=require_request_id(message.request_id),
        draft_epoch=require_range(message.draft_epoch, "draft_epoch", 0),
    )
