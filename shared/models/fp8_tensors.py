"""Weights in FP8 (e4m3) as checkpoints store them -> as kernels read them.

A checkpoint stores such a weight as two tensors: the values, `NAME`, and the scales,
`NAME_scale_inv` (DeepSeek's name, although values are multiplied by these scales, too) or
`NAME_scale`. There is one scale for the whole weight, one per row, or one per block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from shared.errors import CheckpointError
from shared.kernels.fp8_experts import QuantizedExperts
from shared.kernels.quantized import QuantizedWeight, spread_scales
from shared.models.stored_tensors import StoredTensors
from shared.models.tensor_files import FLOAT_DTYPES, FP8_DTYPE, TensorInfo

_SCALE_ENDS = ("_scale_inv", "_scale")


class Fp8Tensors:
    """Loads weights in FP8 with their scales, and remembers whether they hold NaN or infinity.

    The check of the numbers comes at the end, for all weights at once: asking after each weight
    would have a GPU stop reading for the answer.

    Args:
        tensors: Where values and scales are read from.
    """

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors
        self._names: list[str] = []
        # In the order of `_names`, [n] bool each: whether the weights are free of NaN and infinity.
        self._are_finite: list[torch.Tensor] = []

    def load(
        self, names: Sequence[str], shape: Sequence[int], *, has_fp8_rows: bool
    ) -> QuantizedExperts | None:
        """Load weights of one shape, with all their scales at once.

        Args:
            shape: (N, K) of each weight.
            has_fp8_rows: The rows that are multiplied by these weights become FP8 as well.
        Returns: The weights in the order of `names`; None: their scales are not of one kind.
        Raises: CheckpointError naming a tensor that is missing or mis-shaped.
        """
        tensors = self._tensors
        infos = [tensors.take(name, shape) for name in names]
        scales = self._load_scales(names, shape)
        if scales is None:
            return None
        weights = QuantizedExperts(
            values=tensors.read_stack(infos, torch.float8_e4m3fn),
            scales=scales,
            dtype=tensors.dtype,
            has_fp8_rows=has_fp8_rows,
        )
        self._names += names
        self._are_finite.append(weights.are_finite())
        return weights

    def note(self, name: str, weight: QuantizedWeight) -> None:
        """Have `check_numbers` check a weight that became FP8 while it was loaded."""
        self._names.append(name)
        self._are_finite.append(weight.is_finite()[None])

    def check_numbers(self) -> None:
        """Raise CheckpointError naming a tensor in FP8 that was loaded and holds NaN or infinity:
        kernels would take these bytes for numbers.
        """
        are_finite = torch.cat([*self._are_finite]).tolist() if self._are_finite else []
        for name, is_finite in zip(self._names, are_finite, strict=True):
            if not is_finite:
                info = self._tensors.info(name)
                assert info is not None, "it was loaded"
                raise CheckpointError(
                    f"{self._tensors.directory}: tensor {info.name!r} or its scales hold NaN or "
                    "infinity; get an undamaged checkpoint"
                )

    def _load_scales(self, names: Sequence[str], shape: Sequence[int]) -> torch.Tensor | None:
        """Load the scales of weights, as QuantizedExperts has them; None: not of one kind."""
        parts = []
        infos = map(self._take_scales, names)
        for (dtype, stored_shape), group in groupby(infos, lambda info: (info.dtype, info.shape)):
            alike = list(group)
            spread = None
            if dtype in FLOAT_DTYPES:
                spread = spread_scales(self._tensors.read_stack(alike, None).float(), shape)
            if spread is None:
                raise CheckpointError(
                    f"{self._tensors.directory}: scales {alike[0].name!r} are {dtype} of shape "
                    f"{list(stored_shape)}; a weight of {list(shape)} needs floating-point scales, "
                    "one, one per row, or one per block of 128 x 128"
                )
            parts.append(spread)
        if len({part.shape[1:] for part in parts}) > 1:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _take_scales(self, name: str) -> TensorInfo:
        """Return the header entry of the scales of a weight."""
        tensors = self._tensors
        found = [f"{name}{end}" for end in _SCALE_ENDS if f"{name}{end}" in tensors.names]
        if len(found) != 1:
            ends = " or ".join(_SCALE_ENDS)
            raise CheckpointError(
                f"{tensors.directory}: {name!r} is {FP8_DTYPE}, and needs one tensor of scales, of "
                f"the same name and {ends}; there are {len(found)}"
            )
        return tensors.take(found[0], tensors.shape(found[0]))
