"""Hugging Face checkpoint directories: where they are, what is in them, strict reading.

Importing this module does not import torch; only CheckpointReader.load does.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import CheckpointError
from shared.models import hub
from shared.models.int4_config import PACKED, QWEIGHT, Int4Config, read_int4_config
from shared.models.quantization import (
    activation_scale_of,
    is_output_layer,
    is_projection,
    output_layer_becomes_fp8,
    projections_become_fp8,
    read_fp8_rows,
    stays_fp8,
)
from shared.models.tensor_files import TensorInfo, read_tensor_infos

if TYPE_CHECKING:
    import torch

    from shared.kernels.fp8_experts import QuantizedExperts
    from shared.kernels.int4 import Int4Weight
    from shared.kernels.products_cpu import Weight
    from shared.kernels.quantized import GpuWeight, QuantizedWeight

DEMO = "demo"
BUNDLED_ROLES = ("target", "eagle3", "standalone")
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
FP8_DTYPE = "F8_E4M3"
BYTES_DTYPE = "U8"

# Ends of the names of scales of int4 weights.
_INT4_SCALES = (".scales", ".weight_scale")
# Ends of the names of scales: DeepSeek's, though values are multiplied by them, and all others'.
_SCALE_ENDS = ("_scale_inv", "_scale")
# What follows the module's name in the tensors that a weight in int4 is loaded from, in that order.
_INT4_PARTS = (QWEIGHT, PACKED, "qzeros", "weight_scale", "scales")


def resolve_model(name: str, role: str) -> Path:
    """Return the directory of a checkpoint.

    Args:
        name: A directory; "demo" for the bundled model; `org/name` or `org/name@revision` for one
            on the Hugging Face Hub, which is downloaded if it is not cached.
        role: Which bundled model: "target", "eagle3" or "standalone".
    Raises: CheckpointError when there is no checkpoint.
    """
    if name == DEMO:
        assert role in BUNDLED_ROLES, f"no bundled model is called {role!r}"
        spec = importlib.util.find_spec("coppice")
        assert spec is not None and spec.submodule_search_locations, "coppice is not installed"
        directory = Path(spec.submodule_search_locations[0]) / "bundled" / role
    elif hub.is_hub_name(name):
        directory = hub.fetch(name)
    else:
        directory = Path(name).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} holds no config.json; pass a Hugging Face checkpoint directory, a name "
            "on the Hub (org/name) or 'demo'"
        )
    return directory


def tokenizer_hash(directory: Path) -> str:
    """Return a fingerprint of what every token id means; "" without a tokenizer.json.

    Covers the vocabulary and the added tokens, not the merges, templates or padding: two models
    with equal hashes mean the same text by the same ids.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        vocab = fields["model"]["vocab"]
        added = [[token["id"], token["content"]] for token in fields.get("added_tokens") or []]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a tokenizers file: {error!r}") from error
    text = json.dumps([vocab, sorted(added)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def stored_bytes(directory: Path) -> int:
    """Return the bytes that a checkpoint's tensors take in its files."""
    return sum(info.end - info.start for info in read_tensor_infos(directory).values())


def weight_bytes(directory: Path, itemsize: int, quantization: str = "") -> int:
    """Return the memory that a checkpoint's weights take, bytes.

    Args:
        itemsize: Bytes per value as they are loaded, of what is not quantised.
        quantization: What becomes FP8, see `quantization_while_loading`.
    """
    int4, infos = read_int4_config(directory), read_tensor_infos(directory)
    has_fp8_output = output_layer_becomes_fp8(quantization)
    is_tied = not any(map(is_output_layer, infos))

    def loaded(name: str, info: TensorInfo) -> int:
        if int4 is not None and name.endswith((QWEIGHT, PACKED, *_INT4_SCALES)):
            return _int4_bytes(name, info, int4, itemsize)
        if has_fp8_output and is_tied and name.endswith("embed_tokens.weight"):
            return math.prod(info.shape) * itemsize + _fp8_bytes(info)  # it stays beside its copy
        becomes_fp8 = (has_fp8_output and is_output_layer(name)) or (
            projections_become_fp8(quantization) and is_projection(name)
        )
        return _dense_bytes(name, info, itemsize, becomes_fp8=becomes_fp8)

    return sum(loaded(name, info) for name, info in infos.items())


def _int4_bytes(name: str, info: TensorInfo, int4: Int4Config, itemsize: int) -> int:
    """Return the memory of a tensor of an int4 weight: its values or its scales."""
    size = math.prod(info.shape)
    if name.endswith(_INT4_SCALES):
        return 4 * size  # with their zeros
    is_kept = is_projection(name) and not int4.is_reordered
    return 4 * size if is_kept else 8 * size * itemsize


def _dense_bytes(name: str, info: TensorInfo, itemsize: int, *, becomes_fp8: bool) -> int:
    """Return the memory of a tensor that is not int4."""
    is_fp8 = info.dtype == FP8_DTYPE
    if info.dtype == BYTES_DTYPE:  # MXFP4, whose last blocks are made whole
        return _fp8_bytes(info)
    if info.dtype not in FLOAT_DTYPES and not is_fp8:
        return 0
    if becomes_fp8 or (is_fp8 and stays_fp8(name)):
        return _fp8_bytes(info)
    return math.prod(info.shape) * itemsize


def _fp8_bytes(info: TensorInfo) -> int:
    """Return the memory of a byte for each value, and scales: one of four bytes for 128 values."""
    size = math.prod(info.shape)
    return size + size // 32


def _names_of_false(names: Sequence[str], answers: Sequence[torch.Tensor]) -> list[str]:
    """Return the names whose answers are no; waits once for all.

    Args:
        answers: [n] bool each, on one device; of the first n names, of those after them, ...
    """
    import torch

    are_true = torch.cat([*answers]).tolist() if answers else []
    return [name for name, is_true in zip(names, are_true, strict=True) if not is_true]


class CheckpointReader:
    """Reads a checkpoint's tensors straight to a device, and accounts for every one of them.

    Args:
        directory: Holds model.safetensors, or shards with their index; or pytorch_model.bin.
        device: Where tensors go.
        dtype: What floating-point tensors become.
        rename: Maps a name in the files to the name by which `load` asks; errors say both.
        quantization: What becomes FP8, see `quantization_while_loading`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rename: Callable[[str], str] | None = None,
        quantization: str = "",
    ) -> None:
        from shared.kernels.products_cpu import CpuProducts
        from shared.models.tensor_reads import TensorReads

        self.products = CpuProducts()
        self.directory = directory
        self._device = device
        self._dtype = dtype
        self._quantization = quantization
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
        # Weights in FP8, and whether they hold numbers, see `_names_of_false`. Asked at the end: a
        # GPU would stop reading for every answer.
        self._fp8_names: list[str] = []
        self._are_finite: list[torch.Tensor] = []

    def __enter__(self) -> CheckpointReader:
        return self

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

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is in `names`."""
        return self._infos[name].shape

    def read_ahead(self, stacks: Iterable[Sequence[str]]) -> None:
        """Say which weights will be loaded next, in order, so that their bytes come sooner.

        This replaces what was said before. An order that is not kept costs time, nothing else.

        Args:
            stacks: What each call will load: one weight, or those of a stack. Scales of FP8 are
                few bytes, and read when they are asked for.
        """
        self._reads.read_ahead(stack for names in stacks for stack in self._stored_stacks(names))

    def _stored_stacks(self, names: Sequence[str]) -> list[list[TensorInfo]]:
        """Return the tensors that weights are loaded from, by calls that read them."""
        if all(name in self._infos for name in names):
            return [[self._infos[name] for name in names]]
        modules = [name.removesuffix("weight") for name in names]
        parts = [f"{module}{part}" for module in modules for part in _INT4_PARTS]
        return [[self._infos[part]] for part in parts if part in self._infos]

    def load(
        self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a floating-point tensor on the device.

        Args:
            shape: What the tensor must measure.
            dtype: What it becomes; None: the reader's.
        Raises: CheckpointError naming a tensor that is missing, mis-shaped or quantised.
        """
        return self._read(self._take_float(name, shape), dtype or self._dtype)

    def load_stack(self, names: Sequence[str], shape: Sequence[int]) -> torch.Tensor:
        """Return floating-point tensors of one shape as one, [n, *shape]; see `load`."""
        infos = [self._take_float(name, shape) for name in names]
        return self._read_stack(infos, self._dtype)

    def packs_weights(self) -> bool:
        """Return whether weights are packed for products before they are used; on a CPU."""
        import torch

        return self.products.packs(torch.empty(0, dtype=self._dtype, device=self._device))

    def are_float(self, names: Iterable[str]) -> bool:
        """Return whether tensors are there, and of no quantised weights."""
        infos = map(self._infos.get, names)
        return all(info is not None and info.dtype in FLOAT_DTYPES for info in infos)

    def load_weight(self, name: str, shape: Sequence[int]) -> Weight:
        """Return the weight of a linear layer, ready to be multiplied by; see `load`."""
        return self.products.weight(self.load(name, shape))

    def output_layer(self, weight: torch.Tensor | QuantizedWeight) -> Weight:
        """Return an output layer, [V, h], ready to be multiplied by; in FP8, if it is to become it.

        Raises: CheckpointError if it is to become FP8, and holds no numbers.
        """
        from shared.kernels.quantized import QuantizedWeight, quantize

        becomes_fp8 = output_layer_becomes_fp8(self._quantization)
        if becomes_fp8 and not isinstance(weight, QuantizedWeight):
            weight = quantize(weight, has_fp8_rows=True)
            if not weight.is_finite():
                raise CheckpointError(
                    f"{self.directory}: the output layer holds NaN or infinity; get an undamaged "
                    "checkpoint, or one of its target if the draft has no output layer of its own"
                )
        return self.products.weight(weight)

    def load_projection(self, name: str, shape: Sequence[int]) -> Weight:
        """Return the weight of a projection, ready to be multiplied by; see `load_matrix`."""
        return self.products.weight(self.load_matrix(name, shape))

    def load_dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a matrix on the device in the dtype, dequantised if need be; see `load`."""
        from shared.kernels.int4 import Int4Weight

        if self._is_packed(name):
            weight = self._load_packed(name, shape)
            if isinstance(weight, Int4Weight):
                weight = weight.dequantized()
            return weight.to(self._dtype)
        info = self._infos.get(name)
        if info is None or info.dtype != FP8_DTYPE:
            return self.load(name, shape)
        return self.load_quantized(name, shape).dequantized(self._dtype)

    def load_expert(self, name: str, shape: Sequence[int]) -> torch.Tensor | QuantizedWeight:
        """Return a weight of a routed expert on the device, in FP8 if the checkpoint has it so.

        Others are in the dtype, dequantised if need be; see `load_matrix`.
        """
        if self.are_fp8([name]):
            return self.load_quantized(name, shape)
        return self.load_dense(name, shape)

    def load_matrix(self, name: str, shape: Sequence[int]) -> GpuWeight:
        """Return the weight of a projection on the device, in FP8, in int4 or in the dtype.

        Raises: CheckpointError naming a tensor that is missing or mis-shaped; `finish` does, if
            one in FP8 holds no numbers.
        """
        from shared.kernels.quantized import quantize

        if self._is_packed(name):
            return self._load_packed(name, shape)
        info = self._infos.get(name)
        if info is not None and info.dtype == FP8_DTYPE:
            return self.load_quantized(name, shape)
        weight = self.load(name, shape)
        if not projections_become_fp8(self._quantization):
            return weight
        quantized = quantize(weight, has_fp8_rows=True)
        self._fp8_names.append(name)
        self._are_finite.append(quantized.is_finite()[None])
        return quantized

    def _is_packed(self, name: str) -> bool:
        """Return whether a weight is in int4."""
        module = name.removesuffix("weight")
        return name not in self._infos and any(
            f"{module}{end}" in self._infos for end in (QWEIGHT, PACKED)
        )

    def _load_packed(self, name: str, shape: Sequence[int]) -> Int4Weight | torch.Tensor:
        """Load values, scales and zeros of a weight in int4."""
        from shared.models.int4_tensors import Int4Source, load_int4

        source = Int4Source(
            place=str(self.directory),
            config=self._int4_config,
            read=self._load_raw,
            dtype_of=lambda name: self._infos[name].dtype if name in self._infos else "",
        )
        return load_int4(source, name.removesuffix(".weight"), shape, self._dtype)

    @cached_property
    def _int4_config(self) -> Int4Config:
        config = read_int4_config(self.directory)
        if config is None:
            raise CheckpointError(
                f"{self.directory}: some weights are packed in int4, but quantization_config of "
                "config.json does not say how"
            )
        return config

    @cached_property
    def _has_fp8_rows(self) -> bool:
        return read_fp8_rows(self.directory)

    def _load_raw(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> torch.Tensor:
        """Return a tensor on the device in its own dtype, one of `dtypes`."""
        info = self._take(name, shape)
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} is {info.dtype}, expected "
                f"{' or '.join(dtypes)}"
            )
        return self._read(info, None)

    def are_fp8(self, names: Iterable[str]) -> bool:
        """Return whether the values of weights are there, in FP8."""
        infos = map(self._infos.get, names)
        return all(info is not None and info.dtype == FP8_DTYPE for info in infos)

    def load_quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight:
        """Load a weight in FP8, see `load_fp8`."""
        weights = self.load_fp8([name], shape)
        assert weights is not None, "one weight has scales of one kind"
        return weights[0]

    def load_fp8(self, names: Sequence[str], shape: Sequence[int]) -> QuantizedExperts | None:
        """Load weights in FP8 that are alike, with all their scales at once.

        Args:
            shape: (N, K) of each.
        Returns: The weights in that order; None: their scales are not alike.
        Raises: CheckpointError naming a tensor that is missing or mis-shaped; `finish` does, if
            one holds no numbers.
        """
        import torch

        from shared.kernels.fp8_experts import QuantizedExperts

        infos = [self._take(name, shape) for name in names]
        scales = self._load_scales(names, shape)
        if scales is None:
            return None
        weights = QuantizedExperts(
            values=self._read_stack(infos, torch.float8_e4m3fn),
            scales=scales,
            dtype=self._dtype,
            has_fp8_rows=projections_become_fp8(self._quantization) or self._has_fp8_rows,
        )
        self._fp8_names += names
        self._are_finite.append(weights.are_finite())
        return weights

    def _load_scales(self, names: Sequence[str], shape: Sequence[int]) -> torch.Tensor | None:
        """Load the scales of weights in FP8, as QuantizedExperts have them; None: not alike."""
        import torch

        from shared.kernels.quantized import spread_scales

        parts = []
        infos = map(self._take_scales, names)
        for (dtype, stored_shape), group in groupby(infos, lambda info: (info.dtype, info.shape)):
            alike = list(group)
            spread = None
            if dtype in FLOAT_DTYPES:
                spread = spread_scales(self._read_stack(alike, None).float(), shape)
            if spread is None:
                raise CheckpointError(
                    f"{self.directory}: scales {alike[0].name!r} are {dtype} of shape "
                    f"{list(stored_shape)}; a weight of {list(shape)} needs floating-point scales, "
                    "one, one per row, or one per block of 128 x 128"
                )
            parts.append(spread)
        if len({part.shape[1:] for part in parts}) > 1:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _take_scales(self, name: str) -> TensorInfo:
        """Return where the scales of a weight in FP8 are."""
        found = [f"{name}{end}" for end in _SCALE_ENDS if f"{name}{end}" in self._infos]
        if len(found) != 1:
            ends = " or ".join(_SCALE_ENDS)
            raise CheckpointError(
                f"{self.directory}: {name!r} is {FP8_DTYPE}, and needs one tensor of scales, of "
                f"the same name and {ends}; there are {len(found)}"
            )
        return self._take(found[0], self._infos[found[0]].shape)

    def load_bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of bytes on the device, u8.

        Raises: CheckpointError naming a tensor that is missing, mis-shaped or not of bytes.
        """
        import torch

        info = self._take(name, shape)
        if info.dtype != BYTES_DTYPE:
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} is {info.dtype}, expected {BYTES_DTYPE}"
            )
        return self._read(info, torch.uint8)

    def load_int64(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return an integer tensor on the device, as int64.

        Raises: CheckpointError naming a tensor that is missing, mis-shaped or not of integers.
        """
        import torch

        info = self._take(name, shape)
        if info.dtype not in ("I64", "I32"):
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} is {info.dtype}, expected I64 or I32"
            )
        return self._read(info, torch.int64)

    def check_numbers(self) -> None:
        """Raise CheckpointError naming a tensor in FP8 that was loaded and holds NaN or infinity,
        which kernels would take for numbers.
        """
        broken = _names_of_false(self._fp8_names, self._are_finite)
        if broken:
            raise CheckpointError(
                f"{self.directory}: tensor {self._infos[broken[0]].name!r} or its scales hold NaN "
                "or infinity; get an undamaged checkpoint"
            )

    def finish(self, extras: Collection[str] = (), *, within: str = "") -> None:
        """Raise unless every tensor was loaded or is a known extra, and those in FP8 hold numbers.

        Args:
            extras: fnmatch patterns of tensors that are known and not needed.
            within: Only tensors whose names begin so are meant.
        Raises: CheckpointError naming the tensors that are left over, or as `check_numbers`.
        """
        self.check_numbers()
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

    def _is_activation_scale(self, name: str) -> bool:
        """Return whether a tensor belongs to a loaded weight in FP8, and is not needed."""
        weight = activation_scale_of(name)
        return weight in self._loaded and self._infos[weight].dtype == FP8_DTYPE

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is the bias that GPTQ's tools give projections without one."""
        if not name.endswith(".bias") or not self._is_packed(f"{name.removesuffix('bias')}weight"):
            return False
        return not bool(self._read(self._infos[name], None).any())

    def _take(self, name: str, shape: Sequence[int]) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            packed = "; it is in int4, which only projections of layers may be"
            raise CheckpointError(
                f"{self.directory}: missing tensor {name!r} of shape {list(shape)}"
                f"{packed if self._is_packed(name) else ''}"
            )
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} has shape {list(info.shape)}, "
                f"config.json makes it {list(shape)}"
            )
        self._loaded.add(name)
        return info

    def _take_float(self, name: str, shape: Sequence[int]) -> TensorInfo:
        info = self._take(name, shape)
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.directory}: tensor {info.name!r} is {info.dtype}; it must be one of "
                f"{', '.join(sorted(FLOAT_DTYPES))}: only projections of layers and the output "
                "layer may be FP8"
            )
        return info

    def _read(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        return self._read_stack([info], dtype)[0]

    def _read_stack(self, infos: Sequence[TensorInfo], dtype: torch.dtype | None) -> torch.Tensor:
        return self._reads.read_stack(infos, dtype)
