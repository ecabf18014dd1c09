"""Exclusive GPU leases, so that replicas on one machine never share a GPU by accident.

A lease is a lock (flock) on `<gpu_lease_dir>/gpu-<uuid>`, taken before torch is imported anywhere.
The kernel drops it when the last process that holds the file dies, however it dies; the front and
its engine both hold it. Containers share the folder as a volume.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import re
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.config import WorkerConfig
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

_UUID_BYTES = 96
_UUID_PATTERN = re.compile(r"^GPU \d+:.*\(UUID: (GPU-[0-9a-fA-F-]+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLease:
    """A GPU that nobody else may use until this process and the engine are gone.

    Args:
        fd: Descriptor of the locked file.
    """

    uuid: str
    fd: int

    def release(self) -> None:
        """Give the GPU back; a copy of the descriptor in a living engine keeps it."""
        os.close(self.fd)


def lease_gpu(
    config: WorkerConfig, *, role: str, list_gpus: Callable[[], list[str]] | None = None
) -> GpuLease | None:
    """Take a free GPU of the pool and make it the only one that torch will see.

    Args:
        role: Said to whoever finds the GPU taken.
        list_gpus: Returns the uuids of the machine's GPUs in PCI order; default: ask the driver.
    Returns: None when no lease is wanted: on a CPU, or with an empty `gpu_lease_dir`.
    Mutates: CUDA_VISIBLE_DEVICES, which `gpus` indexes and limits, with a lease or without.
    Raises: ConfigError if the pool names unknown GPUs or all of its GPUs are taken.
    """
    if config.device == "cpu":
        return None
    if not config.gpu_lease_dir:
        if config.gpus:
            _show_only(config.gpus)
        return None
    pool = _pool((list_gpus or list_machine_gpus)(), config.gpus)
    if not pool:
        if config.device == "auto" and not config.gpus:
            return None
        raise ConfigError(
            f"--device {config.device} needs a GPU and this machine shows none; "
            "use --device cpu, or make the driver and the GPUs visible here"
        )
    if ":" in config.device:
        raise ConfigError(
            f"--device {config.device} picks a GPU and so does the lease in "
            f"{config.gpu_lease_dir}; use --device cuda and --gpus {config.device.split(':')[1]}"
        )
    lease = _lock_one(pool, Path(config.gpu_lease_dir), role)
    os.environ["CUDA_VISIBLE_DEVICES"] = lease.uuid
    logger.info("leased GPU %s", lease.uuid)
    return lease


def _show_only(gpus: str) -> None:
    """Limit CUDA_VISIBLE_DEVICES to `gpus`: its entries, by their index, or GPUs by their uuid."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        return
    entries, names = _split(shown), _split(gpus)
    for name in names:
        if name.isdigit() and int(name) >= len(entries):
            raise ConfigError(
                f"--gpus names GPU {name!r}, counted from 0 among those that CUDA_VISIBLE_DEVICES "
                f"shows, {shown!r}: name one of these, or set the variable otherwise"
            )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        [entries[int(name)] if name.isdigit() else name for name in names]
    )


def visible_gpus() -> list[str]:
    """Return the machine's GPUs that CUDA_VISIBLE_DEVICES leaves, in its order: as CUDA has it,
    those before the first entry that names none.
    """
    machine, shown = list_machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return machine
    visible = []
    for name in _split(shown):
        try:
            visible += _select(machine, name, "CUDA_VISIBLE_DEVICES")
        except ConfigError:
            break
    return visible


def list_machine_gpus() -> list[str]:
    """Return the uuids of the GPUs that the driver shows, in PCI order; [] without a driver."""
    uuids = _list_by_nvml()
    if uuids is not None:
        return uuids
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_listing(listing.stdout)


def parse_listing(text: str) -> list[str]:
    """Return the uuids in the output of `nvidia-smi -L`, MIG slices left out."""
    return _UUID_PATTERN.findall(text)


def _list_by_nvml() -> list[str] | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        uuids = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(_UUID_BYTES)
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                return None
            if nvml.nvmlDeviceGetUUID(device, uuid, _UUID_BYTES):
                return None
            uuids.append(uuid.value.decode())
        return uuids
    finally:
        nvml.nvmlShutdown()


def _pool(uuids: Sequence[str], gpus: str) -> list[str]:
    """Pick from the machine's GPUs: CUDA_VISIBLE_DEVICES first, then `gpus`, which indexes it."""
    visible = list(uuids)
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        visible = _select(visible, allowed, "CUDA_VISIBLE_DEVICES")
    return _select(visible, gpus, "--gpus") if gpus else visible


def _select(uuids: Sequence[str], wanted: str, source: str) -> list[str]:
    selected = []
    for name in _split(wanted):
        if name.isdigit():
            matches = [uuids[int(name)]] if int(name) < len(uuids) else []
        else:
            matches = [uuid for uuid in uuids if uuid.startswith(name)]
        if len(matches) != 1:
            shown = ", ".join(f"{i} = {uuid}" for i, uuid in enumerate(uuids)) or "none"
            raise ConfigError(f"{source} names GPU {name!r}; the GPUs visible here are: {shown}")
        selected += matches
    return selected


def _split(names: str) -> list[str]:
    return [name for part in names.split(",") if (name := part.strip())]


def _lock_one(pool: Sequence[str], folder: Path, role: str) -> GpuLease:
    holders = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create --gpu-lease-dir {folder}: {error.strerror}") from error
    for uuid in pool:
        path = folder / f"gpu-{uuid}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holders.append(f"{uuid} is held by {_read_holder(fd)}")
            os.close(fd)
            continue
        _write_holder(fd, role)
        return GpuLease(uuid=uuid, fd=fd)
    raise ConfigError(
        f"no free GPU in {folder}: {'; '.join(holders)}. Start fewer replicas, widen --gpus, or "
        "leave --gpu-lease-dir empty to share GPUs"
    )


def _write_holder(fd: int, role: str) -> None:
    holder = {"role": role, "pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def _read_holder(fd: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"{holder['role']} (pid {holder['pid']} on {holder['host']})"
    return "another process"
