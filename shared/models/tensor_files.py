"""The tensors of a checkpoint's files: names, dtypes, shapes and places, from headers. No torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.models import pickled

# Names of dtypes as safetensors headers have them.
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
FP8_DTYPE = "F8_E4M3"
BYTES_DTYPE = "U8"
# Bytes of a value; types that are packed are not here.
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file: an entry of a safetensors header, or of a pytorch_model.bin.

    Args:
        dtype: As safetensors calls it.
        start, end: Bytes of the tensor in the file, [start, end); of a pytorch_model.bin only
            their difference means something.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_pickled(self) -> bool:
        """Return whether the file is in PyTorch's own format."""
        return self.file.suffix == pickled.SUFFIX


def read_tensor_infos(directory: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a checkpoint, by name, from the headers of its files.

    They are safetensors, or pytorch_model.bin where there are none.

    Raises: CheckpointError naming the file that is missing or broken, or the tensor that the index
        promises and no file holds.
    """
    index_path = directory / "model.safetensors.index.json"
    if not index_path.is_file() and not any(directory.glob("*.safetensors")):
        index_path = directory / pickled.INDEX
    if not index_path.is_file():
        return _read_header(_single_file(directory))
    weight_map = _read_weight_map(index_path)
    infos: dict[str, TensorInfo] = {}
    for file_name in sorted(set(weight_map.values())):
        for name, info in _read_header(directory / file_name).items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(f"{info.file} holds {name!r}, which the index does not say")
            infos[name] = info
    missing = sorted(set(weight_map) - set(infos))
    if missing:
        raise CheckpointError(f"{directory}: missing tensors that the index names: {missing}")
    return infos


def _read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor, as a safetensors index says."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise CheckpointError(
            f"{path}: weight_map must be an object that gives each tensor a file of this directory"
        )
    return weight_map


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value == Path(value).name != ""


def _single_file(directory: Path) -> Path:
    preferred = directory / "model.safetensors"
    files = [preferred] if preferred.is_file() else sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{directory} holds {len(files)} safetensors files and no model.safetensors.index.json"
        )
    if (directory / pickled.FILE).is_file():
        return directory / pickled.FILE
    hint = pickled.hint_at_pickles(directory)
    raise CheckpointError(f"{directory} holds no safetensors file{hint}")


def _read_header(path: Path) -> dict[str, TensorInfo]:
    if path.suffix == pickled.SUFFIX:
        return {
            name: TensorInfo(name=name, file=path, dtype=dtype, shape=shape, start=0, end=size)
            for name, (dtype, shape, size) in pickled.PickledFile(path).entries().items()
        }
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header: Mapping[str, Any] = json.loads(file.read(length))
        infos = {
            name: _read_entry(path, name, entry, first=8 + length, size=size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    in_order = sorted(infos.values(), key=lambda info: (info.start, info.end))
    for info, following in itertools.pairwise(in_order):
        if following.start < info.end:
            raise CheckpointError(f"{path}: {following.name!r} begins within {info.name!r}")
    return infos


def _read_entry(path: Path, name: str, entry: Any, *, first: int, size: int) -> TensorInfo:
    """Return what an entry of a header says of a tensor.

    Args:
        first: Of the bytes that offsets count from.
        size: Of the file, bytes.
    Raises: CheckpointError if the tensor cannot lie there.
    """
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    where = f"{path}: {name!r} is {dtype} {list(shape)} at bytes [{begin}, {end})"
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointError(f"{where}: shape and offsets must be integers that are not negative")
    item_bytes = _ITEM_BYTES.get(dtype)
    num_bytes = max(end - begin, 0) if item_bytes is None else math.prod(shape) * item_bytes
    if end - begin != num_bytes:
        raise CheckpointError(f"{where}, but takes {num_bytes} bytes")
    if first + end > size:
        raise CheckpointError(
            f"{where}, of which the file has {size - first}: it is not a whole safetensors file"
        )
    return TensorInfo(
        name=name, file=path, dtype=dtype, shape=shape, start=first + begin, end=first + end
    )
