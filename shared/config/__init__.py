"""Configuration of every service."""

from shared.config.ports import DialConfig, PortConfig
from shared.config.secret import (
    CALLS,
    NO_SECRET,
    PEERS,
    SECRET_VARIABLE,
    Secret,
    read_secret,
    read_secret_of,
)
from shared.config.services import (
    ALGORITHMS,
    DTYPES,
    DraftConfig,
    OrchestratorConfig,
    TargetConfig,
    WorkerConfig,
    admin_port,
    option,
)

__all__ = [
    "ALGORITHMS",
    "CALLS",
    "DTYPES",
    "DialConfig",
    "DraftConfig",
    "NO_SECRET",
    "OrchestratorConfig",
    "PEERS",
    "PortConfig",
    "SECRET_VARIABLE",
    "Secret",
    "TargetConfig",
    "WorkerConfig",
    "admin_port",
    "option",
    "read_secret",
    "read_secret_of",
]
