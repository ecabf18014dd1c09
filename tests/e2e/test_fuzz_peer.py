"""Frames that nobody should send over a peer channel, to the engine at either end.

What follows the first bad frame comes all the same, and then another channel is opened.
"""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from coppice import Client
from coppice.v1 import draft_pb2, draft_pb2_grpc, peer_pb2, target_pb2, target_pb2_grpc
from shared.access.caller import Caller
from shared.messages import AcceptedPath, RequestFailure, batches
from shared.peer.shared_files import RING_DIR
from shared.rpc.health_names import DRAFT_SERVICE, TARGET_SERVICE
from tests.e2e.fuzzing import INTERNAL, PROMPT, SIZES, unharmed
from tests.e2e.serving import Server
from tests.mutations import Mutator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ID = "running"
NUM_TOKENS = 100
FRAMES_PER_CHANNEL = 20
NOISE_SHARE = 0.7
ACCEPT_TIMEOUT_S = 60.0
EPOCHS = {"target_epochs": [1], "draft_epochs": [1]}
IDS = {"request_id": ID, "target_epoch": 1, "draft_epoch": 1}


def goods_for_target() -> list[Message]:
    """Return frames as a draft sends them."""
    tree = {"round_idx": [3], "seq_lens": [6], "num_nodes": [3]}
    nodes = {"token_ids": PROMPT, "parent_index": [-1, 0, 0]}
    return [
        peer_pb2.PeerToTarget(attaches=[{**IDS, "num_tokens": 4}]),
        peer_pb2.PeerToTarget(trees=[{"request_ids": [ID], **EPOCHS, **tree, **nodes}]),
        peer_pb2.PeerToTarget(
            subscribes=[{"request_id": ID, "target_epoch": 1, "draft_epoch": 1}],
            acks=[{"request_id": ID, "target_epoch": 1, "position": 3}],
        ),
        peer_pb2.PeerToTarget(detaches=[IDS]),
    ]


def goods_for_draft(width: int, ring: str) -> list[Message]:
    """Return frames as a target sends them.

    Args:
        width: Of a feature row, bytes.
    """
    rows = {"shape": [3, width // 4], "dtype": "TENSOR_DTYPE_FLOAT32"}
    inline = {**rows, "inline_data": bytes(3 * width)}
    shape = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}
    order = {**IDS, "round_idx": 1, "seq_len": 3, "token_offset": 3, "token_ids": [5]}
    path = {"round_idx": [1], "seq_lens": [3], "num_tokens": [1], "token_ids": [5]}
    return [
        peer_pb2.PeerToDraft(
            chunks=[{"request_id": ID, "target_epoch": 1, "handle": inline}],
            rounds=[{**order, **shape}],
        ),
        peer_pb2.PeerToDraft(
            chunks=[
                {
                    "request_id": ID,
                    "target_epoch": 1,
                    "handle": {**rows, "ring_span": {"ring": ring}},
                }
            ]
        ),
        peer_pb2.PeerToDraft(path_batches=[{"request_ids": [ID], **EPOCHS, **path, **shape}]),
        peer_pb2.PeerToDraft(failures=[{**IDS, "code": 3, "reason": "x"}]),
    ]


def frames(mutator: Mutator, goods: Sequence[Message]) -> Iterator[bytes]:
    """Yield what is sent over one channel; past a bad frame there is more."""
    noise_at = mutator.rng.randrange(int(FRAMES_PER_CHANNEL / NOISE_SHARE))
    for i in range(FRAMES_PER_CHANNEL):
        data = mutator.noise(goods) if i == noise_at else mutator.any_of(goods)
        yield struct.pack("<I", len(data)) + data
    if mutator.rng.random() < 0.2:
        yield struct.pack("<I", mutator.rng.randrange(1 << 32)) + mutator.rng.randbytes(300)


class Session:
    """A session with a worker: what is put into it is sent; what comes back is handed over."""

    def __init__(
        self, address: str, service: str, caller: Caller, make_stub: Callable[[Any], Any]
    ) -> None:
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._call = make_stub(self._channel).Session(
            iter(self._outgoing.get, None), metadata=caller.metadata(f"/{service}/Session")
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.put = self._outgoing.put

    def close(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        self._thread.join(30.0)
        self._channel.close()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for reply in self._call:
                self.replies.put(reply)


@pytest.mark.parametrize("num_messages", SIZES)
def test_no_frame_harms_a_target(pair: Server, num_messages: int) -> None:
    """Its requests give what they always give, though anybody may be their draft."""
    with Client(pair.address) as client:
        plain = client.generate(
            token_ids=PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, speculation=False
        ).token_ids
    opened = target_pb2.TargetOpen(
        request_id=ID,
        target_epoch=1,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling={"temperature": 0.0, "seed": 1},
        stopping={"max_new_tokens": NUM_TOKENS},
        wants_features=True,
        credit={
            "until_round_idx": 4 * NUM_TOKENS,
            "peer": {"draft_epoch": 1, "num_steps": 2, "topk": 2, "num_draft_tokens": 4},
        },
    )
    open_request = target_pb2.TargetServiceSessionRequest(opens=[opened])
    mutator, goods = Mutator(random.Random(5), [ID]), goods_for_target()
    name = pair.info("target-0").peer_socket
    num_sent = num_outputs = 0
    address, stub = pair.target_addresses[0], target_pb2_grpc.TargetServiceStub
    session = Session(address, TARGET_SERVICE, pair.caller, stub)
    with unharmed(pair), contextlib.closing(session):
        output: list[int] = []
        session.put(open_request)
        while num_sent < num_messages or not num_outputs:
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
                contextlib.suppress(BrokenPipeError, ConnectionResetError),
            ):
                sock.settimeout(30.0)
                sock.connect(str(RING_DIR / name))
                for data in frames(mutator, goods):
                    num_sent += 1
                    sock.sendall(data)
            while not session.replies.empty():
                for message in batches.unpack_target_response(session.replies.get()).messages:
                    if isinstance(message, RequestFailure):
                        assert message.code != INTERNAL, message
                    if isinstance(message, AcceptedPath):
                        output += message.token_ids
                        assert output == list(plain[: len(output)])
            if len(output) == NUM_TOKENS:
                num_outputs += 1
                output = []
                session.put(open_request)


@pytest.mark.parametrize("num_messages", SIZES)
def test_no_frame_harms_a_draft(pair: Server, num_messages: int) -> None:
    """Its target may say anything."""
    info = pair.info("target-0")
    mutator = Mutator(random.Random(6), [ID, info.feature_ring])
    goods = goods_for_draft(4 * info.features.width, info.feature_ring)
    path = RING_DIR / f"coppice-channel-{secrets.token_hex(16)}"
    opened = draft_pb2.DraftOpen(
        request_id=ID,
        target_epoch=1,
        target_address=pair.target_addresses[0],
        token_ids=PROMPT,
        sampling={"temperature": 0.0, "seed": 1},
        target_socket=path.name,
    )
    address, stub = pair.draft_addresses[0], draft_pb2_grpc.DraftServiceStub
    session = Session(address, DRAFT_SERVICE, pair.caller, stub)
    num_sent = 0
    with (
        unharmed(pair),
        contextlib.closing(session),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        listener.bind(str(path))
        try:
            listener.listen()
            listener.settimeout(ACCEPT_TIMEOUT_S)
            while num_sent < num_messages:
                opened.draft_epoch += 1
                session.put(draft_pb2.DraftServiceSessionRequest(opens=[opened]))
                sock, _ = listener.accept()
                with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.settimeout(30.0)
                    for data in frames(mutator, goods):
                        num_sent += 1
                        sock.sendall(data)
                while not session.replies.empty():
                    batch = batches.unpack_draft_response(session.replies.get())
                    for message in batch.messages:
                        if isinstance(message, RequestFailure):
                            assert message.code != INTERNAL, message
        finally:
            path.unlink()
