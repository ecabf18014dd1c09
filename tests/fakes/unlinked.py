"""An engine without links to others."""

from __future__ import annotations

from typing import Any

from shared.rpc.link import Link, LinkSet


class Unlinked:
    """What an engine needs to say that has no links; base of the fakes."""

    has_work_in_s: float | None = None

    @property
    def links(self) -> LinkSet:
        return LinkSet()

    def submit_linked(self, link: Link, message: Any) -> None:
        raise AssertionError(f"{message} over a link that does not exist")
