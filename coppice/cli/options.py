"""Flags that several subcommands share, and the way from parsed arguments to a configuration."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, TypeVar

from coppice.stack.config import UpConfig
from shared.config import (
    SECRET_VARIABLE,
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
)
from shared.config.check import flag_name
from shared.config.loader import ENV_PREFIX, load_config, read_config_file, variables_of
from shared.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from coppice.admin import AdminClient
    from coppice.credentials import Credentials
    from shared.access.tls import Tls

Config = TypeVar("Config")

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
SERVER_VARIABLE = ENV_PREFIX + "SERVER"
DEFAULT_SERVER = "localhost:50051"
TOKEN_VARIABLE = ENV_PREFIX + "TOKEN"
ADMIN_TOKEN_VARIABLE = ENV_PREFIX + "ADMIN_TOKEN"
ADMIN_VARIABLE = ENV_PREFIX + "ADMIN"
DEFAULT_ADMIN = "localhost:51051"
CONNECT_TIMEOUT_S = 15.0  # who refuses does so at once; a busy server may take seconds
_TCP_TIMEOUT_S = 3.0  # the kernel answers, however busy the server is
_MAX_PORT = 65535
SECTIONS = ("up", "orchestrator", "target", "draft", "gateway")
CONFIG_TYPES = (UpConfig, OrchestratorConfig, TargetConfig, DraftConfig, GatewayConfig)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=os.environ.get(CONFIG_VARIABLE) or None,
        help=f"TOML file with a table per service; also {CONFIG_VARIABLE}",
    )


def add_server_option(parser: argparse.ArgumentParser) -> None:
    """Add `--server HOST:PORT`, and what it is shown."""
    default = os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        default=default,
        help=f"orchestrator to talk to; also {SERVER_VARIABLE} (default: {default})",
    )
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help=f"file with the token that the server knows this client by; or {TOKEN_VARIABLE}",
    )
    add_tls_options(parser)


def add_admin_option(parser: argparse.ArgumentParser) -> None:
    """Add `--address HOST:PORT`."""
    default = os.environ.get(ADMIN_VARIABLE) or DEFAULT_ADMIN
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        default=default,
        help="--admin-host and --admin-port of the orchestrator; "
        f"also {ADMIN_VARIABLE} (default: {default})",
    )
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help=f"file with the token of an operator; or {ADMIN_TOKEN_VARIABLE}",
    )
    add_tls_options(parser)


def open_admin(arguments: argparse.Namespace) -> AdminClient:
    """Return a client of the operators' port.

    Raises: UnavailableError, if nobody serves operators there, that says where that may be,
        ConfigError for an address that is none.
    """
    from coppice.admin import AdminClient
    from coppice.health import can_connect

    check_address(arguments.address, "--address")
    credentials = credentials_of(arguments, variable=ADMIN_TOKEN_VARIABLE)
    if not can_connect(arguments.address, timeout_s=CONNECT_TIMEOUT_S, tls=credentials.tls):
        what = other_speech(arguments.address, credentials.tls)
        raise UnavailableError(
            f"{what or f'nobody serves operators at {arguments.address}'}; name the --admin-port "
            "of an orchestrator of this machine, which is 1000 above its --port"
        )
    return AdminClient(arguments.address, credentials=credentials)


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add how to talk to a server that has TLS."""
    group = parser.add_argument_group("TLS")
    group.add_argument(
        "--tls",
        action="store_true",
        help="talk TLS to a server whose certificate comes from a well-known authority",
    )
    for name, text in (
        ("ca", "talk TLS to a server whose certificate comes from these authorities (PEM)"),
        ("cert", "certificate chain (PEM) to show to a server that asks for one"),
        ("key", "private key (PEM) of --tls-cert-file"),
    ):
        group.add_argument(f"--tls-{name}-file", default="", metavar="FILE", help=text)
    group.add_argument(
        "--tls-server-name",
        default="",
        metavar="NAME",
        help="name in the server's certificate (default: the host that is dialled)",
    )


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Return how to encrypt; None: not at all.

    Raises: ConfigError if the options mean nothing together.
    """
    from shared.access.tls import Tls

    if not (arguments.tls or arguments.tls_ca_file):
        for name in ("cert_file", "key_file", "server_name"):
            if getattr(arguments, f"tls_{name}"):
                flag = flag_name(f"tls_{name}")
                raise ConfigError(f"{flag} means something with --tls or --tls-ca-file only")
        return None
    return Tls(
        ca_file=arguments.tls_ca_file,
        cert_file=arguments.tls_cert_file,
        key_file=arguments.tls_key_file,
        server_name=arguments.tls_server_name,
    )


def credentials_of(arguments: argparse.Namespace, *, variable: str = TOKEN_VARIABLE) -> Credentials:
    """Return what the server is shown.

    Args:
        variable: Of a token, in the place of `--token-file`.
    Raises: ConfigError.
    """
    from coppice.credentials import Credentials
    from shared.access.tokens import read_token

    token = os.environ.get(variable, "")
    if arguments.token_file:
        token = read_token(arguments.token_file)
    return Credentials(token=token, tls=tls_of(arguments))


def require_server(address: str, credentials: Credentials) -> None:
    """Raise unless a server answers at an address; said at once, where a request would retry.

    Raises: UnavailableError that says what to start or to name, ConfigError for an address that is
        none.
    """
    from coppice.health import can_connect

    check_address(address, "--server")
    if can_connect(address, timeout_s=CONNECT_TIMEOUT_S, tls=credentials.tls):
        return
    if what := other_speech(address, credentials.tls):
        raise UnavailableError(
            f"{what}; of a gateway name its orchestrator's --port (default: 50051)"
        )
    raise UnavailableError(
        f"no server listens at {address}; start one with `coppice up`, or name another one "
        "with --server HOST:PORT"
    )


def other_speech(address: str, tls: Tls | None) -> str:
    """Return what is wrong where something listens and gRPC is not answered; "": nothing listens.

    Args:
        tls: With which gRPC was tried; None: in plain text.
    """
    from coppice.health import is_listening

    if not is_listening(address, timeout_s=_TCP_TIMEOUT_S):
        return ""
    if tls is None:
        return (
            f"something listens at {address}, but answers no plain gRPC: a server with TLS "
            "(--tls-ca-file), one of HTTP, or one that hangs"
        )
    return (
        f"something listens at {address}, but answers no gRPC with this TLS: its certificate is of "
        "another authority (--tls-ca-file) or name (--tls-server-name), it asks for one of ours "
        "(--tls-cert-file), or it has no TLS"
    )


def check_address(address: str, name: str) -> None:
    """Refuse a port that is none, which gRPC would look up as a name.

    Raises: ConfigError.
    """
    _, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= _MAX_PORT
    if colon and not is_port and not address.startswith("unix"):
        raise ConfigError(
            f"{name} is {address!r}, expected HOST:PORT with a port of 1 to {_MAX_PORT}"
        )


def known_variables() -> set[str]:
    """Return every COPPICE_* variable that means something to some command."""
    return variables_of(CONFIG_TYPES) | {
        ADMIN_VARIABLE,
        CONFIG_VARIABLE,
        SECRET_VARIABLE,
        SERVER_VARIABLE,
        TOKEN_VARIABLE,
        ADMIN_TOKEN_VARIABLE,
    }


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
