"""Several rounds of one stream in one TokenDelta message, and back.

A server that is busy sends rounds together; a client hands them on one by one, as they would have
come from a server that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter

from coppice.v1 import generation_pb2
from shared.errors import InvalidArgumentError
from shared.messages.codec import from_proto, to_proto
from shared.messages.fields import Within
from shared.messages.generation import RoundTree, TokenDelta
from shared.messages.routed_experts import RoutedExperts, join_routed

_COLUMNS = (
    "round_token_offsets",
    "round_num_chars",
    "round_num_accepted_drafts",
    "round_num_accepted_draft_chars",
)


_get_round = attrgetter(*(field.name for field in fields(TokenDelta)))


def write_deltas(message: generation_pb2.TokenDelta, deltas: Sequence[TokenDelta]) -> None:
    """Write deltas that follow each other, a round each, into one empty message.

    Field by field: every token of every request comes through here.
    """
    if len(deltas) == 1:
        (
            offset,
            token_ids,
            text,
            logprobs,
            num_drafts,
            num_draft_chars,
            tree,
            routed,
        ) = _get_round(deltas[0])
        if tree is not None:
            message.tree.CopyFrom(to_proto(tree))
    else:
        columns = zip(*map(_get_round, deltas), strict=True)
        offsets, ids, texts, lists, num_round_drafts, num_round_draft_chars, trees, parts = columns
        message.round_token_offsets.extend(offsets)
        message.round_num_chars.extend([*map(len, texts)])
        message.round_num_accepted_drafts.extend(num_round_drafts)
        message.round_num_accepted_draft_chars.extend(num_round_draft_chars)
        if any(trees):
            message.round_trees.extend([_tree_on_wire(tree) for tree in trees])
        offset, num_drafts, num_draft_chars = (
            offsets[0],
            sum(num_round_drafts),
            sum(num_round_draft_chars),
        )
        token_ids, text = [*chain.from_iterable(ids)], "".join(texts)
        logprobs = [*chain.from_iterable(lists)] if any(lists) else ()
        routed = join_routed(parts) if any(parts) else None
    message.token_offset = offset
    message.token_ids.extend(token_ids)
    message.num_accepted_drafts = num_drafts
    message.num_accepted_draft_chars = num_draft_chars
    if text:
        message.text = text
    if logprobs:
        message.logprobs.extend(map(to_proto, logprobs))
    if routed is not None:
        message.routed_experts.CopyFrom(to_proto(routed))


def split_delta(message: generation_pb2.TokenDelta) -> list[TokenDelta]:
    """Return the rounds of a message.

    Raises: InvalidArgumentError if the columns do not add up to what the message holds.
    """
    whole: TokenDelta = from_proto(message)
    columns = [getattr(message, name)[:] for name in _COLUMNS]
    if not any(columns):  # empty, all of them
        return [whole]
    _check_columns(columns, whole)
    return list(_rounds_of(whole, columns, _trees_of(message, len(columns[0]))))


def _tree_on_wire(tree: RoundTree | None) -> generation_pb2.RoundTree:
    return generation_pb2.RoundTree() if tree is None else to_proto(tree)


def _trees_of(message: generation_pb2.TokenDelta, num_rounds: int) -> list[RoundTree | None]:
    trees = message.round_trees
    if not trees:
        return [None] * num_rounds
    if len(trees) != num_rounds:
        raise InvalidArgumentError(
            f"round_trees has {len(trees)} entries for {num_rounds} rounds", field="round_trees"
        )
    with Within("round_trees"):
        return [from_proto(tree) if tree.token_ids else None for tree in trees]


def _check_columns(columns: list[list[int]], whole: TokenDelta) -> None:
    offsets, *counts = columns
    totals = (len(whole.text), whole.num_accepted_drafts, whole.num_accepted_draft_chars)
    for name, column, total in zip(_COLUMNS[1:], counts, totals, strict=True):
        if len(column) != len(offsets) or min(column) < 0 or sum(column) != total:
            raise InvalidArgumentError(
                f"{name} is {column}, expected {len(offsets)} counts that add up to {total}",
                field=name,
            )
    if offsets[0] != whole.token_offset or offsets != sorted(offsets):
        raise InvalidArgumentError(
            f"round_token_offsets is {offsets}, expected to rise from {whole.token_offset}",
            field="round_token_offsets",
        )


def _rounds_of(
    whole: TokenDelta, columns: list[list[int]], trees: Sequence[RoundTree | None]
) -> Iterator[TokenDelta]:
    begin_char = 0
    begins = [offset - whole.token_offset for offset in columns[0]]
    stops: list[int | None] = [*begins[1:], None]
    for begin, stop, num_chars, num_drafts, num_draft_chars, tree in zip(
        begins, stops, *columns[1:], trees, strict=True
    ):
        end_char = begin_char + num_chars
        yield TokenDelta(
            token_offset=whole.token_offset + begin,
            token_ids=whole.token_ids[begin:stop],
            text=whole.text[begin_char:end_char],
            logprobs=whole.logprobs[begin:stop],
            num_accepted_drafts=num_drafts,
            num_accepted_draft_chars=num_draft_chars,
            tree=tree,
            routed_experts=_part_of(whole.routed_experts, begin, stop),
        )
        begin_char = end_char


def _part_of(routed: RoutedExperts | None, begin: int, stop: int | None) -> RoutedExperts | None:
    """Return those of a round's tokens; None if it has none."""
    part = None if routed is None else routed.part(begin, stop)
    return part if part is not None and part.ids else None
