"""State of one request on a target worker."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shared.messages import (
    MAX_TREE_NODES,
    AcceptedPath,
    PeerTree,
    PeerTrees,
    TargetOpen,
    TokenTree,
    TreeShape,
)
from shared.priority import turn_s
from target_service.draft_peer import DraftPeer
from target_service.feature_log import FeatureLog

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher


class Phase(enum.Enum):
    """Where a request stands; only the scheduler and the commit move it."""

    WAITING = "waiting"
    """No pages yet."""
    PREFILL = "prefill"
    """Pages held; tokens [committed_len, len(tokens)) have no committed KV yet."""
    RUNNING = "running"
    """tokens[-1] is the root; between rounds, or with a round queued."""


@dataclass(frozen=True, slots=True)
class RootOnlyRound:
    """A round of the root alone."""

    @property
    def num_rows(self) -> int:
        return 1

    @property
    def most_drafts(self) -> int:
        return 0


class HostTree(NamedTuple):
    """A round whose tree is here.

    Args:
        token_ids, parent_index: [N], root first.
        source: "relayed" by the orchestrator, sent by the draft's engine ("peer"), or what the
            "grammar" makes certain.
        num_grown: Nodes that a draft has grown, root included: a grammar leaves some of them out,
            and adds others.
    """

    token_ids: Sequence[int]
    parent_index: tuple[int, ...]
    source: str
    num_grown: int

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def most_drafts(self) -> int:
        return len(self.token_ids) - 1


class DeviceTree(NamedTuple):
    """A round whose tree the device takes from the mailbox.

    Args:
        shape: The largest that the tree may be.
    """

    shape: TreeShape

    @property
    def num_rows(self) -> int:
        return self.shape.num_draft_tokens

    @property
    def most_drafts(self) -> int:
        return self.shape.num_steps


QueuedRound = RootOnlyRound | HostTree | DeviceTree
ROOT_ONLY = RootOnlyRound()


@dataclass(slots=True, kw_only=True, eq=False)
class TargetRequest:
    """A request: its tokens are the truth, its KV can be rebuilt from them.

    Args:
        open: What the orchestrator asked for.
        admission_idx: Order in which requests came.
        opened_s: When it came, seconds of the monotonic clock.
        tokens: Prompt + output. While RUNNING, committed_len == len(tokens) - 1.
        token_limit: Tokens, the prompt included, with which the request ends.
        stop_ids: Tokens with which it may end earlier.
        committed_len: Tokens with committed KV; excludes the root. `seq_len` on the wire.
        launched_len: Tokens whose KV is computed by what was launched, for certain; a round in
            flight counts as its root. The next round's root, or the next prompt chunk, goes here.
        req_idx: Row of the page table; -1 while WAITING.
        round_idx: Last round answered; -1 before the prefill is.
        last_reply: Answer of that round, repeated when the round is.
        queued: The round to run next.
        queue_idx: Order of queueing; rounds that have waited longest run first.
        credit_until: Last round that needs no order.
        peer_trees: Trees that these rounds may have once their draft has caught up; None: none.
        num_in_flight: Rounds launched and not committed yet.
        num_unsure: Tokens that the newest of them may commit beside its root.
        num_grown: Nodes that a draft has grown for it; 0: all that it has, as far as is known.
        is_forced: Its tree is no draft's, but what its grammar forces.
        draft: The attached draft; None: there is none.
        newest_draft_epoch: Of the drafts that attached or subscribed; older ones are over.
        last_credited_round: Last round that had begun without an order when a credit was ended.
        features: Rows kept for a draft; None when no draft wants any.
        matcher: Follows the output in its grammar; None: it has none.
    """

    open: TargetOpen
    admission_idx: int
    opened_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    token_limit: int = 0
    stop_ids: frozenset[int] = frozenset()
    committed_len: int = 0
    launched_len: int = 0
    phase: Phase = Phase.WAITING
    req_idx: int = -1
    round_idx: int = -1
    last_reply: AcceptedPath | None = None
    queued: QueuedRound | None = None
    queue_idx: int = 0
    credit_until: int = 0
    peer_trees: PeerTrees | None = None
    num_in_flight: int = 0
    num_unsure: int = 0
    num_grown: int = 0
    is_forced: bool = False
    draft: DraftPeer | None = None
    newest_draft_epoch: int = 0
    last_credited_round: int = 0
    features: FeatureLog | None = None
    matcher: OutputMatcher | None = None

    @property
    def request_id(self) -> str:
        return self.open.request_id

    @property
    def target_epoch(self) -> int:
        return self.open.target_epoch

    @property
    def turn(self) -> tuple[float, int]:
        """Return what orders requests by priority and age: the first one is retracted last."""
        return turn_s(self.opened_s, self.open.priority), self.admission_idx

    @property
    def keeps_rows(self) -> bool:
        """Return whether feature rows of the steps that are launched now are kept."""
        return self.features is not None and not self.features.is_dormant

    @property
    def next_num_rows(self) -> int:
        """Return the rows of the next round."""
        return 1 if self.queued is None else self.queued.num_rows

    @property
    def most_launched_len(self) -> int:
        """Return `launched_len`, if all drafts of the round in flight are accepted."""
        return self.launched_len + (self.num_unsure if self.num_in_flight else 0)

    @property
    def is_between_rounds(self) -> bool:
        """Return whether the root is known and no round is queued or in flight."""
        return self.phase is Phase.RUNNING and self.queued is None and not self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        """Return whether tokens of the prompt are left to launch."""
        return self.phase is Phase.PREFILL and self.launched_len < len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens so far, those of earlier epochs included."""
        return len(self.tokens) - self.open.num_prompt_tokens

    @property
    def is_sampled_by_path(self) -> bool:
        """Return whether sampling needs the tokens before it on the host."""
        return self.open.sampling.has_penalties or self.matcher is not None

    def can_run_alone(self, *, overlaps_steps: bool) -> bool:
        """Return whether a round of the root alone can be launched by credit, without an order.

        Args:
            overlaps_steps: Also when the root is still being computed, by a round or by the end of
                the prompt, unless sampling needs it.
        """
        if self.queued is not None or not (self.phase is Phase.RUNNING or self.num_in_flight):
            return False
        if self.draft is not None and self.draft.is_waited_for:
            return False
        if self.num_in_flight:
            is_known = not self.num_unsure and not self.is_sampled_by_path
            if not (overlaps_steps and is_known):
                return False
        has_credit = self.round_idx + self.num_in_flight < self.credit_until
        return has_credit and len(self.tokens) + self.num_in_flight < self.token_limit

    def host_tree(self, tree: TokenTree | PeerTree, source: str) -> HostTree:
        """Return the round of a tree that has come, as the grammar wants it."""
        token_ids: Sequence[int] = tree.token_ids
        parent_index = tree.parent_index
        num_grown = len(token_ids)
        if self.matcher is not None:
            token_ids, parent_index = self.matcher.prune_and_graft(
                token_ids, parent_index, most_nodes=MAX_TREE_NODES
            )
        return HostTree(token_ids, parent_index, source, num_grown)

    def queue_forced(self) -> None:
        """Let a round that would have the root alone have what must follow it, too."""
        if self.matcher is None or not self.open.grows_forced:
            return
        if self.can_run_alone(overlaps_steps=False) and (forced := self.matcher.forced()):
            token_ids = [self.tokens[-1], *forced]
            self.queued = HostTree(token_ids, tuple(range(-1, len(forced))), "grammar", 1)

    def end_credit(self) -> None:
        """Let no round run without an order but those that have begun."""
        num_begun = self.num_in_flight + (self.queued is not None)
        self.credit_until = min(self.credit_until, self.round_idx + num_begun)
        self.last_credited_round = max(self.last_credited_round, self.credit_until)
        self.peer_trees = None

    def note_launch(self, queue_idx: int) -> None:
        """Take note that the next round is in flight, and of the turn of the round after it."""
        self.num_unsure = 0 if self.queued is None else self.queued.most_drafts
        tree = self.queued if isinstance(self.queued, HostTree) else None
        self.num_grown = 0 if tree is None else tree.num_grown
        self.is_forced = tree is not None and tree.source == "grammar"
        self.queued = None
        self.queue_idx = queue_idx
        if self.phase is Phase.RUNNING or self.num_in_flight:  # else it is the end of the prompt
            self.launched_len += 1
        self.num_in_flight += 1
