"""Flags that several subcommands share, and the way from parsed arguments to a configuration."""

from __future__ import annotations

import argparse
import os
from typing import Any, TypeVar

from coppice.stack.config import UpConfig
from shared.config import DraftConfig, OrchestratorConfig, TargetConfig
from shared.config.loader import ENV_PREFIX, load_config, read_config_file, variables_of
from shared.errors import UnavailableError

Config = TypeVar("Config")

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
SERVER_VARIABLE = ENV_PREFIX + "SERVER"
DEFAULT_SERVER = "localhost:50051"
CONNECT_TIMEOUT_S = 5.0
SECTIONS = ("up", "orchestrator", "target", "draft")
CONFIG_TYPES = (UpConfig, OrchestratorConfig, TargetConfig, DraftConfig)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=os.environ.get(CONFIG_VARIABLE) or None,
        help=f"TOML file with a table per service; also {CONFIG_VARIABLE}",
    )


def add_server_option(parser: argparse.ArgumentParser) -> None:
    """Add `--server HOST:PORT`."""
    default = os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        default=default,
        help=f"orchestrator to talk to; also {SERVER_VARIABLE} (default: {default})",
    )


def require_server(address: str) -> None:
    """Raise unless something listens at an address; said at once, where a request would retry.

    Raises: UnavailableError that says what to start.
    """
    from coppice.health import can_connect

    if not can_connect(address, timeout_s=CONNECT_TIMEOUT_S):
        raise UnavailableError(
            f"no server listens at {address}; start one with `coppice up`, or name another one "
            "with --server HOST:PORT"
        )


def known_variables() -> set[str]:
    """Return every COPPICE_* variable that means something to some command."""
    return variables_of(CONFIG_TYPES) | {CONFIG_VARIABLE, SERVER_VARIABLE}


def read_sections(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Read the file of `--config`, if any."""
    return read_config_file(arguments.config, SECTIONS)


def load_service_config(
    arguments: argparse.Namespace, config_type: type[Config], *, section: str
) -> Config:
    """Build the configuration of one service from flags, environment and file."""
    return load_config(
        config_type,
        section=section,
        flags=vars(arguments),
        environ=os.environ,
        file=read_sections(arguments),
        known_variables=known_variables(),
    )
