"""Read docker-compose.yml as `docker compose` would: anchors merged, variables interpolated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSE_FILE = ROOT / "docker-compose.yml"
# ${NAME}, ${NAME:-value if unset or empty}, ${NAME-value if unset}, ${NAME:+value if set}, $$ = $
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?-|:\+)([^}]*))?\}|\$\$")

# Compose service -> the service that `coppice serve` runs in it; beside these there is the gateway.
ROLES = {
    "orchestrator": "orchestrator",
    "target_service": "target",
    "draft_service": "draft",
    "target_service_cpu": "target",
    "draft_service_cpu": "draft",
}


def load_compose(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file with `environ` filled in."""
    document = yaml.safe_load(COMPOSE_FILE.read_text())
    return _interpolate(document, environ or {})


def services_of(document: dict[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    """Return the orchestrator and the workers that `docker compose --profile NAME up` starts."""
    return {
        name: service
        for name, service in document["services"].items()
        if name in ROLES and profile in service["profiles"]
    }


def _interpolate(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolate(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, environ) for item in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, operator, default = match.groups()
        if name is None:
            return "$"
        given = environ.get(name)
        if operator == ":+":
            return default if given else ""
        if given is None or (operator == ":-" and given == ""):
            return default or ""
        return given

    return VARIABLE.sub(fill, value)
