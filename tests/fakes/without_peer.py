"""An engine without channels to others."""

from __future__ import annotations

from typing import Any

from shared.peer.channel import PeerChannel, PeerChannels


class WithoutPeer:
    """What an engine needs to say that has no channels; base of the fakes."""

    has_work_in_s: float | None = None

    @property
    def channels(self) -> PeerChannels:
        return PeerChannels()

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        raise AssertionError(f"{message} over a channel that does not exist")
