"""A draft that sends nonsense: a proxy before a real one, which spoils some of its trees."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from coppice.v1 import draft_pb2, tree_pb2
from shared.rpc.channel import channel_options

SESSION = "/coppice.v1.DraftService/Session"
Spoil = Callable[[tree_pb2.TokenTree], None]


class SpoilingProxy(grpc.GenericRpcHandler):
    """Forwards every call to a draft worker, byte by byte but for the trees that it spoils, and
    for the name of the peer channel.

    Args:
        spoils: Each is applied to all trees of one draft_epoch; later epochs are left alone.
    """

    def __init__(self, address: str, spoils: Sequence[Spoil]) -> None:
        self._spoils = list(spoils)
        self._epochs: list[tuple[str, int]] = []
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._lock = threading.Lock()

    def service(self, handler_call_details: Any) -> Any:
        """Handle any method as streams of bytes, which is what all of them are on the wire."""
        method = handler_call_details.method
        forward = self._channel.stream_stream(method)

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            shown = [pair for pair in context.invocation_metadata() if pair[0] == "authorization"]
            call = forward(map(_alone, requests) if method == SESSION else requests, metadata=shown)
            context.add_callback(call.cancel)
            with contextlib.suppress(grpc.RpcError):  # the orchestrator has gone
                for reply in call:
                    yield self._spoil(reply) if method == SESSION else reply

        return grpc.stream_stream_rpc_method_handler(handle)

    @property
    def num_epochs(self) -> int:
        """Return how often the draft was opened and sent a tree."""
        return len(self._epochs)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _spoil(self, data: bytes) -> bytes:
        reply = draft_pb2.DraftServiceSessionResponse.FromString(data)
        for tree in reply.trees:
            with self._lock:
                epoch = (tree.request_id, tree.draft_epoch)
                if epoch not in self._epochs:
                    self._epochs.append(epoch)
                index = self._epochs.index(epoch)
            if index < len(self._spoils):
                self._spoils[index](tree)
        return reply.SerializeToString()


def _alone(data: bytes) -> bytes:
    """Let the draft know of no peer channel: trees would go to the target by another way."""
    request = draft_pb2.DraftServiceSessionRequest.FromString(data)
    for message in request.opens:
        message.target_socket = message.target_peer_address = ""
    return request.SerializeToString()


@contextlib.contextmanager
def spoiling_proxy(address: str, spoils: Sequence[Spoil]) -> Iterator[tuple[SpoilingProxy, str]]:
    """Serve a proxy for the length of the block; yields it and its HOST:PORT."""
    proxy = SpoilingProxy(address, spoils)
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((proxy,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield proxy, f"127.0.0.1:{port}"
        finally:
            proxy.close()
            server.stop(0).wait()
