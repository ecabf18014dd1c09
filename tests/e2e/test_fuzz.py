"""Messages that nobody should send, to every method of every service, thousands of them.

Whatever comes, no process ends, no answer is INTERNAL, memory stays what it is, and requests that
run meanwhile give what they always give.
"""

from __future__ import annotations

import collections
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from coppice.v1 import draft_pb2, generation_pb2, target_pb2
from shared.access.caller import Caller
from tests.e2e.fuzzing import PROMPT, SIZES, failures_in, unharmed
from tests.e2e.serving import Server
from tests.mutations import Mutator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ID = "fuzzed"
IDS = {"request_id": ID, "target_epoch": 1}
NAMES = [ID, "running", "0"]
CALL_TIMEOUT_S = 300.0
MESSAGES_PER_CALL = 20
MAX_REPLIES = 4
NOISE_SHARE = 0.3
STREAM_S = 0.05
FORBIDDEN = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "UNAVAILABLE")
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
NUM_SENDERS = 4


def goods_of_generate(pair: Server) -> list[Message]:
    pb = generation_pb2
    return [
        pb.GenerateRequest(text="x = 1", stopping={"max_new_tokens": 2}, sampling={"seed": 1}),
        pb.GenerateRequest(
            token_ids={"ids": PROMPT},
            stopping={"max_new_tokens": 3, "stop_strings": ["a"], "stop_token_ids": [4]},
            speculation={"num_steps": 2, "topk": 2, "num_draft_tokens": 4},
            output={"logprobs": True, "top_logprobs": 2},
            sampling={"temperature": 0.5, "top_p": 0.9, "logit_bias": {5: 1.0}},
            resume_token_ids={"ids": [5]},
        ),
    ]


def tree_of(num_nodes: int) -> dict[str, object]:
    parents = range(-1, num_nodes - 1)
    return {"draft_epoch": 1, "token_ids": PROMPT[:num_nodes], "parent_index": list(parents)}


def goods_of_target(pair: Server) -> list[Message]:
    open_request = target_pb2.TargetOpen(
        **IDS,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling={"temperature": 0.0, "seed": 1},
        stopping={"max_new_tokens": 50},
        wants_features=True,
        credit={"until_round_idx": 20, "root_only": {}},
    )
    order = {**IDS, "round_idx": 1, "seq_len": 3, "root_token_id": PROMPT[0]}
    peer = {"draft_epoch": 1, "num_steps": 2, "topk": 2, "num_draft_tokens": 4}
    return [
        target_pb2.TargetServiceSessionRequest(opens=[open_request]),
        target_pb2.TargetServiceSessionRequest(
            opens=[open_request],
            verifies=[target_pb2.VerifyRound(**order, tree={**IDS, **tree_of(3)})],
        ),
        target_pb2.TargetServiceSessionRequest(
            credits=[{**IDS, "credit": {"until_round_idx": 9, "peer": peer}}]
        ),
        target_pb2.TargetServiceSessionRequest(closes=[IDS]),
    ]


def goods_of_features(pair: Server) -> list[Message]:
    return [
        target_pb2.StreamFeaturesRequest(subscribe={**IDS, "draft_epoch": 1}),
        target_pb2.StreamFeaturesRequest(acks=[{**IDS, "position": 2}]),
        target_pb2.StreamFeaturesRequest(unsubscribe=IDS),
    ]


def goods_of_draft(pair: Server) -> list[Message]:
    open_request = draft_pb2.DraftOpen(
        **IDS,
        draft_epoch=1,
        target_address=pair.target_addresses[0],
        token_ids=PROMPT,
        sampling={"temperature": 0.0, "seed": 1},
        target_socket=pair.info("target-0").peer_socket,
    )
    order = {**IDS, "draft_epoch": 1, "round_idx": 1, "seq_len": 3, "token_offset": 3}
    shape = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}
    return [
        draft_pb2.DraftServiceSessionRequest(opens=[open_request]),
        draft_pb2.DraftServiceSessionRequest(
            opens=[open_request], rounds=[{**order, **shape, "token_ids": [5]}]
        ),
        draft_pb2.DraftServiceSessionRequest(closes=[{"request_id": ID, "draft_epoch": 1}]),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of a service.

    Args:
        service: That serves it.
        goods: Makes messages that it would take.
        response: What it answers; None: that is not looked into.
    """

    service: str
    goods: Callable[[Server], list[Message]]
    is_stream: bool = False
    response: type[Message] | None = None


METHODS = {
    "coppice.v1.GenerationService/Generate": Method(
        service="orchestrator", goods=goods_of_generate
    ),
    "coppice.v1.GenerationService/ListModels": Method(
        service="orchestrator", goods=lambda _: [generation_pb2.ListModelsRequest()]
    ),
    "coppice.v1.GenerationService/Tokenize": Method(
        service="orchestrator",
        goods=lambda _: [generation_pb2.TokenizeRequest(text="def f():", add_special_tokens=True)],
    ),
    "coppice.v1.GenerationService/Detokenize": Method(
        service="orchestrator",
        goods=lambda _: [generation_pb2.DetokenizeRequest(token_ids=[1, 22, 333])],
    ),
    "coppice.v1.TargetService/Session": Method(
        service="target-0",
        goods=goods_of_target,
        is_stream=True,
        response=target_pb2.TargetServiceSessionResponse,
    ),
    "coppice.v1.TargetService/StreamFeatures": Method(
        service="target-0",
        goods=goods_of_features,
        is_stream=True,
        response=target_pb2.StreamFeaturesResponse,
    ),
    "coppice.v1.TargetService/GetInfo": Method(
        service="target-0", goods=lambda _: [target_pb2.TargetServiceGetInfoRequest()]
    ),
    "coppice.v1.DraftService/Session": Method(
        service="draft-0",
        goods=goods_of_draft,
        is_stream=True,
        response=draft_pb2.DraftServiceSessionResponse,
    ),
    "coppice.v1.DraftService/GetInfo": Method(
        service="draft-0", goods=lambda _: [draft_pb2.DraftServiceGetInfoRequest()]
    ),
    "grpc.health.v1.Health/Check": Method(
        service="orchestrator", goods=lambda _: [health_pb2.HealthCheckRequest(service="x")]
    ),
}


def slowly(messages: Sequence[bytes], method: Method) -> Iterator[bytes]:
    """Yield messages; a stream goes on for a moment, so that what it opened runs."""
    yield from messages
    if method.is_stream:
        time.sleep(STREAM_S)


@pytest.mark.parametrize("num_messages", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_no_message_does_harm(pair: Server, name: str, num_messages: int) -> None:
    method = METHODS[name]
    goods = method.goods(pair)
    share = num_messages // NUM_SENDERS
    codes: collections.Counter[str] = collections.Counter()
    with unharmed(pair), ThreadPoolExecutor(NUM_SENDERS) as threads:
        address = pair.services[method.service].address
        senders = [
            threads.submit(
                send, address, pair.caller, name, goods, random.Random(f"{name} {i}"), share
            )
            for i in range(NUM_SENDERS)
        ]
        for sender in senders:
            codes += sender.result()
    print(name, dict(codes))  # noqa: T201
    assert codes["INVALID_ARGUMENT"] > 0


def send(
    address: str,
    caller: Caller,
    name: str,
    goods: list[Message],
    rng: random.Random,
    num_messages: int,
) -> collections.Counter[str]:
    """Send messages to a method; return how often each code came back."""
    method = METHODS[name]
    mutator = Mutator(rng, NAMES)
    codes: collections.Counter[str] = collections.Counter()
    count = MESSAGES_PER_CALL if method.is_stream else 1
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call_method = channel.stream_stream(f"/{name}")
        for _ in range(0, num_messages, count):
            messages = [mutator.any_of(goods) for _ in range(count)]
            if rng.random() < NOISE_SHARE:  # what follows it comes all the same
                messages[rng.randrange(count)] = mutator.noise(goods)
            shown = caller.metadata(f"/{name}")
            sent = slowly(messages, method)
            call = call_method(sent, timeout=CALL_TIMEOUT_S, metadata=shown)
            with contextlib.suppress(grpc.RpcError):
                for num_replies, reply in enumerate(call):
                    assert not method.response or not failures_in(method.response, reply)
                    if num_replies == MAX_REPLIES and not method.is_stream:
                        call.cancel()  # it was a good request, perhaps of a long output
            codes[call.code().name] += 1
            assert call.code().name not in FORBIDDEN, (call.code(), call.details(), messages)
    return codes
