"""Services do not pause to collect garbage: what is over is freed at once, large messages too."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest

from orchestrator.request_log import logged_end
from tests.fakes.in_memory import run_virtual
from tests.unit.scene import Scene, read

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


HOLES = """
import asyncio, json, mmap
from shared.memory import tended

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE >> 20

async def work():
    blocks = [b"x" * (100 << 10) for _ in range(800)]
    kept = blocks[::8]
    sizes = [resident_mb()]
    del blocks
    sizes.append(resident_mb())
    for _ in range(2000):
        await asyncio.sleep(0.05)
        if resident_mb() < sizes[0] - 50:
            break
    print(json.dumps([*sizes, resident_mb(), len(kept)]))

asyncio.run(tended(work(), interval_s=0.02))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_free_between_blocks_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True)
    full, freed, trimmed, _ = json.loads(done.stdout)
    assert full - freed < 20, "else the test shows nothing"
    assert full - trimmed > 50


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def nothing(scene: Scene) -> None:
    pass


def lose_target(scene: Scene) -> None:
    scene.add_target()
    scene.targets[0].lose()


def lose_draft(scene: Scene) -> None:
    scene.add_draft()
    scene.drafts[0].lose()


@pytest.mark.parametrize("has_peer", [False, True])
@pytest.mark.parametrize("happens", [nothing, lose_target, lose_draft, None])
def test_a_request_that_is_over_is_freed_without_a_collection(
    happens: Callable[[Scene], None] | None, *, has_peer: bool
) -> None:
    """Collections are rare: a request in a circle would stay, with all its tokens, for hundreds.

    Args:
        happens: While it runs; None: it is cancelled.
    """

    async def main() -> None:
        scene = Scene(has_peer=has_peer)
        scene.add_target()
        scene.add_draft()
        with contextlib.suppress(asyncio.CancelledError), logged_end("r", lambda: None) as log:
            generation = scene.generation("r", log, max_new_tokens=200)
            held = weakref.ref(generation)
            running = asyncio.gather(read(generation), generation.run())
            await asyncio.sleep(0.02)
            assert not running.done()
            if happens is None:
                running.cancel()
            else:
                happens(scene)
            del generation
            await running
        del running
        await scene.check_free()
        assert held() is None

    with no_collection():
        run_virtual(main())
