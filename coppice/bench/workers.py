"""Counters of a server's workers, before and after; whatever counters there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice.admin import AdminClient

_ABOUT = (
    *("kind", "model", "dtype", "quantization", "kv_cache_dtype", "device", "device_model"),
    *("versions", "incarnation"),
)


def read_workers(client: AdminClient) -> dict[str, dict[str, Any]]:
    """Return who each worker of a deployment is and what it has counted.

    Returns: address -> fields of WorkerInfo, and "load": name -> number. Workers that have not
        answered yet are left out.
    """
    workers = client.call("ListWorkers").workers
    return {worker.address: _read(worker.info) for worker in workers if worker.HasField("info")}


def differences(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, int] | None]:
    """Return what every worker's counters have grown by; None for one that was started anew, or
    is gone.
    """
    return {
        address: _difference(old, after[address])
        if address in after and old["incarnation"] == after[address]["incarnation"]
        else None
        for address, old in before.items()
    }


def describe(address: str, grown: Mapping[str, int] | None) -> str:
    """Return a worker's differences in one line."""
    if grown is None:
        return f"{address}: it was started anew or is gone, so its counters say nothing"
    changed = [f"{name} {value:+}" for name, value in grown.items() if value]
    same = [name for name, value in grown.items() if not value]
    parts = [", ".join(changed), f"unchanged: {', '.join(same)}" if same else ""]
    return f"{address}: {'; '.join(part for part in parts if part)}"


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    old, new = before["load"], after["load"]
    return {name: value - old[name] for name, value in new.items()}


def _read(info: Any) -> dict[str, Any]:
    values = {field.name: getattr(info.load, field.name) for field in info.load.DESCRIPTOR.fields}
    load = {name: value for name, value in values.items() if isinstance(value, int)}
    return {**{name: getattr(info, name) for name in _ABOUT}, "load": load}
