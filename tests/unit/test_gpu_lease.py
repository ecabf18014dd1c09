"""GPU leases: who gets which GPU, what the others are told, and that no death leaks one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import gpu_lease
from shared.config import TargetConfig
from shared.errors import ConfigError
from shared.gpu_lease import (
    GpuLease,
    lease_gpu,
    list_machine_gpus,
    parse_listing,
    visible_gpus,
)

ROOT = Path(__file__).resolve().parents[2]
GPUS = ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-cccc-2"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def leases() -> Iterator[list[GpuLease]]:
    held: list[GpuLease] = []
    yield held
    for lease in held:
        lease.release()


def take(folder: Path, leases: list[GpuLease], gpus: str = "", device: str = "auto") -> str:
    # What an earlier lease of this process left there.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    config = TargetConfig(gpu_lease_dir=str(folder), gpus=gpus, device=device)
    lease = lease_gpu(config, role="target", list_gpus=lambda: list(GPUS))
    assert lease is not None
    leases.append(lease)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == lease.uuid
    return lease.uuid


def test_each_lease_gets_its_own_gpu(tmp_path: Path, leases: list[GpuLease]) -> None:
    assert [take(tmp_path / "leases", leases) for _ in GPUS] == GPUS


def test_exhausted_pool_names_the_holders(tmp_path: Path, leases: list[GpuLease]) -> None:
    take(tmp_path, leases, "1")
    with pytest.raises(ConfigError) as caught:
        take(tmp_path, leases, "1")
    message = str(caught.value)
    assert f"GPU-bbbb-1 is held by target (pid {os.getpid()} on " in message
    assert "GPU-aaaa-0" not in message and "--gpus" in message


def test_released_gpu_is_free_again(tmp_path: Path, leases: list[GpuLease]) -> None:
    take(tmp_path, leases, "0")
    leases.pop().release()
    assert take(tmp_path, leases, "0") == GPUS[0]


@pytest.mark.parametrize(
    ("gpus", "expected"), [("2,0", GPUS[2]), ("GPU-bbbb", GPUS[1]), (" 1 , 2 ", GPUS[1])]
)
def test_pool_is_limited_and_ordered_by_gpus(
    gpus: str, expected: str, tmp_path: Path, leases: list[GpuLease]
) -> None:
    assert take(tmp_path, leases, gpus) == expected


@pytest.mark.parametrize("gpus", ["3", "GPU-dddd", "GPU-"])
def test_unknown_or_ambiguous_gpu_is_refused(
    gpus: str, tmp_path: Path, leases: list[GpuLease]
) -> None:
    with pytest.raises(ConfigError, match="--gpus names GPU"):
        take(tmp_path, leases, gpus)


def test_visible_devices_limit_the_pool(
    tmp_path: Path, leases: list[GpuLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    config = TargetConfig(gpu_lease_dir=str(tmp_path), gpus="1")
    lease = lease_gpu(config, role="target", list_gpus=lambda: list(GPUS))
    assert lease is not None
    leases.append(lease)
    assert lease.uuid == GPUS[1]


def test_no_lease_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> list[str]:
        raise AssertionError("the driver is asked for nothing")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-bbbb-1,7")
    assert lease_gpu(TargetConfig(), role="target", list_gpus=never) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,GPU-bbbb-1,7"
    assert lease_gpu(TargetConfig(gpus="1,0"), role="target", list_gpus=never) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb-1,5"
    with pytest.raises(ConfigError, match="--gpus names GPU '2', .* CUDA_VISIBLE_DEVICES"):
        lease_gpu(TargetConfig(gpus="2"), role="target", list_gpus=never)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert lease_gpu(TargetConfig(gpus="1,0"), role="target", list_gpus=never) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, GPUS),
        ("2,0", [GPUS[2], GPUS[0]]),
        ("GPU-bbbb, 2", [GPUS[1], GPUS[2]]),
        ("1,-1,0", [GPUS[1]]),
        ("", []),
    ],
)
def test_what_cuda_shows_is_visible(
    shown: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "list_machine_gpus", lambda: GPUS)
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus() == expected


def test_no_lease_on_a_cpu(tmp_path: Path) -> None:
    config = TargetConfig(gpu_lease_dir=str(tmp_path), device="cpu")
    assert lease_gpu(config, role="target", list_gpus=lambda: list(GPUS)) is None
    config = TargetConfig(gpu_lease_dir=str(tmp_path))
    assert lease_gpu(config, role="target", list_gpus=list) is None
    assert list(tmp_path.iterdir()) == []


def test_gpu_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    config = TargetConfig(gpu_lease_dir=str(tmp_path), device="cuda")
    with pytest.raises(ConfigError, match="this machine shows none"):
        lease_gpu(config, role="target", list_gpus=list)


def test_device_index_and_lease_contradict_each_other(tmp_path: Path) -> None:
    config = TargetConfig(gpu_lease_dir=str(tmp_path), device="cuda:1")
    with pytest.raises(ConfigError, match="--device cuda and --gpus 1"):
        lease_gpu(config, role="target", list_gpus=lambda: list(GPUS))


HOLDER = textwrap.dedent(
    """
    import os, sys, time
    from shared.config import DraftConfig
    from shared.gpu_lease import lease_gpu

    config = DraftConfig(gpu_lease_dir=sys.argv[1])
    lease = lease_gpu(config, role="draft", list_gpus=lambda: sys.argv[2:])
    assert "torch" not in sys.modules
    sys.stdout.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    sys.stdout.flush()
    time.sleep(600)
    """
)


def test_processes_exclude_each_other_and_a_kill_frees_the_gpu(
    tmp_path: Path, leases: list[GpuLease]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), *GPUS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == GPUS[0]
        assert take(tmp_path, leases) == GPUS[1]
        with pytest.raises(ConfigError, match=rf"draft \(pid {holder.pid} on "):
            take(tmp_path, leases, "0")
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        assert take(tmp_path, leases, "0") == GPUS[0]


def test_listing_of_the_driver_tool() -> None:
    text = (
        "GPU 0: NVIDIA H200 (UUID: GPU-5d7b3b4a-0d51-11ef-9b1c-0123456789ab)\n"
        "  MIG 1g.18gb     Device  0: (UUID: MIG-8f2b0b1a-1c9c-5b1f-8a0a-6a1b7c1d2e3f)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-6e8c4c5b-0d51-11ef-9b1c-0123456789ab)\n"
    )
    assert parse_listing(text) == [
        "GPU-5d7b3b4a-0d51-11ef-9b1c-0123456789ab",
        "GPU-6e8c4c5b-0d51-11ef-9b1c-0123456789ab",
    ]
    assert parse_listing("No devices were found\n") == []


@pytest.mark.gpu
@pytest.mark.skipif(not list_machine_gpus(), reason="needs a GPU")
def test_library_and_tool_of_the_driver_agree(tmp_path: Path) -> None:
    tool = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    assert list_machine_gpus() == parse_listing(tool.stdout)
    lease = lease_gpu(TargetConfig(gpu_lease_dir=str(tmp_path)), role="target")
    assert lease is not None
    show = "import torch; p = torch.cuda.get_device_properties(0); print(p.uuid)"
    seen = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=60
    )
    lease.release()
    assert f"GPU-{seen.stdout.strip()}" == lease.uuid
