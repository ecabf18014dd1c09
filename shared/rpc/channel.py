"""Channel and server options, and the one way to open a channel to a Coppice service.

`grpc.keepalive_timeout_ms` does nothing in C-core; `grpc.http2.ping_timeout_ms` is what notices a
peer that stopped answering. gRPC's own retries are off: a broken stream must surface at once.
`grpc.min_reconnect_backoff_ms` is no backoff, but how long an attempt to connect may take.
"""

from __future__ import annotations

import grpc
import grpc.aio

from shared.access.tls import Tls

MAX_INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024

Options = list[tuple[str, int | str]]


def channel_options() -> Options:
    """Return the options of a channel to a worker or to an orchestrator."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MAX_INTERNAL_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_INTERNAL_MESSAGE_BYTES),
    ]


def server_options(
    *, max_message_bytes: int = MAX_INTERNAL_MESSAGE_BYTES, shares_port: bool = False
) -> Options:
    """Return the options of a server.

    Args:
        max_message_bytes: Largest message received; a larger one ends its call with
            RESOURCE_EXHAUSTED.
        shares_port: Other processes listen on the port as well; the kernel spreads connections.
    """
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # Two services on one port must fail loudly.
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_send_message_length", MAX_INTERNAL_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def open_channel(
    address: str, *, tls: Tls | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """Open a channel to HOST:PORT.

    Args:
        tls: None: plain text.
        server_name: Name in the server's certificate, where `tls` says none; empty: the host.
    Raises: ConfigError if files of `tls` cannot be read.
    """
    options = channel_options()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    options += tls.options(server_name=server_name)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def open_blocking_channel(address: str, *, tls: Tls | None = None) -> grpc.Channel:
    """Open a channel to HOST:PORT for code without an event loop; see `open_channel`."""
    options = channel_options()
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=[*options, *tls.options()])
