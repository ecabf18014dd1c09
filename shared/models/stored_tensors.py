"""The tensors of a checkpoint's files, read strictly: every tensor has the expected name, shape and
dtype, and no tensor is left over.

checkpoint.py makes weights of these tensors: a weight in FP8 or int4 is stored as several of them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch

from shared.errors import CheckpointError
from shared.models.int4_config import PACKED, QWEIGHT
from shared.models.quantization import activation_scale_of
from shared.models.tensor_files import (
    BYTES_DTYPE,
    FLOAT_DTYPES,
    FP8_DTYPE,
    TensorInfo,
    read_tensor_infos,
)
from shared.models.tensor_reads import TensorReads


class StoredTensors:
    """Reads a checkpoint's tensors straight to a device, and notes which of them were loaded.

    Args:
        directory: Holds model.safetensors, or shards with their index; or pytorch_model.bin.
        device: Where tensors go.
        dtype: What floating-point tensors become.
        rename: Maps a name in the files to the name by which callers ask; errors say both.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self.directory = directory
        self._device = device
        self._dtype = dtype
        self._infos: dict[str, TensorInfo] = {}
        for name, info in read_tensor_infos(directory).items():
            key = rename(name) if rename else name
            if key in self._infos:
                raise CheckpointError(
                    f"{directory}: tensors {name!r} and {self._infos[key].name!r} both mean {key!r}"
                )
            self._infos[key] = info
        self._reads = TensorReads(device)
        self._loaded: set[str] = set()

    def __exit__(self, *raised: object) -> None:
        self._reads.close()

    @property
    def dtype(self) -> torch.dtype:
        """Return what floating-point tensors become."""
        return self._dtype

    @property
    def names(self) -> Collection[str]:
        """Return every tensor's name, renamed."""
        return self._infos.keys()

    def info(self, name: str) -> TensorInfo | None:
        """Return the header entry of a tensor; None: the checkpoint has no such tensor."""
        return self._infos.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is in `names`."""
        return self._infos[name].shape

    def are_float(self, names: Iterable[str]) -> bool:
        """Return whether all these tensors exist in a floating-point dtype other than FP8."""
        infos = map(self._infos.get, names)
        return all(info is not None and info.dtype in FLOAT_DTYPES for info in infos)

    def are_fp8(self, names: Iterable[str]) -> bool:
        """Return whether all these tensors exist in FP8."""
        infos = map(self._infos.get, names)
        return all(info is not None and info.dtype == FP8_DTYPE for info in infos)

    def load(
        self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a floating-point tensor on the device.

        Args:
            shape: What the tensor must measure.
            dtype: What the tensor becomes; None: the reader's dtype.
        Raises: CheckpointError naming a tensor that is missing, mis-shaped or quantised.
        """
        return self.read(self._take_float(name, shape), dtype or self._dtype)

    def load_stack(self, names: Sequence[str], shape: Sequence[int]) -> torch.Tensor:
        """Return floating-point tensors of one shape as one, [n, *shape]; see `load`."""
        infos = [self._take_float(name, shape) for name in names]
        return self.read_stack(infos, self._dtype)

    def load_bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of bytes on the device, u8.

        Raises: CheckpointError naming a tensor that is missing, mis-shaped or not of bytes.
        """
        return self.load_as_stored(name, shape, (BYTES_DTYPE,))

    def load_int64(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return an integer tensor on the device, as int64.

        Raises: CheckpointError naming a tensor that is missing, mis-shaped or not of integers.
        """
        return self.load_as_stored(name, shape, ("I64", "I32")).to(torch.int64)

    def load_as_stored(
        self, name: str, shape: Sequence[int], dtypes: Sequence[str]
    ) -> torch.Tensor:
        """Return a tensor on the device in its own dtype, which must be one of `dtypes`.

        Args:
            dtypes: Names as in safetensors headers.
        Raises: CheckpointError naming a tensor that is missing, mis-shaped or of another dtype.
        """
        info = self.take(name, shape)
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} is {info.dtype}, expected "
                f"{' or '.join(dtypes)}"
            )
        return self.read(info, None)

    def take(self, name: str, shape: Sequence[int]) -> TensorInfo:
        """Return the header entry of a tensor that the caller reads now: the tensor counts as
        loaded.

        Raises: CheckpointError naming a tensor that is missing or mis-shaped.
        """
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.directory}: missing tensor {name!r} of shape {list(shape)}"
                f"{self._why_missing(name)}"
            )
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} has shape {list(info.shape)}, "
                f"config.json makes it {list(shape)}"
            )
        self._loaded.add(name)
        return info

    def read(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor on the device, in `dtype`; None: in its own dtype."""
        return self.read_stack([info], dtype)[0]

    def read_stack(self, infos: Sequence[TensorInfo], dtype: torch.dtype | None) -> torch.Tensor:
        """Return tensors of one shape on the device as one, [n, *shape]; dtype as of `read`."""
        return self._reads.read_stack(infos, dtype)

    def check_all_loaded(self, extras: Collection[str] = (), *, within: str = "") -> None:
        """Raise unless every tensor was loaded or need not be.

        Args:
            extras: fnmatch patterns of tensors that are known and not needed.
            within: Only tensors whose names begin with this prefix are checked.
        Raises: CheckpointError naming the tensors that are left over.
        """
        left_over = sorted(
            self._infos[name].name
            for name in set(self._infos) - self._loaded
            if name.startswith(within)
            and not self._is_activation_scale(name)
            and not self._is_zero_bias(name)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in extras)
        )
        if left_over:
            shown = ", ".join(left_over[:8]) + (", ..." if len(left_over) > 8 else "")
            raise CheckpointError(
                f"{self.directory}: {len(left_over)} left-over tensors that this architecture "
                f"does not have: {shown}"
            )

    def is_packed(self, name: str) -> bool:
        """Return whether a weight is stored in int4: not under its own name, but as a tensor of
        packed values beside its scales.
        """
        module = name.removesuffix("weight")
        return name not in self._infos and any(
            f"{module}{end}" in self._infos for end in (QWEIGHT, PACKED)
        )

    def _is_activation_scale(self, name: str) -> bool:
        """Return whether a tensor is the static scale of the inputs of an FP8 weight that was
        loaded; such scales are not needed.
        """
        weight = activation_scale_of(name)
        return weight in self._loaded and self._infos[weight].dtype == FP8_DTYPE

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is the bias of zeros that GPTQ's tools give to projections
        without a bias.
        """
        if not name.endswith(".bias") or not self.is_packed(f"{name.removesuffix('bias')}weight"):
            return False
        return not bool(self.read(self._infos[name], None).any())

    def _why_missing(self, name: str) -> str:
        if not self.is_packed(name):
            return ""
        return "; it is in int4, which only projections of layers may be"

    def _take_float(self, name: str, shape: Sequence[int]) -> TensorInfo:
        info = self.take(name, shape)
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} is {info.dtype}; it must be one of "
                f"{', '.join(sorted(FLOAT_DTYPES))}: only projections of layers and the output "
                "layer may be FP8"
            )
        return info
