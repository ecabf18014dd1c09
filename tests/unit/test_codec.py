"""What a dataclass declares must fit its message; what does not fit is found at the definition."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from coppice.v1 import generation_pb2, peer_pb2, target_pb2, tree_pb2
from shared.errors import InvalidArgumentError
from shared.messages import (
    AnswerTimes,
    FeatureChunk,
    FinishReason,
    PathBatch,
    PathEntry,
    PathRows,
    RingSpan,
    StageTime,
    TreeBatch,
    TreeShape,
    VerifyRound,
    from_proto,
    to_proto,
)
from shared.messages.codec import Mark, message
from shared.messages.fields import Count, RequestId

value = dataclass(frozen=True, slots=True, kw_only=True)
SPAN = RingSpan(ring="coppice-features-" + "0" * 32, begin=5, num_bytes=8)
ROWS = PathRows(shape=(1, 2), dtype="float32", data=SPAN)
TIMES = AnswerTimes(clock_id=1, begin_ns=2, stages=(StageTime(name="grow", end_ns=3),))
# Of the messages that are converted by hand, values that set every field.
BY_HAND = [
    TreeBatch(
        request_ids=["a"],
        target_epochs=[1],
        draft_epochs=[1],
        round_idx=[1],
        seq_lens=[1],
        num_nodes=[2],
        token_ids=[5, 6],
        parent_index=[-1, 0],
        times={0: TIMES},
        is_overlapped=True,
        num_targets=2,
    ),
    PathBatch(
        parts=(PathEntry("a", 1, 1, 1, 1, (7,), 1, 1),),
        shape=TreeShape(num_steps=1, topk=1, num_draft_tokens=2),
        following=TreeShape(num_steps=2, topk=1, num_draft_tokens=3),
        rows=ROWS,
    ),
    FeatureChunk(request_id="a", target_epoch=1, start=1, shape=(1, 2), dtype="float32", data=SPAN),
]


def test_a_field_that_the_message_lacks_is_found() -> None:
    @value
    class TargetClose:
        request_id: RequestId
        target_epoch: Count
        why: str = ""

    with pytest.raises(TypeError, match=r"TargetClose\.why does not map.*coppice\.v1\.TargetClose"):
        message(target_pb2.TargetClose)(TargetClose)


def test_a_field_that_the_dataclass_lacks_is_found() -> None:
    @value
    class TargetClose:
        request_id: RequestId

    with pytest.raises(TypeError, match=r"only one of them has \['target_epoch'\]"):
        message(target_pb2.TargetClose)(TargetClose)
    with pytest.raises(TypeError, match="seq_len"):
        message(target_pb2.TargetClose, ignored=("target_epoch", "seq_len"))(TargetClose)


def test_a_field_of_another_type_is_found() -> None:
    @value
    class TargetClose:
        request_id: RequestId
        target_epoch: str

    with pytest.raises(TypeError, match=r"TargetClose\.target_epoch does not map"):
        message(target_pb2.TargetClose)(TargetClose)


def test_a_part_of_another_message_is_found() -> None:
    @value
    class VerifyOrder:
        request_id: RequestId
        target_epoch: Count
        round_idx: Count
        seq_len: Count
        root_token_id: Count
        tree: VerifyRound | None = None
        credit: int = 0

    with pytest.raises(TypeError, match=r"VerifyOrder\.tree does not map"):
        message(target_pb2.VerifyRound)(VerifyOrder)


def test_a_union_has_as_many_types_as_the_oneof_has_fields() -> None:
    @value
    class Ending:
        matched_stop: int | None = None

    with pytest.raises(TypeError, match=r"Ending\.matched_stop does not map"):
        message(generation_pb2.FinishInfo)(Ending)


def test_what_stays_in_the_process_needs_a_default() -> None:
    @value
    class TargetClose:
        request_id: RequestId
        target_epoch: Count
        received_ns: Annotated[int, Mark.OFF_WIRE]

    with pytest.raises(TypeError, match="received_ns is off the wire"):
        message(target_pb2.TargetClose)(TargetClose)


def test_enums_agree_with_the_wire() -> None:
    for member in FinishReason:
        name = "UNSPECIFIED" if member is FinishReason.NONE else member.name
        assert generation_pb2.FinishReason.Value(f"FINISH_REASON_{name}") == member
    assert len(FinishReason) == len(generation_pb2.FinishReason.items())
    assert issubclass(FinishReason, enum.IntEnum)


@pytest.mark.parametrize("full", BY_HAND, ids=lambda full: type(full).__name__)
def test_what_is_converted_by_hand_leaves_no_field_out(full: Any) -> None:
    sent = to_proto(full)
    known = {field.name for field in sent.DESCRIPTOR.fields}
    assert {field.name for field, _ in sent.ListFields()} == known
    assert from_proto(type(sent).FromString(sent.SerializeToString())) == full


def test_errors_name_the_field_below_its_parents() -> None:
    bad = peer_pb2.PathBatch(
        request_ids=["a"],
        target_epochs=[1],
        draft_epochs=[1],
        round_idx=[1],
        seq_lens=[1],
        num_tokens=[1],
        token_ids=[7],
        mailbox_slots=[0],
        round_tags=[0],
        num_steps=1,
        topk=1,
        num_draft_tokens=2,
        handle=tree_pb2.FeatureHandle(shape=[1, 2], dtype=tree_pb2.TENSOR_DTYPE_FLOAT32),
    )
    with pytest.raises(InvalidArgumentError) as caught:
        from_proto(bad)
    assert caught.value.field == "handle.location"
    order = target_pb2.CreditUpdate(request_id="a")
    order.credit.until_round_idx = 3
    with pytest.raises(InvalidArgumentError, match="must be root_only or peer") as caught:
        from_proto(order)
    assert caught.value.field == "credit.trees"
    order.credit.peer.draft_epoch = -1
    with pytest.raises(InvalidArgumentError) as caught:
        from_proto(order)
    assert caught.value.field == "credit.peer.draft_epoch"
