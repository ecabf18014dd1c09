"""Attached engines that reach each other by TCP alone, as on two hosts."""

from __future__ import annotations

import select

from shared.peer.channel import PeerChannels
from tests.local_pair import LocalRequest
from tests.peer_pair import PoisonedPeerPair

ACROSS_HOSTS = {"peer_socket": False, "peer_host": "127.0.0.1"}
"""Options of a target."""

_PATIENCE_S = 60.0


class TcpPeerPair(PoisonedPeerPair):
    """A pair that waits for what is on its way in the kernel and in the threads that connect."""

    waits_for_dials = True
    """Whether a draft is attached, or cannot be, before anything else happens."""

    def open_draft(self, request: LocalRequest) -> None:
        """Open the request's draft state; rounds are relayed if it cannot be attached."""
        super().open_draft(request)
        if self.waits_for_dials:
            self.settle()
            assert self.draft is not None
            if self.draft.requests[request.request_id].channel is None:
                del self.peer_until[request.request_id]

    def settle(self) -> None:
        """Wait until no channel is being opened."""
        assert self.draft is not None
        while any(request.dial is not None for request in self.draft.requests.values()):
            assert wait_for(self.draft.channels), "a dial has no end"
            self.pump()

    def step(self) -> bool:
        """Step both engines once; return whether anything is left to do."""
        if super().step():
            return True
        if all(request.finish_reason for request in self.requests.values()):
            return False
        assert self.draft is not None
        return wait_for(self.target.channels, self.draft.channels)


def wait_for(*channels: PeerChannels) -> bool:
    """Wait until an end has something to receive; return False if that takes too long."""
    poller = select.poll()
    for one in channels:
        for fd, events in one.events.items():
            poller.register(fd, events & select.POLLIN)
    return bool(poller.poll(_PATIENCE_S * 1e3))
