"""Wall clocks of processes under test, which a test may set."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

JUMPING = Path(__file__).parent / "jumping_clock"


class Clocks:
    """One clock per service, in time at first.

    Args:
        directory: Of files with how far each is ahead.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def environ(self, name: str, path: str) -> dict[str, str]:
        """Return the variables by which a service, and all that it starts, has its clock.

        Args:
            path: What is on Python's path besides.
        """
        self.set([name], 0.0)
        return {
            "PYTHONPATH": os.pathsep.join([str(JUMPING), path]),
            "CLOCK_OFFSET_FILE": str(self._directory / name),
        }

    def set(self, names: Iterable[str], offset_s: float) -> None:
        """Set clocks, so far ahead of this process's."""
        for name in names:
            new = self._directory / f"{name}.new"
            new.write_text(str(offset_s))
            new.rename(self._directory / name)


@contextlib.contextmanager
def clocks() -> Iterator[Clocks]:
    """Yield clocks for the length of the block."""
    with tempfile.TemporaryDirectory() as directory:
        yield Clocks(Path(directory))
