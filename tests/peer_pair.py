"""A local pair whose engines are attached: they run rounds between themselves.

A stand-in for the orchestrator that gives credit for trees from the first path on, until a round is
missed. Then it relays a tree before it gives credit again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draft_service.engine import DraftEngine
from shared.messages import (
    AcceptedPath,
    DraftDetached,
    DraftRest,
    FeatureChunk,
    PathBatch,
    PeerTree,
    PeerTrees,
    TokenTree,
    TreeBatch,
)
from shared.peer.channel import PeerChannel
from shared.rpc.engine import will_have_work
from target_service.engine import TargetEngine
from tests.engines import PoisonedPair
from tests.local_pair import LocalPair, LocalRequest


class PeerPair(LocalPair):
    """The rounds between two engines in one process, over a real socket.

    Args:
        credit_rounds: Rounds of a credit.
        margin: Rounds before the end of a credit at which the next one is given; 0: at its end.
        adapts: The target may choose smaller trees, or none.
        edit_tree: As of LocalPair; also sees the trees that go over the channel (None: lost there).
    """

    def __init__(
        self,
        target: TargetEngine,
        draft: DraftEngine | None = None,
        *,
        credit_rounds: int = 8,
        margin: int = 3,
        adapts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(target, draft, **options)
        self.target_socket = target.info.peer_socket
        self.target_peer_address = target.info.peer_address
        self.is_deaf = False
        """Whether answers wait in `unheard`."""
        self.unheard: list[AcceptedPath] = []
        self.peer_until: dict[str, int] = {}
        """Of the requests in peer rounds, the last round of the credit."""
        self.trees: list[TokenTree] = []
        """Those that came over the channel."""
        self.rows: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """Feature rows [start, stop) that came over the channel, by request and draft_epoch."""
        self.rests: list[DraftRest] = []
        """What the target said about trees that it wants or does not want."""
        self.detached: list[str] = []
        """Requests whose channel to their draft was lost, as the target said."""
        self._num_tokens: dict[str, int] = {}  # that the draft was opened with
        self._peer_credit_rounds = credit_rounds
        self._margin = margin
        self._adapts = adapts

    def step(self) -> bool:
        """Step both engines once; return whether anything is left to do."""
        self.pump()
        super().step()
        self.pump()
        return will_have_work(self.target) or self.draft_has_work

    @property
    def draft_has_work(self) -> bool:
        """Return whether there is a draft with work, now or later."""
        return self.draft is not None and will_have_work(self.draft)

    def pump(self) -> None:
        """Carry what is on the channels until both ends are silent."""
        while self.to_draft() or self.to_target():
            pass

    def to_target(self) -> bool:
        """Carry what the draft's engine has said; return whether there was anything."""
        assert self.draft is not None
        self.draft.channels.flush()
        received = self.target.channels.receive()
        for channel, message in received:
            self.tell_target(channel, message)
        return bool(received)

    def to_draft(self) -> bool:
        """Carry what the target's engine has said; return whether there was anything."""
        assert self.draft is not None
        self.target.channels.flush()
        received = self.draft.channels.receive()
        for channel, message in received:
            self.tell_draft(channel, message)
        return bool(received)

    def tell_target(self, channel: PeerChannel, message: Any) -> None:
        """Let the target's engine hear one message."""
        if isinstance(message, TreeBatch):
            trees = [token_tree(tree) for tree in message.trees()]
            self.trees += trees
            edited = [tree for tree in map(self.edit_tree, trees) if tree is not None]
            if not edited:
                return
            message = replace(
                batch_of(*edited),
                is_overlapped=message.is_overlapped,
                num_targets=message.num_targets,
            )
        self.target.submit_peer(channel, message)

    def tell_draft(self, channel: PeerChannel, message: Any) -> None:
        """Let the draft's engine hear one message."""
        assert self.draft is not None
        match message:
            case PathBatch() if message.rows is not None:
                for part in message.parts:
                    self._note_rows(part.request_id, part.seq_len, len(part.token_ids))
            case FeatureChunk():
                self._note_rows(message.request_id, message.start, message.shape[0])
        self.draft.submit_peer(channel, message)

    def hear(self) -> None:
        """Take the answers that were held back."""
        self.is_deaf = False
        unheard, self.unheard = self.unheard, []
        for path in unheard:
            self.on_path(path)

    def miss(self, request: LocalRequest) -> None:
        """End peer rounds: order the next one of the root alone, done or not."""
        self.peer_until.pop(request.request_id, None)
        request.ordered_round = -1
        self.verify(request, None)

    def open_draft(self, request: LocalRequest) -> None:
        """Open the request's draft state with the next epoch, also in mid-stream."""
        self._num_tokens[request.request_id] = len(request.tokens)
        self.peer_until[request.request_id] = 0
        super().open_draft(request)

    def order_tree(self, request: LocalRequest) -> None:
        """Order the next tree, unless the target does so; renew its credit."""
        assert request.shape is not None
        until = self.peer_until.get(request.request_id)
        if until is None:
            self.send_order(request, self._num_tokens[request.request_id])
        elif request.paths[-1].round_idx + self._margin >= until:
            trees = PeerTrees(
                draft_epoch=request.draft_epoch, shape=request.shape, adapts=self._adapts
            )
            self.peer_until[request.request_id] = self.give_credit(
                request, self._peer_credit_rounds, trees
            )

    def on_target(self, message: Any) -> None:
        if isinstance(message, DraftDetached):
            self._on_detached(message)
        elif isinstance(message, DraftRest):
            self.rests.append(message)
        else:
            super().on_target(message)

    def _on_detached(self, message: DraftDetached) -> None:
        request = self.requests[message.request_id]
        epochs = (message.target_epoch, message.draft_epoch)
        if epochs == (request.target_epoch, request.draft_epoch):
            self.detached.append(message.request_id)
            # Else its end is in the same batch: on the wire paths come first.
            is_held = message.request_id in self.target.requests
            has_path = request.target_epoch in {path.target_epoch for path in request.paths}
            if message.request_id in self.peer_until and is_held and has_path:
                self.miss(request)

    def on_path(self, path: AcceptedPath) -> None:
        request = self.requests[path.request_id]
        if self.is_deaf:
            self.unheard.append(path)
        elif path.target_epoch < request.target_epoch:
            pass
        elif path.target_epoch == 1 and path.round_idx < len(request.paths):
            assert replace(path, times=None) == request.paths[path.round_idx], "another answer"
        else:
            assert request.target_epoch > 1 or path.round_idx == len(request.paths), (
                "one is missing"
            )
            super().on_path(path)

    def on_tree(self, tree: TokenTree) -> None:
        is_current = tree.round_idx == self.requests[tree.request_id].ordered_round
        super().on_tree(tree)
        if is_current and self._is_attached(tree.request_id):
            self.peer_until[tree.request_id] = 0

    def _is_attached(self, request_id: str) -> bool:
        held = self.target.requests.get(request_id)
        return held is not None and held.draft is not None

    def lose_draft(self, request: LocalRequest) -> None:
        was_peer = self.peer_until.pop(request.request_id, None)
        super().lose_draft(request)
        if was_peer is not None and not request.finish_reason:
            self.verify(request, None)

    def _note_rows(self, request_id: str, start: int, count: int) -> None:
        assert self.draft is not None
        request = self.draft.requests.get(request_id)
        if request is not None:
            epoch = (request_id, request.open.draft_epoch)
            self.rows.setdefault(epoch, []).append((start, start + count))


def batch_of(*trees: TokenTree) -> TreeBatch:
    """Return what carries trees over a channel."""
    return TreeBatch(
        request_ids=[tree.request_id for tree in trees],
        target_epochs=[tree.target_epoch for tree in trees],
        draft_epochs=[tree.draft_epoch for tree in trees],
        round_idx=[tree.round_idx for tree in trees],
        seq_lens=[tree.seq_len for tree in trees],
        num_nodes=[len(tree.token_ids) for tree in trees],
        token_ids=[token_id for tree in trees for token_id in tree.token_ids],
        parent_index=[parent for tree in trees for parent in tree.parent_index],
        times={i: tree.times for i, tree in enumerate(trees) if tree.times is not None},
    )


def token_tree(tree: PeerTree) -> TokenTree:
    """Return a tree that came over a channel as one of the other kind."""
    return TokenTree(**{**tree._asdict(), "token_ids": tuple(tree.token_ids)})


class PoisonedPeerPair(PeerPair, PoisonedPair):
    """An attached pair whose KV is NaN wherever nothing is committed, between any two steps."""


def peer_rounds(pair: PeerPair, request: LocalRequest) -> int:
    """Return how many of the request's rounds had a tree that came over the channel."""
    mine = {tree.round_idx for tree in pair.trees if tree.request_id == request.request_id}
    return sum(path.round_idx in mine for path in request.paths if path.num_draft_tokens > 1)


def close_channels(*engines: TargetEngine | DraftEngine) -> None:
    """Close the engines' ends of every channel."""
    for engine in engines:
        for channel in engine.channels:
            channel.close()
        engine.channels.receive()
