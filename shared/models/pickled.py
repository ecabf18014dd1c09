"""Weights in PyTorch's own format, pytorch_model.bin: read as tensors and never run as code.

Such a file is a pickle, which may name functions to call; `weights_only` refuses every name but
those of tensors. Importing this module does not import torch.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# What reading a damaged one raises, beside what torch and the file system do.
DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError,
    struct.error,
)  # fmt: skip
SUFFIX = ".bin"
FILE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
# Ends of files that are pickles as well, and under which weights are found.
_OTHER_PICKLES = (SUFFIX, ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class PickledFile:
    """A pytorch_model.bin, mapped into memory; it is used as an open safetensors file is.

    Raises: CheckpointError if it holds anything but tensors by name.
    """

    def __init__(self, path: Path) -> None:
        import torch

        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (*DAMAGED, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as tensors only, and what else a pickle holds is never "
                f"run: {_first_line(error)}. Convert it with safetensors.torch.save_file"
            ) from error
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in tensors.items()
        ):
            raise CheckpointError(
                f"{path} must hold a dictionary of tensors by name; save the model's state_dict() "
                "with safetensors.torch.save_file"
            )
        self._path = path
        self._tensors: dict[str, torch.Tensor] = tensors

    def __enter__(self) -> PickledFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._tensors = {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, a view of the mapped file."""
        return self._tensors[name].detach()

    def entries(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return dtype, as safetensors calls it, shape and size in bytes of every tensor.

        Raises: CheckpointError naming a tensor of a dtype that no weights have.
        """
        import torch

        entries = {}
        for name, tensor in self._tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            is_dense = tensor.layout is torch.strided and not tensor.is_quantized
            if dtype not in _DTYPES or not is_dense or 0 in tensor.stride():
                raise CheckpointError(
                    f"{self._path}: {name!r} is {tensor.layout} of {dtype} with strides "
                    f"{tensor.stride() if is_dense else None}, which no weights have"
                )
            size = tensor.numel() * tensor.element_size()
            entries[name] = (_DTYPES[dtype], tuple(tensor.shape), size)
        return entries

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of a tensor as safetensors has them."""
        import torch

        flat = self._tensors[name].detach().contiguous().flatten()
        return flat.view(torch.uint8).numpy().data


def hint_at_pickles(directory: Path) -> str:
    """Return what to do about weights that lie in other files than those that are read; "": none.

    Called for a checkpoint without safetensors and without a pytorch_model.bin.
    """
    names = sorted(path.name for path in directory.glob("*") if path.suffix in _OTHER_PICKLES)
    if not names:
        return ""
    return (
        f"; of PyTorch's own format only {FILE} is read, and {INDEX} with its shards: convert "
        f"{', '.join(names[:3])} with safetensors.torch.save_file"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else repr(error)
