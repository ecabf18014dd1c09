"""Weights in pytorch_model.bin: the same model as in safetensors, and no code is run."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.models.checkpoint import CheckpointReader
from shared.models.digest import HashCache, model_hash
from shared.models.draft import load_draft
from shared.models.tensor_files import read_tensor_infos
from shared.models.weight_memory import stored_bytes, weight_bytes
from tests import checkpoints
from tests.engines import Pairing, make_target

CPU = torch.device("cpu")


def read_all(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory, device=CPU, dtype=dtype) as reader:
        return {name: reader.load(name, reader.shape(name)) for name in reader.names}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_they_are_the_same_model(tmp_path: Path, num_shards: int) -> None:
    safe = checkpoints.write_llama(tmp_path / "safe", dtype=torch.float16)
    directory = checkpoints.pickle_weights(safe, tmp_path / "bin", num_shards=num_shards)
    assert not list(directory.glob("*.safetensors"))
    cache = HashCache(tmp_path / "cache", settle_s=0)
    assert model_hash(directory, cache) == model_hash(safe, cache)
    assert stored_bytes(directory) == stored_bytes(safe)
    assert weight_bytes(directory, 4) == weight_bytes(safe, 4)
    got, want = read_all(directory), read_all(safe)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert all(info.is_pickled for info in read_tensor_infos(directory).values())


def test_a_head_loads_with_its_integer_tensors(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    safe = checkpoints.write_eagle3(tmp_path / "safe", target)
    head = checkpoints.pickle_weights(safe, tmp_path / "bin")
    drafts = [load_draft("auto", d, target, device=CPU, dtype=torch.float32) for d in (safe, head)]
    ids = torch.arange(drafts[0].vocab_size)
    assert torch.equal(drafts[0].to_target_ids(ids), drafts[1].to_target_ids(ids))
    hidden = torch.randn(3, 48)
    assert torch.equal(drafts[0].logits(hidden), drafts[1].logits(hidden))


def test_safetensors_go_first(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        (directory / name).write_bytes(b"never looked at")
    assert not any(info.is_pickled for info in read_tensor_infos(directory).values())
    read_all(directory)


def test_views_of_one_storage_are_read_as_they_are(tmp_path: Path) -> None:
    """torch.save keeps what tensors share, and their strides."""
    safe = checkpoints.write_llama(tmp_path / "safe")
    directory = checkpoints.pickle_weights(safe, tmp_path / "bin")
    tensors = checkpoints.read_tensors(safe)
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = torch.stack([tensors[name].T.contiguous(), tensors[name].T.contiguous()])
    tensors[name] = whole[1].T
    torch.save(tensors, directory / "pytorch_model.bin")
    cache = HashCache(tmp_path / "cache", settle_s=0)
    assert model_hash(directory, cache) == model_hash(safe, cache)
    assert torch.equal(read_all(directory)[name], read_all(safe)[name])


def test_a_start_names_the_tensor_that_holds_nan(tmp_path: Path) -> None:
    safe = checkpoints.write_llama(tmp_path / "safe")
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].fill_(float("nan"))

    checkpoints.edit_checkpoint(safe, tensors=spoil)
    directory = checkpoints.pickle_weights(safe, tmp_path / "bin")
    with pytest.raises(CheckpointError, match=f"values of 1 tensors: {name}"):
        make_target(Pairing(target=directory, draft=directory, algorithm="none"))


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _save_legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def _save_damaged(path: Path) -> None:
    """Write a pickle that reads from its memo what it has never put there."""
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w") as damaged:
        for name, part in parts.items():
            damaged.writestr(name, b"\x80\x02h\x05." if name.endswith("data.pkl") else part)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"garbage"), "cannot be read as tensors only"),
        (lambda path: path.write_bytes(b""), "cannot be read as tensors only"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "cannot be read as tensors only"),
        (lambda path: torch.save(_Bomb(path.parent / "ran"), path), "never run"),
        (lambda path: torch.save({"a": _Bomb(path.parent / "ran")}, path), "never run"),
        (lambda path: _save_legacy({"a": torch.ones(2)}, path), "mmap"),
        (lambda path: torch.save([torch.ones(2)], path), "dictionary of tensors by name"),
        (lambda path: torch.save({"model": {"a": torch.ones(2)}}, path), "dictionary of tensors"),
        (lambda path: torch.save({"a": torch.ones(2, dtype=torch.complex64)}, path), "complex64"),
        (lambda path: torch.save({"a": torch.ones(2).expand(1 << 40, 2)}, path), "strides"),
        (lambda path: torch.save({"a": torch.eye(2).to_sparse()}, path), "sparse_coo"),
        (_save_damaged, "cannot be read as tensors only"),
    ],
    ids=["garbage", "empty", "pickle", "bomb", "bomb-inside", "legacy", "list", "nested", "dtype",
         "stride-0", "sparse", "damaged"],
)  # fmt: skip
def test_anything_else_that_is_pickled_is_refused(tmp_path: Path, write: Any, message: str) -> None:
    directory = checkpoints.write_llama(tmp_path)
    (directory / "model.safetensors").unlink()
    write(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message) as raised:
        read_tensor_infos(directory)
    assert "pytorch_model.bin" in str(raised.value)
    assert not (directory / "ran").exists()
