"""How the products of experts are cut into tiles and programs, and what these read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels import linear_swiglu, linear_tiles
from shared.kernels.expert_products_cpu import KernelWeights
from shared.kernels.fp8_experts import QuantizedExperts
from shared.kernels.fp8_rows import becomes_fp8
from shared.kernels.linear_tiles import INTERPRETED_TILES, SQUARE_TILES, Tiles
from shared.kernels.mxfp4 import MXFP4_BLOCK, WORDS_K, Mxfp4Weights
from shared.kernels.quantized import fp8_operands
from shared.kernels.tensor_blocks import blocks_of

# Pairs have programs of their own while hardly any two of them share an expert.
_EXPERTS_PER_PAIR = 4
# Tiles hold so many times the rows that an expert has on average.
_ROOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How pairs are dealt out to programs; none of it changes a bit.

    Args:
        num_items: Pairs, or experts and padding.
        rows_per_expert: What tiles are chosen for.
    """

    is_direct: bool
    num_items: int
    rows_per_expert: int

    def num_lanes(self, tiles: Tiles) -> int:
        """Return how many programs share the rows of an item."""
        return max(1, self.rows_per_expert // (_ROOM * tiles.block_t))


def choose_grid(num_pairs: int, num_experts: int) -> Grid:
    """Return how pairs are dealt out."""
    if num_pairs * _EXPERTS_PER_PAIR <= num_experts:
        return Grid(is_direct=True, num_items=num_pairs, rows_per_expert=1)
    rows = triton.cdiv(_ROOM * num_pairs, num_experts)
    return Grid(is_direct=False, num_items=num_experts + 1, rows_per_expert=rows)


def choose_up_tiles(rows_per_expert: int, element_size: int, *, is_fp8: bool = False) -> Tiles:
    """Return a GPU's tiles of gate and up."""
    if is_fp8:
        return linear_swiglu.choose_fp8_tiles(rows_per_expert, element_size)
    return linear_swiglu.choose_tiles(rows_per_expert, element_size)


def choose_down_tiles(rows_per_expert: int, element_size: int, *, is_fp8: bool = False) -> Tiles:
    """Return a GPU's tiles of the second product, of FP8 as long as blocks that share a scale."""
    if is_fp8:
        return linear_tiles.choose_fp8_tiles(rows_per_expert, element_size, (1, 1), by_block=True)
    if rows_per_expert > 128 and element_size == 2:
        return SQUARE_TILES
    return linear_tiles.choose_tiles(rows_per_expert, element_size, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The weights of all experts as a kernel reads them.

    Args:
        weight: One matrix, in blocks.
        scales: Unread if there are none.
        tiles: That fit the blocks.
        constants: Of the kernel.
    """

    weight: TensorDescriptor
    scales: torch.Tensor
    tiles: Tiles
    constants: dict[str, Any]


def expert_operands(weight: KernelWeights, tiles: Tiles, *, multiplies_e4m3: bool) -> Operands:
    """Return what a kernel reads of weights, in tiles but for the length of blocks of words.

    Args:
        multiplies_e4m3: See `fp8_operands`.
    """
    if isinstance(weight, Mxfp4Weights):
        tiles = tiles._replace(block_k=WORDS_K)
        blocks = blocks_of(weight.values.flatten(0, 1), tiles.block_n, MXFP4_BLOCK)
        constants = {"IS_MXFP4": True, "SCALING": "none"}
        return Operands(weight=blocks, scales=weight.scales, tiles=tiles, constants=constants)
    if isinstance(weight, QuantizedExperts):
        values, scales, constants = fp8_operands(weight, multiplies_e4m3=multiplies_e4m3)
    else:
        values, scales, constants = weight, weight, {"SCALING": "none"}
    blocks = blocks_of(values.flatten(0, 1), tiles.block_n, tiles.block_k)
    constants = {**constants, "IS_MXFP4": False}
    return Operands(weight=blocks, scales=scales, tiles=tiles, constants=constants)


def up_tiles(x: torch.Tensor, weight: KernelWeights, grid: Grid) -> Tiles:
    """Return the tiles of gate and up where x is."""
    if not x.is_cuda:
        return INTERPRETED_TILES
    if becomes_fp8(x, weight):
        return linear_swiglu.choose_fp8_row_tiles(grid.rows_per_expert, by_block=True)
    is_fp8 = isinstance(weight, QuantizedExperts)
    return choose_up_tiles(grid.rows_per_expert, x.element_size(), is_fp8=is_fp8)


def down_tiles(x: torch.Tensor, weight: KernelWeights, grid: Grid) -> Tiles:
    """Return the tiles of the second product where x is."""
    if not x.is_cuda:
        return INTERPRETED_TILES
    if becomes_fp8(x, weight):
        return linear_tiles.choose_fp8_row_tiles(
            grid.rows_per_expert, (weight.shape[1], weight.shape[2]), by_block=True
        )
    is_fp8 = isinstance(weight, QuantizedExperts)
    return choose_down_tiles(grid.rows_per_expert, x.element_size(), is_fp8=is_fp8)
