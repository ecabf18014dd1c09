"""What is said of tenants, the names of callers: how high a priority they may ask for.

`--max-priority 10,batch=0,web=20`: 10 for all but `batch` and `web`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.validation import GenerationRequest
from shared.errors import ConfigError

LEAST_PRIORITY = -100
MOST_PRIORITY = 100
FAIR_S = 1.0
"""Among those who wait, each request of a tenant that is here stands for so many seconds by which
its next one comes later, if there are other tenants: least served first, and nobody starves."""


class Tenants:
    """Limits of priorities.

    Args:
        max_priority: As of the flag.
    Raises: ConfigError if that cannot be read.
    """

    def __init__(self, max_priority: str) -> None:
        self._default, self._of_tenant = _parse(max_priority)

    def own(self, request: GenerationRequest, tenant: str) -> GenerationRequest:
        """Return the request as its tenant's, with the priority that it gets."""
        most = self._of_tenant.get(tenant, self._default)
        priority = max(LEAST_PRIORITY, min(request.priority, most))
        return replace(request, tenant=tenant, priority=priority)


def _parse(text: str) -> tuple[int, Mapping[str, int]]:
    default, of_tenant = 0, {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.rpartition("=")
        try:
            priority = int(value)
        except ValueError:
            raise ConfigError(
                f"--max-priority has {part!r}, expected a number or NAME=NUMBER, as in 10,batch=0"
            ) from None
        if not LEAST_PRIORITY <= priority <= MOST_PRIORITY:
            raise ConfigError(
                f"--max-priority has {priority}, expected {LEAST_PRIORITY}..{MOST_PRIORITY}"
            )
        if equals:
            of_tenant[name.strip()] = priority
        else:
            default = priority
    return default, of_tenant
