"""What a service shows to the workers that it calls: proofs of the secret, a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.access.proofs import prove
from shared.access.tls import Tls
from shared.config import (
    CALLS,
    NO_SECRET,
    DialConfig,
    DraftConfig,
    OrchestratorConfig,
    Secret,
    read_secret,
)
from shared.errors import ConfigError

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls workers.

    Args:
        secret: Of the deployment; falsy: nothing is proven.
        tls: None: plain text.
    """

    secret: Secret = NO_SECRET
    tls: Tls | None = None

    def metadata(self, method: str) -> Metadata:
        """Return the metadata of one call of a method, /PACKAGE.SERVICE/METHOD."""
        if not self.secret:
            return ()
        return (("authorization", prove(self.secret.keys(CALLS)[0], method)),)


NOBODY = Caller()
"""Proves nothing, in plain text."""


def caller_of(config: OrchestratorConfig | DraftConfig, environ: Mapping[str, str]) -> Caller:
    """Return what a service shows, and check that its files can be read.

    Raises: ConfigError.
    """
    return Caller(
        secret=read_secret(config, environ),
        tls=dialled_tls(config, cert_file=config.tls_cert_file, key_file=config.tls_key_file),
    )


def dialled_tls(config: DialConfig, *, cert_file: str, key_file: str) -> Tls | None:
    """Return how to encrypt to those who are dialled; None: not at all.

    Args:
        cert_file: Certificate to show where the configuration names none for that.
        key_file: Its key.
    Raises: ConfigError if the options mean nothing together, or files cannot be read.
    """
    if not config.tls_ca_file:
        for name in ("client_cert_file", "client_key_file", "server_name"):
            if getattr(config, f"tls_{name}"):
                flag = f"--tls-{name.replace('_', '-')}"
                raise ConfigError(f"{flag} means something with --tls-ca-file only")
        return None
    tls = Tls(
        ca_file=config.tls_ca_file,
        cert_file=config.tls_client_cert_file or cert_file,
        key_file=config.tls_client_key_file or key_file,
        server_name=config.tls_server_name,
    )
    tls.credentials()
    return tls
