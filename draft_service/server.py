"""The draft worker process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from coppice.v1 import draft_pb2_grpc
from draft_service.allowed_targets import AllowedTargets
from draft_service.servicer import DraftServicer
from shared.access.caller import caller_of
from shared.config import DraftConfig
from shared.rpc.engine import EngineHandle
from shared.rpc.health_names import DRAFT_SERVICE
from shared.rpc.identity import WorkerIdentity
from shared.rpc.worker import WorkerServer, run_worker

ENGINE_FACTORY = "draft_service.engine_factory:create_engine"


def create_worker(config: DraftConfig, engine: EngineHandle) -> WorkerServer:
    """Put a draft's front before an engine that is not started yet.

    Raises: ConfigError if what targets are to be shown cannot be read, or --targets.
    """
    caller, targets = caller_of(config, os.environ), AllowedTargets(config.targets)

    def register(
        server: Any, identity: WorkerIdentity, send: Callable[[Sequence[Any]], None]
    ) -> DraftServicer:
        servicer = DraftServicer(identity, send, caller=caller, targets=targets)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
        return servicer

    return WorkerServer(config, engine, role="draft", service=DRAFT_SERVICE, register=register)


def main(config: DraftConfig) -> int:
    """Run the draft worker to its end; return the process's exit code."""
    return run_worker(config, role="draft", factory=ENGINE_FACTORY, create_worker=create_worker)
