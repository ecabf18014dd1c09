"""Where the feature rows of a PathBatch lie: in the ring, or in the message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from shared.messages import PathRows
from shared.peer.channel import PeerChannel
from target_service.feature_log import FeatureRows
from target_service.features import FeatureOutlet
from target_service.request import TargetRequest

Prepare = Callable[[], None]
"""What is to be done right before a message is sent."""


def place_rows(
    outlet: FeatureOutlet,
    channel: PeerChannel,
    requests: Sequence[TargetRequest],
    parts: Sequence[FeatureRows],
) -> Iterator[tuple[slice, PathRows, Prepare | None]]:
    """Yield for each message which paths it brings, their rows, and what is done before it is sent.

    Paths that fit into no message are left out: their rows follow once each is committed.

    Args:
        parts: Rows of each path.
    """
    counts = list(map(len, parts))
    if channel.shares_memory:
        place = outlet.claim_early(requests, counts)
        if place is not None:  # else there are too many for the ring
            yield slice(len(parts)), place, functools.partial(outlet.write_early, place, parts)
        return
    for span in _spans(counts, outlet.rows_per_chunk):
        rows = outlet.take_early(requests[span], parts[span])
        if rows is not None:  # else one path is too large
            yield span, rows, None


def _spans(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Yield consecutive parts of `counts` of which each adds up to at most `most`, if it can."""
    first = total = 0
    for i, count in enumerate(counts):
        if total + count > most and i > first:
            yield slice(first, i)
            first, total = i, 0
        total += count
    yield slice(first, len(counts))
