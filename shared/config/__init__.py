"""Configuration of every service."""

from shared.config.option import option, option_of
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
    QUANTIZATIONS,
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
    WorkerConfig,
    admin_port,
    served_name,
)

__all__ = [
    "CALLS",
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
    "option_of",
    "read_secret",
    "read_secret_of",
    "served_name",
]
