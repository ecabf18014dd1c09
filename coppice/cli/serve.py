"""`coppice serve`: one service in this process; what `up`, compose and Kubernetes start."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import threading
from typing import Any

from coppice.cli.options import add_config_option, load_service_config
from shared.config import DraftConfig, GatewayConfig, OrchestratorConfig, TargetConfig
from shared.config.loader import add_config_flags
from shared.logs import LogSettings, configure_logging

# role -> (configuration, module whose main(config) serves until SIGTERM)
ROLES: dict[str, tuple[type, str]] = {
    "orchestrator": (OrchestratorConfig, "orchestrator.server"),
    "draft": (DraftConfig, "draft_service.server"),
    "target": (TargetConfig, "target_service.server"),
    "gateway": (GatewayConfig, "coppice.gateway.server"),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve orchestrator|draft|target|gateway`."""
    parser = commands.add_parser("serve", help="run one service", allow_abbrev=False)
    roles = parser.add_subparsers(title="services", metavar="SERVICE", required=True)
    for role, (config_type, _) in ROLES.items():
        service = roles.add_parser(role, help=f"run the {role}", allow_abbrev=False)
        add_config_option(service)
        service.add_argument(
            "--exit-with-parent",
            action="store_true",
            help="end when standard input closes, which is when the process that opened it dies",
        )
        add_config_flags(service, config_type)
        service.set_defaults(run=run, parser=service, role=role)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    config_type, module_name = ROLES[arguments.role]
    config: Any = load_service_config(arguments, config_type, section=arguments.role)
    configure_logging(
        LogSettings(level=config.log_level, format=config.log_format, role=arguments.role)
    )
    if arguments.exit_with_parent:
        threading.Thread(target=_end_with_stdin, name="parent-watch", daemon=True).start()
    return int(importlib.import_module(module_name).main(config) or 0)


def _end_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
