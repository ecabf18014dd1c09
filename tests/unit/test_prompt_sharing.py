"""Long prompts that never end, and short ones that pass them, by a simulated target's clock."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

import pytest

from target_service.prompt_budget import PromptBudget
from target_service.request import Phase, TargetRequest
from target_service.step_costs import StepCosts
from tests.unit.test_scheduler import World

LONG_LEN, SHORT_LEN = 1900, 12
PACKED_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What steps take.

    Args:
        costs: Of a forward, without context, milliseconds.
        context_ms: What a row of a prompt takes beyond that.
        chunk_len: Most rows of a prompt in a step.
        around_ms: What a request takes beside its steps: hops, text, the draft.
    """

    costs: StepCosts
    context_ms: float
    chunk_len: int
    around_ms: float


MACHINES = {
    "gpu": Machine(
        costs=StepCosts([1, 16, 64, 256, 512, 1024, 2048], [5.0, 5.1, 5.5, 9.0, 17.0, 33.0, 65.0]),
        context_ms=0.0,
        chunk_len=2048,
        around_ms=2.0,
    ),
    "cpu": Machine(
        costs=StepCosts([1, 8, 16, 32, 64, 128], [7.4, 7.5, 10.3, 14.9, 23.2, 40.9]),
        context_ms=0.5,
        chunk_len=256,
        around_ms=15.0,
    ),
}


class Target:
    """A scheduler whose steps take as long as a machine takes for them."""

    def __init__(self, machine: Machine) -> None:
        self.world = World(
            num_pages=4000, page_size=16, max_num_requests=64, max_batch_rows=PACKED_ROWS,
            chunk_len=machine.chunk_len,
        )  # fmt: skip
        self.budget = self.world.scheduler.prompt_budget = PromptBudget(
            machine.costs, clock=lambda: self.world.now
        )
        self.machine = machine
        self.num_prompt_rows = 0

    def step(self) -> None:
        """Compute a step, which lasts as long as it takes."""
        began_s = self.world.now
        plan = self.world.step()
        num_chain_rows = sum(work.stop - work.start for work in plan.prefills)
        num_rows = num_chain_rows + sum(request.next_num_rows for request in plan.verifies)
        context_ms = self.machine.context_ms * num_chain_rows
        self.world.now += self.machine.costs.of(num_rows) + context_ms
        self.num_prompt_rows += num_chain_rows
        self.budget.note_step(num_rows, num_chain_rows=num_chain_rows, began_s=began_s)

    def first_token_ms(self, prompt: TargetRequest) -> float:
        """Step until a prompt is read; return how long that took since it came."""
        while prompt.phase is not Phase.RUNNING:
            self.step()
        self.world.scheduler.remove(prompt)
        return self.world.now - prompt.opened_s + self.machine.around_ms


def crowd(target: Target, num_clients: int, num_shorts: int) -> list[float]:
    """Serve clients that send one long prompt after the other; return what short ones waited.

    A short prompt comes in the middle of a step.
    """
    longs = [target.world.open(f"long {i}", LONG_LEN) for i in range(num_clients)]
    waited = []
    for index in range(num_shorts):
        for _ in range(3):
            for i, request in enumerate(longs):
                if request.phase is Phase.RUNNING:
                    target.world.scheduler.remove(request)
                    longs[i] = target.world.open(f"long {i} {index}", LONG_LEN)
            before_s = target.world.now
            target.step()
        came_s = (before_s + target.world.now) / 2
        short = target.world.open(f"short {index}", SHORT_LEN)
        short.opened_s = came_s
        waited.append(target.first_token_ms(short))
    return waited


@pytest.mark.parametrize("name", MACHINES)
def test_a_short_prompt_beside_six_long_ones_waits_five_times_as_long_at_most(name: str) -> None:
    machine = MACHINES[name]
    idle = Target(machine)
    alone_ms = idle.first_token_ms(idle.world.open("alone", SHORT_LEN))
    target = Target(machine)
    waited = crowd(target, 6, 200)
    learned = waited[20:]  # what the context costs
    assert max(learned) <= 5 * alone_ms
    assert mean(learned) <= 4 * alone_ms


@pytest.mark.parametrize("name", MACHINES)
def test_long_prompts_are_read_nearly_as_fast_as_without_short_ones(name: str) -> None:
    """Steps that are small enough for others to pass cost a fifth of the throughput at most."""
    machine = MACHINES[name]
    whole = Target(machine)
    whole.world.scheduler.prompt_budget = None
    rates = []
    for target in (whole, Target(machine)):
        crowd(target, 6, 200)
        rates.append(target.num_prompt_rows / target.world.now)
    assert rates[1] >= 0.8 * rates[0]


def test_the_oldest_long_prompt_gets_on_while_short_ones_never_end() -> None:
    target = Target(MACHINES["gpu"])
    long = target.world.open("long", LONG_LEN)
    for index in range(1000):
        short = [target.world.open(f"{index} {i}", 400) for i in range(2)]
        target.step()
        if long.phase is Phase.RUNNING:
            return
        for request in short:
            target.world.scheduler.remove(request)
    pytest.fail("the long prompt starves")
