"""Matrix products on a CPU whose bits depend on a row's values alone, and the ways to compute them.

BLAS gives equal rows of one product other bits by their address, their place and the number of rows
(seen on AMD and Intel). So a product here is one of these, tried in this order:

    oneDNN       packed weights, constant tiles of rows; it blocks by the shape alone
    BLAS         the same tiles, where torch is built without oneDNN
    elementwise  additions and multiplications in an order of our own; slow, and exact on any CPU

The first two see nothing but aligned copies of one height, K and N padded with zeros, and are
probed at start-up all the same (probe_cpu.py). Attention's products are batches of one constant
size of aligned, padded tiles, by torch.bmm or elementwise.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from shared.kernels.dispatch import use_triton
from shared.kernels.products_elementwise import LANES, multiply_elementwise
from shared.kernels.quantized import GpuWeight, values_of

# Rows of one call of a library: of plain decoding, and of trees of up to 8 nodes.
ROW_TILE = 8
# Items of one batched product.
BATCH_ITEMS = 8
# Operands and their rows begin at multiples of 64 bytes, and outputs are never narrow.
ALIGNED_BYTES = 64
ALIGNED_VALUES = 16
_MIN_WIDTH = 64
# Query heads of one item of attention's batches: a library treats narrow products otherwise.
GROUP_MULTIPLE = 4


def padded(count: int, multiple: int) -> int:
    """Return the least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


class ProductLibrary(ABC):
    """One way to compute x W^T in float32."""

    name: str
    # Whether IEEE arithmetic alone makes the bits of a row a function of its values.
    is_invariant = False

    def is_available(self) -> bool:
        """Return whether this build of torch has it."""
        return True

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight [N, K] f32, N and K padded, as `multiply` reads it."""

    @abstractmethod
    def unpack(self, held: torch.Tensor) -> torch.Tensor:
        """Return the weight that was packed."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, held: torch.Tensor, width_k: int) -> torch.Tensor:
        """Return x W^T.

        Args:
            x: [T, K], any layout, T >= 1.
            held: What `pack` returned.
            width_k: K, padded.
        Returns: [T, N] f32, N padded.
        """


class TileLibrary(ProductLibrary):
    """A library that is called for one shape of rows only: aligned tiles [ROW_TILE, K]."""

    @abstractmethod
    def multiply_tile(self, tile: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Return the product of one tile. [ROW_TILE, N] f32."""

    def unpack(self, held: torch.Tensor) -> torch.Tensor:
        """Return the weight that was packed."""
        return held

    def multiply(self, x: torch.Tensor, held: torch.Tensor, width_k: int) -> torch.Tensor:
        """Return x W^T, tile by tile."""
        num_rows = x.shape[0]
        x = aligned_tiles(x, width_k)
        if x.shape[0] == ROW_TILE:
            out = self.multiply_tile(x, held)
            return out if num_rows == ROW_TILE else out[:num_rows]
        tiles = x.view(-1, ROW_TILE, width_k).unbind()
        return torch.cat([self.multiply_tile(tile, held) for tile in tiles])[:num_rows]


def aligned_tiles(x: torch.Tensor, width_k: int) -> torch.Tensor:
    """Return rows as whole tiles, dense, aligned, padded with zeros. [T padded, width_k] f32."""
    num_rows, num_columns = x.shape
    is_whole = num_rows % ROW_TILE == 0 and num_columns == width_k and x.dtype == torch.float32
    if is_whole and x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0:
        return x
    tiles = torch.zeros((padded(num_rows, ROW_TILE), width_k), dtype=torch.float32)
    tiles[:num_rows, :num_columns] = x
    return tiles


class OneDnn(TileLibrary):
    """oneDNN's inner product, its weights packed for tiles of this height."""

    name = "oneDNN"

    def is_available(self) -> bool:
        """Return whether torch has oneDNN and exposes what is needed of it."""
        if not torch.backends.mkldnn.is_available():
            return False
        ops = torch.ops.mkldnn
        return hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight in the blocks that oneDNN prefers for a tile."""
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROW_TILE)

    def unpack(self, held: torch.Tensor) -> torch.Tensor:
        """Return the weight that was packed, bit for bit."""
        return held.to_dense()

    def multiply_tile(self, tile: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Return the product of one tile."""
        return torch.ops.mkldnn._linear_pointwise(tile, held, None, "none", [], "")


class Blas(TileLibrary):
    """The BLAS that torch is built with; worth a probe where there is no oneDNN."""

    name = "BLAS"

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as it is."""
        return weight

    def multiply_tile(self, tile: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Return the product of one tile."""
        return torch.mm(tile, held.t())


class Elementwise(ProductLibrary):
    """Products and sums of single values, in an order of our own."""

    name = "elementwise"
    is_invariant = True

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with K first."""
        return weight.t().contiguous()

    def unpack(self, held: torch.Tensor) -> torch.Tensor:
        """Return the weight that was packed."""
        return held.t().contiguous()

    def multiply(self, x: torch.Tensor, held: torch.Tensor, width_k: int) -> torch.Tensor:
        """Return x W^T."""
        num_rows, num_columns = x.shape
        rows = torch.zeros((width_k, 1, num_rows))
        rows[:num_columns, 0] = x.t()
        out = torch.empty((1, num_rows, held.shape[1]))
        multiply_elementwise(rows, held.unsqueeze(1), out)
        return out[0]


class BatchLibrary:
    """Attention's products: batches [BATCH_ITEMS, M, K] x [BATCH_ITEMS, K, N] by torch.bmm."""

    name = "BLAS"
    is_invariant = False

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply a batch of aligned, padded items.

        Mutates: `out`, all of it.
        """
        torch.bmm(a, b, out=out)


class ElementwiseBatches(BatchLibrary):
    """Attention's products in an order of our own."""

    name = "elementwise"
    is_invariant = True

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply a batch; K is a multiple of LANES.

        Mutates: `out`, all of it.
        """
        assert a.shape[2] % LANES == 0
        multiply_elementwise(a.permute(2, 0, 1), b.transpose(0, 1), out)


class CpuProducts:
    """How one worker's model multiplies on a CPU; its weights and attention ask it at every call.

    Args:
        linear: Ways to multiply by weights, the fastest first; an invariant one is added.
        attention: Ways to compute attention's batches, likewise.
    """

    def __init__(
        self,
        linear: Sequence[ProductLibrary] | None = None,
        attention: Sequence[BatchLibrary] | None = None,
    ) -> None:
        candidates = (OneDnn(), Blas()) if linear is None else linear
        self._linear = [*(one for one in candidates if one.is_available()), Elementwise()]
        batches = (BatchLibrary(),) if attention is None else attention
        self._attention = [*batches, ElementwiseBatches()]
        self._weights: weakref.WeakSet[CpuWeight] = weakref.WeakSet()

    @property
    def linear(self) -> ProductLibrary:
        """Return how weights are multiplied by."""
        return self._linear[0]

    @property
    def attention(self) -> BatchLibrary:
        """Return how attention multiplies."""
        return self._attention[0]

    @property
    def is_invariant(self) -> bool:
        """Return whether every product is invariant by IEEE arithmetic alone."""
        return self.linear.is_invariant and self.attention.is_invariant

    @property
    def weights(self) -> list[CpuWeight]:
        """Return the weights that are multiplied in this way, one of each shape."""
        return list({weight.shape: weight for weight in self._weights}.values())

    @staticmethod
    def packs(values: torch.Tensor) -> bool:
        """Return whether a CPU multiplies by such values, which are packed for that."""
        return values.device.type == "cpu" and not use_triton(values)

    def weight(self, given: GpuWeight) -> Weight:
        """Return a weight [N, K] as `linear` and its kin read it: packed, if a CPU computes it."""
        if not self.packs(values_of(given)):
            return given
        weight = CpuWeight(given, self)
        self._weights.add(weight)
        return weight

    def give_up_linear(self) -> None:
        """Multiply by weights in the next way from now on."""
        assert not self.linear.is_invariant, "there is no way after this one"
        del self._linear[0]

    def give_up_attention(self) -> None:
        """Multiply in attention in the next way from now on."""
        assert not self.attention.is_invariant, "there is no way after this one"
        del self._attention[0]

    def give_up_libraries(self) -> None:
        """Multiply in the invariant ways from now on."""
        del self._linear[:-1]
        del self._attention[:-1]


def _widened(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return values [N, K] in float32 with zeros around them, themselves if they need neither."""
    if values.shape == shape and values.data_ptr() % ALIGNED_BYTES == 0:
        return values.float().contiguous()
    wide = torch.zeros(shape)
    wide[: values.shape[0], : values.shape[1]] = values
    return wide


class CpuWeight:
    """The weight of a linear layer in float32, packed for the way in which it is multiplied.

    Args:
        weight: [N, K]; not kept.
        products: How to multiply; packed anew after a change.
    """

    def __init__(self, weight: GpuWeight, products: CpuProducts) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self._products = products
        width_n, width_k = weight.shape
        self._width_k = padded(width_k, ALIGNED_VALUES)
        values = weight if isinstance(weight, torch.Tensor) else weight.dequantized()
        shape = (max(_MIN_WIDTH, padded(width_n, ALIGNED_VALUES)), self._width_k)
        self._library = products.linear
        self._held = self._library.pack(_widened(values, shape))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T; a row's bits do not depend on where or among which others it stands.

        Args:
            x: [T, K], any layout.
        Returns: [T, N] f32, dense.
        """
        assert x.shape[1] == self.shape[1] and x.dtype == self.dtype
        if self._library is not self._products.linear:
            wide = self._library.unpack(self._held)
            self._library = self._products.linear
            self._held = self._library.pack(wide)
        if x.shape[0] == 0:
            return torch.empty((0, self.shape[0]))
        out = self._library.multiply(x, self._held, self._width_k)
        width_n = self.shape[0]
        return (out if out.shape[1] == width_n else out[:, :width_n]).contiguous()


Weight = GpuWeight | CpuWeight


def linear_cpu(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Do what `linear` does on a CPU; what is not packed is packed for this call only."""
    if not isinstance(weight, CpuWeight):
        weight = CpuWeight(weight, CpuProducts())
    out = weight.multiply(x)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype or x.dtype)
