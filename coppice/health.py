"""Ask a service for its health over grpc.health.v1. "" = alive, the full service name = ready."""

from __future__ import annotations

import queue
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.access.tls import Tls
from shared.rpc.channel import open_blocking_channel


class HealthProbe:
    """A channel to one address, kept for repeated questions in a block."""

    def __init__(self, address: str, *, tls: Tls | None = None) -> None:
        self._channel = open_blocking_channel(address, tls=tls)
        self._stub = health_pb2_grpc.HealthStub(self._channel)

    def status(self, service: str = "", *, timeout_s: float = 2.0) -> str:
        """Return SERVING, NOT_SERVING, SERVICE_UNKNOWN (no such service) or UNREACHABLE."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = self._stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            is_unknown = error.code() == grpc.StatusCode.NOT_FOUND
            return "SERVICE_UNKNOWN" if is_unknown else "UNREACHABLE"
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

    def __enter__(self) -> HealthProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def can_connect(address: str, *, timeout_s: float, tls: Tls | None = None) -> bool:
    """Return whether a gRPC server answers at an address; False as soon as every try has failed."""
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def on_change(state: grpc.ChannelConnectivity) -> None:
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            found.put(state is grpc.ChannelConnectivity.READY)

    with open_blocking_channel(address, tls=tls) as channel:
        channel.subscribe(on_change, try_to_connect=True)
        try:
            return found.get(timeout=timeout_s)
        except queue.Empty:  # no answer at all, as behind a firewall
            return False


def is_listening(address: str, *, timeout_s: float) -> bool:
    """Return whether anything takes connections at HOST:PORT, whatever it speaks."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, ValueError):  # who writes a path or no port has gRPC's own ways to say where
        return False
    return True
