"""Every value survives the wire; every malformed message is refused by the name of its field."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.messages as types
from coppice.v1 import draft_pb2, generation_pb2, peer_pb2, target_pb2, tree_pb2
from shared.errors import InvalidArgumentError, InvalidTreeError, StatusCode
from shared.messages import batches, from_proto, to_proto
from shared.rpc.engine import EngineReport
from shared.rpc.pipe import BlockingPipe
from tests.contract.strategies import BY_TYPE

RING = "coppice-features-" + "0" * 32
# Parts and wrappers: they have no message of their own.
NO_MESSAGE = {types.TreeShape, types.RingSpan, types.FeatureCommand, types.FeatureFailure}
IN_PIPES = [value_type for value_type in BY_TYPE if value_type is not types.TreeBatch]


def test_every_wire_type_is_covered() -> None:
    declared = {
        value
        for value in vars(types).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    }
    assert set(BY_TYPE) == declared - NO_MESSAGE


@pytest.mark.parametrize("value_type", BY_TYPE, ids=lambda value_type: value_type.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_value_survives_the_wire(value_type: type[Any], data: st.DataObject) -> None:
    value = data.draw(BY_TYPE[value_type])
    message = to_proto(value)
    parsed = type(message).FromString(message.SerializeToString())
    assert from_proto(parsed) == value


@pytest.mark.parametrize("value_type", IN_PIPES, ids=lambda value_type: value_type.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_value_survives_the_pipe(value_type: type[Any], data: st.DataObject) -> None:
    """Between a front and its engine values are pickled, parts and wrappers included."""
    value = data.draw(BY_TYPE[value_type])
    failure = types.FeatureFailure(failure=data.draw(BY_TYPE[types.RequestFailure]))
    report = EngineReport(
        outputs=[value, value, failure], load=types.WorkerLoad(), num_received=1, has_work=False
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        BlockingPipe(ours).send(report)
        BlockingPipe(ours).send([value])
        pipe, received = BlockingPipe(theirs), []
        while len(received) < 2:
            received += pipe.receive()
    assert received == [report, [value]]
    assert all(hash(one) == hash(value) for one in received[0].outputs[:2])  # still frozen values


PACKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[type[Any], ...]]] = {
    "target_request": (
        batches.pack_target_request,
        batches.unpack_target_request,
        (types.TargetOpen, types.VerifyRound, types.CreditUpdate, types.TargetClose),
    ),
    "target_response": (
        batches.pack_target_response,
        batches.unpack_target_response,
        (
            types.TargetAdmitted,
            types.DraftRest,
            types.AcceptedPath,
            types.RequestFailure,
            types.RequestRetracted,
            types.DraftDetached,
        ),
    ),
    "draft_request": (
        batches.pack_draft_request,
        batches.unpack_draft_request,
        (types.DraftOpen, types.DraftRound, types.DraftClose),
    ),
    "draft_response": (
        batches.pack_draft_response,
        batches.unpack_draft_response,
        (types.TokenTree, types.RequestFailure, types.RequestRetracted),
    ),
    "feature_response": (
        batches.pack_feature_response,
        batches.unpack_feature_response,
        (types.FeatureChunk, types.RequestFailure),
    ),
    "to_target": (
        batches.pack_to_target,
        batches.unpack_to_target,
        (
            types.RowsOffer,
            types.PeerAttach,
            types.FeatureSubscribe,
            types.FeatureAck,
            types.TreeBatch,
            types.PeerDetach,
        ),
    ),
    "to_draft": (
        batches.pack_to_draft,
        batches.unpack_to_draft,
        (
            types.RowsAnswer,
            types.FeatureChunk,
            types.RequestFailure,
            types.DraftRound,
            types.PathBatch,
        ),
    ),
}


def _says_more(path: types.AcceptedPath) -> bool:
    return path != dataclasses.replace(
        path,
        logprobs=(),
        finish_reason=types.FinishReason.NONE,
        matched_stop_token_id=None,
        times=None,
        tree=None,
        routed_experts=None,
    )


@pytest.mark.parametrize("name", PACKERS)
@settings(max_examples=20)
@given(data=st.data())
def test_batch_survives_in_the_order_of_its_kinds(name: str, data: st.DataObject) -> None:
    pack, unpack, kinds = PACKERS[name]
    messages = data.draw(st.lists(st.one_of(*(BY_TYPE[kind] for kind in kinds)), max_size=6))
    has_load = name in ("target_response", "draft_response")
    load = data.draw(BY_TYPE[types.WorkerLoad]) if has_load else None
    message = pack(messages, load) if has_load else pack(messages)
    batch = unpack(type(message).FromString(message.SerializeToString()))
    in_order = [m for kind in kinds for m in messages if type(m) is kind]
    is_path = [isinstance(m, types.AcceptedPath) for m in in_order]
    if any(is_path):  # as columns come first: those that end a request, or say more, are messages
        first, stop = is_path.index(True), len(is_path) - is_path[::-1].index(True)
        in_order[first:stop] = sorted(in_order[first:stop], key=_says_more)
    assert batch.messages == in_order
    assert batch.rejected == []
    assert batch.load == (load and dataclasses.replace(load, kernel_launches=(), counts=()))


@pytest.mark.parametrize(
    "command",
    [
        types.FeatureSubscribe(request_id="a", target_epoch=1, from_position=3),
        types.FeatureAck(request_id="a", target_epoch=1, position=7),
        types.FeatureUnsubscribe(request_id="a", target_epoch=1),
    ],
)
def test_feature_command_survives(command: Any) -> None:
    (message,) = batches.pack_feature_requests([command])
    assert batches.unpack_feature_request(message).messages == [command]


def test_acknowledgements_share_a_message_and_commands_keep_their_order() -> None:
    def ack(request_id: str) -> types.FeatureAck:
        return types.FeatureAck(request_id=request_id, target_epoch=1, position=3)

    end = types.FeatureUnsubscribe(request_id="a", target_epoch=1)
    again = types.FeatureSubscribe(request_id="a", target_epoch=1, from_position=0)
    messages = batches.pack_feature_requests([ack("a"), end, again, ack("b")])
    assert [batches.unpack_feature_request(message).messages for message in messages] == [
        [ack("a"), ack("b")], [end], [again],
    ]  # fmt: skip


def test_unknown_feature_command_is_rejected() -> None:
    batch = batches.unpack_feature_request(target_pb2.StreamFeaturesRequest())
    assert batch.messages == []
    assert [failure.field for failure in batch.rejected] == ["command"]


@settings(max_examples=40)
@given(event=st.one_of(*(BY_TYPE[kind] for kind in get_args(types.GenerateEvent))))
def test_event_survives(event: types.GenerateEvent) -> None:
    response = batches.pack_events([event])
    parsed = type(response).FromString(response.SerializeToString())
    assert batches.unpack_events(parsed) == [event]


@settings(max_examples=60)
@given(data=st.data(), has_ids=st.booleans(), has_logprobs=st.booleans(), has_trees=st.booleans())
def test_rounds_that_leave_together_come_apart_as_they_were(
    data: st.DataObject, *, has_ids: bool, has_logprobs: bool, has_trees: bool
) -> None:
    """Whatever a client asked for: no token ids, no text, logprobs of every token, trees.

    A tree leaves with the first delta of its round: those that go on with a round have none.
    """
    trees = st.none() | BY_TYPE[types.RoundTree]
    offset = data.draw(st.integers(0, 99))
    deltas = []
    for ids in data.draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=2)):
        text = data.draw(st.text(max_size=9))
        logprob = types.TokenLogprob(token_id=1, logprob=-0.5, top=((2, -1.0),))
        deltas.append(
            types.TokenDelta(
                token_offset=offset,
                token_ids=tuple(ids) if has_ids else (),
                text=text,
                logprobs=(logprob,) * len(ids) if has_logprobs else (),
                num_accepted_drafts=data.draw(st.integers(0, len(ids))),
                num_accepted_draft_chars=data.draw(st.integers(0, len(text))),
                tree=data.draw(trees) if has_trees else None,
            )
        )
        offset += len(ids)
    response = batches.pack_events(deltas)
    parsed = type(response).FromString(response.SerializeToString())
    assert batches.unpack_events(parsed) == deltas
    assert list(parsed.delta.token_ids) == [i for delta in deltas for i in delta.token_ids]
    assert parsed.delta.text == "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("round_token_offsets", [5, 4]),
        ("round_token_offsets", [6, 6]),
        ("round_num_chars", [1]),
        ("round_num_chars", [3, -1]),
        ("round_num_chars", [1, 2]),
        ("round_num_accepted_drafts", [0, 0]),
        ("round_num_accepted_draft_chars", []),
    ],
)
def test_rounds_that_do_not_add_up_are_refused(field: str, values: list[int]) -> None:
    deltas = [
        types.TokenDelta(token_offset=5, token_ids=(1, 2), text="a", num_accepted_drafts=1),
        types.TokenDelta(token_offset=7, token_ids=(3,), text="b"),
    ]
    response = batches.pack_events(deltas)
    assert batches.unpack_events(response) == deltas
    del getattr(response.delta, field)[:]
    getattr(response.delta, field).extend(values)
    with pytest.raises(InvalidArgumentError) as caught:
        batches.unpack_events(response)
    assert caught.value.field == f"delta.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [("ids", b"12345"), ("num_layers", 0), ("top_k", -1), ("num_experts", 0),
     ("num_experts", 1 << 17)],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused(field: str, value: Any) -> None:
    """Of one round, and of several, which give each token its own row."""
    routed = types.RoutedExperts(ids=bytes(range(8)), num_layers=2, top_k=2, num_experts=200)
    first = types.TokenDelta(token_offset=0, token_ids=(7, 8), routed_experts=routed)
    silent = types.TokenDelta(token_offset=2, text="x")
    last = types.TokenDelta(
        token_offset=2,
        token_ids=(9,),
        routed_experts=dataclasses.replace(routed, ids=bytes(range(4))),
    )
    for deltas in ([first], [first, silent, last]):
        response = batches.pack_events(deltas)
        assert batches.unpack_events(response) == deltas
        setattr(response.delta.routed_experts, field, value)
        with pytest.raises(InvalidArgumentError) as caught:
            batches.unpack_events(response)
        assert caught.value.field == f"delta.routed_experts.{field}"


TREE = types.RoundTree(
    token_ids=(5, 6, 7),
    parent_index=(-1, 0, 0),
    accept_index=(0, 2),
    bonus_token_id=8,
    texts=("a", "b", "c", "d"),
)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("token_ids", []),
        ("token_ids", [5, 6]),
        ("parent_index", [-1, 0, 2]),
        ("parent_index", [-1, -1, 0]),
        ("parent_index", [0, 0, 0]),
        ("accept_index", []),
        ("accept_index", [2]),
        ("accept_index", [0, 3]),
        ("accept_index", [0, 1, 2]),
        ("texts", ["a", "b", "c"]),
    ],
)
def test_a_tree_that_is_none_is_refused(field: str, values: list[Any]) -> None:
    """Sent with a delta; of several rounds it is refused as well."""
    delta = types.TokenDelta(token_offset=0, token_ids=(7, 8), num_accepted_drafts=1, tree=TREE)
    for deltas in ([delta], [delta, dataclasses.replace(delta, token_offset=2)]):
        response = batches.pack_events(deltas)
        assert batches.unpack_events(response) == deltas
        tree = response.delta.tree if len(deltas) == 1 else response.delta.round_trees[1]
        del getattr(tree, field)[:]
        getattr(tree, field).extend(values)
        if len(deltas) == 2 and field == "token_ids" and not values:
            assert [d.tree for d in batches.unpack_events(response)] == [TREE, None]
            continue
        with pytest.raises(InvalidArgumentError) as caught:
            batches.unpack_events(response)
        named = "parent_index" if field == "token_ids" and values else field
        assert caught.value.field is not None and caught.value.field.endswith(f".{named}")
    response = batches.pack_events([delta, delta])
    response.delta.round_trees.pop()
    with pytest.raises(InvalidArgumentError) as caught:
        batches.unpack_events(response)
    assert caught.value.field == "delta.round_trees"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("request_ids", ["a"]),
        ("request_ids", ["a", ""]),
        ("target_epochs", [1, -1]),
        ("round_idx", [1]),
        ("num_tokens", [1, 1]),
        ("num_tokens", [4, -1]),
        ("num_draft_tokens", [1, 0]),
        ("token_ids", [1, 2, -3]),
        ("accept_index", [0, 0]),
    ],
)
def test_columns_of_paths_that_disagree_are_rejected_for_every_request(
    field: str, values: list[Any]
) -> None:
    """Nothing in them can be relied on; what else the message holds is taken."""
    path = from_proto(_path())
    longer = dataclasses.replace(path, request_id="b", token_ids=(7, 8), accept_index=(0, 1))
    message = batches.pack_target_response([path, longer], types.WorkerLoad())
    assert batches.unpack_target_response(message).messages == [path, longer]
    column = getattr(message.path_batch, field)
    del column[:]
    column.extend(values)
    batch = batches.unpack_target_response(message)
    assert batch.messages == []
    assert {failure.request_id for failure in batch.rejected} == set(message.path_batch.request_ids)


def test_unknown_event_is_refused_by_field() -> None:
    response = generation_pb2.GenerateResponse()
    with pytest.raises(InvalidArgumentError) as caught:
        batches.unpack_events(response)
    assert caught.value.field == "event"
    response.finish.reason = 99  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError) as caught:
        batches.unpack_events(response)
    assert caught.value.field == "finish.reason"


def _open() -> target_pb2.TargetOpen:
    return to_proto(
        types.TargetOpen(
            request_id="a",
            target_epoch=1,
            token_ids=(1, 2, 3),
            num_prompt_tokens=2,
            sampling=types.SamplingParams(),
            stopping=types.StoppingParams(max_new_tokens=4),
        )
    )


def _tree() -> tree_pb2.TokenTree:
    return to_proto(
        types.TokenTree(
            request_id="a",
            target_epoch=1,
            draft_epoch=1,
            round_idx=1,
            seq_len=3,
            token_ids=(5, 6),
            parent_index=(-1, 0),
            cumulative_logprobs=(0.0, -1.0),
        )
    )


def _tree_batch() -> peer_pb2.TreeBatch:
    return to_proto(
        types.TreeBatch(
            request_ids=["a", "b"],
            target_epochs=[1, 2],
            draft_epochs=[1, 3],
            round_idx=[1, 4],
            seq_lens=[3, 9],
            num_nodes=[2, 1],
            token_ids=[5, 6, 7],
            parent_index=[-1, 0, -1],
        )
    )


def _verify() -> target_pb2.VerifyRound:
    return target_pb2.VerifyRound(
        request_id="a", target_epoch=1, round_idx=1, seq_len=3, root_token_id=5, tree=_tree()
    )


def _path() -> tree_pb2.AcceptedPath:
    return to_proto(
        types.AcceptedPath(
            request_id="a",
            target_epoch=1,
            round_idx=1,
            seq_len=4,
            accept_index=(0,),
            token_ids=(7,),
            num_accepted_drafts=0,
            num_draft_tokens=2,
        )
    )


def _chunk() -> target_pb2.FeatureChunk:
    return to_proto(
        types.FeatureChunk(
            request_id="a",
            target_epoch=1,
            start=0,
            shape=(2, 3),
            dtype="float32",
            data=bytes(24),
        )
    )


def _draft_open() -> draft_pb2.DraftOpen:
    return to_proto(
        types.DraftOpen(
            request_id="a",
            target_epoch=1,
            draft_epoch=1,
            target_address="host:1",
            token_ids=(1,),
            sampling=types.SamplingParams(),
        )
    )


def _draft_round() -> draft_pb2.DraftRound:
    return to_proto(
        types.DraftRound(
            request_id="a",
            target_epoch=1,
            draft_epoch=1,
            round_idx=1,
            seq_len=3,
            token_offset=3,
            token_ids=(4,),
            shape=types.TreeShape(num_steps=3, topk=2, num_draft_tokens=4),
        )
    )


def _info() -> tree_pb2.WorkerInfo:
    return to_proto(
        types.WorkerInfo(
            incarnation="i",
            model="m",
            model_hash="h",
            tokenizer_hash="",
            vocab_size=10,
            max_context_len=10,
            page_size=1,
            dtype="float32",
            device="cpu",
            features=types.FeatureSpec(),
            kind="target",
        )
    )


def _set(**fields: Any) -> Callable[[Any], None]:
    """Set fields by dotted path, `__` for the dot; a list replaces a repeated field."""

    def change(message: Any) -> None:
        for path, value in fields.items():
            *parents, name = path.split("__")
            owner = message
            for parent in parents:
                owner = getattr(owner, parent)
            if isinstance(value, list):
                del getattr(owner, name)[:]
                getattr(owner, name).extend(value)
            else:
                setattr(owner, name, value)

    return change


def _clear(*path: str) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        for parent in path[:-1]:
            message = getattr(message, parent)
        message.ClearField(path[-1])

    return change


def _set_bias(token_id: int, value: float) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.sampling.logit_bias[token_id] = value

    return change


MALFORMED: list[tuple[Callable[[], Any], Callable[[Any], None], str]] = [
    (_open, _set(request_id=""), "request_id"),
    (_open, _set(request_id="x" * 257), "request_id"),
    (_open, _set(target_epoch=-1), "target_epoch"),
    (_open, _set(token_ids=[]), "token_ids"),
    (_open, _set(token_ids=[1, -2]), "token_ids"),
    (_open, _set(num_prompt_tokens=0), "num_prompt_tokens"),
    (_open, _set(num_prompt_tokens=4), "num_prompt_tokens"),
    (_open, _set(top_logprobs=21), "top_logprobs"),
    (_open, _set(top_logprobs=-1), "top_logprobs"),
    (_open, _set(sampling__temperature=-0.5), "sampling.temperature"),
    (_open, _set(sampling__temperature=float("nan")), "sampling.temperature"),
    (_open, _set(sampling__temperature=float("inf")), "sampling.temperature"),
    (_open, _set(sampling__top_p=0.0), "sampling.top_p"),
    (_open, _set(sampling__top_p=1.5), "sampling.top_p"),
    (_open, _set(sampling__top_p=float("nan")), "sampling.top_p"),
    (_open, _set(sampling__min_p=-0.1), "sampling.min_p"),
    (_open, _set(sampling__min_p=1.1), "sampling.min_p"),
    (_open, _set(sampling__top_k=-1), "sampling.top_k"),
    (_open, _set(sampling__repetition_penalty=0.0), "sampling.repetition_penalty"),
    (_open, _set(sampling__presence_penalty=2.5), "sampling.presence_penalty"),
    (_open, _set(sampling__frequency_penalty=-2.5), "sampling.frequency_penalty"),
    (_open, _set_bias(-1, 1.0), "sampling.logit_bias"),
    (_open, _set_bias(7, 101.0), "sampling.logit_bias[7]"),
    (_open, _set_bias(7, float("nan")), "sampling.logit_bias[7]"),
    (_open, _clear("stopping", "max_new_tokens"), "stopping.max_new_tokens"),
    (_open, _set(stopping__max_new_tokens=0), "stopping.max_new_tokens"),
    (_open, _set(stopping__min_new_tokens=-1), "stopping.min_new_tokens"),
    (_open, _set(stopping__stop_token_ids=[-3]), "stopping.stop_token_ids"),
    (_verify, _set(request_id=""), "request_id"),
    (_verify, _set(round_idx=0), "round_idx"),
    (_verify, _set(seq_len=-1), "seq_len"),
    (_verify, _set(root_token_id=-1), "root_token_id"),
    (_verify, _set(tree__token_ids=[]), "tree.token_ids"),
    (_verify, _set(tree__token_ids=[1] * 65), "tree.token_ids"),
    (_verify, _set(tree__parent_index=[-1]), "tree.parent_index"),
    (_verify, _set(tree__scores__cumulative_logprobs=[0.0]), "tree.scores.cumulative_logprobs"),
    (_verify, _set(tree__request_id=""), "tree.request_id"),
    (_tree, _set(draft_epoch=-1), "draft_epoch"),
    (_tree_batch, _set(request_ids=["a"]), "request_ids"),
    (_tree_batch, _set(target_epochs=[1]), "request_ids"),
    (_tree_batch, _set(draft_epochs=[1, 2, 3]), "request_ids"),
    (_tree_batch, _set(round_idx=[]), "request_ids"),
    (_tree_batch, _set(seq_lens=[3]), "request_ids"),
    (_tree_batch, _set(num_nodes=[3]), "request_ids"),
    (_tree_batch, lambda message: message.Clear(), "request_ids"),
    (_tree_batch, _set(num_nodes=[3, 0]), "num_nodes"),
    (_tree_batch, _set(num_nodes=[65, -62]), "num_nodes"),
    (_tree_batch, _set(num_nodes=[2, 2]), "token_ids"),
    (_tree_batch, _set(token_ids=[5, 6]), "token_ids"),
    (_tree_batch, _set(parent_index=[-1, 0]), "parent_index"),
    (_path, _set(accept_index=[0, 1]), "accept_index"),
    (_path, _set(accept_index=[-1]), "accept_index"),
    (_path, _set(token_ids=[-1]), "token_ids"),
    (_path, _set(finish_reason=99), "finish_reason"),
    (_path, _set(num_draft_tokens=0), "num_draft_tokens"),
    (_path, _set(num_accepted_drafts=-1), "num_accepted_drafts"),
    (_chunk, _set(start=-1), "start"),
    (_chunk, _clear("handle"), "handle.shape"),
    (_chunk, _set(handle__shape=[2]), "handle.shape"),
    (_chunk, _set(handle__shape=[0, 3]), "handle.shape"),
    (_chunk, _set(handle__shape=[2, -3]), "handle.shape"),
    (_chunk, _set(handle__shape=[2, 3, 1]), "handle.shape"),
    (_chunk, _set(handle__dtype=0), "handle.dtype"),
    (_chunk, _set(handle__dtype=77), "handle.dtype"),
    (_chunk, _clear("handle", "inline_data"), "handle.location"),
    (_chunk, _set(handle__inline_data=bytes(23)), "handle.inline_data"),
    (_chunk, _set(handle__inline_data=bytes(25)), "handle.inline_data"),
    (
        _chunk,
        _set(handle__shape=[1 << 18, 2], handle__inline_data=b""),
        "handle.inline_data",
    ),
    (_chunk, _set(handle__ring_span__ring="../../etc/passwd"), "handle.ring_span.ring"),
    (
        _chunk,
        _set(handle__ring_span__ring=RING, handle__ring_span__begin=-1),
        "handle.ring_span.begin",
    ),
    (_draft_open, _set(target_address=""), "target_address"),
    (_draft_open, _set(token_ids=[]), "token_ids"),
    (_draft_open, _set(sampling__temperature=-1.0), "sampling.temperature"),
    (_draft_round, _set(num_steps=0), "num_steps"),
    (_draft_round, _set(num_steps=17), "num_steps"),
    (_draft_round, _set(topk=17), "topk"),
    (_draft_round, _set(num_draft_tokens=1), "num_draft_tokens"),
    (_draft_round, _set(num_draft_tokens=65), "num_draft_tokens"),
    (_draft_round, _set(num_steps=1, num_draft_tokens=5), "num_draft_tokens"),
    (_draft_round, _set(token_offset=-1), "token_offset"),
    (_info, _set(incarnation=""), "incarnation"),
    (_info, _set(vocab_size=0), "vocab_size"),
    (_info, _set(page_size=0), "page_size"),
    (_info, _set(features__dtype=9), "features.dtype"),
]


@pytest.mark.parametrize(
    ("build", "change", "field"),
    MALFORMED,
    ids=[f"{build.__name__[1:]}-{i}-{field}" for i, (build, _, field) in enumerate(MALFORMED)],
)
def test_malformed_message_is_refused_by_field(
    build: Callable[[], Any], change: Callable[[Any], None], field: str
) -> None:
    message = build()
    from_proto(message)  # well-formed before the change
    change(message)
    with pytest.raises(InvalidArgumentError) as caught:
        from_proto(message)
    assert caught.value.field == field


def test_chunk_of_more_than_a_mebibyte_is_refused() -> None:
    num_rows = (1 << 20) // 16
    chunk = types.FeatureChunk(
        request_id="a",
        target_epoch=1,
        start=0,
        shape=(num_rows, 4),
        dtype="float32",
        data=bytes(num_rows * 16),
    )
    assert from_proto(to_proto(chunk)) == chunk
    larger = dataclasses.replace(chunk, shape=(num_rows + 1, 4), data=bytes(num_rows * 16 + 16))
    with pytest.raises(InvalidArgumentError) as caught:
        from_proto(to_proto(larger))
    assert caught.value.field == "handle.inline_data"


def test_malformed_tree_is_an_invalid_tree() -> None:
    message = _tree()
    del message.parent_index[1:]
    with pytest.raises(InvalidTreeError):
        from_proto(message)


def test_one_malformed_entry_does_not_spoil_its_batch() -> None:
    batch = target_pb2.TargetServiceSessionRequest(
        opens=[_open(), _open()], verifies=[_verify(), _verify()]
    )
    batch.opens[0].request_id = "bad"
    batch.opens[0].sampling.temperature = -1
    del batch.verifies[1].tree.parent_index[:]
    unpacked = batches.unpack_target_request(batch)
    assert [type(message).__name__ for message in unpacked.messages] == [
        "TargetOpen",
        "VerifyRound",
    ]
    first, second = unpacked.rejected
    assert (first.request_id, first.field, first.round_idx) == ("bad", "sampling.temperature", 0)
    assert (second.request_id, second.field, second.round_idx) == ("a", "tree.parent_index", 1)
    assert (second.reason, second.code) == ("INVALID_TREE", StatusCode.INVALID_ARGUMENT)
    assert second.target_epoch == 1


def test_absent_sampling_fields_take_their_defaults() -> None:
    message = _open()
    message.ClearField("sampling")
    assert from_proto(message).sampling == types.SamplingParams()
