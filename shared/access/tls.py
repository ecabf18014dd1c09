"""TLS of both ends: certificates are files, and a server reads them again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from shared.access.watched_file import WatchedFiles
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a caller encrypts; the files are read when a channel is opened.

    Args:
        ca_file: Authorities (PEM) that the server's certificate must come from; empty: those that
            gRPC trusts by itself.
        cert_file: Certificate chain (PEM) to show; empty: none, which mutual TLS does not take.
        key_file: Its private key (PEM).
        server_name: Name that the server's certificate must have; empty: the host that is dialled.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("a certificate to show needs both its file and that of its key")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises: ConfigError if they do not belong together.
        """
        if self.ca_file:
            _check_authorities(self.ca_file)
        if self.cert_file:
            _check_pair(self.cert_file, self.key_file)
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )

    def options(self, *, server_name: str = "") -> list[tuple[str, str]]:
        """Return the options of a channel.

        Args:
            server_name: In place of the dialled host where none was given at the making.
        """
        name = self.server_name or server_name
        return [("grpc.ssl_target_name_override", name)] if name else []


class ServerTls:
    """The certificate of a server, and the authorities of its callers'.

    Args:
        cert_file: Certificate chain (PEM).
        key_file: Its private key (PEM).
        client_ca_file: Authorities (PEM) of callers; empty: callers show no certificate.
    Raises: ConfigError if the files do not belong together.
    """

    def __init__(self, *, cert_file: str, key_file: str, client_ca_file: str = "") -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        paths = tuple(path for path in (cert_file, key_file, client_ca_file) if path)
        self._files = WatchedFiles(paths, self._load)

    @property
    def is_mutual(self) -> bool:
        """Return whether callers must show a certificate."""
        return bool(self._client_ca_file)

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that look at the files with every connection that is opened."""
        return grpc.dynamic_ssl_server_credentials(
            self._files.current()[0], self._fetch, require_client_authentication=self.is_mutual
        )

    def _fetch(self) -> Any:
        """Return the new certificate, or None to go on with the one before."""
        configuration, is_new = self._files.current()
        return configuration if is_new else None

    def _load(self) -> Any:
        _check_pair(self._cert_file, self._key_file)
        if self._client_ca_file:
            _check_authorities(self._client_ca_file)
        key, chain = Path(self._key_file).read_bytes(), Path(self._cert_file).read_bytes()
        return grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=_read(self._client_ca_file)
        )


def _check_pair(cert_file: str, key_file: str) -> None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{cert_file} and {key_file} are no certificate chain and its private key, both PEM "
            f"and without a password: {_why(error)}"
        ) from error


def _check_authorities(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} holds no certificates (PEM): {_why(error)}") from error


def _no_password() -> str:
    raise ValueError("the key has a password")


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
