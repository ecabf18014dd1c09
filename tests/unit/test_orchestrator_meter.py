"""What operators see of a request while it runs."""

from __future__ import annotations

import asyncio

from tests.fakes import generate
from tests.fakes.in_memory import virtual
from tests.unit.scene import PROMPT, Scene, check_stream, read


@virtual
async def test_the_wait_for_the_target_grows_while_rounds_go_by_credit() -> None:
    """Not only once they end, which may be minutes later."""
    scene = Scene(round_s=0.1)
    scene.add_target()
    generation = scene.generation(shape=None)
    serving = asyncio.gather(read(generation), generation.run())
    seen = []
    for _ in range(3):
        await asyncio.sleep(1.0)
        figures = generation.status.figures
        seen.append((round(figures.verify_s, 1), figures.num_rounds))
        assert abs(figures.verify_s / figures.num_rounds - 0.1) < 0.02
    assert sorted(set(seen)) == seen
    events, _ = await serving
    finish = check_stream(events, generate(PROMPT, 40))
    assert abs(finish.timings.mean_verify_ms - 100.0) < 5.0
