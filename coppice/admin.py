"""A client of AdminService, blocking: what `coppice admin` and `coppice top` use."""

from __future__ import annotations

import time
from typing import Any, cast

import grpc

from coppice.credentials import NO_CREDENTIALS, Credentials
from coppice.v1 import admin_pb2 as pb
from coppice.v1 import admin_pb2_grpc as pb_grpc
from shared.rpc.channel import open_blocking_channel
from shared.rpc.status import ADMIN_PORT, from_rpc_error

_TIMEOUT_S = 150.0
_POLL_INTERVAL_S = 0.2


class AdminClient:
    """Calls the operators' port of an orchestrator.

    Args:
        address: HOST:PORT of `--admin-host` and `--admin-port`.
        credentials: What it is shown.
    """

    def __init__(self, address: str, *, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._metadata = credentials.metadata
        self._channel = open_blocking_channel(address, tls=credentials.tls)
        self._stub = pb_grpc.AdminServiceStub(self._channel)

    def call(self, method: str, **fields: Any) -> Any:
        """Call a method of AdminService with these fields of its request; return its response.

        Raises: CoppiceError with `code`, `reason` and, if one is to blame, `field`.
        """
        request = getattr(pb, f"{method}Request")(**fields)
        try:
            return getattr(self._stub, method)(request, timeout=_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(cast(grpc.Call, error), port=ADMIN_PORT) from None

    def wait_drained(self, worker: str) -> None:
        """Wait until a worker holds no request, as far as it has said so, or is gone."""
        while True:
            workers = self.call("ListWorkers").workers
            busy = [w for w in workers if w.address == worker and w.num_running + w.num_waiting]
            if not busy:
                return
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
