"""Which drafts cannot work with which targets, each logged once, and whose own drafts are."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from orchestrator.pairing import pair_problem
from orchestrator.workers import WorkerSession

logger = logging.getLogger(__name__)


class Pairs:
    """Which of the workers in use cannot work together; a line in the log for what is new."""

    def __init__(self) -> None:
        self.problems: dict[tuple[str, str], str] = {}
        """(target address, draft address) -> why they cannot work together."""
        self.unpaired: dict[str, str] = {}
        """Address of each draft that fits no target, though there are targets -> why."""
        self._owners: dict[str, str] = {}  # draft address -> target address
        self._logged: dict[str, str] = {}  # as `unpaired`, and kept while there is no target

    def update(self, targets: Sequence[WorkerSession], drafts: Sequence[WorkerSession]) -> None:
        """Look at all pairs again, and log what is new: once of a draft that fits no target."""
        known, self.problems, self.unpaired = self.problems, {}, {}
        for draft in drafts:
            misfits = {
                target.address: problem
                for target in targets
                if (problem := pair_problem(target.info, draft.info))
            }
            if targets and len(misfits) == len(targets):
                self.unpaired[draft.address] = next(iter(misfits.values()))
            for target, problem in misfits.items():
                self.problems[target, draft.address] = problem
                if (target, draft.address) not in known and draft.address not in self.unpaired:
                    logger.error(
                        "draft %s cannot draft for target %s: %s", draft.address, target, problem
                    )
        self._owners = self._owners_of(targets, drafts)
        self._log(targets, drafts)

    def is_own(self, target: str, draft: str) -> bool:
        """Return whether a draft is for a target's requests first; both are addresses.

        A step waits for all its trees, so it is best if they come from one draft, and a draft that
        works for one target need not do so for others. So where a host has at least as many drafts
        as targets, each draft is one target's own, the same in every process.
        """
        return self._owners.get(draft) == target

    def _owners_of(
        self, targets: Sequence[WorkerSession], drafts: Sequence[WorkerSession]
    ) -> dict[str, str]:
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)  # targets, by drafts
        for target in targets:
            fitting = [
                draft.address
                for draft in drafts
                if draft.host == target.host
                and (target.address, draft.address) not in self.problems
            ]
            alike[tuple(sorted(fitting))].append(target.address)
        return {
            draft: sorted(group)[turn % len(group)]
            for fitting, group in alike.items()
            if len(fitting) >= len(group)
            for turn, draft in enumerate(fitting)
        }

    def _log(self, targets: Sequence[WorkerSession], drafts: Sequence[WorkerSession]) -> None:
        logged = self._logged
        for address, problem in self.unpaired.items():
            if logged.get(address) != problem:
                logger.error("draft %s fits no target, nobody uses it: %s", address, problem)
        here = {draft.address for draft in drafts}
        kept = {} if targets else {address: logged[address] for address in logged.keys() & here}
        self._logged = {**kept, **self.unpaired}
