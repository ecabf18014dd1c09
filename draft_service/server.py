"""The draft worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coppice.v1 import draft_pb2_grpc
from draft_service.servicer import SERVICE_NAME, DraftServicer
from shared.config import DraftConfig
from shared.rpc.engine import EngineHandle
from shared.rpc.identity import WorkerIdentity
from shared.rpc.worker import WorkerServer, run_worker

ENGINE_FACTORY = "draft_service.engine_factory:create_engine"


def create_worker(config: DraftConfig, engine: EngineHandle) -> WorkerServer:
    """Put a draft's front before an engine that is not started yet."""

    def register(
        server: Any, identity: WorkerIdentity, send: Callable[[Sequence[Any]], None]
    ) -> DraftServicer:
        servicer = DraftServicer(identity, send)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
        return servicer

    return WorkerServer(config, engine, role="draft", service=SERVICE_NAME, register=register)


def main(config: DraftConfig) -> int:
    """Run the draft worker to its end; return the process's exit code."""
    return run_worker(config, role="draft", factory=ENGINE_FACTORY, create_worker=create_worker)
