"""Configuration of every service."""

from shared.config.services import (
    ALGORITHMS,
    DTYPES,
    DraftConfig,
    OrchestratorConfig,
    TargetConfig,
    WorkerConfig,
    option,
)

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "DraftConfig",
    "OrchestratorConfig",
    "TargetConfig",
    "WorkerConfig",
    "option",
]
