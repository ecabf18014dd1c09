"""Tensors are read whole, by however many threads, and what happens to files meanwhile is said."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import CheckpointError
from shared.models.tensor_files import TensorInfo, read_tensor_infos
from shared.models.tensor_reads import TensorReads
from tests.checkpoints import pickle_weights

CPU = torch.device("cpu")
SHARE = 1 << 10
# Around the bounds of shares, and of no size and no dimension.
SHAPES = ((), (0, 4), (1,), (SHARE - 1,), (SHARE,), (2 * SHARE + 1,), (7, 3 * SHARE), (5, 2, 999))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)


def reads_of(num_threads: int, *, stage_bytes: int = 0) -> TensorReads:
    """Return what reads in small shares and pieces."""
    return TensorReads(
        CPU,
        num_threads=num_threads,
        min_share_bytes=SHARE,
        stage_bytes=stage_bytes,
        piece_values=300,
    )


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Write a file of tensors, and return them."""
    generator = torch.Generator().manual_seed(3)
    values = {
        f"{dtype}-{shape}": (100 * torch.randn(shape, generator=generator)).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(values, tmp_path / "model.safetensors")
    return values


def one_by_one(infos: Iterable[TensorInfo]) -> list[list[TensorInfo]]:
    """Return what is announced of tensors that become no stacks."""
    return [[info] for info in infos]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("stage_bytes", [0, 5 * SHARE + 8])
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_tensors_are_those_of_the_file(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    num_threads: int,
    stage_bytes: int,
    *,
    is_inference: bool,
) -> None:
    with torch.inference_mode(is_inference):
        check_tensors(tmp_path, tensors, reads_of(num_threads, stage_bytes=stage_bytes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_reads_tensors_in_turns(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    gpu = torch.device("cuda")
    torch.cuda._sleep(1_000_000_000)  # so that no copy is over when its memory is wanted again
    check_tensors(tmp_path, tensors, TensorReads(gpu, min_share_bytes=SHARE, stage_bytes=5 * SHARE))
    check_tensors(tmp_path, tensors, TensorReads(gpu))
    torch.cuda._sleep(1_000_000_000)
    reads = TensorReads(gpu, min_share_bytes=SHARE, stage_bytes=5 * SHARE)
    infos = read_tensor_infos(tmp_path)
    reads.read_ahead(one_by_one(infos.values()))
    was_read = {name: reads.read(info, None) for name, info in infos.items()}
    close(reads)
    for name, tensor in was_read.items():
        assert torch.equal(bits_of(tensor).cpu(), bits_of(tensors[name]))


def check_tensors(directory: Path, tensors: dict[str, torch.Tensor], reads: TensorReads) -> None:
    """Read every tensor as it is and as other dtypes."""
    infos = read_tensor_infos(directory)
    was_read = {name: reads.read(info, None) for name, info in infos.items()}
    for name, info in infos.items():
        want, got = tensors[name], was_read[name]
        assert got.dtype is want.dtype and got.shape == want.shape
        assert torch.equal(bits_of(got).cpu(), bits_of(want))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(bits_of(reads.read(info, dtype)).cpu(), bits_of(want.to(dtype)))
    close(reads)


def close(reads: TensorReads) -> None:
    """Close, and look for threads that are left."""
    reads.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("read-weights") for name in names)


def test_what_was_read_does_not_change_with_the_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    infos = [info for info in read_tensor_infos(tmp_path).values() if "bfloat16" in info.name]
    reads = reads_of(3)
    for dtype in (torch.float32, None):
        got = {info.name: reads.read(info, dtype) for info in infos}
        for name, tensor in got.items():
            assert torch.equal(tensor.float(), tensors[name].float())
    (tmp_path / "model.safetensors").write_bytes(b"")
    reads.close()
    for name, tensor in got.items():
        assert torch.equal(tensor.float(), tensors[name].float())


@pytest.mark.parametrize("stage_bytes", [0, 5 * SHARE + 8])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_file_that_is_cut_off_meanwhile_is_an_error(
    tmp_path: Path, tensors: dict[str, torch.Tensor], num_threads: int, stage_bytes: int
) -> None:
    """Not the end of the process, as with a mapped file."""
    infos = read_tensor_infos(tmp_path)
    info = max(infos.values(), key=lambda one: one.end)
    os.truncate(info.file, info.end - 1)
    reads = reads_of(num_threads, stage_bytes=stage_bytes)
    with pytest.raises(CheckpointError, match=r"ended within .*, while it was read"):
        reads.read(info, None)
    reads.close()


def in_another_order(infos: list[TensorInfo], order: str) -> list[TensorInfo]:
    """Return what is announced of tensors that are asked for in order."""
    announced = {
        "all": infos,
        "reversed": infos[::-1],
        "others": infos[::2],
        "twice": [info for info in infos for _ in range(2)],
        "none": [],
    }
    return announced[order]


@pytest.mark.parametrize("order", ["all", "reversed", "others", "twice", "none"])
@pytest.mark.parametrize("stage_bytes", [SHARE, 5 * SHARE + 8, 1 << 20])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_tensors_read_ahead_are_those_of_the_file(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    num_threads: int,
    stage_bytes: int,
    order: str,
) -> None:
    """The stages are fewer than what is announced, and smaller than some tensors."""
    infos = list(read_tensor_infos(tmp_path).values())
    reads = reads_of(num_threads, stage_bytes=stage_bytes)
    for _ in range(2):
        reads.read_ahead(one_by_one(in_another_order(infos, order)))
        for info in infos:
            got = reads.read(info, None)
            assert got.dtype is tensors[info.name].dtype
            assert torch.equal(bits_of(got), bits_of(tensors[info.name]))
    close(reads)


Stacks = list[tuple[list[TensorInfo], list[torch.Tensor]]]
STACKED = (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)


@pytest.fixture
def stacks(tmp_path: Path) -> Stacks:
    """Write tensors of a few shapes, and return those of each shape, which lie apart in the file.

    Some are larger than a stage; of some a stage holds several, and the last one not wholly.
    """
    shapes = ((), (0, 4), (3, 7), (SHARE, 3), (SHARE // 2 - 4,), (2, 2 * SHARE))
    generator = torch.Generator().manual_seed(4)
    values = {
        f"{i}-{shape}": (100 * torch.randn(shape, generator=generator)).to(dtype)
        for i, dtype in enumerate(3 * STACKED)
        for shape in shapes
    }
    save_file(values, tmp_path / "model.safetensors")
    infos = read_tensor_infos(tmp_path)
    names = [[f"{i}-{shape}" for i in range(3 * len(STACKED))] for shape in shapes]
    return [([infos[name] for name in one], [values[name] for name in one]) for one in names]


@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("stage_bytes", [0, SHARE, 5 * SHARE + 8, 1 << 20])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_stack_is_its_tensors_in_order(
    stacks: Stacks, num_threads: int, stage_bytes: int, *, is_announced: bool
) -> None:
    """Whatever dtypes they have, and become."""
    check_stacks(stacks, reads_of(num_threads, stage_bytes=stage_bytes), is_announced=is_announced)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_gpu_reads_stacks_in_turns(stacks: Stacks, *, is_announced: bool) -> None:
    reads = TensorReads(torch.device("cuda"), min_share_bytes=SHARE, stage_bytes=5 * SHARE)
    torch.cuda._sleep(1_000_000_000)  # so that no copy is over when its memory is wanted again
    check_stacks(stacks, reads, is_announced=is_announced)


def check_stacks(stacks: Stacks, reads: TensorReads, *, is_announced: bool) -> None:
    """Read stacks as other dtypes, and the first tensors of each as they are."""
    got = []
    for dtype in (torch.bfloat16, torch.float32):
        if is_announced:
            reads.read_ahead(infos for infos, _ in stacks)
        got += [(reads.read_stack(infos, dtype), tensors) for infos, tensors in stacks]
    got += [(reads.read_stack(infos[:2], None), tensors[:2]) for infos, tensors in stacks]
    close(reads)
    for stack, tensors in got:
        assert torch.equal(stack.cpu(), torch.stack([one.to(stack.dtype) for one in tensors]))


@pytest.mark.parametrize("stage_bytes", [SHARE, 1 << 20])
def test_a_tensor_of_a_stack_that_cannot_be_read_is_named(stacks: Stacks, stage_bytes: int) -> None:
    infos, tensors = stacks[4]
    infos, tensors = infos[:2], tensors[:2]
    gone = replace(infos[0], name="gone", file=infos[0].file.with_name("gone"))
    cut = replace(infos[0], name="cut", file=infos[0].file.with_name("cut"))
    cut.file.write_bytes(infos[0].file.read_bytes()[: cut.end - 1])
    reads = reads_of(2, stage_bytes=stage_bytes)
    for is_announced in (False, True):
        for bad, message in (
            (gone, "'gone' is not readable.*No such file"),
            (cut, "ended within 'cut', while it was read"),
        ):
            if is_announced:
                reads.read_ahead([[*infos, bad], infos])
            with pytest.raises(CheckpointError, match=message):
                reads.read_stack([*infos, bad], None)
            assert torch.equal(reads.read_stack(infos, None), torch.stack(tensors))
    close(reads)


def test_what_is_read_ahead_and_never_asked_for_is_in_nobodys_way(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    infos = list(read_tensor_infos(tmp_path).values())
    reads = reads_of(3, stage_bytes=SHARE)
    for first in range(len(infos)):
        reads.read_ahead(one_by_one(infos))
        info = infos[first]
        assert torch.equal(bits_of(reads.read(info, None)), bits_of(tensors[info.name]))
    reads.read_ahead(one_by_one(infos))
    close(reads)


@pytest.fixture
def reading_threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return which thread has read how many bytes, read by read."""
    seen: list[tuple[str, int]] = []
    preadv = os.preadv

    def note(*arguments: Any) -> int:
        num_read = preadv(*arguments)
        seen.append((threading.current_thread().name, num_read))
        return num_read

    monkeypatch.setattr(os, "preadv", note)
    return seen


def test_threads_read_every_byte_once_and_ahead(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reading_threads: list[tuple[str, int]]
) -> None:
    """Whoever asks reads none: all come in order, though they are far more than stages are."""
    infos = list(read_tensor_infos(tmp_path).values())
    reads = reads_of(3, stage_bytes=SHARE)
    reads.read_ahead(one_by_one(infos))
    for info in infos:
        reads.read(info, None)
    close(reads)
    assert all(name.startswith("read-weights") for name, _ in reading_threads)
    assert sum(size for _, size in reading_threads) == sum(info.end - info.start for info in infos)


def test_stages_of_what_is_not_asked_for_are_used_again(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reading_threads: list[tuple[str, int]]
) -> None:
    infos = read_tensor_infos(tmp_path)
    dropped, info = (infos[f"torch.float32-{shape}"] for shape in ((7, 3 * SHARE), (5, 2, 999)))
    reads = reads_of(3, stage_bytes=4 * SHARE)
    for _ in range(40):
        reads.read_ahead([[dropped]])
    reads.read_ahead([])
    reading_threads.clear()
    reads.read_ahead([[info]])
    deadline = time.monotonic() + 60
    while sum(size for _, size in reading_threads) < info.end - info.start:
        assert time.monotonic() < deadline, "nothing is read before it is asked for"
        time.sleep(0.001)
    reading_threads.clear()
    assert torch.equal(bits_of(reads.read(info, None)), bits_of(tensors[info.name]))
    assert not reading_threads
    close(reads)


def test_errors_of_what_is_read_ahead_are_raised_for_whom_they_concern(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reading_threads: list[tuple[str, int]]
) -> None:
    infos = sorted(read_tensor_infos(tmp_path).values(), key=lambda one: one.end)
    whole = next(info for info in infos if info.end - info.start > 5 * SHARE)
    cut = [info for info in infos if info.end == infos[-1].end]
    gone = TensorInfo(
        name="gone", file=tmp_path / "gone", dtype="F32", shape=(SHARE,), start=0, end=4 * SHARE
    )
    os.truncate(infos[-1].file, infos[-1].end - 1)
    reads = reads_of(3, stage_bytes=SHARE)
    for _ in range(40):  # the stages of what failed are there again
        reads.read_ahead(one_by_one([*cut, gone, whole]))
        assert torch.equal(bits_of(reads.read(whole, None)), bits_of(tensors[whole.name]))
        with pytest.raises(CheckpointError, match=r"'gone' is not readable.*No such file"):
            reads.read(gone, None)
        for info in cut:
            message = f"{re.escape(str(info.file))} ended within {re.escape(repr(info.name))}"
            with pytest.raises(CheckpointError, match=message):
                reads.read(info, None)
    reading_threads.clear()
    reads.read_ahead([[whole]])
    reads.read(whole, None)
    assert all(name.startswith("read-weights") for name, _ in reading_threads)
    reads.read_ahead(one_by_one([*cut, gone]))
    close(reads)


def test_what_cannot_be_read_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    info = next(iter(read_tensor_infos(tmp_path).values()))
    reads = TensorReads(CPU)
    strange = TensorInfo(
        name=info.name, file=info.file, dtype="F4", shape=info.shape, start=0, end=8
    )
    with pytest.raises(CheckpointError, match="is F4, which none reads"):
        reads.read(strange, None)
    info.file.unlink()
    with pytest.raises(CheckpointError, match=r"is not readable.*No such file"):
        reads.read(info, None)
    reads.close()


def write_header(path: Path, header: Any, *, num_bytes: int = 32) -> None:
    """Write a safetensors file with any header at all."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(num_bytes)))


def entry(offsets: list[Any], shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2, 2] if shape is None else shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry([16, 20]), "takes 16 bytes"),
        (entry([16, 31]), "takes 16 bytes"),
        (entry([0, 32]), "takes 16 bytes"),
        (entry([32, 16]), "takes 16 bytes"),
        (entry([32, 16], dtype="F4"), "takes 0 bytes"),
        (entry([-16, 0]), "not negative"),
        (entry([16, 32], [-2, -2]), "not negative"),
        (entry([16, 32.0]), "must be integers"),
        (entry([24, 40]), r"file has 32: it is not a whole"),
        (entry([8, 24]), "'wrong' begins within 'right'"),
        (entry([0, 16]), r"'(right|wrong)' begins within '(right|wrong)'"),
    ],
)
def test_bytes_that_cannot_be_a_tensor_are_not_read_as_one(
    tmp_path: Path, wrong: Any, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, {"right": entry([0, 16]), "wrong": wrong})
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*{message}") as raised:
        read_tensor_infos(tmp_path)
    assert "'wrong'" in str(raised.value)


def test_tensors_without_values_lie_anywhere(tmp_path: Path) -> None:
    empty = entry([16, 16], [0, 4])
    write_header(tmp_path / "model.safetensors", {"b": empty, "a": entry([16, 32]), "c": empty})
    infos = read_tensor_infos(tmp_path)
    assert infos["b"].start == infos["b"].end == infos["a"].start < infos["a"].end


@pytest.mark.parametrize("header", [[1], "text", {"a": 1}, {"a": {"dtype": "F32"}}])
def test_a_header_of_another_form_is_an_error(tmp_path: Path, header: Any) -> None:
    write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_tensor_infos(tmp_path)


def test_pickled_tensors_are_read_too(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory = pickle_weights(tmp_path, tmp_path / "pickled")
    reads = TensorReads(CPU)
    for name, info in read_tensor_infos(directory).items():
        assert info.is_pickled
        assert torch.equal(bits_of(reads.read(info, None)), bits_of(tensors[name]))
    reads.close()
