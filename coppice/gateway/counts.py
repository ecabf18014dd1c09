"""What the gateway counts of its HTTP requests."""

from __future__ import annotations

from collections import Counter

from shared.metrics.samples import Samples, histogram, named
from shared.metrics.tally import Tally

DURATION_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
# What a reader sees before it happens for the first time: a rate begins at 0.
_SEEN = (("/v1/chat/completions", 200), ("/v1/completions", 200))


class HttpCounts:
    """Counters of one process."""

    def __init__(self) -> None:
        self.num_running = 0
        """HTTP requests that are being answered."""
        self._ended: Counter[tuple[str, int]] = Counter(dict.fromkeys(_SEEN, 0))
        self._num_tokens = 0
        self._duration = Tally(DURATION_BOUNDS_S)

    def note_end(self, path: str, status: int, *, num_tokens: int, duration_s: float) -> None:
        """Count a request that has ended.

        Args:
            path: Of an endpoint; others are counted as "other".
            status: Of HTTP; 499: the client went away.
            num_tokens: Of all of its outputs.
        """
        self._ended[path, status] += 1
        self._num_tokens += num_tokens
        self._duration.add(duration_s)

    def samples(self, *, is_ready: bool) -> Samples:
        """Return what /metrics says."""
        ended = {
            named("coppice_http_requests_total", path=path, status=status): float(count)
            for (path, status), count in self._ended.items()
        }
        return {
            "coppice_ready": float(is_ready),
            "coppice_http_requests_running": float(self.num_running),
            "coppice_http_tokens_total": float(self._num_tokens),
            **ended,
            **dict(histogram("coppice_http_request_duration_seconds", self._duration)),
        }
