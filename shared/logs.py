"""One format of log lines for every process of Coppice."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: int | str) -> None:
    """Log to standard error from now on; warnings of Python are log records like any other.

    Args:
        level: Least severity that is logged: one of logging's numbers, or of LEVELS.
    """
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, format=FORMAT, stream=sys.stderr
    )
    logging.captureWarnings(capture=True)
    logging.getLogger("grpc").setLevel(logging.WARNING)  # below, it tells of every call's steps
    logging.getLogger("asyncio").setLevel(logging.WARNING)
