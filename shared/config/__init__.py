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
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
    WorkerConfig,
    admin_port,
    option,
    served_name,
)

__all__ = [
    "ALGORITHMS",
    "CALLS",
    "DTYPES",
    "KV_CACHE_DTYPES",
    "QUANTIZATIONS",
    "DialConfig",
    "DraftConfig",
    "GatewayConfig",
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
    "served_name",
]
