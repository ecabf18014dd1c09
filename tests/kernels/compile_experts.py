"""Kernels of experts to compile, see `compile_kernels`."""

from __future__ import annotations

import itertools

import triton.language as tl

from shared.kernels import (
    expert_choice,
    expert_order,
    expert_products,
    expert_tiles,
    linear_swiglu,
    linear_tiles,
)
from shared.kernels.linear_tiles import Tiles
from tests.kernels.compile_options import DOT_DTYPES, blocks, descriptors, launch_options


def choice_kernels():
    """Yield, as `kernels` does, what chooses the experts of rows, of Qwen3, Gemma 4, gpt-oss,
    DeepSeek."""
    for num_experts, is_grouped, is_of_chosen, has_scales in (
        (128, False, False, False),
        (128, False, False, True),
        (32, False, True, False),
        (256, True, False, False),
    ):
        yield (
            expert_choice._choose_experts_kernel,
            ["*fp32", "*fp32", "*fp32", "*i32", "*i32", "*fp32", "i32", "i32", "fp32"],
            {
                "NUM_EXPERTS": num_experts,
                "BLOCK": num_experts,
                "NUM_SPLITS": 2,
                "COUNT": 8,
                "IS_SIGMOID": is_grouped,
                "IS_OF_CHOSEN": is_of_chosen,
                "HAS_BIAS": is_grouped or is_of_chosen,
                "HAS_SCALES": has_scales,
                "IS_NORMALISED": True,
                "NUM_GROUPS": 8 if is_grouped else 1,
                "GROUP_BLOCK": 8 if is_grouped else 1,
                "NUM_CHOSEN_GROUPS": 4 if is_grouped else 1,
                "JUDGES_BY_TWO": is_grouped,
                "SCORE_OF_NAN": -1e30,
                "SCORE_OF_OTHERS": -3e38,
                "TINY": 1e-20,
            },
            {"num_warps": 1},
        )
    for block in (64, 4096):
        yield (
            expert_order._order_pairs_kernel,
            ["*i32", "*i32", "*i32", "i32"],
            {"BLOCK": block},
            {"num_warps": 1 if block <= 256 else 8},
        )


def expert_kernels(dtype: str):
    """Yield, as `kernels` does, the products by the experts' weights."""
    values, size = f"*{dtype}", 4 if dtype == "fp32" else 2
    ids = ["*i32"] * 3
    forms = ("block", "", "channel", "mxfp4", *(("rows",) if size == 2 else ()))
    for rows_per_expert, form in itertools.product((1, 32, 64, 128, 256), forms):
        is_mxfp4, is_fp8 = form == "mxfp4", form in ("block", "channel", "rows")
        has_fp8_rows = form == "rows"
        x = "*fp8e4nv" if has_fp8_rows else values
        row_scales = "*fp32" if has_fp8_rows else values
        shape = {
            "DOT_DTYPE": tl.float8e4nv if has_fp8_rows else DOT_DTYPES[dtype],
            "HAS_FP8_ROWS": has_fp8_rows,
            "NUM_EXPERTS": 128,
            "SLOTS": 8,
            "HAS_BIAS": is_mxfp4,
            "IS_DIRECT": rows_per_expert == 1,
            "IS_WHOLE": rows_per_expert != 64 and not is_mxfp4,
            "IS_MXFP4": is_mxfp4,
            "SCALING": "block" if has_fp8_rows else form if is_fp8 else "none",
        }
        tiles = expert_tiles.choose_up_tiles(rows_per_expert, size, is_fp8=is_fp8)
        if has_fp8_rows:
            tiles = linear_swiglu.choose_fp8_row_tiles(rows_per_expert, by_block=True)
        weight, tiles = _weight(dtype, tiles, form)
        for activation in ("silu", "gelu_tanh") if form == "" else ("silu",):
            acting = {"LIMIT": 7.0 * is_mxfp4, "ALPHA": 1.702, "ACTIVATION": activation}
            yield (
                expert_products._expert_swiglu_kernel,
                [x, *weight, row_scales, *ids, values, values, *["i32"] * 3],
                {**shape, **blocks(tiles), **acting},
                launch_options(tiles),
            )
        tiles = expert_tiles.choose_down_tiles(rows_per_expert, size, is_fp8=is_fp8)
        if has_fp8_rows:
            tiles = linear_tiles.choose_fp8_row_tiles(rows_per_expert, (2048, 768), by_block=True)
        weight, tiles = _weight(dtype, tiles, form)
        yield (
            expert_products._expert_down_kernel,
            [x, *weight, row_scales, *ids, "*fp32", values, "*fp32", *["i32"] * 4],
            {**shape, **blocks(tiles)},
            launch_options(tiles),
        )


def _weight(dtype: str, tiles: Tiles, form: str) -> tuple[list[str], Tiles]:
    """Return the types of a weight's descriptor and its scales, and the tiles that fit them."""
    if form == "mxfp4":
        words = f"tensordesc<i16[{tiles.block_n}, 32]>"
        return [words, "*i32"], tiles._replace(block_k=128)
    if form:
        kind = "fp8e4nv" if form == "rows" else "u8"
        return [descriptors(kind, tiles)[1], "*fp32"], tiles
    return [descriptors(dtype, tiles)[1], f"*{dtype}"], tiles
