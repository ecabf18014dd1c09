"""Counters of a server's workers, before and after; whatever counters there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from coppice.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, tree_pb2
from shared.access.caller import NOBODY, Caller
from shared.errors import CoppiceError, UnavailableError
from shared.rpc.channel import open_blocking_channel
from shared.rpc.health_names import DRAFT_SERVICE, TARGET_SERVICE
from shared.rpc.status import from_rpc_error

_TIMEOUT_S = 5.0
_ABOUT = (
    "kind", "model", "dtype", "quantization", "kv_cache_dtype", "device", "device_model",
    "versions", "incarnation"
)  # fmt: skip


def read_workers(addresses: Sequence[str], caller: Caller = NOBODY) -> dict[str, dict[str, Any]]:
    """Return who each worker is and what it has counted.

    Args:
        addresses: HOST:PORT of targets and drafts.
        caller: What they are shown.
    Returns: address -> fields of WorkerInfo, and "load": name -> number, kernels one by one.
    Raises: UnavailableError that names the option and the address that does not answer,
        UnauthenticatedError.
    """
    return {address: _read(address, caller) for address in addresses}


def differences(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, int] | None]:
    """Return what every worker's counters have grown by; None for one that was started anew."""
    return {
        address: _difference(old, after[address])
        if old["incarnation"] == after[address]["incarnation"]
        else None
        for address, old in before.items()
    }


def describe(address: str, grown: Mapping[str, int] | None) -> str:
    """Return a worker's differences in one line."""
    if grown is None:
        return f"{address}: it was started anew, so its counters say nothing"
    changed = [f"{name} {value:+}" for name, value in grown.items() if value]
    same = [name for name, value in grown.items() if not value]
    parts = [", ".join(changed), f"unchanged: {', '.join(same)}" if same else ""]
    return f"{address}: {'; '.join(part for part in parts if part)}"


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    old, new = before["load"], after["load"]
    return {name: value - old.get(name, 0) for name, value in new.items()}


def _read(address: str, caller: Caller) -> dict[str, Any]:
    with open_blocking_channel(address, tls=caller.tls) as channel:
        info = _get_info(address, channel, caller)
    about = {name: getattr(info, name) for name in _ABOUT}
    load: dict[str, int] = {}
    for field in info.load.DESCRIPTOR.fields:
        value = getattr(info.load, field.name)
        if isinstance(value, int):
            load[field.name] = value
        elif isinstance(value, Mapping):  # of each kernel
            load |= {f"{field.name}.{name}": each for name, each in sorted(value.items())}
    return {**about, "load": load}


def _get_info(address: str, channel: grpc.Channel, caller: Caller) -> tree_pb2.WorkerInfo:
    """Ask as a target is asked, then as a draft."""
    try:
        target = target_pb2_grpc.TargetServiceStub(channel)
        return target.GetInfo(
            target_pb2.TargetServiceGetInfoRequest(),
            timeout=_TIMEOUT_S,
            metadata=caller.metadata(f"/{TARGET_SERVICE}/GetInfo"),
        ).info
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNIMPLEMENTED:
            raise _unavailable(address, error) from None
    try:
        draft = draft_pb2_grpc.DraftServiceStub(channel)
        return draft.GetInfo(
            draft_pb2.DraftServiceGetInfoRequest(),
            timeout=_TIMEOUT_S,
            metadata=caller.metadata(f"/{DRAFT_SERVICE}/GetInfo"),
        ).info
    except grpc.RpcError as error:
        raise _unavailable(address, error) from None


def _unavailable(address: str, error: Any) -> CoppiceError:
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return from_rpc_error(error)
    return UnavailableError(
        f"--workers: {address} does not say what it counted ({error.code().name}); expected "
        "HOST:PORT of a target or a draft, as its `ready` line says it"
    )
