"""TLS of the HTTP port: certificates are files, and are read again when they change."""

from __future__ import annotations

import ssl
from typing import Any

from shared.access.watched_file import WatchedFiles
from shared.config import GatewayConfig
from shared.errors import ConfigError


def server_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """Return how the port encrypts; None: not at all.

    Every connection is shown what the files hold when it is opened.

    Raises: ConfigError if they do not belong together.
    """
    if not config.tls_cert_file:
        return None
    paths = (config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    files = WatchedFiles(tuple(path for path in paths if path), lambda: _load(config))

    def renew(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context, _ = files.current()

    context, _ = files.current()
    context.sni_callback = renew
    return context


def _load(config: GatewayConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file, password=_no_password)
        if config.tls_client_ca_file:
            context.load_verify_locations(config.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"cannot use the files of --tls-...: {error}") from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")
