"""A helper process that kills this one when its event loop stops turning.

    this process --[a byte every 0.5 s]--> helper: nothing for LIMIT_S: SIGKILL; EOF: the end

A stopped or stuck process cannot end itself, and no container runtime restarts one that is merely
unhealthy. The helper counts its own looks, not seconds: a machine that sleeps kills nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

LIMIT_S = 10
BEAT_INTERVAL_S = 0.5

_HELPER = """
import os, select, signal, sys
pid, pipe, limit = map(int, sys.argv[1:])
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
num_silent = 0
while num_silent < limit:
    if not select.select([pipe], [], [], 1.0)[0]:
        num_silent += 1
    elif os.read(pipe, 4096):
        num_silent = 0
    else:
        sys.exit()
sys.stderr.write(f"process {pid} hangs, killing it\\n")
sys.stderr.flush()
if os.getppid() == pid:
    os.kill(pid, signal.SIGKILL)
"""


async def watched(work: Coroutine[Any, Any, None], *, limit_s: int = LIMIT_S) -> None:
    """Run the work of a process under watch.

    Args:
        limit_s: Whole seconds that the event loop may stand still, at least 2.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    command = [sys.executable, "-I", "-S", "-c", _HELPER]
    helper = subprocess.Popen(
        [*command, str(os.getpid()), str(readable), str(limit_s)],
        pass_fds=[readable],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(readable)
    beating = asyncio.create_task(_beat(writable))
    try:
        await work
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        os.close(writable)
        helper.kill()
        helper.wait()


async def _beat(pipe: int) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):  # the helper itself is stopped
            os.write(pipe, b".")
        await asyncio.sleep(BEAT_INTERVAL_S)
