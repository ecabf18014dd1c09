"""What a result was measured on."""

from __future__ import annotations

import datetime
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return the date, the command, the processor, the GPUs and the versions that matter."""
    import torch
    import triton

    gpus = []
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        gpus = listed.stdout.split("\n")[:-1]
    script = Path(sys.argv[0]).stem
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", f"benchmarks.{script}", *sys.argv[1:]]),
        "processor": _processor(),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _processor() -> str:
    import os

    cores = len(os.sched_getaffinity(0))
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        return f"{names[0]}, {cores} cores"
    except (OSError, IndexError):
        return f"{platform.machine()}, {cores} cores"
