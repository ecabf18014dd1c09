"""Kernels of latent attention to compile, see `compile_kernels`: of the widths of DeepSeek's."""

from __future__ import annotations

import triton.language as tl

from shared.kernels import (
    head_linear,
    latent_attention,
    latent_attention_kernels,
    latent_store,
    tree_attention,
    tree_attention_tiles,
)
from tests.kernels.compile_options import DOT_DTYPES


def latent_kernels(dtype: str):
    """Yield, as `kernels` does, the attention of V2-Lite's heads and of V3's, and the rest."""
    values, dot = f"*{dtype}", DOT_DTYPES[dtype]
    for num_heads in (16, 128):
        groups = latent_attention.num_head_groups(num_heads, dot)
        heads = num_heads // groups
        for is_sequential in (False, True):
            shape = {
                "DOT_DTYPE": dot,
                "GROUPS": groups,
                "HEADS": heads,
                "VALUE": 512,
                "TAIL": 64,
                "TILE": tree_attention_tiles.TRITON_KV_TILE,
                "CHUNK_TILES": latent_attention.CHUNK_TILES,
                "SEQUENTIAL": is_sequential,
            }
            blocks = {"VALUE_BLOCK": 512, "TAIL_BLOCK": 64}
            types = [values, values, "*fp32", "*fp32", *["*i32"] * 3, "i32", "fp32"]
            rows = tree_attention.choose_queries(dot) // heads
            window = {"PAGE_SIZE": 16, "HAS_WINDOW": False}
            shared = {**shape, **window, "HEADS_BLOCK": heads, "ROWS": rows}
            yield (
                latent_attention_kernels._shared_latents_kernel,
                types,
                {**shared, **blocks, "COLUMNS": 128},
                latent_attention.shared_options(dot),
            )
            if dot != tl.float32:
                yield (
                    latent_attention.hopper_kernel(),
                    types,
                    shared,
                    latent_attention.hopper_options(),
                )
            for columns in (128,) if dot == tl.float32 else (128, 512):
                yield (
                    latent_attention_kernels._finish_latents_kernel,
                    [*[values] * 3, "*fp32", "*fp32", *["*i32"] * 2, "i32", "fp32"],
                    {**shape, **blocks, "COLUMNS": columns, "OWN_SLOTS": 128, "QUERIES": 16},
                    latent_attention.finish_options(),
                )
    for block_t in (16, 128) if dot == tl.bfloat16 else (32,):
        yield (
            head_linear._head_linear_kernel,
            [*[values] * 3, *["i32"] * 5],
            {
                "DOT_DTYPE": dot,
                "WIDTH_N": 512,
                "WIDTH_K": 128,
                "BLOCK_N": head_linear.BLOCK_N,
                "BLOCK_T": block_t,
                "BLOCK_K": head_linear.BLOCK_K,
            },
            {"num_warps": 4, "num_stages": 3},
        )
    yield (
        latent_store._latent_store_kernel,
        ["*fp32", values, values, "*fp32", "*fp32", "*i32", values, values]
        + ["i32", "i32", "fp32"],
        {
            "NUM_SPLITS": 2,
            "NUM_HEADS": 128,
            "NOPE": 128,
            "VALUE": 512,
            "VALUE_BLOCK": 512,
            "HALF": 32,
            "HALF_BLOCK": 32,
            "HEADS": 8,
        },
    )
