"""`coppice up`: targets, drafts, orchestrator and gateway on this machine, until it is stopped."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from coppice.cli.options import (
    CONFIG_TYPES,
    SECTIONS,
    add_config_option,
    known_variables,
    read_sections,
)
from coppice.stack import ServiceFailedError, Stack, StackConfig
from coppice.stack.config import UpConfig, stack_config
from shared.config import DraftConfig, GatewayConfig, OrchestratorConfig, TargetConfig
from shared.config.check import flag_name
from shared.config.loader import (
    add_config_flags,
    explicit_values,
    load_config,
    variable_name,
    variables_of,
)
from shared.errors import EXIT_CONFIG, CheckpointError, ConfigError
from shared.models.checkpoint_names import check_local_model

if TYPE_CHECKING:
    from coppice.cli.progress import StackProgress

Config = TypeVar("Config")

_PLACES = {
    "host": ("orchestrator", "host"),
    "port": ("orchestrator", "port"),
    "http_port": ("gateway", "port"),
}
"""Option of `up` -> table and key of a configuration file that mean the same."""

NOT_HERE = {
    "model": "it means another model to each service; set COPPICE_TARGET_MODEL and "
    "COPPICE_DRAFT_MODEL",
    "targets": "it starts the targets itself, COPPICE_NUM_TARGETS of them; run `coppice serve "
    "orchestrator` for others",
    "drafts": "it starts the drafts itself, COPPICE_NUM_DRAFTS of them; run `coppice serve "
    "orchestrator` for others",
    "orchestrators": "it starts the orchestrator itself; run `coppice serve gateway` for others",
    "health_port": "only one service can have the port; write health_port into its table of the "
    "--config file",
}
"""Options whose variables cannot mean every service of a stack, and what to do instead."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `up`."""
    parser = commands.add_parser(
        "up",
        help="run everything on this machine",
        description="Run targets, drafts, the orchestrator and the HTTP gateway as processes of "
        "this machine. "
        "Options of a single service go into its table of the --config file.",
        allow_abbrev=False,
    )
    add_config_option(parser)
    add_config_flags(parser, UpConfig)
    parser.set_defaults(run=run, parser=parser, elsewhere=_elsewhere)


def _elsewhere(flag: str) -> str:
    """Return where an option of services that is none of `up` goes; "" if no service has it."""
    tables = [
        f"[{section}]"
        for section, config_type in zip(SECTIONS, CONFIG_TYPES, strict=True)
        for spec in dataclasses.fields(config_type)
        if flag_name(spec.name) == flag and spec.name not in NOT_HERE
    ]
    name = flag.removeprefix("--").replace("-", "_")
    return f": write {name} into {' or '.join(tables)} of the --config file" if tables else ""


def run(arguments: argparse.Namespace) -> int:
    """Start, announce the address, wait for a signal, stop."""
    from coppice.cli.progress import StackProgress

    config = config_of(arguments)
    _check_models(config)
    asked_to_stop = threading.Event()
    starting = threading.Event()
    starting.set()

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked_to_stop.set()
        if starting.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    progress = StackProgress(shows_log=True, is_json=config.orchestrator.log_format == "json")
    stack = Stack(config, on_log=progress.on_log, on_state=progress.on_state)
    try:
        with progress:
            stack.start()
    except ServiceFailedError as error:
        sys.stderr.write(f"coppice: {error}\n")
        return EXIT_CONFIG if error.exit_code == EXIT_CONFIG else 1
    starting.clear()
    _announce(progress, stack, config)
    while not asked_to_stop.wait(1.0):
        pass
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    progress.note("stopping; running requests may finish, Ctrl-C again ends them")
    stack.stop()
    return 0


def _check_models(config: StackConfig) -> None:
    """Raise ConfigError naming the option of a checkpoint that is not there, before services start:
    each of them needs seconds to find out.
    """
    named = {"--target-model": config.target.model}
    if config.num_drafts:
        named["--draft-model"] = config.draft.model
    for flag, model in named.items():
        try:
            check_local_model(model)
        except CheckpointError as error:
            raise ConfigError(f"{flag}: {error}") from None


def _announce(progress: StackProgress, stack: Stack, config: StackConfig) -> None:
    """Say where everything is.

    Args:
        config: As it was asked for; a port that is taken may have become another one.
    """
    speculation = "" if config.num_drafts else ", without speculation"
    progress.say(f"Coppice listens on {stack.address}{speculation}. Ctrl-C stops it.")
    if 0 < config.num_drafts < config.num_targets:
        progress.say(
            f"{config.num_targets} targets share {config.num_drafts} draft(s): with --num-drafts "
            f"{config.num_targets} each has its own, on one GPU if --draft-gpus names one."
        )
    if stack.http_url:
        wanted = config.gateway.port if config.gateway is not None else 0
        if wanted and not stack.http_url.endswith(f":{wanted}"):
            progress.say(f"Port {wanted} is taken, so HTTP has a free one; --http-port names one.")
        progress.say(
            f"OpenAI's API is at {stack.http_url}/v1, a page to try it at {stack.http_url}/"
        )
    elif config.orchestrator.tls_cert_file:
        progress.say("No HTTP: with TLS the gateway needs tls_ca_file in [gateway] of --config.")
    for name, url in sorted(stack.metrics_urls.items()):
        progress.say(f"Metrics of {name}: {url}")


def config_of(arguments: argparse.Namespace) -> StackConfig:
    """Build the stack's configuration from flags, environment and file."""
    file = read_sections(arguments)
    known = known_variables()
    given = _places_in(file) | explicit_values(
        UpConfig,
        section="up",
        flags=vars(arguments),
        environ=os.environ,
        file=file,
        known_variables=known,
    )

    environ = _environ_of_services()

    def table(config_type: type[Config], section: str) -> Config:
        return load_config(
            config_type,
            section=section,
            flags={},
            environ=environ,
            file=file,
            known_variables=known,
        )

    return stack_config(
        given,
        target=table(TargetConfig, "target"),
        draft=table(DraftConfig, "draft"),
        orchestrator=table(OrchestratorConfig, "orchestrator"),
        gateway=table(GatewayConfig, "gateway"),
    )


def _places_in(file: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return where the services' tables of a file have them listen, by the options of `up` that say
    the same.
    """
    return {
        option: file[section][name]
        for option, (section, name) in _PLACES.items()
        if name in file.get(section, {})
    }


def _environ_of_services() -> dict[str, str]:
    """Return the variables that are options of services, and none of `up` itself.

    Raises: ConfigError if one cannot mean every service.
    """
    for name, problem in NOT_HERE.items():
        if os.environ.get(variable_name(name)):
            raise ConfigError(f"`coppice up` cannot take {variable_name(name)}: {problem}")
    own = variables_of([UpConfig])
    return {name: value for name, value in os.environ.items() if name not in own}
