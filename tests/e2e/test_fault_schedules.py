"""Faults in random order while clients stream: no token is lost, repeated or changed.

Schedule N alone: `pytest -s 'tests/e2e/test_fault_schedules.py::test_no_schedule_costs_a_token[N]'`
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from coppice import Completion
from shared.config import DraftConfig, OrchestratorConfig, TargetConfig
from tests.e2e.callers import Caller, calling, go_on
from tests.e2e.fault_schedules import FAULTS, GO_ON_TIMEOUT_S, Strike, make_schedule, play
from tests.e2e.harm import HarmedStack, harmed_stack
from tests.e2e.serving import READY_TIMEOUT_S, PlainOutputs, stack_config
from tests.marks import exhaustive
from tests.processes import wait_for

pytestmark = pytest.mark.slow

NUM_CALLERS = 3
NUM_FAST = 3
NUM_DEALT = 4
NUM_SEEDS = 203
TOO_FAR_S = 600.0
TIMEOUTS = ("draft_timeout_ms", "draft_open_timeout_ms", "step_timeout_s")
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "object", "properties": {"is_on": {"type": "boolean"}}},
    "minItems": 9,
}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "def read_config(path):\n", "max_new_tokens": 64, "ignore_eos": True},
    {
        "prompt": "class Queue:\n",
        "max_new_tokens": 48,
        "ignore_eos": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "presence_penalty": 0.1,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
    },
    {"prompt": "import asyncio\n" * 20, "max_new_tokens": 40, "temperature": 0.7, "seed": 5},
    {
        "prompt": "def merge(left, right):\n",
        "max_new_tokens": 90,
        "ignore_eos": True,
        "num_steps": 6,
        "topk": 4,
        "num_draft_tokens": 32,
    },
    {"prompt": "for i in range(", "max_new_tokens": 24, "stop_strings": ["\n\n"], "priority": 1},
    {"prompt": "x = ", "max_new_tokens": 60, "ignore_eos": True, "speculation": False},
    {"prompt": "config = ", "max_new_tokens": 70, "json_schema": SCHEMA, "seed": 9},
]


@pytest.fixture(scope="module")
def stack() -> Iterator[HarmedStack]:
    """Return two targets and two drafts with the default timeouts."""
    defaults = OrchestratorConfig()
    config = stack_config(
        num_targets=2,
        num_drafts=2,
        target={"spare_after_s": TargetConfig().spare_after_s},
        draft={"spare_after_s": DraftConfig().spare_after_s},
        orchestrator={name: getattr(defaults, name) for name in TIMEOUTS},
    )
    with harmed_stack(config) as stack:
        yield stack


@pytest.fixture(scope="module")
def plain(stack: HarmedStack, plain_outputs: PlainOutputs) -> list[Completion]:
    """Return the outputs without speculation, before anything has happened."""
    return plain_outputs.of(stack, REQUESTS)


def schedule_of(seed: int) -> list[Strike]:
    """Return the schedule of a seed: those of every run share all faults out among them."""
    if seed < NUM_FAST:
        return make_schedule(seed, num_faults=NUM_DEALT, num_dealt=NUM_DEALT)
    return make_schedule(seed, num_faults=5)


@pytest.mark.parametrize("seed", [*range(NUM_FAST), *exhaustive(range(NUM_FAST, NUM_SEEDS))])
def test_no_schedule_costs_a_token(stack: HarmedStack, plain: list[Completion], seed: int) -> None:
    schedule = schedule_of(seed)
    print(f"schedule {seed}:", *schedule, sep="\n  ")  # noqa: T201
    first_line = len(stack.log)
    callers = [
        Caller(
            stack.front_address,
            REQUESTS,
            plain,
            random.Random(f"{seed} {i}"),
        )
        for i in range(NUM_CALLERS)
    ]
    with stack.log_shown_if_it_fails(), calling(callers):
        play(stack, callers, schedule, seed)
    stack.wait_ready(*stack.services, timeout_s=READY_TIMEOUT_S)
    stack.check_idle()
    stack.check_nothing_left()
    assert not [line for line in stack.log[first_line:] if "Traceback" in line]
    assert all(caller.num_outputs for caller in callers)


def test_hosts_whose_clocks_differ_are_named_and_used_again_once_they_agree(
    stack: HarmedStack, plain: list[Completion]
) -> None:
    """Drafts do without it for as long, and targets make requests wait."""
    callers = [Caller(stack.front_address, REQUESTS, plain, random.Random(i)) for i in range(2)]
    with stack.log_shown_if_it_fails(), calling(callers):
        for role in ("draft", "target"):
            names = [name for name in stack.services if name.startswith(role)]
            num_said = stack.logged("set the clocks", service="orchestrator")
            stack.clocks.set(names, TOO_FAR_S)
            for name in names:
                stack.links[name].reset()
            wait_for(
                lambda num_said=num_said, names=names: (
                    stack.logged("set the clocks", service="orchestrator") >= num_said + len(names)
                )
            )
            if role == "draft":
                assert go_on(callers, timeout_s=GO_ON_TIMEOUT_S), "it speculates or not"
            stack.clocks.set(names, 0.0)
            assert go_on(callers, timeout_s=GO_ON_TIMEOUT_S)
    stack.check_idle()


def test_the_first_schedules_have_nearly_all_kinds_of_faults() -> None:
    """Those that every run of the tests plays: all but the last ones of the list."""
    schedules = [schedule_of(seed) for seed in range(NUM_FAST)]
    num_kinds = len({strike.name for schedule in schedules for strike in schedule})
    assert num_kinds == NUM_FAST * NUM_DEALT
    assert len(FAULTS) <= num_kinds + 11
