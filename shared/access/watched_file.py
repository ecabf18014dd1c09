"""A file that is read again when it has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

_Stamp = tuple[int, int, int]


class WatchedFiles(Generic[Content]):
    """What one or more files say, as of now; what cannot be read leaves what they said before.

    Args:
        paths: The files.
        parse: Reads them. Raises: ConfigError or OSError.
    Raises: ConfigError if they cannot be read at first.
    """

    def __init__(self, paths: tuple[str, ...], parse: Callable[[], Content]) -> None:
        self._paths = paths
        self._parse = parse
        self._stamps = self._look()
        try:
            self._content = parse()
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error

    def current(self) -> tuple[Content, bool]:
        """Return what the files say, and whether that has changed since the last look."""
        stamps = self._look()
        if stamps == self._stamps:
            return self._content, False
        self._stamps = stamps
        try:
            self._content = self._parse()
        except (ConfigError, OSError) as error:
            logger.error("%s: kept as before: %s", ", ".join(self._paths), error)
            return self._content, False
        logger.info("read again: %s", ", ".join(self._paths))
        return self._content, True

    def _look(self) -> tuple[_Stamp | None, ...]:
        return tuple(map(_stamp, self._paths))


def read_text_file(path: str, *, option: str) -> str:
    """Return the text of a file.

    Raises: ConfigError that names the option.
    """
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is no text file") from error


def _stamp(path: str) -> _Stamp | None:
    """Return what differs between two contents of a file; a link's is that of what it names."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
