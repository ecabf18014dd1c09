"""The helper that kills a process which hangs; real processes, limits of seconds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import with_path

SCRIPT = textwrap.dedent(
    """
    import asyncio, os, signal, sys, time
    from shared.watchdog import watched

    async def work(mode):
        if mode == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif mode == "blocked":
            time.sleep(600)
        elif mode == "failing":
            raise SystemExit(3)
        await asyncio.sleep(limit_s + 2)

    limit_s = int(sys.argv[2])
    asyncio.run(watched(work(sys.argv[1]), limit_s=limit_s))
    """
)


@pytest.mark.parametrize(
    ("mode", "limit_s", "code"),
    # One that turns may have to wait for a core for many seconds.
    [("stopped", 2, -9), ("blocked", 2, -9), ("failing", 2, 3), ("turning", 11, 0)],
)
def test_only_a_process_that_hangs_is_killed(mode: str, limit_s: int, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(limit_s)],
        env=with_path(Path(__file__).resolve().parents[2]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # it returns when the helper has closed its end of stderr, too
    assert ended.returncode == code
    assert ("hangs, killing it" in ended.stderr) == (code == -9)
