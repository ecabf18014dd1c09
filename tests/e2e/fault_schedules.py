"""Seeded schedules of faults, and what each fault does to a stack.

A schedule is a few faults in a row, while clients stream. A fault comes when all clients have
tokens since the one before, or right behind it, so that it meets a stack which recovers. At the
end every fault is healed, the clients end, and the stack must be whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coppice
from coppice.stack import ServiceState
from shared.peer.shared_files import RINGS
from tests.e2e.callers import Caller, go_on
from tests.e2e.garbling import send_garbage_to_peer
from tests.e2e.harm import LIAR, HarmedStack
from tests.processes import wait_for

PARTS = ("engine", "front", "all")
ORCHESTRATOR = "orchestrator"
NUM_OF_ROLE = 2
# Both targets may have to start anew, on a machine that does other things.
GO_ON_TIMEOUT_S = 120.0
RECOVER_TIMEOUT_S = 180.0
# Longer than it takes to find, kill and replace what hangs, on a machine at rest.
LAST_TIMEOUT_S = 20.0
# 0: until the end of the schedule, or until it is all that keeps tokens off. After 5 s a silent
# worker is left, after 5 to 10 s killed.
LENGTHS_S = (1.0, 0.2, 7.0, 0.0)
NUM_GARBLED = 12
"""Trees of garbage that a draft sends, at least, unless it cannot."""
NUM_STRANGERS = 5
GARBLE_TIMEOUT_S = 10.0
OTHER_DRAFT_S = 1.0
# A proof of identity holds for 300 s.
JUMPS_S = (3600.0, -3600.0, 240.0, -240.0)
OTHER_DRAFT = Path(coppice.__file__).parent / "bundled" / "standalone"


@dataclass(slots=True, kw_only=True)
class Scene:
    """What a schedule is played on.

    Args:
        healers: Ends the faults that last.
    """

    stack: HarmedStack
    rng: random.Random
    healers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def worker(self, role: str) -> str:
        """Choose a worker of a role."""
        return f"{role}-{self.rng.randrange(NUM_OF_ROLE)}"

    def kill(self, name: str) -> None:
        """Kill a part of a service."""
        self.stack.signal_part(name, self.rng.choice(PARTS), signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Stop a part of a service for a while, or until it is killed for that."""
        pids = self.stack.part(name, self.rng.choice(PARTS))
        _signal(pids, signal.SIGSTOP)
        self._last(lambda: _signal(pids, signal.SIGCONT))

    def cut(self, name: str) -> None:
        """Let nothing through to a service for a while."""
        link = self.stack.links[name]
        link.block()
        self._last(link.unblock)

    def slow(self, name: str) -> None:
        """Let the engine of a worker run for a small share of the time, for a while."""
        for _ in range(self.rng.randrange(1, 5)):
            pids = self.stack.part(name, "engine")
            _signal(pids, signal.SIGSTOP)
            time.sleep(0.5)
            _signal(pids, signal.SIGCONT)
            time.sleep(0.02)

    def fill_memory(self) -> None:
        """Leave no shared memory, and have a target start so."""
        self._during_restart(self.stack.host.filled(self.stack.host.shared), "target")

    def fill_disk(self) -> None:
        """Leave no room on the disk, and have a worker start so that has no digest on it."""
        disk = self.stack.host.disk_from_here
        for path in disk.rglob("*.json"):
            path.unlink()
        self._during_restart(self.stack.host.filled(disk), self.rng.choice(["target", "draft"]))

    def remove_files(self) -> None:
        """Remove sockets and rings that are in use."""
        for path in self.stack.shared_here():
            if self.rng.random() < 0.7:
                path.unlink(missing_ok=True)

    def tear_words(self) -> None:
        """Write noise over words of the rings, the count of what is written included."""
        for path in self.stack.shared_here():
            if not RINGS.is_name(path.name):
                continue
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                size = path.stat().st_size
                places = [64, *(8 * self.rng.randrange(size // 8) for _ in range(2000))]
                for place in places:
                    file.seek(max(place, 64))
                    file.write(self.rng.randbytes(8))

    def jump_clocks(self) -> None:
        """Set the clock of a service, or of all, and perhaps have them connect again by it."""
        names = list(self.stack.services)
        if self.rng.random() < 0.7:
            names = [self.rng.choice(names)]
        self.stack.clocks.set(names, self.rng.choice(JUMPS_S))
        if self.rng.random() < 0.5:
            for link in self.stack.links.values():
                link.reset()
        self._last(lambda: self.stack.clocks.set(names, 0.0))

    def replace_draft(self) -> None:
        """Have a draft of another model start in place of one, and later the first one again."""
        name = self.worker("draft")
        service = self.stack.services[name]
        before = service.command
        service.command = [
            *before,
            f"--model={OTHER_DRAFT}",
            "--algorithm=standalone",
        ]

        def bring_back() -> None:
            service.command = before
            self.stack.kill(name)

        self.healers.callback(bring_back)
        self._restart(name)
        time.sleep(OTHER_DRAFT_S)  # it gets requests, if it fits

    def garble_trees(self) -> None:
        """Let a draft send garbage for a while."""
        assert self.stack.garbler is not None
        with self.stack.garbler.garbling(self.rng.randrange(1 << 30)):
            if self.rng.random() < 0.5:  # relayed rounds: whatever opens now has no channel
                self._restart(LIAR)
            deadline = time.monotonic() + GARBLE_TIMEOUT_S  # it may be cut off
            while self.stack.garbler.num_garbled < NUM_GARBLED and time.monotonic() < deadline:
                time.sleep(0.05)

    def garble_peer(self) -> None:
        """Pretend to be a draft on a peer channel, with garbage trees and then noise."""
        assert self.stack.garbler is not None
        for path in self.stack.shared_here():
            for _ in range(NUM_STRANGERS if path.is_socket() else 0):
                send_garbage_to_peer(path, self.stack.garbler.opens, self.rng, num_frames=20)

    def _last(self, end: Callable[[], None]) -> None:
        length_s = self.rng.choice(LENGTHS_S)
        if length_s:
            time.sleep(length_s)
            end()
        else:
            self.healers.callback(end)

    def _during_restart(self, state: contextlib.AbstractContextManager[None], role: str) -> None:
        with state:
            self._restart(self.worker(role))

    def _restart(self, name: str) -> None:
        """Kill a service, and wait until its successor is ready."""
        service = self.stack.services[name]
        num_restarts = service.num_restarts
        self.stack.kill(name)
        wait_for(
            lambda: service.num_restarts > num_restarts and service.state is ServiceState.READY,
            RECOVER_TIMEOUT_S,
            service.log_tail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a stack.

    Args:
        takes_targets: Requests may lose their target by it. A request that loses two without a
            round in between is suspected of having brought them down, and rightly.
        needs_private: It is done to shared memory or to the disk.
    """

    strike: Callable[[Scene], object]
    takes_targets: bool = False
    needs_private: bool = False


def _all_workers(scene: Scene) -> None:
    """Kill a part of each worker within a moment: a request that met one death after the other
    would rightly be suspected.
    """
    names = [f"{role}-{index}" for role in ("target", "draft") for index in range(NUM_OF_ROLE)]
    parts = [scene.stack.part(name, scene.rng.choice(PARTS)) for name in names]
    _signal(set().union(*parts), signal.SIGKILL)


FAULTS: dict[str, Fault] = {
    "full shared memory": Fault(strike=Scene.fill_memory, takes_targets=True, needs_private=True),
    "torn words": Fault(strike=Scene.tear_words),
    "cut a target off": Fault(strike=lambda s: s.cut(s.worker("target")), takes_targets=True),
    "another draft": Fault(strike=Scene.replace_draft),
    "kill all workers": Fault(strike=_all_workers, takes_targets=True),
    "removed files": Fault(strike=Scene.remove_files),
    "clock jump": Fault(strike=Scene.jump_clocks, takes_targets=True),
    "reset clients": Fault(strike=lambda s: s.stack.links[ORCHESTRATOR].reset()),
    "full disk": Fault(strike=Scene.fill_disk, takes_targets=True, needs_private=True),
    "slow draft": Fault(strike=lambda s: s.slow(s.worker("draft"))),
    "reset a target": Fault(
        strike=lambda s: s.stack.links[s.worker("target")].reset(), takes_targets=True
    ),
    "cut a draft off": Fault(strike=lambda s: s.cut(s.worker("draft"))),
    # The other faults of these kinds come before.
    "cut clients off": Fault(strike=lambda s: s.cut(ORCHESTRATOR)),
    "reset a draft": Fault(strike=lambda s: s.stack.links[s.worker("draft")].reset()),
    # These have tests of their own: in test_faults.py, test_liveness.py, where all faults meet slow
    # targets, test_bad_input.py and test_fuzz_peer.py.
    "stop a draft": Fault(strike=lambda s: s.stop(s.worker("draft"))),
    "kill the orchestrator": Fault(strike=lambda s: s.kill(ORCHESTRATOR)),
    "stop a target": Fault(strike=lambda s: s.stop(s.worker("target")), takes_targets=True),
    "kill a draft": Fault(strike=lambda s: s.kill(s.worker("draft"))),
    "stop the orchestrator": Fault(strike=lambda s: s.stop(ORCHESTRATOR)),
    "kill a target": Fault(strike=lambda s: s.kill(s.worker("target")), takes_targets=True),
    "slow target": Fault(strike=lambda s: s.slow(s.worker("target"))),
    "garbage trees": Fault(strike=Scene.garble_trees),
    "garbage on a peer channel": Fault(strike=Scene.garble_peer),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault of a schedule.

    Args:
        delay_s: After the condition below holds.
        is_hasty: It comes right behind the one before, while that is being recovered from.
    """

    name: str
    delay_s: float
    is_hasty: bool


def make_schedule(seed: int, num_faults: int, *, num_dealt: int = 2) -> list[Strike]:
    """Return a schedule; schedules in a row begin with all faults in turn, some of them each.

    Args:
        num_faults: At least `num_dealt`.
        num_dealt: Faults that are dealt in turn; the others are chosen at random.
    """
    rng = random.Random(seed)
    deck = list(FAULTS)
    begin = [deck[(num_dealt * seed + i) % len(deck)] for i in range(num_dealt)]
    names = [*begin, *rng.choices(deck, k=num_faults - num_dealt)]
    return [
        Strike(name=name, delay_s=rng.uniform(0.0, 0.5), is_hasty=i > 0 and rng.random() < 0.4)
        for i, name in enumerate(names)
    ]


def play(
    stack: HarmedStack, callers: Sequence[Caller], schedule: Sequence[Strike], seed: int
) -> None:
    """Let the faults of a schedule happen to a stack, and heal them."""
    scene = Scene(stack=stack, rng=random.Random(seed))
    with scene.healers:
        has_lost_targets = False
        for strike in schedule:
            fault = FAULTS[strike.name]
            if fault.needs_private and not stack.host.is_private:
                continue
            if not strike.is_hasty or (has_lost_targets and fault.takes_targets):
                _wait_until_all_go_on(scene, callers)
                has_lost_targets = False
            time.sleep(strike.delay_s)
            fault.strike(scene)
            has_lost_targets |= fault.takes_targets
    _wait_until_all_go_on(scene, callers)


def _wait_until_all_go_on(scene: Scene, callers: Sequence[Caller]) -> None:
    """Wait for tokens; what lasts is healed if it keeps them off, such as both targets cut off."""
    if not go_on(callers, timeout_s=LAST_TIMEOUT_S):
        scene.healers.close()
        assert go_on(callers, timeout_s=GO_ON_TIMEOUT_S), [caller.doing for caller in callers]


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
