"""What a server asks of those who connect and call, as its configuration says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from shared.access.proofs import ProofCheck
from shared.access.tls import ServerTls
from shared.access.tokens import TokenCheck
from shared.config import (
    CALLS,
    GatewayConfig,
    OrchestratorConfig,
    PortConfig,
    WorkerConfig,
    read_secret,
)
from shared.config.check import flag_name
from shared.config.exposure import check_exposure, is_loopback
from shared.errors import ConfigError
from shared.rpc.auth import IdentityCheck

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How a server is reached.

    Args:
        tls: None: plain text.
        check: Of every call but health checks; None: anybody may call.
        health_port: Port that answers health checks alone, in plain text; 0: none.
        has_reflection: Callers may ask for methods and messages.
    """

    tls: ServerTls | None = None
    check: IdentityCheck | None = None
    health_port: int = 0
    has_reflection: bool = True


OPEN = Gate()
"""Anybody may call, in plain text."""


def worker_gate(config: WorkerConfig, environ: Mapping[str, str]) -> Gate:
    """Return what a worker asks: the secret of its deployment, if there is one.

    Raises: ConfigError, also if other hosts could call and nothing is asked of them.
    """
    secret = read_secret(config, environ)
    _check_exposure(
        config,
        has_identity=bool(secret),
        fix="--secret-file (or COPPICE_SECRET), the same on orchestrator and workers",
    )
    return _gate(config, ProofCheck(secret.keys(CALLS)) if secret else None)


def front_gate(config: OrchestratorConfig | GatewayConfig) -> Gate:
    """Return what orchestrator and gateway ask of clients: a token, if there is a file of them.

    Raises: ConfigError, also if other hosts could call and nothing is asked of them.
    """
    fix = "--token-file with the tokens of clients"
    _check_exposure(config, has_identity=bool(config.token_file), fix=fix)
    return _gate(config, TokenCheck(config.token_file) if config.token_file else None)


def admin_gate(config: OrchestratorConfig) -> Gate:
    """Return what is asked of operators: a token of theirs, if there is a file of them.

    A client's certificate makes no operator. Beyond loopback there is TLS if clients have it.

    Raises: ConfigError, also if other hosts could call and nothing is asked of them.
    """
    path, is_local = config.admin_token_file, is_loopback(config.admin_host)
    check_exposure(
        config.admin_host,
        is_insecure=config.insecure,
        has_identity=bool(path),
        fix="--admin-token-file with the tokens of operators",
        option="--admin-host",
    )
    return Gate(
        tls=None if is_local else _server_tls(config),
        check=TokenCheck(path, option="--admin-token-file") if path else None,
        has_reflection=config.reflection,
    )


def log_exposure(config: PortConfig, gate: Gate) -> None:
    """Warn of what others than this host can do by the configuration."""
    if is_loopback(config.host):
        return
    if gate.check is None and not config.tls_client_ca_file:
        logger.warning("--insecure: whoever reaches this port may call, and is not asked who it is")
    elif isinstance(gate.check, TokenCheck) and gate.tls is None:
        logger.warning(
            "tokens come in plain text: whoever sees the network can use them; give "
            "--tls-cert-file, or let nobody connect but a proxy that has TLS"
        )


def _check_exposure(config: PortConfig, *, has_identity: bool, fix: str) -> None:
    check_exposure(
        config.host,
        is_insecure=config.insecure,
        has_identity=has_identity or bool(config.tls_client_ca_file),
        fix=f"{fix}, or --tls-client-ca-file (mutual TLS)",
    )


def _gate(config: PortConfig, check: IdentityCheck | None) -> Gate:
    return Gate(
        tls=_server_tls(config),
        check=check,
        health_port=config.health_port,
        has_reflection=config.reflection,
    )


def _server_tls(config: PortConfig) -> ServerTls | None:
    if not config.tls_cert_file:
        for name in ("tls_key_file", "tls_client_ca_file"):
            if getattr(config, name):
                raise ConfigError(f"{flag_name(name)} means something with --tls-cert-file only")
        return None
    if not config.tls_key_file:
        raise ConfigError("--tls-cert-file needs --tls-key-file")
    return ServerTls(
        cert_file=config.tls_cert_file,
        key_file=config.tls_key_file,
        client_ca_file=config.tls_client_ca_file,
    )
