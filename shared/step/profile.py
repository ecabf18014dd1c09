"""Record what an engine does in some steps, with torch's profiler, into a file for Perfetto."""

from __future__ import annotations

import contextlib
import gzip
import logging
import shutil
from pathlib import Path

import torch

# torch.profiler has more to offer, for which it imports the whole compiler: seconds without a step.
from torch.autograd.profiler import profile

from shared.progress import note_progress

logger = logging.getLogger(__name__)

_GZIP_LEVEL = 3
_COPIED_BYTES = 1 << 20


class StepProfile:
    """Records from its creation on, in the thread that creates it and on all devices.

    Args:
        path: File to write, *.json.gz, in a folder that is made if need be.
        num_steps: Engine steps to record.
    """

    def __init__(self, path: str, num_steps: int) -> None:
        self.path = path
        self._num_left = num_steps
        device = "cuda" if torch.cuda.is_initialized() else None
        self._profile = profile(use_cpu=True, use_device=device, use_kineto=True)
        self._profile.__enter__()
        logger.info("recording %d steps", num_steps)

    def note_step(self) -> bool:
        """Count a step; return whether it was the last one to record."""
        self._num_left -= 1
        return self._num_left <= 0

    def write(self) -> str:
        """End the recording and write the file; return why that failed, or "".

        May take seconds, and says in between that it goes on.
        """
        plain = Path(self.path).with_suffix("")
        try:
            self._profile.__exit__(None, None, None)
            note_progress(is_slow=True)
            plain.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(plain))
            note_progress(is_slow=True)
            with (
                plain.open("rb") as trace,
                gzip.open(self.path, "wb", compresslevel=_GZIP_LEVEL) as packed,
            ):
                shutil.copyfileobj(trace, packed, _COPIED_BYTES)
        except (OSError, RuntimeError) as error:
            logger.warning("cannot write a profile to %s: %s", self.path, error)
            _remove(self.path)  # a part of it is of no use
            return str(error)
        finally:
            _remove(plain)
        logger.info("wrote a profile to %s", self.path)
        return ""


def _remove(path: Path | str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()
