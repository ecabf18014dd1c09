"""Names for which services say their health: "" is alive, a service's full name is ready."""

from __future__ import annotations

ORCHESTRATOR_SERVICE = "coppice.v1.GenerationService"
SPECULATION_SERVICE = ORCHESTRATOR_SERVICE + "/speculation"
"""SERVING while some draft fits some target."""
GATEWAY_SERVICE = "coppice.v1.Gateway"
"""The HTTP gateway; it has no methods of gRPC."""
TARGET_SERVICE = "coppice.v1.TargetService"
DRAFT_SERVICE = "coppice.v1.DraftService"
CONTROL_SERVICE = "coppice.v1.WorkerControlService"
"""Has no health of its own."""
ADMIN_SERVICE = "coppice.v1.AdminService"
HEALTH_SERVICES = (
    ORCHESTRATOR_SERVICE,
    SPECULATION_SERVICE,
    TARGET_SERVICE,
    DRAFT_SERVICE,
    GATEWAY_SERVICE,
)
"""Those that have a health of their own, each at its own process."""


def process_name(pid: int) -> str:
    """Return the name that only the process of this id knows.

    Who starts a service asks for it: another one may have had the port before.
    """
    return f"process/{pid}"
