"""The helper that kills a process which hangs; real processes, a limit of two seconds."""

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
        await asyncio.sleep(4)

    asyncio.run(watched(work(sys.argv[1]), limit_s=2))
    """
)


@pytest.mark.parametrize(
    ("mode", "code"), [("stopped", -9), ("blocked", -9), ("failing", 3), ("turning", 0)]
)
def test_only_a_process_that_hangs_is_killed(mode: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env=with_path(Path(__file__).resolve().parents[2]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # it returns when the helper has closed its end of stderr, too
    assert ended.returncode == code
    assert ("hangs, killing it" in ended.stderr) == (code == -9)
