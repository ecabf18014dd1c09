"""An engine factory whose module imports torch, as the real ones do."""

from __future__ import annotations

import torch

from shared.config import WorkerConfig
from shared.rpc.engine import ProgressCallback
from tests.fakes.target import FakeTarget


def create_engine(config: WorkerConfig, progress: ProgressCallback) -> FakeTarget:
    """Say in `incarnation` how many threads torch has at this moment."""
    return FakeTarget(incarnation=f"{torch.get_num_threads()} threads")
