"""What is said of tenants, the names of callers: how high a priority, how many requests at once.

`--max-priority 10,batch=0,web=20`: 10 for all but `batch` and `web`.
`--max-requests-per-tenant 64,batch=16`: 64 at once of each, but 16 of `batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.validation import GenerationRequest
from shared.errors import ConfigError

LEAST_PRIORITY = -100
MOST_PRIORITY = 100
MOST_REQUESTS = 1_000_000
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
        self._default, self._of_tenant = _parse(
            max_priority, option="--max-priority", least=LEAST_PRIORITY, most=MOST_PRIORITY
        )

    def own(self, request: GenerationRequest, tenant: str) -> GenerationRequest:
        """Return the request as its tenant's, with the priority that it gets."""
        most = self._of_tenant.get(tenant, self._default)
        priority = max(LEAST_PRIORITY, min(request.priority, most))
        return replace(request, tenant=tenant, priority=priority)


class TenantLimits:
    """How many requests each tenant may have here at once, waiting ones included.

    Args:
        max_requests: As of the flag; 0: as many as there are places.
    Raises: ConfigError if that cannot be read.
    """

    def __init__(self, max_requests: str = "0") -> None:
        self._default, self._of_tenant = _parse(
            max_requests, option="--max-requests-per-tenant", least=0, most=MOST_REQUESTS
        )

    def of(self, tenant: str) -> int:
        """Return a tenant's limit; 0: it has none."""
        return self._of_tenant.get(tenant, self._default)


def _parse(text: str, *, option: str, least: int, most: int) -> tuple[int, Mapping[str, int]]:
    default, of_tenant = 0, {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.rpartition("=")
        try:
            number = int(value)
        except ValueError:
            raise ConfigError(
                f"{option} has {part!r}, expected a number or NAME=NUMBER, as in 10,batch=0"
            ) from None
        if not least <= number <= most:
            raise ConfigError(f"{option} has {number}, expected {least}..{most}")
        if equals:
            of_tenant[name.strip()] = number
        else:
            default = number
    return default, of_tenant
