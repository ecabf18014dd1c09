"""The secret of a deployment: its services prove to each other that they know it.

One secret serves several purposes, each with a key of its own that is derived from it. A file may
hold several secrets, a line each: the first one proves, each is accepted. So a secret is replaced
while services run: the new one is added below the old one, then above it, then the old one goes.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from shared.config.ports import PortConfig
from shared.errors import ConfigError

SECRET_VARIABLE = "COPPICE_SECRET"
"""In the place of --secret-file; it is no flag, which other users of a host can read."""
CALLS = b"calls"
"""Purpose: who calls a worker."""
PEERS = b"peers"
"""Purpose: engines that meet over TCP."""

_MIN_BYTES = 16
_LABEL = b"coppice key v1: "


class Secret:
    """What a service knows; falsy if it knows none.

    Args:
        values: At least 16 bytes each; the first one proves, each is accepted.
    """

    def __init__(self, *values: bytes) -> None:
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._values)

    def keys(self, purpose: bytes) -> tuple[bytes, ...]:
        """Return the keys of a purpose, 32 bytes each; the first one proves.

        Without a secret it is the one key that everybody can make.
        """
        values = self._values or (b"",)
        return tuple(hmac.digest(value, _LABEL + purpose, "sha256") for value in values)


NO_SECRET = Secret()


def read_secret(config: PortConfig, environ: Mapping[str, str]) -> Secret:
    """Return the secret, without white space around it; falsy: none was given.

    Args:
        environ: The process environment; the file of the configuration goes first.
    Raises: ConfigError if the file cannot be read, or a secret is easy to guess.
    """
    return read_secret_of(config.secret_file, environ)


def read_secret_of(path: str, environ: Mapping[str, str]) -> Secret:
    """Return the secret of a file, or without one of the environment; see `read_secret`."""
    source, text = SECRET_VARIABLE, environ.get(SECRET_VARIABLE, "").encode()
    if path:
        source = f"--secret-file {path}"
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    values = [line.strip() for line in text.splitlines() if line.strip()]
    shortest = min(map(len, values), default=0)
    if shortest < _MIN_BYTES and (text or path):
        raise ConfigError(
            f"the secret of {source} has {shortest} bytes, expected {_MIN_BYTES} or more; make "
            "one with: openssl rand -hex 32"
        )
    return Secret(*values)
