"""Which drafts cannot work with which targets; each is logged once."""

from __future__ import annotations

import logging
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
        self._log(targets, drafts)

    def _log(self, targets: Sequence[WorkerSession], drafts: Sequence[WorkerSession]) -> None:
        logged = self._logged
        for address, problem in self.unpaired.items():
            if logged.get(address) != problem:
                logger.error("draft %s fits no target, nobody uses it: %s", address, problem)
        here = {draft.address for draft in drafts}
        kept = {} if targets else {address: logged[address] for address in logged.keys() & here}
        self._logged = {**kept, **self.unpaired}
