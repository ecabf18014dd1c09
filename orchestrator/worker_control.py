"""Calls to a worker's WorkerControlService, beside its session."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from coppice.v1 import control_pb2_grpc
from orchestrator.workers import WorkerSession
from shared.errors import StaleStateError, UnavailableError
from shared.rpc.health_names import CONTROL_SERVICE
from shared.rpc.protocol import METADATA
from shared.rpc.status import from_rpc_error

_TIMEOUT_S = 150.0
"""A profile may take so long to be written."""


async def call_worker(worker: WorkerSession, method: str, request: Any) -> Any:
    """Call a method of a worker's WorkerControlService.

    Raises: CoppiceError, the worker's own or that it cannot be called.
    """
    if worker.channel is None:
        raise UnavailableError(f"{worker} cannot be called")
    stub = control_pb2_grpc.WorkerControlServiceStub(worker.channel)
    metadata = (*METADATA, *worker.caller.metadata(f"/{CONTROL_SERVICE}/{method}"))
    try:
        return await getattr(stub, method)(request, timeout=_TIMEOUT_S, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise StaleStateError(
                f"{worker} is of a release without {method}; upgrade it",
                reason="PROTOCOL_MISMATCH",
            ) from None
        raise from_rpc_error(error) from None
