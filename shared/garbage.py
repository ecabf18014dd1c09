"""Python's garbage collector in processes that must not pause."""

from __future__ import annotations

import gc

_THRESHOLD = 50_000


def settle_garbage() -> None:
    """Exempt all that lives now from collection, and look at the rest less often.

    What is loaded stays; looking through it would hold everything up for tens of milliseconds now
    and then. Messages hold no cycles, so there is next to nothing to find.

    Mutates: the collector of this process.
    """
    gc.collect()  # what loading left behind would be kept for ever with the rest
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
