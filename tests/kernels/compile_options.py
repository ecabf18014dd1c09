"""With what products are compiled, as `compile_kernels` lists them."""

from __future__ import annotations

import triton.language as tl

from shared.kernels import linear_tiles

DOT_DTYPES = {"fp32": tl.float32, "bf16": tl.bfloat16}


def blocks(tiles: linear_tiles.Tiles) -> dict[str, int]:
    """Return the tiles of a product as constexprs."""
    return {"BLOCK_N": tiles.block_n, "BLOCK_T": tiles.block_t, "BLOCK_K": tiles.block_k}


def descriptors(dtype: str, tiles: linear_tiles.Tiles) -> list[str]:
    """Return the types of the descriptors of x and the weight."""
    return [
        f"tensordesc<{dtype}[{height}, {tiles.block_k}]>"
        for height in (tiles.block_t, tiles.block_n)
    ]


def launch_options(tiles: linear_tiles.Tiles) -> dict[str, int]:
    """Return the options with which a product is launched."""
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
