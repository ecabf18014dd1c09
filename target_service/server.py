"""The target worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coppice.v1 import target_pb2_grpc
from shared.config import TargetConfig
from shared.rpc.engine import EngineHandle
from shared.rpc.health_names import TARGET_SERVICE
from shared.rpc.identity import WorkerIdentity
from shared.rpc.worker import WorkerServer, run_worker
from target_service.servicer import TargetServicer

ENGINE_FACTORY = "target_service.engine_factory:create_engine"


def create_worker(config: TargetConfig, engine: EngineHandle) -> WorkerServer:
    """Put a target's front before an engine that is not started yet."""

    def register(
        server: Any, identity: WorkerIdentity, send: Callable[[Sequence[Any]], None]
    ) -> TargetServicer:
        servicer = TargetServicer(identity, send)
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        return servicer

    return WorkerServer(config, engine, role="target", service=TARGET_SERVICE, register=register)


def main(config: TargetConfig) -> int:
    """Run the target worker to its end; return the process's exit code."""
    return run_worker(config, role="target", factory=ENGINE_FACTORY, create_worker=create_worker)
