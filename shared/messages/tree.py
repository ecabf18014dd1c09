"""Token trees and what a target accepts of them.

Node 0 is the root (the target's bonus token of the round before); `parent_index` is topological,
root = -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from coppice.v1 import tree_pb2
from shared.errors import InvalidArgumentError, InvalidTreeError
from shared.messages.codec import Mark, Via, message
from shared.messages.fields import Count, Ids, RequestId, require_range
from shared.messages.generation import FinishReason, RoundTree, TokenLogprob
from shared.messages.routed_experts import RoutedExperts
from shared.messages.times import AnswerTimes

MAX_TREE_NODES = 64
MAX_NUM_STEPS = 16
MAX_TOPK = 16

_SCORES = "scores.cumulative_logprobs"
_SCORES_ON_WIRE = Via(
    lambda scores: {"cumulative_logprobs": scores},
    lambda scores, _: tuple(scores.cumulative_logprobs[:]),
    wire_name="scores",
)


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


def check_shape(shape: TreeShape, *, prefix: str = "speculation.") -> None:
    """Raise InvalidArgumentError, naming the field, if no tree can have this shape.

    `num_draft_tokens < num_steps + 1` is fine: the tree is cut to its best nodes.
    """

    def refuse(name: str, value: int, expected: str) -> None:
        raise InvalidArgumentError(
            f"{name} is {value}, expected {expected}",
            reason="INVALID_TREE_SHAPE",
            field=prefix + name,
        )

    if not 1 <= shape.num_steps <= MAX_NUM_STEPS:
        refuse("num_steps", shape.num_steps, f"1..{MAX_NUM_STEPS}")
    if not 1 <= shape.topk <= MAX_TOPK:
        refuse("topk", shape.topk, f"1..{MAX_TOPK}")
    if not 2 <= shape.num_draft_tokens <= MAX_TREE_NODES:
        refuse("num_draft_tokens", shape.num_draft_tokens, f"2..{MAX_TREE_NODES}, root included")
    most = shape.max_num_draft_tokens
    if shape.num_draft_tokens > most:
        refuse(
            "num_draft_tokens",
            shape.num_draft_tokens,
            f"at most 1 + topk + (num_steps - 1) * topk^2 = {most}; "
            "lower it, or raise topk or num_steps",
        )


def _require_shape(shape: TreeShape, _field: str) -> TreeShape:
    check_shape(shape, prefix="")
    return shape


FlatShape = Annotated[TreeShape, Mark.FLAT, _require_shape]


def _check_nodes(tree: TokenTree) -> None:
    """Check the sizes; the user of the tree checks its topology."""
    num_nodes = len(tree.token_ids)
    if not 1 <= num_nodes <= MAX_TREE_NODES:
        raise InvalidTreeError(
            f"token_ids has {num_nodes} nodes, must be 1..{MAX_TREE_NODES}", field="token_ids"
        )
    scores = tree.cumulative_logprobs
    for name, values in (("parent_index", tree.parent_index), (_SCORES, scores or tree.token_ids)):
        if len(values) != num_nodes:
            raise InvalidTreeError(
                f"{name} has {len(values)} entries for {num_nodes} nodes", field=name
            )


@message(tree_pb2.TokenTree, check=_check_nodes)
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A candidate tree; see proto TokenTree.

    Args:
        token_ids: [N] N = num_draft_tokens, root included.
        parent_index: [N] topological, root = -1.
        cumulative_logprobs: [N] sum of draft log-probabilities from the root.
        times: Only of a request that is timed.
    """

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count
    round_idx: Count
    seq_len: Count
    token_ids: tuple[int, ...]
    parent_index: tuple[int, ...]
    cumulative_logprobs: Annotated[tuple[float, ...], _SCORES_ON_WIRE] = ()
    times: AnswerTimes | None = None


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
        request_ids: [B], like the other columns up to num_nodes.
        num_nodes: Nodes of each tree, root included, 1..MAX_TREE_NODES.
        token_ids: [L] tree by tree, roots included.
        parent_index: [L] within the node's own tree, root = -1.
        times: Times of the requests that are timed, by index.
        is_overlapped: The draft's device grew the trees before the draft's host had the orders;
            targets of release 0.1.0 send the next orders of such drafts later.
        num_targets: Targets with requests of the draft's; 0: not said, as by release 0.1.0.
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
    is_overlapped: bool = False
    num_targets: int = 0

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


def _check_path(path: AcceptedPath) -> None:
    num_tokens = len(path.token_ids)
    if len(path.accept_index) != num_tokens:
        raise InvalidArgumentError(
            f"accept_index has {len(path.accept_index)} entries for {num_tokens} token_ids",
            field="accept_index",
        )
    if path.logprobs and len(path.logprobs) != num_tokens:
        raise InvalidArgumentError(
            f"logprobs has {len(path.logprobs)} entries for {num_tokens} token_ids",
            field="logprobs",
        )
    routed = path.routed_experts
    if routed is not None and routed.shape[0] != num_tokens:
        raise InvalidArgumentError(
            f"routed_experts has {routed.shape[0]} rows for {num_tokens} token_ids",
            field="routed_experts",
        )


@message(tree_pb2.AcceptedPath, check=_check_path)
@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """What a target committed in one round; see proto AcceptedPath."""

    request_id: RequestId
    target_epoch: Count
    round_idx: Count
    seq_len: Count
    accept_index: Ids
    token_ids: Ids
    num_accepted_drafts: Count
    num_draft_tokens: Annotated[int, partial(require_range, low=1)]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason = FinishReason.NONE
    matched_stop_token_id: int | None = None
    times: AnswerTimes | None = None
    tree: RoundTree | None = None
    routed_experts: RoutedExperts | None = None
    is_forced: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a tuple between processes: a step has one of these per request."""
        return restore_path, (*_get_path(self), int(self.finish_reason))


_PATH_NAMES = tuple(field.name for field in fields(AcceptedPath) if field.name != "finish_reason")
_get_path = attrgetter(*_PATH_NAMES)
_new, _set = object.__new__, object.__setattr__
_SETTERS = [
    getattr(AcceptedPath, name).__set__ for name in (*_PATH_NAMES, "finish_reason")
]  # of slots


def restore_path(*values: Any) -> AcceptedPath:
    """Return a path, as the __init__ of a frozen dataclass would make it, but sooner.

    Args:
        values: In the order of the fields, but `finish_reason`, an int, comes last.
    """
    path = _new(AcceptedPath)
    any(map(_set, repeat(path), _PATH_NAMES, values))
    _set(path, "finish_reason", FinishReason(values[-1]) if values[-1] else FinishReason.NONE)
    return path


def plain_paths(columns: Sequence[Sequence[Any]]) -> list[AcceptedPath]:
    """Return paths that say no more than tokens, made a column at a time: a step has hundreds.

    Args:
        columns: Of the fields without a default, in their order; at least one path.
    """
    paths = [*map(_new, repeat(AcceptedPath, len(columns[0])))]
    defaults = map(repeat, ((), None, None, None, None, False, FinishReason.NONE))
    for put, column in zip(_SETTERS, (*columns, *defaults), strict=True):
        any(map(put, paths, column))
    return paths
