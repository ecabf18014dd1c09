"""The accepted paths of a step as columns: one message for all requests of an orchestrator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from coppice.v1 import target_pb2
from shared.errors import InvalidArgumentError
from shared.messages.fields import (
    MAX_REQUEST_ID_LEN,
    require_ids,
    require_range,
    require_request_id,
    require_same_lengths,
    split_column,
)
from shared.messages.tree import AcceptedPath, plain_paths

_COLUMNS = (
    "request_ids",
    "target_epochs",
    "round_idx",
    "seq_lens",
    "num_accepted_drafts",
    "num_draft_tokens",
)
_FIELDS = (
    "request_id",
    "target_epoch",
    "round_idx",
    "seq_len",
    "num_accepted_drafts",
    "num_draft_tokens",
)
_get_fields = attrgetter(*_FIELDS, "token_ids", "accept_index")
_LEAST = {"num_draft_tokens": 1}


def is_plain(path: AcceptedPath) -> bool:
    """Return whether the columns hold all that a path says."""
    return (
        not path.finish_reason
        and path.times is None
        and path.tree is None
        and path.routed_experts is None
        and not path.logprobs
        and path.matched_stop_token_id is None
        and not path.is_forced
    )


def paths_arguments(paths: Iterable[AcceptedPath]) -> dict[str, Any]:
    """Return the arguments of the message of plain paths, at least one."""
    *columns, token_ids, accept_index = zip(*map(_get_fields, paths), strict=True)
    return {
        **dict(zip(_COLUMNS, columns, strict=True)),
        "num_tokens": list(map(len, token_ids)),
        "token_ids": list(chain.from_iterable(token_ids)),
        "accept_index": list(chain.from_iterable(accept_index)),
    }


def paths_from_proto(message: target_pb2.AcceptedPathBatch) -> list[AcceptedPath]:
    """Return the paths after checking that the arrays agree.

    Raises: InvalidArgumentError naming the field.
    """
    num_tokens = message.num_tokens[:]
    columns = [getattr(message, name)[:] for name in _COLUMNS]
    require_same_lengths(num_tokens, *columns)
    if not num_tokens:
        return []
    _check_counts(columns, message, num_tokens)
    token_ids = split_column(require_ids(message.token_ids[:], "token_ids"), num_tokens)
    accept_index = split_column(require_ids(message.accept_index[:], "accept_index"), num_tokens)
    request_ids, epochs, round_idx, seq_lens, num_drafts, num_nodes = columns
    begin = (request_ids, epochs, round_idx, seq_lens)
    return plain_paths((*begin, accept_index, token_ids, num_drafts, num_nodes))


def _check_counts(
    columns: Sequence[Sequence[Any]], message: target_pb2.AcceptedPathBatch, num_tokens: list[int]
) -> None:
    for name, column in zip(_COLUMNS[1:], columns[1:], strict=True):
        require_range(min(column), name, _LEAST.get(name, 0))
    lengths = [*map(len, columns[0])]
    if not 0 < min(lengths) <= max(lengths) <= MAX_REQUEST_ID_LEN:
        for request_id in columns[0]:
            require_request_id(request_id)
    for name in ("token_ids", "accept_index"):
        size = len(getattr(message, name))
        if min(num_tokens) < 0 or sum(num_tokens) != size:
            raise InvalidArgumentError(
                f"num_tokens is {num_tokens}, {name} has {size} entries", field=name
            )
