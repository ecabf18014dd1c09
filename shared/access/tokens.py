"""Tokens of clients: a file names them, and is read again when it changes.

    # name:token[:until]
    alice:9f0c...e1
    nightly:77ab...20:2027-01-31
    alice:51d2...7c                     a second one, while the first is replaced

A client sends `authorization: Bearer TOKEN`. The name is that of the tenant, for logs and shares.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import time
from dataclasses import dataclass, field

from shared.access.watched_file import WatchedFiles, read_text_file
from shared.errors import ConfigError, InvalidArgumentError, UnauthenticatedError

SCHEME = "Bearer"
MIN_TOKEN_CHARS = 16

_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_TOKEN = re.compile(r"[\w.~+/=-]+", re.ASCII)  # what RFC 6750 allows
_EXPECTED = "expected name:token or name:token:2027-01-31"


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is kept: not itself.

    Args:
        name: Whose it is.
        digest: SHA-256 of it.
        until: Seconds since the epoch from which on it is refused; None: never.
    """

    name: str
    digest: bytes = field(repr=False)
    until: float | None


class TokenCheck:
    """Takes calls of whoever has a token of the file.

    Args:
        path: The file.
        option: That names it.
    Raises: ConfigError if the file cannot be read.
    """

    def __init__(self, path: str, *, option: str = "--token-file") -> None:
        self._file = WatchedFiles((path,), lambda: read_tokens(path, option=option))

    def check(self, method: str, authorization: str | None) -> str:
        """Return the name of the token's owner.

        Raises: UnauthenticatedError.
        """
        del method  # a token holds for all of them
        scheme, _, value = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME.lower():
            raise UnauthenticatedError(
                "this server asks for a token: send `authorization: Bearer TOKEN` (coppice: "
                "--token-file, or COPPICE_TOKEN)",
                reason="NO_IDENTITY",
            )
        tokens, _ = self._file.current()
        digest = _digest(value.strip())
        found = [token for token in tokens if hmac.compare_digest(token.digest, digest)]
        if not found:
            raise UnauthenticatedError(
                "this token is not one of the server's; ask who runs it for one",
                reason="WRONG_IDENTITY",
            )
        (token,) = found
        if token.until is not None and time.time() >= token.until:
            raise UnauthenticatedError(
                f"this token of {token.name} has expired; ask who runs the server for a new one",
                reason="EXPIRED_IDENTITY",
            )
        return token.name


def read_tokens(path: str, *, option: str) -> tuple[Token, ...]:
    """Return the tokens of a server's file.

    Raises: ConfigError that names the line, and never says a token.
    """
    tokens: list[Token] = []
    for number, line in enumerate(read_text_file(path, option=option).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        token = _parse(text, where=f"{option} {path}, line {number}")
        if any(token.digest == other.digest for other in tokens):
            raise ConfigError(f"{option} {path}, line {number}: the token stands there twice")
        tokens.append(token)
    if not tokens:
        raise ConfigError(f"{option} {path} holds no token; {_EXPECTED}")
    return tuple(tokens)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a client's call; "": it has no token.

    Args:
        token: White space around it, as a file's last newline, is left out.
    Raises: InvalidArgumentError for what metadata does not hold; the token is not said.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise InvalidArgumentError(
            "a token has printable ASCII characters only, and no line break in it", field="token"
        )
    return (("authorization", f"{SCHEME} {token}"),) if token else ()


def read_token(path: str) -> str:
    """Return the token of a client's file, which holds nothing else.

    Raises: ConfigError.
    """
    token = read_text_file(path, option="--token-file").strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"--token-file {path} of a client holds one token and nothing else; the file with "
            "name:token lines is the server's"
        )
    return token


def _parse(text: str, *, where: str) -> Token:
    name, _, rest = text.partition(":")
    value, _, until = rest.partition(":")
    if not (_NAME.fullmatch(name) and _TOKEN.fullmatch(value)):
        raise ConfigError(f"{where}: {_EXPECTED}")
    if len(value) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{where}: the token has {len(value)} characters, expected {MIN_TOKEN_CHARS} or more; "
            "make one with: openssl rand -hex 32"
        )
    return Token(name, _digest(value), _moment(until, where=where) if until else None)


def _moment(text: str, *, where: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{where}: the token's end is {text!r}, expected a date as in 2027-01-31 or "
            "2027-01-31T12:00:00 (UTC)"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
