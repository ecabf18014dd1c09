"""What a worker prints while it starts, one line per event, and how its starter reads it back.

target loading 40% reading weights
target ready address=127.0.0.1:50061 model=demo ... page_size=16 kv_tokens=65536 start_s=3.1
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from dataclasses import dataclass

from shared.logs import json_head, log_settings
from shared.messages import WorkerInfo

_LOADING = re.compile(r"^(\w+) loading +(\d+)% (.*)$")
_READY = re.compile(r"^(\w+) ready address=(\S+) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A worker says how far it is; `fraction` in 0..1."""

    role: str
    fraction: float
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker serves; `address` is dialled from this machine."""

    role: str
    address: str


def loading_line(role: str, stage: str, fraction: float) -> str:
    """Say how far a worker is."""
    return f"{role} loading {fraction:.0%} {' '.join(stage.split())}"


def ready_line(role: str, address: str, info: WorkerInfo, start_s: float) -> str:
    """Say that a worker serves, where, and what.

    Args:
        start_s: Seconds that it took to start.
    """
    quantization = f" quantization={info.quantization}" if info.quantization else ""
    kv_dtype = f" kv_cache_dtype={info.kv_cache_dtype}" if info.kv_cache_dtype else ""
    return (
        f"{role} ready address={address} model={info.model} kind={info.kind} "
        f"device={info.device} dtype={info.dtype}{quantization}{kv_dtype} "
        f"page_size={info.page_size} kv_tokens={info.load.num_pages * info.page_size} "
        f"start_s={start_s:.1f}"
    )


def parse_line(line: str) -> Loading | Ready | None:
    """Read a line of a worker's output, text or JSON; None for anything else."""
    line = _message_of(line.strip())
    if match := _LOADING.match(line):
        role, percent, stage = match.groups()
        return Loading(role=role, fraction=int(percent) / 100, stage=stage)
    if match := _READY.match(line):
        role, address = match.groups()
        return Ready(role=role, address=address)
    return None


def announce(line: str) -> None:
    """Print a line at once, in the format of this process's log."""
    settings = log_settings()
    if settings.format == "json":
        head = json_head("info", __name__, role=settings.role, at=time.time())
        line = json.dumps({**head, "message": line})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _message_of(line: str) -> str:
    """Return what a line of a log says, if it is JSON; else the line."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            return str(json.loads(line).get("message", ""))
    return line
