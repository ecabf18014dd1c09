"""The orchestrator does not pause to collect garbage, and gives back what large messages took."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, gc, json, os, signal
from orchestrator.server import serve
from shared.config import OrchestratorConfig

async def main():
    config = OrchestratorConfig(host="127.0.0.1", port=0, targets="127.0.0.1:1")
    first = gc.get_threshold()
    serving = asyncio.create_task(serve(config))
    while gc.get_threshold() == first and not serving.done():
        await asyncio.sleep(0.01)
    frozen, left = gc.get_freeze_count(), len(gc.get_objects())
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    print(json.dumps([frozen, left, gc.get_threshold()[0]]))

asyncio.run(main())
"""


def test_what_the_orchestrator_has_loaded_is_not_looked_through_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True
    )
    frozen, left, threshold = json.loads(done.stdout)
    assert frozen > 20_000
    assert left < frozen / 20
    assert threshold >= 10_000


LARGE = """
from shared.memory import return_large_buffers

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

return_large_buffers()
before = resident_mb()
for size in (4, 8, 16, 31):  # glibc would raise its threshold with each
    buffers = [bytearray(b"x" * (size << 20)) for _ in range(4)]
    del buffers
print(resident_mb() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_buffers_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 16
