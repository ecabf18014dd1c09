"""What nobody should send, sent to real services: the right error, and they go on serving."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grpc
import pytest

from coppice import Client, Completion, CoppiceError
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import target_pb2, target_pb2_grpc, tree_pb2
from shared.access.caller import NOBODY, Caller
from shared.messages import AcceptedPath, RequestFailure, batches
from shared.rpc.status import from_rpc_error
from tests.e2e.proxy import Spoil, spoiling_proxy
from tests.e2e.serving import Server, generate_plain, orchestrator_process
from tests.e2e.streaming import streams
from tests.processes import wait_for

pytestmark = pytest.mark.slow

Reply = TypeVar("Reply", AcceptedPath, RequestFailure)
NUM_VOCAB = 4096
MAX_CONTEXT_LEN = 2048
PROMPT = [791, 675, 1686]
GENERATE = "GenerationService/Generate"
SHAPE = ("num_steps", "topk", "num_draft_tokens")
HUNDRED_MB = 100 * 1024 * 1024
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty text": ({"text": ""}, "text", "INVALID_ARGUMENT"),
    "no token": ({"token_ids": []}, "token_ids", "INVALID_ARGUMENT"),
    "id too large": ({"token_ids": [1, NUM_VOCAB]}, "token_ids", "TOKEN_OUT_OF_VOCABULARY"),
    "id negative": ({"token_ids": [-1]}, "token_ids", "INVALID_ARGUMENT"),
    "long prompt": ({"token_ids": [1] * MAX_CONTEXT_LEN}, "token_ids", "PROMPT_TOO_LONG"),
    "long text": ({"text": "x = 1\n" * 2 * MAX_CONTEXT_LEN}, "text", "PROMPT_TOO_LONG"),
    "resumed id": (
        {"resume_token_ids": {"ids": [NUM_VOCAB]}},
        "resume_token_ids",
        "TOKEN_OUT_OF_VOCABULARY",
    ),
    "resumed beyond the end": (
        {"resume_token_ids": {"ids": [1, 2, 3]}, "stopping": {"max_new_tokens": 2}},
        "resume_token_ids",
        "INVALID_ARGUMENT",
    ),
    "request_id": ({"request_id": "x" * 129}, "request_id", "INVALID_ARGUMENT"),
    **{
        f"{name} {value}": ({"sampling": {name: value}}, f"sampling.{name}", "INVALID_ARGUMENT")
        for name, values in {
            "temperature": (-0.5, math.nan, math.inf),
            "top_p": (0.0, -1.0, 1.01, math.nan),
            "min_p": (-0.1, 1.5, math.nan),
            "top_k": (-1,),
            "repetition_penalty": (0.0, -1.0, math.inf),
            "presence_penalty": (2.5, math.nan),
            "frequency_penalty": (-2.5,),
        }.items()
        for value in values
    },
    "bias of no token": (
        {"sampling": {"logit_bias": {NUM_VOCAB: 1.0}}},
        "sampling.logit_bias",
        "TOKEN_OUT_OF_VOCABULARY",
    ),
    "infinite bias": (
        {"sampling": {"logit_bias": {1: math.inf}}},
        "sampling.logit_bias[1]",
        "INVALID_ARGUMENT",
    ),
    **{
        f"{name} {value}"[:40]: (
            {"stopping": {"max_new_tokens": 8, name: value}},
            f"stopping.{name}",
            reason,
        )
        for name, value, reason in (
            ("max_new_tokens", 0, "INVALID_ARGUMENT"),
            ("min_new_tokens", 9, "INVALID_ARGUMENT"),
            ("min_new_tokens", -1, "INVALID_ARGUMENT"),
            ("stop_strings", [""], "INVALID_ARGUMENT"),
            ("stop_strings", ["x" * 257], "INVALID_ARGUMENT"),
            ("stop_strings", list("abcdefghijklmnopq"), "INVALID_ARGUMENT"),
            ("stop_token_ids", [NUM_VOCAB], "TOKEN_OUT_OF_VOCABULARY"),
        )
    },
    **{
        f"tree {shape}": (
            {"speculation": dict(zip(SHAPE, shape, strict=True))},
            f"speculation.{field}",
            "INVALID_TREE_SHAPE",
        )
        for shape, field in {
            (0, 2, 4): "num_steps",
            (17, 2, 4): "num_steps",
            (3, 0, 4): "topk",
            (3, 17, 4): "topk",
            (3, 2, 1): "num_draft_tokens",
            (16, 8, 65): "num_draft_tokens",
            (3, 1, 5): "num_draft_tokens",
            (2, 2, 8): "num_draft_tokens",
        }.items()
    },
    "top_logprobs": (
        {"output": {"logprobs": True, "top_logprobs": 21}},
        "output.top_logprobs",
        "INVALID_ARGUMENT",
    ),
    "top_logprobs alone": (
        {"output": {"top_logprobs": 1}},
        "output.top_logprobs",
        "INVALID_ARGUMENT",
    ),
}


@pytest.fixture(scope="module")
def served(pair: Server) -> Completion:
    """Return what a good request gives, before anything bad has happened."""
    with Client(pair.address) as client:
        return client.generate(
            token_ids=PROMPT, max_new_tokens=24, ignore_eos=True, speculation=True
        )


@pytest.fixture(autouse=True)
def _still_serves(pair: Server, served: Completion) -> Iterator[None]:
    """After every test no process has been restarted, and good requests are answered as ever."""
    incarnations = [pair.info(name).incarnation for name in pair.workers]
    yield
    assert [pair.info(name).incarnation for name in pair.workers] == incarnations
    with Client(pair.address) as client:

        def speculates() -> bool:
            """Return whether a tree came in time, which is up to the machine; tokens are not."""
            again = client.generate(
                token_ids=PROMPT, max_new_tokens=24, ignore_eos=True, speculation=True
            )
            assert again.token_ids == served.token_ids
            return again.speculation.accept_length > 1

        wait_for(speculates)


def send(
    address: str, method: str, messages: Sequence[bytes], caller: Caller = NOBODY
) -> CoppiceError:
    """Send raw bytes to a method; return the error that it ends with."""
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        path = f"/coppice.v1.{method}"
        call = channel.stream_stream(path)(
            iter(messages), timeout=300, metadata=caller.metadata(path)
        )
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
    return from_rpc_error(caught.value)


def ask(**fields: Any) -> pb.GenerateRequest:
    if "text" not in fields:
        fields["token_ids"] = pb.TokenIds(ids=fields.get("token_ids", PROMPT))
    fields.setdefault("stopping", {"max_new_tokens": 4})
    return pb.GenerateRequest(**fields)


def test_bad_requests_are_refused_by_the_name_of_their_field(pair: Server) -> None:
    """The workers never hear of them."""
    pair.check_idle()  # reports are a moment old
    before = [pair.info(name).load.num_steps for name in pair.workers]
    for name, (fields, field, reason) in REFUSED.items():
        error = send(pair.address, GENERATE, [ask(**fields).SerializeToString()])
        assert error.code == 3, name
        assert (error.field, error.reason) == (field, reason), name
        assert error.message
    error = send(pair.address, GENERATE, [b""])
    assert (error.code, error.field) == (3, "prompt")
    assert [pair.info(name).load.num_steps for name in pair.workers] == before


def test_unknown_enum_values_and_bytes_that_are_no_message(pair: Server) -> None:
    """As a client of another version or language may send them."""
    good = ask().SerializeToString()
    unknown_mode = good + bytes([6 << 3 | 2, 2, 1 << 3, 99])  # speculation { mode: 99 }
    error = send(pair.address, GENERATE, [unknown_mode])
    assert (error.code, error.field) == (3, "speculation.mode")
    for name, bad in {"corrupt": b"\xff\xff\xff\xff", "not UTF-8": b"\x12\x02\xff\xfe"}.items():
        error = send(pair.address, GENERATE, [bad])
        assert (error.code, error.reason) == (3, "MALFORMED_MESSAGE"), name
    target, draft = pair.target_addresses[0], pair.draft_addresses[0]
    for address, method in (
        (target, "TargetService/Session"),
        (target, "TargetService/StreamFeatures"),
        (target, "TargetService/GetInfo"),
        (draft, "DraftService/Session"),
    ):
        error = send(address, method, [b"\xff\xff\xff\xff"], pair.caller)
        assert (error.code, error.reason) == (3, "MALFORMED_MESSAGE"), method


def test_a_message_of_100_mb(pair: Server) -> None:
    """Whichever service it goes to."""
    message = b"\x12" + b"\x80\x80\x80\x32" + b"x" * HUNDRED_MB  # text of 100 MB
    assert len(pb.GenerateRequest.FromString(message).text) == HUNDRED_MB
    for address, method in (
        (pair.address, GENERATE),
        (pair.target_addresses[0], "TargetService/Session"),
        (pair.draft_addresses[0], "DraftService/Session"),
    ):
        error = send(address, method, [message], pair.caller)
        assert (error.code, error.reason) == (8, "MESSAGE_TOO_LARGE"), method


def test_malformed_trees_sent_to_a_target(pair: Server) -> None:
    """Refused by name, and the request's state is as before: a root-only round may follow."""
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.insecure_channel(pair.target_addresses[0]) as channel:
        session = target_pb2_grpc.TargetServiceStub(channel).Session(
            iter(outgoing.get, None),
            metadata=pair.caller.metadata("/coppice.v1.TargetService/Session"),
        )

        def reply(kind: type[Reply]) -> Reply:
            answers = (m for r in session for m in batches.unpack_target_response(r).messages)
            return next(answer for answer in answers if isinstance(answer, kind))

        ids = {"request_id": "crafted", "target_epoch": 1}
        opened = target_pb2.TargetOpen(
            **ids,
            token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            sampling=pb.SamplingParams(temperature=0, seed=1),
            stopping=pb.StoppingCriteria(max_new_tokens=3),
        )
        outgoing.put(target_pb2.TargetServiceSessionRequest(opens=[opened]))
        first = reply(AcceptedPath)
        root = first.token_ids[0]
        order = {**ids, "round_idx": 1, "seq_len": len(PROMPT), "root_token_id": root}
        trees = {
            "another root": ([root + 1, 5], [-1, 0]),
            "out of vocabulary": ([root, NUM_VOCAB], [-1, 0]),
            "negative id": ([root, -7], [-1, 0]),
            "not topological": ([root, 5, 6], [-1, 2, 0]),
            "its own parent": ([root, 5], [-1, 1]),
            "two roots": ([root, 5], [-1, -1]),
            "no parents": ([root, 5], [-1]),
            "nothing": ([], []),
            "too many nodes": ([root] * 65, [-1] + [0] * 64),
        }
        for name, (token_ids, parent_index) in trees.items():
            tree = tree_pb2.TokenTree(
                request_id="crafted",
                target_epoch=1,
                draft_epoch=1,
                round_idx=1,
                seq_len=len(PROMPT),
                token_ids=token_ids,
                parent_index=parent_index,
            )
            verify = target_pb2.VerifyRound(**order, tree=tree)
            outgoing.put(target_pb2.TargetServiceSessionRequest(verifies=[verify]))
            failure = reply(RequestFailure)
            assert failure.code == 3, name
            assert failure.reason in ("INVALID_TREE", "INVALID_ARGUMENT"), name
            assert failure.field.startswith("tree."), name
        verify = target_pb2.VerifyRound(**order)
        outgoing.put(target_pb2.TargetServiceSessionRequest(verifies=[verify]))
        second = reply(AcceptedPath)
        outgoing.put(None)
    with Client(pair.address) as client:
        plain = client.generate(token_ids=PROMPT, max_new_tokens=3, speculation=False)
    assert plain.token_ids[:2] == (root, second.token_ids[0])


def spoils() -> list[Spoil]:
    """Return ways to make a good tree a wrong one."""

    def other_root(tree: tree_pb2.TokenTree) -> None:
        tree.token_ids[0] ^= 1

    def out_of_vocabulary(tree: tree_pb2.TokenTree) -> None:
        tree.token_ids[-1] = NUM_VOCAB

    def negative_id(tree: tree_pb2.TokenTree) -> None:
        tree.token_ids[-1] = -1

    def not_topological(tree: tree_pb2.TokenTree) -> None:
        tree.parent_index[1] = len(tree.parent_index) - 1

    def too_large(tree: tree_pb2.TokenTree) -> None:
        tree.token_ids.extend([5] * 64)
        tree.parent_index.extend([0] * 64)
        tree.scores.cumulative_logprobs.extend([-1.0] * 64)

    def without_parents(tree: tree_pb2.TokenTree) -> None:
        del tree.parent_index[:]

    def empty(tree: tree_pb2.TokenTree) -> None:
        del tree.token_ids[:]
        del tree.parent_index[:]
        del tree.scores.cumulative_logprobs[:]

    def not_a_number(tree: tree_pb2.TokenTree) -> None:
        tree.scores.cumulative_logprobs[1] = math.nan

    def another_length(tree: tree_pb2.TokenTree) -> None:
        tree.seq_len += 1

    return [
        other_root, out_of_vocabulary, negative_id, not_topological, too_large,
        without_parents, empty, not_a_number, another_length,
    ]  # fmt: skip


def test_malformed_trees_from_a_draft(pair: Server) -> None:
    """Each costs a root-only round and a re-opened draft; the last ones are good again."""
    requests = [
        {
            "token_ids": PROMPT,
            "max_new_tokens": 170,
            "ignore_eos": True,
            "speculation": True,
            "seed": 7,
            **sampling,
        }
        for sampling in ({}, {"temperature": 0.5}, {"temperature": 0.8})
    ]
    plain = generate_plain(pair.address, requests)
    num_epochs = len(spoils()) + len(requests)
    with (
        spoiling_proxy(pair.draft_addresses[0], spoils()) as (proxy, address),
        orchestrator_process(
            pair, targets=pair.target_addresses[0], drafts=address
        ) as orchestrator,
        streams(orchestrator.address, requests) as running,
    ):
        # The outputs must not end before every tree was spoiled and drafts are accepted again.
        with pair.slowed("target-0", pause_s=0.1):
            wait_for(
                lambda: proxy.num_epochs >= num_epochs,
                describe=lambda: f"the draft was opened {proxy.num_epochs} times",
            )
            for stream in running:
                stream.awaits_drafts()
        finishes = [stream.result() for stream in running]
    assert [stream.token_ids for stream in running] == [alone.token_ids for alone in plain]
    assert proxy.num_epochs == num_epochs
    assert sum(finish.retries for finish in finishes) == len(spoils())
    for finish in finishes:
        assert 0 < finish.speculation.num_root_only_rounds < finish.speculation.num_rounds
