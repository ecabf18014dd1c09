"""The mailbox: both ends see one memory, which outlives neither its file nor its tensors' use."""

from __future__ import annotations

import enum
import gc
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.mailbox_words import MAX_PATH
from shared.peer import mailbox as mailbox_module
from shared.peer.mailbox import (
    NUM_TAGS,
    Mailbox,
    MailboxEnd,
    is_tag,
    next_tag,
    open_mailbox,
    tag_of,
)
from shared.peer.shared_files import MAILBOXES, RING_DIR, mailbox_name

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LINK = "coppice-channel-" + "a" * 32
WIDTH = 40


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RING_DIR) as name:
        yield Path(name)


def make(
    folder: Path,
    *,
    num_slots: int = 3,
    width: int = WIDTH,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device = CPU,
    gpu_is_shared: bool = False,
) -> Mailbox:
    return Mailbox(
        LINK,
        num_slots=num_slots,
        width=width,
        dtype=dtype,
        device=device,
        gpu_is_shared=gpu_is_shared,
        directory=folder,
    )


def join(
    folder: Path, *, width: int = WIDTH, device: torch.device = CPU, gpu_is_shared: bool = False
) -> MailboxEnd:
    return open_mailbox(
        LINK, width=width, device=device, gpu_is_shared=gpu_is_shared, directory=folder
    )


def fill(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Write numbers that differ, exact in every dtype; return a copy."""
    tensor.copy_((torch.arange(tensor.numel()) % 251 + first).view(tensor.shape))
    return tensor.clone()


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 3, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_ends_see_what_either_writes(folder: Path, num_slots: int, dtype: torch.dtype) -> None:
    target = make(folder, num_slots=num_slots, dtype=dtype)
    draft = join(folder)
    assert target.num_slots == draft.num_slots == num_slots and draft.dtype == dtype
    assert target.rows is not None and draft.rows is not None
    assert target.trees.shape == (num_slots, 64) and target.paths.shape == (num_slots, MAX_PATH)
    assert target.rows.shape == (2, num_slots, MAX_PATH, WIDTH)
    regions = ((draft.trees, target.trees), (target.paths, draft.paths), (target.rows, draft.rows))
    for written, read in regions:
        assert written.dtype == read.dtype and written.shape == read.shape
        assert written.is_contiguous() and written.data_ptr() % 4096 == 0
        assert not written.any(), "zeros, so no word is valid"
    wanted = [fill(written, first) for first, (written, _) in enumerate(regions)]
    for want, (_, read) in zip(wanted, regions, strict=True):
        assert torch.equal(read, want), "regions do not overlap"


def test_without_rows_there_are_words_alone(folder: Path) -> None:
    target, draft = make(folder, width=0, dtype=torch.float32), join(folder, width=0)
    assert target.rows is None and draft.rows is None and draft.dtype is None
    draft.trees[2, 63] = -1
    assert target.trees[2].tolist() == [0] * 63 + [-1]


def test_the_memory_lives_as_long_as_any_tensor(folder: Path) -> None:
    """A view of either end, when both ends and the file are gone."""
    target = make(folder)
    draft = join(folder)
    row, seen = target.paths[1], draft.paths[1]
    del target, draft
    gc.collect()
    assert list(folder.iterdir()) == []
    row[3] = 7
    assert seen.nonzero().tolist() == [[3]] and seen[3] == 7


# --- files ---------------------------------------------------------------------------------------


def test_its_file_is_for_its_owner_named_by_the_link_and_goes_with_it(folder: Path) -> None:
    target = make(folder)
    (path,) = folder.iterdir()
    assert path.name == target.name == mailbox_name(LINK) == "coppice-mailbox-" + "a" * 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make(folder)
    assert path.exists(), "another's file"
    assert MAILBOXES.is_held(folder, target.name)
    target.close()
    assert list(folder.iterdir()) == []
    assert not MAILBOXES.is_held(folder, target.name)
    with pytest.raises(FileNotFoundError):
        join(folder)


@pytest.mark.parametrize(
    "channel",
    ["", "coppice-channel-", "coppice-channel-" + "a" * 31, "coppice-channel-" + "a" * 32 + "/x"],
)
def test_what_no_link_is_named_by_is_refused(folder: Path, channel: str) -> None:
    target = make(folder)
    with pytest.raises(FileNotFoundError, match="no name of a mailbox"):
        open_mailbox(channel, width=WIDTH, device=CPU, directory=folder)
    target.close()


def test_too_little_room_is_an_error_that_leaves_nothing(folder: Path) -> None:
    free = os.statvfs(folder)
    num_bytes = 2 * free.f_bavail * free.f_frsize
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="MiB left"):
        make(folder, width=num_bytes // (2 * 3 * MAX_PATH * 2))
    with pytest.raises(OSError):
        make(folder / "none")
    assert list(folder.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("width", [0, WIDTH - 1, 2 * WIDTH])
def test_another_width_is_refused(folder: Path, width: int) -> None:
    target = make(folder)
    with pytest.raises(OSError, match=f"width {WIDTH}, expected {width}"):
        join(folder, width=width)
    target.close()


MAGIC, VERSION, NUM_SLOTS, ROW_WIDTH, DTYPE = 0, 8, 12, 16, 20


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (MAGIC, b"coppice1"),
        (VERSION, b"\2"),
        (NUM_SLOTS, bytes(4)),
        (NUM_SLOTS, b"\xff" * 4),
        (NUM_SLOTS, b"\xff" * 8),
        (ROW_WIDTH, b"\0\1"),
        (DTYPE, b"float64" + bytes(9)),
        (DTYPE, b"float32" + bytes(9)),
        (DTYPE, bytes(16)),
        (DTYPE, b"\xff" * 16),
    ],
)
def test_what_is_no_mailbox_of_this_version_is_refused(
    folder: Path, offset: int, data: bytes
) -> None:
    """Whatever its header says, nothing past the file is ever mapped."""
    target = make(folder)
    with (folder / target.name).open("r+b") as file:
        file.seek(offset)
        file.write(data)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no mailbox|not a mailbox"):
        join(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_was_cut_short_is_refused(folder: Path) -> None:
    target = make(folder, num_slots=200)
    for size in (8192, 10, 0):
        os.truncate(folder / target.name, size)
        with pytest.raises(OSError, match="not a mailbox"):
            join(folder)


TARGET = """
import sys, torch
from pathlib import Path
from shared.peer.mailbox import Mailbox
mailbox = Mailbox(sys.argv[2], num_slots=3, width=40, dtype=torch.bfloat16,
                  device=torch.device("cpu"), directory=Path(sys.argv[1]))
mailbox.paths[1, 2] = 1 << 62
print(mailbox.name, flush=True)
sys.stdin.readline()
print(int(mailbox.trees[2, 3]), flush=True)
sys.stdin.readline()
"""


def test_it_joins_two_processes_and_what_a_killed_one_left_is_swept(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TARGET, str(folder), LINK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline().strip() == mailbox_name(LINK)
    draft = join(folder)
    assert draft.paths[1, 2] == 1 << 62
    draft.trees[2, 3] = 12345
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline().strip() == "12345"
    MAILBOXES.remove_stale(folder)
    assert (folder / mailbox_name(LINK)).exists(), "its target lives"
    assert MAILBOXES.is_held(folder, mailbox_name(LINK))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (folder / mailbox_name(LINK)).exists()
    assert not MAILBOXES.is_held(folder, mailbox_name(LINK))
    MAILBOXES.remove_stale(folder)
    assert list(folder.iterdir()) == [], "though the draft has it mapped"
    assert draft.trees[2, 3] == 12345


# --- GPUs ----------------------------------------------------------------------------------------


class CudaError(enum.IntEnum):
    success = 0
    refused = 712


class FakeRuntime:
    """A CUDA runtime that takes note of what is registered."""

    cudaError = CudaError

    def __init__(self) -> None:
        self.result = CudaError.success
        self.uuid = "GPU-0"
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> CudaError:
        assert flags == 3 and address % 4096 == 0
        if self.result is CudaError.success:
            self.registered[address] = num_bytes
        return self.result

    def cudaHostUnregister(self, address: int) -> CudaError:
        del self.registered[address]
        # What is unmapped by now is not in the list of mappings.
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        return CudaError.success

    def cudaGetErrorString(self, result: CudaError) -> str:
        return f"it was {result.name}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=fake.uuid)
    )
    monkeypatch.setattr(mailbox_module.torch, "ones", lambda *shape, device: None)
    return fake


def test_each_end_registers_all_of_it_until_its_last_tensor_is_gone(
    folder: Path, runtime: FakeRuntime
) -> None:
    target = make(folder, device=GPU)
    num_bytes = (folder / target.name).stat().st_size
    runtime.uuid = "GPU-1"
    draft = join(folder, device=GPU)
    assert list(runtime.registered.values()) == [num_bytes] * 2
    assert draft.rows is not None
    assert any(
        address <= draft.rows[1, 2, 7].data_ptr() < address + num_bytes
        for address in runtime.registered
    )
    target.close()
    rows = draft.rows[1]
    del draft
    gc.collect()
    assert len(runtime.registered) == 2, "kernels may still use either"
    del target, rows
    gc.collect()
    assert runtime.registered == {}


def test_a_draft_knows_whether_its_target_is_on_the_same_gpu(
    folder: Path, runtime: FakeRuntime
) -> None:
    target = make(folder, device=GPU)
    near = join(folder, device=GPU)
    runtime.uuid = "GPU-1"
    apart = join(folder, device=GPU)
    assert (near.streams_wait, near.may_lend_rows) == (True, False)
    assert (apart.streams_wait, apart.may_lend_rows) == (False, True)
    target.close()


@pytest.mark.parametrize("who", ["target", "draft"])
def test_no_kernel_waits_for_another_gpu_where_workers_share_one(
    folder: Path, runtime: FakeRuntime, who: str
) -> None:
    """It would hold up what the others compute there, so streams wait. Rows go through the host."""
    target = make(folder, device=GPU, gpu_is_shared=who == "target")
    is_draft = who == "draft"
    assert join(folder, device=GPU, gpu_is_shared=is_draft).streams_wait, "it waits by its stream"
    runtime.uuid = "GPU-1"
    apart = join(folder, device=GPU, gpu_is_shared=is_draft)
    assert apart.streams_wait and not apart.may_lend_rows
    target.close()


def test_cpus_share_no_gpu(folder: Path) -> None:
    target = make(folder)
    draft = join(folder)
    assert not draft.streams_wait and not draft.may_lend_rows
    target.close()


def test_a_draft_on_a_cpu_lets_no_gpu_wait(folder: Path, runtime: FakeRuntime) -> None:
    target = make(folder, device=GPU)
    with pytest.raises(OSError, match="wait for a CPU"):
        join(folder)
    target.close()


def test_nothing_is_registered_on_a_cpu(folder: Path, runtime: FakeRuntime) -> None:
    target = make(folder)
    join(folder)
    assert runtime.registered == {}
    target.close()


def test_what_cuda_refuses_is_an_error_that_leaves_nothing(
    folder: Path, runtime: FakeRuntime
) -> None:
    gc.collect()  # what other tests left
    before = os.listdir("/proc/self/fd")
    runtime.result = CudaError.refused
    with pytest.raises(OSError, match=r"it was refused \(712\)"):
        make(folder, device=GPU)
    assert list(folder.iterdir()) == []
    target = make(folder)
    with pytest.raises(OSError, match=r"it was refused \(712\)"):
        join(folder, device=GPU)
    target.close()
    del target
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_reads_and_writes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(folder, device=GPU)
    with monkeypatch.context() as patch:  # whoever is on a CPU has no business there
        patch.setattr(mailbox_module, "gpu_uuid", lambda device: "another")
        draft = join(folder)
    assert target.trees.is_pinned() and not draft.trees.is_pinned()
    draft.trees[1] = torch.arange(64)
    on_gpu = target.trees.to(GPU)
    target.paths.copy_(on_gpu[:, :MAX_PATH])
    assert draft.paths[1].tolist() == list(range(MAX_PATH))
    assert not draft.streams_wait and join(folder, device=GPU).streams_wait
    data = target.trees[:1, :1].view(torch.uint8).numpy()
    with pytest.raises(OSError, match="CUDA cannot register"):
        mailbox_module._register(data, mmap.mmap(-1, 1), GPU)
    torch.ones(1, device=GPU)  # the error is over


# --- tags ----------------------------------------------------------------------------------------


@given(st.integers(0, NUM_TAGS - 1), st.integers(0, 1 << 24))
def test_the_tag_of_a_round_leads_to_that_of_the_next(base: int, round_idx: int) -> None:
    tag = tag_of(base, round_idx)
    assert is_tag(tag) and 0 < tag < 1 << 23
    assert next_tag(tag) == tag_of(base, round_idx + 1)


@given(st.integers(0, (1 << 23) - 1), st.integers(0, 1 << 24))
def test_tags_of_rounds_next_to_each_other_differ_in_parity(base: int, round_idx: int) -> None:
    """So a round's rows never take the place of those of the round before."""
    assert (tag_of(base, round_idx) + tag_of(base, round_idx + 1)) % 2 == 1


def test_tags_go_round_without_0_and_without_a_pause_in_parity() -> None:
    turn = (1 << 23) - 2
    assert [tag_of(turn - 2, round_idx) for round_idx in range(4)] == [turn, turn + 1, 2, 3]
    assert tag_of(5, turn) == tag_of(5, 0)
