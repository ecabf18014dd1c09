"""Plain values that cross a process or service seam. No torch here: fronts and orchestrator use it.

Names follow docs/glossary.md. Token trees: node 0 is the root (the target's bonus token of the
round before), `parent_index` is topological, root = -1.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NewType

PageId = NewType("PageId", int)
Slot = NewType("Slot", int)
NodeIdx = NewType("NodeIdx", int)

MAX_TREE_NODES = 64
MAX_NUM_STEPS = 16
MAX_TOPK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """How a tree is grown.

    Args:
        num_steps: Depth without the root, 1..16.
        topk: Children kept per expanded node, 1..16.
        num_draft_tokens: Nodes verified, ROOT INCLUDED, 2..64.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def max_num_draft_tokens(self) -> int:
        """Return the most nodes that growth can produce, root included."""
        return 1 + self.topk + (self.num_steps - 1) * self.topk**2

    def within(self, num_nodes: int) -> TreeShape | None:
        """Return the shape cut to so many nodes, root included; None if only the root fits."""
        if num_nodes >= self.num_draft_tokens:
            return self
        return None if num_nodes < 2 else replace(self, num_draft_tokens=num_nodes)

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Resolved sampling parameters; every "off" value is the default.

    Args:
        temperature: 0 = greedy.
        top_k: 0 = off.
        seed: Unsigned 64-bit.
        logit_bias: (token id, value) pairs, ascending ids.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Return whether logits depend on the tokens of the node's own path."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """What the target needs to cut a path inside the commit; stop strings are the orchestrator's.

    Args:
        max_new_tokens: Output tokens in all, tokens of earlier epochs included.
        stop_token_ids: EOS ids (unless ignored) and the request's own.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


class FinishReason(enum.IntEnum):
    """Why a request ended; values equal the proto's."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CONTEXT_LENGTH = 3
    ABORTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Raw-logit log-probability of an output token and its most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StageTime(NamedTuple):
    """What was done or waited for up to a moment, from the end of the stage before on.

    Args:
        end_ns: Monotonic clock, as everywhere in times.
    """

    name: str
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """How a worker spent the time from an order to its answer; see proto AnswerTimes."""

    clock_id: int
    begin_ns: int
    stages: tuple[StageTime, ...] = ()

    @property
    def end_ns(self) -> int:
        """Return the end of the last stage."""
        return self.stages[-1].end_ns if self.stages else self.begin_ns

    def then(self, name: str, end_ns: int) -> AnswerTimes:
        """Return these times and one more stage; a stage never takes less than nothing."""
        stage = StageTime(name=name, end_ns=max(end_ns, self.end_ns))
        return AnswerTimes(
            clock_id=self.clock_id, begin_ns=self.begin_ns, stages=(*self.stages, stage)
        )

    def including(self, kind: str, other: AnswerTimes | None) -> AnswerTimes:
        """Return these times and those of what was asked of a `kind` of worker on this machine."""
        if other is None:
            return self
        times = self.then(f"{kind}: channel", other.begin_ns)
        for stage in other.stages:
            times = times.then(f"{kind}: {stage.name}", stage.end_ns)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A candidate tree; see proto TokenTree.

    Args:
        token_ids: [N] N = num_draft_tokens, root included.
        parent_index: [N] topological, root = -1.
        cumulative_logprobs: [N] sum of draft log-probabilities from the root.
        times: Of a timed request.
        has_peer: The draft is attached to the request's target.
    """

    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_ids: tuple[int, ...]
    parent_index: tuple[int, ...]
    cumulative_logprobs: tuple[float, ...] = ()
    times: AnswerTimes | None = None
    has_peer: bool = False


class PeerTree(NamedTuple):
    """A tree of a TreeBatch; the fields are those of a TokenTree."""

    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_ids: Sequence[int]
    parent_index: tuple[int, ...]
    times: AnswerTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """The trees that a step grew for B requests of one target, L nodes in all.

    Args:
        request_ids: [B], as is what follows.
        num_nodes: Of each tree, root included, 1..MAX_TREE_NODES.
        token_ids: [L] tree by tree, roots included.
        parent_index: [L] within the own tree, root = -1.
        times: Of timed requests, by their place.
        is_ahead: The draft's device grew them before the orders came.
    """

    request_ids: Sequence[str]
    target_epochs: Sequence[int]
    draft_epochs: Sequence[int]
    round_idx: Sequence[int]
    seq_lens: Sequence[int]
    num_nodes: Sequence[int]
    token_ids: Sequence[int]
    parent_index: Sequence[int]
    times: Mapping[int, AnswerTimes] = field(default_factory=dict)
    is_ahead: bool = False

    def trees(self) -> Iterator[PeerTree]:
        """Yield each tree."""
        columns = zip(
            self.request_ids,
            self.target_epochs,
            self.draft_epochs,
            self.round_idx,
            self.seq_lens,
            self.num_nodes,
            strict=True,
        )
        first = 0
        for i, (request_id, target_epoch, draft_epoch, round_idx, seq_len, count) in enumerate(
            columns
        ):
            stop = first + count
            yield PeerTree(
                request_id,
                target_epoch,
                draft_epoch,
                round_idx,
                seq_len,
                self.token_ids[first:stop],
                tuple(self.parent_index[first:stop]),
                self.times.get(i),
            )
            first = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """What a target committed in one round; see proto AcceptedPath."""

    request_id: str
    target_epoch: int
    round_idx: int
    seq_len: int
    accept_index: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_accepted_drafts: int
    num_draft_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason = FinishReason.NONE
    matched_stop_token_id: int | None = None
    times: AnswerTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """How the target's hidden rows become features.

    Args:
        layer_ids: Layers whose output (residual stream) is captured, in order of concatenation;
            empty: the output of the final norm.
        width: Values per row; 0 = the draft needs no features.
        dtype: "float32", "float16" or "bfloat16"; "" when width is 0.
        projection: model_hash of the EAGLE-3 head whose fc the target applies to what it captured;
            "": rows are as they were captured.
    """

    layer_ids: tuple[int, ...] = ()
    width: int = 0
    dtype: str = ""
    projection: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Progress and room of an engine; see proto WorkerLoad.

    Args:
        kernel_launches: (kernel, launches) pairs, ascending.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_request_steps: int = 0
    num_moved_rounds: int = 0
    kernel_launches: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Identity and limits of a worker; see proto WorkerInfo.

    Args:
        feature_ring: Name of the target's feature ring; empty: it has none.
        peer_socket: Name of the target's socket for drafts on its host; empty: it has none.
        device_model, versions, cpu_threads, logits_hash: Of a target; what else decides about bits.
    """

    incarnation: str
    model: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    max_context_len: int
    page_size: int
    dtype: str
    device: str
    features: FeatureSpec
    kind: str
    load: WorkerLoad = field(default_factory=WorkerLoad)
    eos_token_ids: tuple[int, ...] = ()
    draft_window: int = 0
    feature_ring: str = ""
    peer_socket: str = ""
    device_model: str = ""
    versions: str = ""
    cpu_threads: int = 0
    logits_hash: str = ""


# --- messages of the target's session and feature streams ---------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOpen:
    """Rebuild a request from its tokens and prefill it; answered by AcceptedPath of round 0."""

    request_id: str
    target_epoch: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    logprobs: bool = False
    top_logprobs: int = 0
    wants_features: bool = False
    priority: int = 0
    is_timed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOnly:
    """Rounds of the root alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTrees:
    """Trees that the target orders of an attached draft.

    Args:
        token_offset: The draft has the tokens before this index.
        shape: The largest.
    """

    draft_epoch: int
    token_offset: int
    shape: TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Rounds up to and including `until_round_idx` need no order; see proto Credit.

    Args:
        trees: Where the trees of these rounds come from.
    """

    until_round_idx: int
    trees: RootOnly | PeerTrees = RootOnly()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRound:
    """Verify a tree (None: a root-only round) at `seq_len`.

    Args:
        credit: For the rounds after this one; None: each needs an order.
        received_ns: When it reached the worker of a timed request; stays there.
    """

    request_id: str
    target_epoch: int
    round_idx: int
    seq_len: int
    root_token_id: int
    tree: TokenTree | None = None
    credit: Credit | None = None
    received_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditUpdate:
    """Renew a request's credit between orders."""

    request_id: str
    target_epoch: int
    credit: Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDetached:
    """The channel to a draft is gone: no round of this draft is direct any more."""

    request_id: str
    target_epoch: int
    draft_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetClose:
    """Free whatever the request holds."""

    request_id: str
    target_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAdmitted:
    """The request holds pages and is being prefilled.

    Args:
        times: From the reservation of its pages to this answer; None = not known.
    """

    request_id: str
    target_epoch: int
    num_cached_tokens: int = 0
    times: AnswerTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A request-level failure; the stream goes on. `code` is a google.rpc.Code."""

    request_id: str
    code: int
    reason: str
    message: str
    field: str = ""
    target_epoch: int = 0
    draft_epoch: int = 0
    round_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetracted:
    """The worker dropped the request's state to make room."""

    request_id: str
    target_epoch: int = 0
    draft_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSubscribe:
    """Ask for every feature row from `from_position` on.

    Args:
        draft_epoch: Of the draft that asks: a newer one's rows go to no older one. 0: not said.
        ring_nonce: What the subscriber read from the target's feature ring; empty: rows must come
            in the messages.
    """

    request_id: str
    target_epoch: int
    from_position: int
    draft_epoch: int = 0
    ring_nonce: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureAck:
    """Rows below `position` were received."""

    request_id: str
    target_epoch: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureUnsubscribe:
    """No more rows, please."""

    request_id: str
    target_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFailure:
    """What a target engine answers to a subscription that it cannot serve.

    Told apart from a failure of the request itself, whose RequestFailure goes to the orchestrator;
    on the feature stream it travels as the RequestFailure that it holds.
    """

    failure: RequestFailure

    @property
    def request_id(self) -> str:
        """Return the request of the subscription."""
        return self.failure.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpan:
    """Bytes in a target's feature ring (shared/feature_ring.py).

    Args:
        ring: Name of the ring.
        begin: Place of the first byte in the stream of everything ever written there.
    """

    ring: str
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureChunk:
    """Consecutive feature rows from position `start` on.

    Args:
        shape: (num_rows, feature_width).
        data: Row-major little-endian values of `dtype`, or where they lie.
    """

    request_id: str
    target_epoch: int
    start: int
    shape: tuple[int, int]
    dtype: str
    data: bytes | RingSpan

    @property
    def num_inline_bytes(self) -> int:
        """Return how many bytes of rows travel in the message itself."""
        return 0 if isinstance(self.data, RingSpan) else len(self.data)

    def rows(self, first: int, stop: int) -> FeatureChunk:
        """Return rows [first, stop) of the chunk."""
        num_rows, width = self.shape
        data = self.data
        if isinstance(data, RingSpan):
            row_bytes = data.num_bytes // num_rows
            data = RingSpan(
                ring=data.ring,
                begin=data.begin + first * row_bytes,
                num_bytes=(stop - first) * row_bytes,
            )
        else:
            row_bytes = len(data) // num_rows
            data = data[first * row_bytes : stop * row_bytes]
        return replace(self, start=self.start + first, shape=(stop - first, width), data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRows:
    """Feature rows in a target's ring.

    Args:
        shape: (num_rows, feature_width).
        data: Where they lie.
    """

    shape: tuple[int, int]
    dtype: str
    data: RingSpan


class PathEntry(NamedTuple):
    """One request of a PathBatch.

    Args:
        round_idx: The round that the tree is for.
        seq_len: Index of the root that was verified, in prompt + output; position of the first row.
        token_ids: Accepted drafts and bonus token, which come after that root.
        mailbox_slot, round_tag: Where in the target's mailbox the tree goes as well, and its number
            there; number 0: nowhere.
    """

    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_ids: Sequence[int]
    mailbox_slot: int = 0
    round_tag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBatch:
    """What one step accepted of several requests of one draft, and the order of their next trees.

    Args:
        shape: Of every tree.
        rows: A row for every token, in the order of the parts; None if the draft takes none.
    """

    parts: tuple[PathEntry, ...]
    shape: TreeShape
    rows: RingRows | None


# --- messages of the draft's session stream -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOpen:
    """Build draft state for a request from its tokens and the target's features.

    Args:
        target_socket: The target's WorkerInfo.peer_socket.
    """

    request_id: str
    target_epoch: int
    draft_epoch: int
    target_address: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    is_timed: bool = False
    target_socket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRound:
    """New committed tokens, and the order to grow the next tree from the last of them.

    Args:
        token_offset: Index of token_ids[0] in prompt + output.
        received_ns: When it reached the worker of a timed request; stays there.
    """

    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_offset: int
    token_ids: tuple[int, ...]
    shape: TreeShape
    received_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftClose:
    """Free whatever the request holds."""

    request_id: str
    draft_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAttach:
    """This draft holds the request: the target may order its trees over the channel.

    Args:
        has_mailbox: The draft posts them to the target's mailbox as well.
    """

    request_id: str
    target_epoch: int
    draft_epoch: int
    has_mailbox: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDetach:
    """The draft holds the request no more, and wants no more of its features."""

    request_id: str
    target_epoch: int
    draft_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCommand:
    """What a draft engine asks its front to tell a target's feature stream.

    Args:
        avoids_ring: A subscription whose rows were overwritten in the ring: send them as bytes.
    """

    target_address: str
    command: FeatureSubscribe | FeatureAck | FeatureUnsubscribe
    avoids_ring: bool = False
