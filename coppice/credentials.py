"""What a client shows to a server, and expects of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.access.tls import Tls
from shared.access.tokens import bearer


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Of a client.

    Args:
        token: What the server knows it by; "": it has none.
        tls: None: plain text.
    """

    token: str = field(default="", repr=False)
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call. Raises: InvalidArgumentError for an odd token."""
        return bearer(self.token)


NO_CREDENTIALS = Credentials()
