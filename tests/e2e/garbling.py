"""Drafts that lie: trees of any size and shape, by the session of a draft and by a peer channel."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from coppice.v1 import draft_pb2, peer_pb2, tree_pb2
from shared.rpc.channel import channel_options
from tests.e2e.proxy import SESSION

MAX_NODES = 200_000
INT32 = (-(1 << 31), (1 << 31) - 1)


class Garbler(grpc.GenericRpcHandler):
    """Forwards every call to a draft worker; when asked to, adds trees that no draft would grow."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._rng: random.Random | None = None
        self._lock = threading.Lock()
        self.opens: list[draft_pb2.DraftOpen] = []
        """Requests that the draft was asked to open, the newest last."""
        self.num_garbled = 0
        """Trees of garbage that were sent of late."""

    def service(self, handler_call_details: Any) -> Any:
        """Handle any method as streams of bytes, which is what all of them are on the wire."""
        method = handler_call_details.method
        forward = self._channel.stream_stream(method)

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            said = tuple(context.invocation_metadata())
            shown = [pair for pair in said if pair[0] == "authorization"]
            told = self._until_lost(requests, is_session=method == SESSION)
            call = forward(told, metadata=shown)
            context.add_callback(call.cancel)
            try:
                for reply in call:
                    yield self._garble(reply) if method == SESSION else reply
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(handle)

    @contextlib.contextmanager
    def garbling(self, seed: int) -> Iterator[None]:
        """Send garbage for the length of the block."""
        self._rng = random.Random(seed)
        self.num_garbled = 0
        try:
            yield
        finally:
            self._rng = None

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _until_lost(self, requests: Iterator[bytes], *, is_session: bool) -> Iterator[bytes]:
        with contextlib.suppress(grpc.RpcError):  # whoever sent them has gone
            for data in requests:
                yield self._listen(data) if is_session else data

    def _listen(self, data: bytes) -> bytes:
        request = draft_pb2.DraftServiceSessionRequest.FromString(data)
        self.opens = [*self.opens, *request.opens][-64:]
        if self._rng is not None:  # then trees come through here
            for message in request.opens:
                message.target_socket = message.target_peer_address = ""
        return request.SerializeToString()

    def _garble(self, data: bytes) -> bytes:
        with self._lock:
            rng = self._rng
            if rng is None:
                return data
            reply = draft_pb2.DraftServiceSessionResponse.FromString(data)
            for tree in reply.trees:
                _garble_tree(tree, rng)
            for opened in rng.sample(self.opens, min(3, len(self.opens))):
                tree = reply.trees.add(
                    request_id=opened.request_id,
                    target_epoch=opened.target_epoch,
                    draft_epoch=opened.draft_epoch,
                    round_idx=rng.randrange(100),
                    seq_len=len(opened.token_ids) + rng.randrange(100),
                )
                _garble_tree(tree, rng)
            self.num_garbled += len(reply.trees)
        return reply.SerializeToString()


@contextlib.contextmanager
def garbler(address: str) -> Iterator[tuple[Garbler, str]]:
    """Serve a garbler before a draft for the length of the block; yields it and its HOST:PORT."""
    garbler = Garbler(address)
    with ThreadPoolExecutor(32) as threads:
        server = grpc.server(threads, options=channel_options())
        server.add_generic_rpc_handlers((garbler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield garbler, f"127.0.0.1:{port}"
        finally:
            garbler.close()
            server.stop(0).wait()


def send_garbage_to_peer(
    path: Path, opens: list[draft_pb2.DraftOpen], rng: random.Random, *, num_frames: int
) -> None:
    """Pretend to be the draft of requests on a target's peer channel, then send noise.

    Args:
        path: Of the target's socket.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
        sock.settimeout(5.0)
        sock.connect(str(path))
        for _ in range(num_frames):
            frame = peer_pb2.PeerToTarget()
            for opened in rng.sample(opens, min(2, len(opens))):
                _pretend(frame, opened, rng)
            data = frame.SerializeToString()
            sock.sendall(struct.pack("<I", len(data)) + data)
        for _ in range(num_frames):
            sock.sendall(rng.randbytes(rng.randrange(200)))


def _pretend(frame: peer_pb2.PeerToTarget, opened: draft_pb2.DraftOpen, rng: random.Random) -> None:
    names = {
        "request_id": opened.request_id,
        "target_epoch": opened.target_epoch,
        "draft_epoch": opened.draft_epoch + rng.randrange(2),
    }
    frame.attaches.add(**names, has_mailbox=rng.random() < 0.5, num_tokens=rng.randrange(200))
    tree = tree_pb2.TokenTree()
    _garble_tree(tree, rng)
    frame.trees.add(
        request_ids=[opened.request_id],
        target_epochs=[opened.target_epoch],
        draft_epochs=[names["draft_epoch"]],
        round_idx=[rng.randrange(100)],
        seq_lens=[len(opened.token_ids) + rng.randrange(100)],
        num_nodes=[rng.choice([*[len(tree.token_ids)] * 9, rng.randrange(*INT32)])],
        token_ids=tree.token_ids,
        parent_index=tree.parent_index,
    )
    frame.subscribes.add(
        request_id=opened.request_id,
        target_epoch=opened.target_epoch,
        from_position=rng.choice([*[0, 7] * 8, INT32[1], -1]),
    )


def _garble_tree(tree: tree_pb2.TokenTree, rng: random.Random) -> None:
    """Replace the nodes of a tree."""
    num_nodes = rng.choice([0, 1, 2, 8, 33, 64, 65, 1000, MAX_NODES])
    vocabulary = rng.choice([INT32, (0, 4096)])
    parents = rng.choice(["chain", "star", "any"])
    ids = [rng.randrange(*vocabulary) for _ in range(min(num_nodes, 1000))]
    if tree.token_ids and ids and rng.random() < 0.5:
        ids[0] = tree.token_ids[0]  # the right root
    del tree.token_ids[:], tree.parent_index[:], tree.scores.cumulative_logprobs[:]
    tree.token_ids.extend((ids * (num_nodes // max(1, len(ids)) + 1))[:num_nodes])
    match parents:
        case "chain":
            tree.parent_index.extend(range(-1, num_nodes - 1))
        case "star":
            tree.parent_index.extend([-1, *[0] * (num_nodes - 1)][:num_nodes])
        case "any":
            tree.parent_index.extend(rng.randrange(-2, num_nodes + 2) for _ in range(num_nodes))
    num_scores = rng.choice([num_nodes, 0, rng.randrange(100)])
    score = rng.choice([-1.0, float("nan"), float("inf"), -float("inf")])
    tree.scores.cumulative_logprobs.extend([score] * num_scores)
