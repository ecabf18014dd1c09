"""Load a model's weights from a checkpoint, each in the form that kernels multiply by.

A weight comes in one of three forms: in the worker's dtype; in FP8, with scales (fp8_tensors.py);
in int4, with scales and zeros (int4_tensors.py). The checkpoint decides by how it stores the
weight; `--quantization` (`quantization_while_loading`) makes FP8 of a weight that is not quantised.

    load_projection ── load_matrix ─┬─ stored in int4: load_int4
                                    ├─ stored in FP8: Fp8Tensors.load
                                    └─ else: StoredTensors.load, and `quantize` if it becomes FP8

The bytes are read by tensor_reads.py. Which tensors there are, and that none is missing or left
over, is up to stored_tensors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from shared.errors import CheckpointError
from shared.kernels.fp8_experts import QuantizedExperts
from shared.kernels.int4 import Int4Weight
from shared.kernels.products_cpu import CpuProducts, Weight
from shared.kernels.quantized import GpuWeight, QuantizedWeight, quantize
from shared.models.fp8_tensors import Fp8Tensors
from shared.models.int4_config import PACKED, QWEIGHT, Int4Config, read_int4_config
from shared.models.int4_tensors import Int4Source, load_int4
from shared.models.quantization import (
    output_layer_becomes_fp8,
    projections_become_fp8,
    read_fp8_rows,
)
from shared.models.stored_tensors import StoredTensors
from shared.models.tensor_files import TensorInfo

# What follows the module's name in the tensors that a weight in int4 is loaded from, in that order.
_INT4_PARTS = (QWEIGHT, PACKED, "qzeros", "weight_scale", "scales")


class CheckpointReader(StoredTensors):
    """Loads a checkpoint's weights in whatever form they are stored; a context manager.

    Args:
        directory, device, dtype, rename: As of StoredTensors.
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
        super().__init__(directory, device=device, dtype=dtype, rename=rename)
        self.products = CpuProducts()
        self._quantization = quantization
        self._fp8 = Fp8Tensors(self)

    def __enter__(self) -> Self:
        return self

    def packs_weights(self) -> bool:
        """Return whether weights are packed for products before they are used; on a CPU."""
        return self.products.packs(torch.empty(0, dtype=self._dtype, device=self._device))

    # --- one weight ------------------------------------------------------------------------------

    def load_weight(self, name: str, shape: Sequence[int]) -> Weight:
        """Return the weight of a linear layer, ready to be multiplied by; see `load`."""
        return self.products.weight(self.load(name, shape))

    def load_projection(self, name: str, shape: Sequence[int]) -> Weight:
        """Return the weight of a projection, ready to be multiplied by; see `load_matrix`."""
        return self.products.weight(self.load_matrix(name, shape))

    def output_layer(self, weight: torch.Tensor | QuantizedWeight) -> Weight:
        """Return an output layer, ready to be multiplied by; in FP8 if `quantization` says so.

        Args:
            weight: [V, h], as it was loaded.
        Raises: CheckpointError if the weight becomes FP8 and holds NaN or infinity.
        """
        becomes_fp8 = output_layer_becomes_fp8(self._quantization)
        if becomes_fp8 and not isinstance(weight, QuantizedWeight):
            weight = quantize(weight, has_fp8_rows=True)
            if not weight.is_finite():
                raise CheckpointError(
                    f"{self.directory}: the output layer holds NaN or infinity; get an undamaged "
                    "checkpoint, or one of its target if the draft has no output layer of its own"
                )
        return self.products.weight(weight)

    def load_matrix(self, name: str, shape: Sequence[int]) -> GpuWeight:
        """Return the weight of a projection on the device, in FP8, in int4 or in the dtype.

        Raises: CheckpointError naming a tensor that is missing or mis-shaped; `finish` raises it
            for a weight in FP8 that holds NaN or infinity.
        """
        if self.is_packed(name):
            return self._load_packed(name, shape)
        if self.are_fp8([name]):
            return self.load_quantized(name, shape)
        weight = self.load(name, shape)
        if not projections_become_fp8(self._quantization):
            return weight
        quantized = quantize(weight, has_fp8_rows=True)
        self._fp8.note(name, quantized)
        return quantized

    def load_dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a matrix on the device in the dtype, dequantised if need be; see `load`."""
        if self.is_packed(name):
            weight = self._load_packed(name, shape)
            if isinstance(weight, Int4Weight):
                weight = weight.dequantized()
            return weight.to(self._dtype)
        if self.are_fp8([name]):
            return self.load_quantized(name, shape).dequantized(self._dtype)
        return self.load(name, shape)

    def load_expert(self, name: str, shape: Sequence[int]) -> torch.Tensor | QuantizedWeight:
        """Return a weight of a routed expert on the device: in FP8 if it is stored in FP8, else in
        the dtype, dequantised if need be; see `load_matrix`.
        """
        if self.are_fp8([name]):
            return self.load_quantized(name, shape)
        return self.load_dense(name, shape)

    def load_quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight:
        """Load a weight in FP8, see `load_fp8`."""
        weights = self.load_fp8([name], shape)
        assert weights is not None, "one weight has scales of one kind"
        return weights[0]

    def _load_packed(self, name: str, shape: Sequence[int]) -> Int4Weight | torch.Tensor:
        """Load values, scales and zeros of a weight in int4."""
        source = Int4Source(
            place=str(self.directory),
            config=self._int4_config,
            read=self.load_as_stored,
            dtype_of=lambda name: info.dtype if (info := self.info(name)) is not None else "",
        )
        return load_int4(source, name.removesuffix(".weight"), shape, self._dtype)

    # --- several weights -------------------------------------------------------------------------

    def load_fp8(self, names: Sequence[str], shape: Sequence[int]) -> QuantizedExperts | None:
        """Load weights in FP8 of one shape, with all their scales at once.

        Args:
            shape: (N, K) of each weight.
        Returns: The weights in the order of `names`; None: their scales are not of one kind.
        Raises: As `load_matrix`.
        """
        has_fp8_rows = projections_become_fp8(self._quantization) or self._has_fp8_rows
        return self._fp8.load(names, shape, has_fp8_rows=has_fp8_rows)

    def read_ahead(self, stacks: Iterable[Sequence[str]]) -> None:
        """Say which weights will be loaded next, in order, so that their bytes come sooner.

        A call replaces what the call before said. Loading in another order costs time, nothing
        else.

        Args:
            stacks: What each later call will load: one weight, or those of a stack. Scales of FP8
                are few bytes, and read when they are loaded.
        """
        self._reads.read_ahead(stack for names in stacks for stack in self._stored_stacks(names))

    def _stored_stacks(self, names: Sequence[str]) -> list[list[TensorInfo]]:
        """Return the tensors that weights are loaded from, by calls that read them."""
        if all(name in self._infos for name in names):
            return [[self._infos[name] for name in names]]
        modules = [name.removesuffix("weight") for name in names]
        parts = [f"{module}{part}" for module in modules for part in _INT4_PARTS]
        return [[self._infos[part]] for part in parts if part in self._infos]

    # --- at the end ------------------------------------------------------------------------------

    def check_numbers(self) -> None:
        """Raise CheckpointError naming a weight in FP8 that was loaded and holds NaN or infinity,
        which kernels would take for numbers.
        """
        self._fp8.check_numbers()

    def finish(self, extras: Collection[str] = (), *, within: str = "") -> None:
        """Raise unless every tensor was loaded or need not be, and weights in FP8 hold numbers.

        Args:
            extras: fnmatch patterns of tensors that are known and not needed.
            within: Only tensors whose names begin with this prefix are checked.
        Raises: CheckpointError naming the tensors that are left over, or as `check_numbers`.
        """
        self.check_numbers()
        self.check_all_loaded(extras, within=within)

    # --- what config.json says -------------------------------------------------------------------

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
