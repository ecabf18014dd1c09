"""NVIDIA's multi-process service for workers that share a GPU: without it they take turns there.

A turn passes from one process to the other in 0.13 ms, twice a round, and who computes alone keeps
the whole GPU as well. Where the machine has no MPS, workers take turns.

https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence

CONTROL = "nvidia-cuda-mps-control"
_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_TIMEOUT_S = 10.0


class MultiProcessService:
    """A control daemon with a directory of its own; the daemon's server ends with it.

    Args:
        on_log: Called with a line.
    """

    def __init__(self, on_log: Callable[[str], None]) -> None:
        self._on_log = on_log
        self._directory = ""

    @property
    def environ(self) -> dict[str, str]:
        """Return what a worker's environment needs beside the rest; empty: there is no service."""
        if not self._directory:
            return {}
        return {_PIPE_VARIABLE: self._directory, _LOG_VARIABLE: self._directory}

    def start(self) -> None:
        """Start the daemon, if this machine has it and nobody has started one for this process."""
        if _PIPE_VARIABLE in os.environ:
            return
        if shutil.which(CONTROL) is None:
            self._on_log(f"no {CONTROL} here: workers that share a GPU take turns")
            return
        self._directory = tempfile.mkdtemp(prefix="coppice-mps-")
        if self._run([CONTROL, "-d"]):
            self._on_log("workers that share a GPU share its time, too, by MPS")
        else:
            self._remove()

    def stop(self) -> None:
        """End the daemon; its clients have ended."""
        if self._directory:
            self._run([CONTROL], lines="quit\n")
            self._remove()

    def _run(self, command: Sequence[str], lines: str = "") -> bool:
        try:
            subprocess.run(
                command,
                input=lines,
                env=self._environ,
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", "") or error
            self._on_log(f"{' '.join(command)} failed: {str(detail).strip()}")
            return False
        return True

    @property
    def _environ(self) -> dict[str, str]:
        """Return the daemon's: it has all GPUs, so that workers name theirs as without it."""
        environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        return {**environ, **self.environ}

    def _remove(self) -> None:
        directory, self._directory = self._directory, ""
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
