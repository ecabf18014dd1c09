"""Compile every kernel to GPU machine code, without a GPU. Run as a process of its own.

Prints one line per binary: kernel, compute capability, dtype, instructions of its products.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import triton
import triton.language as tl
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from shared.kernels import (
    accept_walk,
    embedding,
    fp8_rows,
    linear,
    linear_balanced,
    linear_gated,
    linear_swiglu,
    linear_tiles,
    linear_two_tiles,
    logprobs,
    mailbox_growth,
    mailbox_paths,
    mailbox_trees,
    move_kv,
    penalties,
    rope_store,
    sampling,
    sampling_filters,
    token_mask,
    tree_attention,
    tree_attention_kernels,
    tree_attention_schedule,
    tree_attention_tiles,
    tree_beams,
    tree_children,
    tree_select,
)
from shared.kernels.dispatch import LAUNCH_OPTIONS
from shared.kernels.mailbox_words import MAX_PATH
from tests.kernels.compile_experts import choice_kernels, expert_kernels
from tests.kernels.compile_latents import latent_kernels
from tests.kernels.compile_norms import norm_kernels
from tests.kernels.compile_options import DOT_DTYPES, blocks, descriptors, launch_options

# What one program may use on Hopper.
SHARED_MEMORY_BYTES = 227 * 1024


def kernels(dtype: str):
    """Yield (kernel, types of the arguments in order, constexprs[, options])."""
    values = f"*{dtype}"
    dot = {"DOT_DTYPE": DOT_DTYPES[dtype]}
    row = {"ROW": 1000, "BLOCK": 1024}
    yield from attention_kernels(dtype)
    yield from latent_kernels(dtype)
    yield from expert_kernels(dtype)
    sizes = [(rows, 4, 4096) for rows in (1, 64, 128, 256, 512, 2048)]
    for num_rows, num_splits, width_n in (*sizes, (256, 1, 4096), (128, 1, 128256)):
        tiles = linear_tiles.choose_tiles(num_rows, 4 if dtype == "fp32" else 2, width_n)
        yield (
            linear._linear_kernel,
            [*descriptors(dtype, tiles), values, values, values, "*fp32", *["i32"] * 3],
            {
                **dot,
                **blocks(tiles),
                "SCALING": "none",
                "GROUP": 0,
                "HAS_FP8_ROWS": False,
                "HAS_BIAS": num_rows <= 16,
                "IS_SPLIT": num_splits > 1 and num_rows <= linear_tiles.MAX_SPLIT_ROWS,
                "NUM_SPLITS": num_splits,
                "SPLIT_K": 1024,
            },
            launch_options(tiles),
        )
    for num_rows in (1, 64, 256, 2048):
        tiles = linear_swiglu.choose_tiles(num_rows, 4 if dtype == "fp32" else 2)
        yield (
            linear_swiglu._linear_swiglu_kernel,
            [*descriptors(dtype, tiles), *[values] * 4, *["i32"] * 3],
            {
                **dot,
                **blocks(tiles),
                "SCALING": "none",
                "GROUP": 0,
                "HAS_FP8_ROWS": False,
                "HAS_BIAS": True,
                "ACTIVATION": "gelu_tanh" if num_rows == 64 else "silu",
            },
            launch_options(tiles),
        )
    if dtype != "fp32":  # tiles of other products are dealt out to programs
        square = linear_tiles.SQUARE_TILES
        share = {"NUM_GROUPS": 5, "NUM_MEMBERS": 26}
        for num_splits in (1, 4):
            yield (
                linear_balanced._balanced_linear_kernel,
                [*descriptors(dtype, square), values, values, "*fp32", "*fp32", *["i32"] * 2],
                {
                    **dot,
                    "SCALING": "none",
                    **blocks(square),
                    **share,
                    "HAS_BIAS": True,
                    "NUM_SPLITS": num_splits,
                    "SPLIT_BLOCKS": 16,
                },
                launch_options(square),
            )
        for activation in ("silu", "gelu_tanh"):
            yield (
                linear_swiglu._balanced_swiglu_kernel,
                [*descriptors(dtype, square), *[values] * 3, "*fp32", *["i32"] * 3],
                {**dot, **blocks(square), **share, "SCALING": "none", "GROUP": 0}
                | {"HAS_BIAS": True, "ACTIVATION": activation},
                launch_options(square),
            )
        yield from products_of_two_tiles(dtype)
    for scaling in ("block", "channel"):
        yield from fp8_products(dtype, scaling)
        if dtype != "fp32":
            yield from fp8_row_products(dtype, scaling)
    if dtype != "fp32":
        for fp8, block in (("*u8", 32768), ("*fp8e4nv", 32768), ("*fp8e4nv", 4096)):
            yield (
                fp8_rows._quantize_rows_kernel,
                [values, fp8, "*fp32", *["i32"] * 2],
                {"BLOCK": block},
                {"num_warps": min(32, block // 256)},
            )
    yield (
        linear_swiglu._swiglu_addends_kernel,
        ["*fp32", values, values, *["i32"] * 2],
        {"HAS_BIAS": True, "ACTIVATION": "silu", "NUM_SPLITS": 4, "BLOCK": 512},
    )
    yield (
        linear_gated._gate_rows_kernel,
        ["*fp32", values, values, *["i32"] * 3],
        {"ACTIVATION": "gelu_tanh", "NUM_SPLITS": 2, "BLOCK": 256},
    )
    forms = [("group", 128), ("zeros", 64), ("zeros", 32)]
    for scaling, group_size in forms[-1:] if dtype == "fp32" else forms:
        yield from int4_products(dtype, scaling, group_size)
    yield (
        linear._sum_addends_kernel,
        ["*fp32", values, values, values, "i32", "i32"],
        {"HAS_BIAS": True, "HAS_RESIDUAL": True, "NUM_SPLITS": 4, "BLOCK": 1024},
    )
    for ids, has_roots in (("*i64", True), ("*i64", False), ("*i32", False)):
        yield (
            embedding._embed_kernel,
            [*[ids] * 3, values, values, "fp32"],
            {"WIDTH": 1000, "BLOCK": 1024, "HAS_ROOTS": has_roots, "HAS_MULTIPLIER": has_roots},
        )
    yield from norm_kernels(dtype)
    kv = [(values, values, True, 64), ("*fp32", values, True, 64), ("*fp32", values, False, 64)]
    kv += [(values, "*u8", True, 64), (values, values, True, 32), (values, "*u8", True, 32)]
    for weights, caches, has_kv, v_half in kv:
        factors = {} if caches == "*u8" else {"k_factor": None, "v_factor": None}
        if v_half == 64:
            factors["v_multiplier"] = None
        yield (
            rope_store._rope_store_kernel,
            ["*fp32", values, weights, weights, "*fp32", "*fp32", "*i32", values, caches, caches]
            + ["i32", "i32", "fp32"]
            + ["fp32"] * (3 - len(factors)),
            {
                **factors,
                "HAS_BIAS": True,
                "HAS_NORM": True,
                "HAS_V_NORM": weights == "*fp32" and has_kv,
                "HAS_KV": has_kv,
                "NUM_SPLITS": 2,
                "NUM_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "HALF": 64,
                "V_HALF": v_half,
                "HALF_BLOCK": 64,
                "HEADS": 8,
            },
        )
    yield from mailbox_kernels(values)
    yield move_kv._move_paths_kernel, ["*i64", "*i32", "*i32", values, "i32"], {**row, "STEPS": 64}
    if dtype == "bf16":  # what has no dtype is compiled once
        for by_length in (False, True):
            yield (
                tree_attention_schedule._schedule_kernel,
                [*["*i32"] * 6, "*i1", *["i32"] * 6],
                {
                    "TILE": tree_attention_tiles.TRITON_KV_TILE,
                    "CHUNK_TILES": tree_attention_tiles.TRITON_CHUNK_TILES,
                    "REQ_BLOCK": 64,
                    "HAS_WINDOW": True,
                    "ROWS": 4 if by_length else 16,
                    "LINES": 128,
                    "BY_LENGTH": by_length,
                },
            )
        yield (
            tree_attention_schedule._own_slots_kernel,
            [*["*i32"] * 4, "i32"],
            {
                "TILE": tree_attention_tiles.TRITON_KV_TILE,
                "PAGE_SIZE": 16,
                "SLOTS": 128,
                "BLOCK": 128,
            },
        )
        yield (
            accept_walk._accept_walk_kernel,
            ["*i64"] * 3
            + ["*i32"]
            + ["*i64"] * 2
            + ["*i32"]
            + ["*i64"] * 3
            + ["*i32"] * 2
            + ["*i64"] * 2
            + ["i32"] * 3,
            {"PAGE_SIZE": 16, "NODES": 64},
            {"num_warps": 1},
        )
        chunks = {"NUM_CHUNKS": 126, "CHUNKS": 128}
        yield (
            logprobs._chunk_logprobs_kernel,
            ["*fp32", "*i64", "*fp32", "*fp32", "*i64", "i32", "i32"],
            {"TOP": 32, "BLOCK": logprobs.BLOCK},
        )
        yield (
            logprobs._row_logprobs_kernel,
            ["*fp32", "*i64", "*i32", "*fp32", "*fp32", "*i64", "*fp32", "*fp32", "*i64"]
            + ["i32", "i32"],
            {"TOP": 32, **chunks},
        )
        yield (
            penalties._penalties_kernel,
            ["*fp32", "*i64", "*i64", "*i1", "*i32", "*i64", "*fp32", "*fp32", "*fp32"]
            + ["i32", "i32"],
            {"BLOCK": 1024},
        )
        for has_ids in (False, True):
            yield (
                token_mask._token_masks_kernel,
                ["*fp32", "*i64", "*i32", "*i64", "i32", "i32"],
                {"HAS_IDS": has_ids, "BLOCK": 1024},
            )
        yield from sampling_kernels()
        yield from growth_kernels()
        yield from choice_kernels()


def products_of_two_tiles(dtype: str):
    """Yield what multiplies 129 to 192 rows."""
    values, options = f"*{dtype}", {**linear_two_tiles._OPTIONS, "DOT_DTYPE": DOT_DTYPES[dtype]}
    num_warps, block_k = options.pop("num_warps"), options["BLOCK_K"]
    heights = (options["FIRST_T"], options["SECOND_T"], options["BLOCK_N"])
    operands = [f"tensordesc<{dtype}[{height}, {block_k}]>" for height in heights]
    for out, has_bias in (("*fp32", False), (values, True)):
        yield (
            linear_two_tiles._linear_two_tiles_kernel,
            [*operands, values, out, *["i32"] * 3],
            {**options, "HAS_BIAS": has_bias, "SPLIT_K": 1024},
            {"num_warps": num_warps, "num_stages": linear_two_tiles._NUM_STAGES},
        )
    for activation in ("silu", "gelu_tanh"):
        yield (
            linear_two_tiles._swiglu_two_tiles_kernel,
            [*operands, values, values, *["i32"] * 3],
            {**options, "HAS_BIAS": True, "ACTIVATION": activation},
            {"num_warps": num_warps, "num_stages": linear_two_tiles._NUM_SWIGLU_STAGES},
        )


def fp8_products(dtype: str, scaling: str):
    """Yield products with weights in FP8, as `kernels` does."""
    itemsize, by_block = 4 if dtype == "fp32" else 2, scaling == "block"
    dot = {
        "DOT_DTYPE": DOT_DTYPES[dtype],
        "SCALING": scaling,
        "GROUP": 0,
        "HAS_FP8_ROWS": False,
        "HAS_BIAS": True,
    }

    def types(tiles: linear_tiles.Tiles) -> list[str]:
        rows = f"tensordesc<{dtype}[{tiles.block_t}, {tiles.block_k}]>"
        weight = f"tensordesc<u8[{tiles.block_n}, {tiles.block_k}]>"
        return [rows, weight, "*fp32", f"*{dtype}", f"*{dtype}"]

    for num_rows in (2048, 128, 64, 32, 1):
        tiles = linear_tiles.choose_fp8_tiles(num_rows, itemsize, (4096, 4096), by_block=by_block)
        split = {"IS_SPLIT": num_rows <= 128, "NUM_SPLITS": 4, "SPLIT_K": 1024}
        yield (
            linear._linear_kernel,
            [*types(tiles), "*fp32", *["i32"] * 3],
            {**dot, **blocks(tiles), **split},
            launch_options(tiles),
        )
        tiles = linear_swiglu.choose_fp8_tiles(num_rows, itemsize)
        yield (
            linear_swiglu._linear_swiglu_kernel,
            [*types(tiles), f"*{dtype}", *["i32"] * 3],
            {**dot, **blocks(tiles), "ACTIVATION": "silu"},
            launch_options(tiles),
        )
    if dtype == "fp32":
        return
    share = {"NUM_GROUPS": 5, "NUM_MEMBERS": 26}
    tiles = linear_tiles.SQUARE_FP8_TILES
    yield (
        linear_balanced._balanced_linear_kernel,
        [*types(tiles)[:3], f"*{dtype}", "*fp32", "*fp32", *["i32"] * 2],
        {"DOT_DTYPE": DOT_DTYPES[dtype], "SCALING": scaling, "HAS_BIAS": True}
        | {**blocks(tiles), **share, "NUM_SPLITS": 4, "SPLIT_BLOCKS": 8},
        launch_options(tiles),
    )


def fp8_row_products(dtype: str, scaling: str):
    """Yield products of rows and weights in FP8, as `kernels` does."""
    dot = {
        "DOT_DTYPE": tl.float8e4nv,
        "SCALING": scaling,
        "GROUP": 0,
        "HAS_FP8_ROWS": True,
        "HAS_BIAS": True,
    }

    def types(tiles: linear_tiles.Tiles) -> list[str]:
        return [*descriptors("fp8e4nv", tiles), "*fp32", "*fp32", f"*{dtype}"]

    for num_rows in (2048, 256, 128, 64, 32, 1):
        by_block = scaling == "block"
        tiles = linear_tiles.choose_fp8_row_tiles(num_rows, (4096, 4096), by_block=by_block)
        is_split = num_rows <= linear_tiles.MAX_FP8_SPLIT_ROWS
        split = {"IS_SPLIT": is_split, "NUM_SPLITS": 4, "SPLIT_K": 1024}
        yield (
            linear._linear_kernel,
            [*types(tiles), "*fp32", *["i32"] * 3],
            {**dot, **blocks(tiles), **split},
            launch_options(tiles),
        )
        tiles = linear_swiglu.choose_fp8_row_tiles(num_rows, by_block=by_block)
        yield (
            linear_swiglu._linear_swiglu_kernel,
            [*types(tiles), f"*{dtype}", *["i32"] * 3],
            {**dot, **blocks(tiles), "ACTIVATION": "silu"},
            launch_options(tiles),
        )


def mailbox_kernels(values: str):
    """Yield what posts to a mailbox and takes out of it, as `kernels` does."""
    width = {"MAX_PATH": MAX_PATH, "WIDTH": 12288, "BLOCK": mailbox_paths._BLOCK}
    lanes = {"MAX_PATH": MAX_PATH, "LANES": mailbox_paths._LANES}
    ids, counts = "*i64", "*i32"
    yield (
        mailbox_paths._post_rows_kernel,
        [ids, counts, counts, ids, ids, values, "i32", "i32"],
        width,
    )
    yield mailbox_paths._take_rows_kernel, [values, *[counts] * 3, values, "i32", "i32"], width
    if values != "*bf16":  # the rest has no dtype
        return
    yield (
        mailbox_trees._post_trees_kernel,
        [ids, *[counts] * 3, "i32"],
        {"NODES": 64, "NO_NODE": 255},
        {"num_warps": 2},
    )
    yield (
        mailbox_trees._take_trees_kernel,
        [ids, *[counts] * 5, ids, counts, counts, "*i1", counts, counts, ids, ids, counts, counts]
        + [*[ids] * 4, *["i32"] * 5],
        {"PAGE_SIZE": 16, "NODES": 64, "HAS_PATHS": True, "WAITS": True},
        {"num_warps": 2},
    )
    yield (
        mailbox_paths._post_paths_kernel,
        [ids, counts, counts, ids, ids, counts, "i32"],
        {"MAX_PATH": MAX_PATH, "HAS_FENCE": True},
        {"num_warps": 1},
    )
    yield (
        mailbox_paths._take_paths_kernel,
        [*[ids] * 4, *[counts] * 4, ids, ids, counts, ids, ids, counts, *["i32"] * 6],
        {**lanes, "WAITS": True},
        {"num_warps": 1},
    )
    yield (
        mailbox_growth._advance_growth_kernel,
        [counts, counts, ids, ids, *[counts] * 4, "i32"],
        lanes,
        {"num_warps": 1},
    )


def sampling_kernels():
    """Yield what chooses tokens, as `kernels` does; for a vocabulary of 128256."""
    filters = ["*fp32", "*i32", "*fp32", "*fp32"]
    noise = ["*i64", "*i64"]
    chunks = {"NUM_CHUNKS": 126, "CHUNKS": 128}
    lanes = {"LANES": sampling_filters.LANES}
    listed = {"CAPACITY": sampling_filters.CAPACITY}
    for has_filters in (True, False):
        yield (
            sampling._best_of_chunk_kernel,
            ["*fp32", *filters, *noise, "*fp32", "*i32", "*fp32", "*u8", "i32"],
            {"HAS_FILTERS": has_filters, "BLOCK": sampling.BLOCK},
        )
        yield (
            sampling._best_of_row_kernel,
            ["*fp32", *filters, *noise, "*fp32", "*i32", "*fp32"]
            + ["*i64", "*i32", "*fp32", "*i64", "*u8", "*i32", "*u8", "i32"],
            {"HAS_FILTERS": has_filters, **chunks, "BLOCK": sampling.BLOCK}
            | {**listed, "STEP": sampling.STEP, **lanes},
            {"num_warps": sampling.STEP // 32 if has_filters else 4},
        )
    yield (
        sampling_filters._tabulate_kernel,
        ["*fp32", *filters, "*fp32", "*i32", "*i64", "i32"],
        {**chunks, "BLOCK": sampling.BLOCK, "STEP": 128, **lanes},
    )
    yield (
        sampling_filters._choose_kernel,
        [*filters, "*fp32", "*i32", "*i64", "*fp32", "*i64", "*i32", "*i32", "i32"],
        {**chunks, **lanes},
        {"num_warps": 8},
    )
    yield (
        sampling_filters._list_kernel,
        ["*fp32", *filters, "*fp32", "*i32", "*i32", "*i64", "i32"],
        {"NUM_CHUNKS": 126, **listed, "BLOCK": sampling.BLOCK},
    )


def attention_kernels(dtype: str):
    """Yield tree attention: with states split and in sequence, of narrow and wide heads."""
    dot = DOT_DTYPES[dtype]
    # Head sizes of K and V, whether states are in sequence, whether there are sinks, dtype of the
    # caches.
    cases = [(80, 80, False, False), (128, 128, False, False), (128, 128, True, False)]
    if dtype != "fp32":
        cases += [(64, 64, False, False), (256, 256, False, False), (256, 256, True, False)]
        cases += [(64, 64, False, True), (64, 64, True, True)]  # of gpt-oss
        cases += [(512, 512, False, False), (512, 512, True, False)]  # of Gemma 4
    cases += [(192, 128, False, False), (192, 128, True, True)]  # of MiMo-V2
    variants = [(*case, dtype) for case in cases]
    variants += [(*case, "u8") for case in cases if case[0] != 64]
    for head_dim, v_dim, is_sequential, has_sinks, caches in variants:
        dim_block = triton.next_power_of_2(head_dim)
        queries = tree_attention.choose_queries(dot)
        shape = {
            "DOT_DTYPE": dot,
            "NUM_KV_HEADS": 8,
            "GROUP": 7,
            "GROUP_BLOCK": 8,
            "HEAD_DIM": head_dim,
            "DIM_BLOCK": dim_block,
            "V_DIM": v_dim,
            "V_BLOCK": triton.next_power_of_2(v_dim),
            "TILE": tree_attention_tiles.TRITON_KV_TILE,
            "CHUNK_TILES": tree_attention_tiles.TRITON_CHUNK_TILES,
            "SEQUENTIAL": is_sequential,
            "HAS_SINKS": has_sinks,
            # As Gemma 2 has it.
            "HAS_SOFTCAP": head_dim == 256,
        }
        values = [f"*{dtype}", *[f"*{caches}"] * 2, "*fp32", f"*{dtype}", *["*fp32"] * 2]
        scales = ["fp32"] * 3
        if caches == dtype:
            scales, shape["v_scale"] = ["fp32"] * 2, None
        # Requests of few rows are always taken so that they may be in sequence.
        for num_queries in (queries, 16) if is_sequential and queries > 16 else (queries,):
            yield (
                tree_attention_kernels._shared_tiles_kernel,
                [*values, *["*i32"] * 3, *["i32"] * 2, *scales],
                {**shape, "PAGE_SIZE": 16, "HAS_WINDOW": False, "ROWS": num_queries // 8},
                tree_attention.shared_options(dot, dim_block, num_queries),
            )
        yield (
            tree_attention_kernels._finish_rows_kernel,
            [*values, *["*i32"] * 2, *["i32"] * 2, *scales],
            {**shape, "OWN_SLOTS": 128, "QUERIES": 16},
            tree_attention.finish_options(dot, dim_block, 16),
        )


def int4_products(dtype: str, scaling: str, group_size: int):
    """Yield products with weights in int4, as `kernels` does."""
    itemsize = 4 if dtype == "fp32" else 2
    dot = {"DOT_DTYPE": DOT_DTYPES[dtype], "HAS_BIAS": True}
    dot |= {"SCALING": scaling, "GROUP": group_size, "HAS_FP8_ROWS": False}

    def types(tiles: linear_tiles.Tiles) -> list[str]:
        rows = f"tensordesc<{dtype}[{tiles.block_t}, {group_size}]>"
        words = f"tensordesc<i16[{tiles.block_n}, {group_size}]>"
        return [rows, words, "*fp16", f"*{dtype}", f"*{dtype}"]

    for num_rows in (2048, 128, 64, 32, 1):
        tiles = linear_tiles.choose_int4_tiles(num_rows, itemsize, 4 * group_size)
        split = {"IS_SPLIT": num_rows <= 128, "NUM_SPLITS": 4, "SPLIT_K": 1024}
        yield (
            linear._linear_kernel,
            [*types(tiles), "*fp32", *["i32"] * 3],
            {**dot, **blocks(tiles), **split},
            launch_options(tiles),
        )
        tiles = linear_swiglu.choose_int4_tiles(num_rows, itemsize, 4 * group_size)
        yield (
            linear_swiglu._linear_swiglu_kernel,
            [*types(tiles), f"*{dtype}", *["i32"] * 3],
            {**dot, **blocks(tiles), "ACTIVATION": "silu"},
            launch_options(tiles),
        )


def growth_kernels():
    """Yield, as `kernels` does, those that grow trees; they know no other dtype."""
    chunk = tree_children._CHUNK
    for topk, width in ((1, 32000), (10, 32000), (16, 151936)):
        count = {"COUNT": topk, "COUNT_BLOCK": triton.next_power_of_2(topk)}
        num_chunks = triton.cdiv(width, chunk)
        for has_noise in (False, True):
            yield (
                tree_children._chunk_children_kernel,
                ["*fp32", "*i64", "*fp32", "*i64", "*i64", "*i64", "*i64"] + ["i32"] * 4,
                {"HAS_NOISE": has_noise, "CHUNK": chunk},
                {"num_warps": 1},
            )
        yield (
            tree_children._merge_children_kernel,
            ["*fp32", "*i64", "*i64", "*i64", "*fp32", "*i32", "i32", "i32"],
            {
                "NUM_CHUNKS": num_chunks,
                "CHUNKS_BLOCK": triton.next_power_of_2(num_chunks),
                **count,
                "CHUNK": chunk,
            },
            {"num_warps": count["COUNT_BLOCK"]},
        )
        for is_root, is_last in ((True, False), (False, False), (False, True)):
            num_children = topk if is_root else topk**2
            yield (
                tree_beams._next_beams_kernel,
                ["*fp32", "*i32", "*i32", "*i32", "*i64", "*i32", "*i32", "*i32", "*fp32"]
                + ["*i32"] * 2
                + ["*fp32", "*i32", "*i32", "*fp32", "*i32", "*i64", "*i64", "*i64"]
                + ["*i32"] * 4
                + ["i32"] * 3,
                {
                    "IS_ROOT": is_root,
                    "IS_LAST": is_last,
                    "WIDTH": topk,
                    "DEPTH": 5,
                    "PAGE_SIZE": 16,
                    "CHILD_BLOCK": triton.next_power_of_2(num_children),
                    "WIDTH_BLOCK": triton.next_power_of_2(topk),
                    "DEPTH_BLOCK": 8,
                },
                {"num_warps": 1},
            )
    for block in (1, 512, 4096):
        yield (
            tree_select._select_nodes_kernel,
            ["*fp32", "*i32", "*i32", "*i32", "*i32", "i32", "i32"],
            {"BLOCK": block, "NODE_BLOCK": 64},
            {"num_warps": {1: 1, 512: 4, 4096: 8}[block]},
        )


def main() -> None:
    """Compile for the capability and the dtype on the command line: "all", or "some" of it."""
    capability, dtype, share = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert share in ("all", "some")
    cases = list(kernels(dtype))
    for kernel, types, constexprs, *options in cases if share == "all" else ends_of_each(cases):
        binary = compile_kernel(kernel, types, constexprs, capability, *options)
        used = [name for name in ("wgmma", "mma.sync") if name in binary.asm["ptx"]]
        products = "+".join(used) or "none"
        sys.stdout.write(f"{kernel.__name__} {capability} {dtype} {products}\n")


def ends_of_each(cases):
    """Return the first and the last case of each kernel."""
    first = {id(case[0]): case for case in reversed(cases)}
    last = {id(case[0]): case for case in cases}
    chosen = [*map(id, first.values()), *map(id, last.values())]
    return [case for case in cases if id(case) in chosen]


def compile_kernel(kernel, types, constexprs, capability, options=None):
    """Compile for arguments as they are in service: all but counts are multiples of 16."""
    if "IS_DEPENDENT" in kernel.arg_names:
        is_dependent = capability >= 90
        constexprs = constexprs | {"IS_DEPENDENT": is_dependent}
        options = (options or {}) | {"launch_pdl": is_dependent}
    names = [name for name in kernel.arg_names if name not in constexprs]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constexprs, "constexpr")
    position = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    is_aligned = [
        name
        for name in names
        if signature[name][0] == "*" or "stride" in name or name.startswith("width")
    ]
    source = source_type(kernel)(
        fn=kernel,
        signature=signature,
        constexprs={position[name]: value for name, value in constexprs.items()},
        attrs={position[name]: [["tt.divisibility", 16]] for name in is_aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options=LAUNCH_OPTIONS | (options or {}))
    assert binary.asm["cubin"]
    assert binary.metadata.shared <= SHARED_MEMORY_BYTES, kernel.__name__
    if constexprs.get("IS_DEPENDENT"):
        # Attention reads its tables before: no layer writes them.
        may_load = "_attention_kernels" in kernel.__module__
        assert waits_first(binary.asm["ptx"], may_load=may_load), (
            f"{kernel.__name__} does not wait first"
        )
    if "wgmma" in binary.asm["ptx"] and not is_serialized_by_old_triton(kernel, constexprs):
        assert not is_serialized(binary.asm["ptx"], capability), f"{kernel.__name__} {constexprs}"
    return binary


def source_type(kernel):
    """Return what Triton compiles of a kernel."""
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def is_serialized_by_old_triton(kernel, constexprs) -> bool:
    """Return whether Triton before 3.7 lets every product of a kernel wait for the one before it.

    Results are right; what the waiting costs was not measured. With a loop per split none waits.
    """
    is_dealt_out = kernel is linear_balanced._balanced_linear_kernel
    is_old = Version(triton.__version__) < Version("3.7")
    return is_old and is_dealt_out and constexprs["SCALING"] == "channel"


def is_serialized(ptx: str, capability: int) -> bool:
    """Return whether the assembler lets every product wait for the one before it."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        result = subprocess.run(
            [get_ptxas(capability).path, f"-arch=sm_{capability}a", "-v", file.name]
            + ["--output-file", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    return "serialized" in result.stderr


def waits_first(ptx: str, *, may_load: bool = False) -> bool:
    """Return whether a kernel waits for earlier ones before it branches or touches memory.

    Args:
        may_load: It may load from memory before, also by way of its shared memory.
    """
    before, wait, _ = re.sub(r"//.*", "", ptx).partition("griddepcontrol.wait;")
    touched = re.findall(r"\b(ld|st|atom|red|cp|bra|ret|exit)\b([.\w]*)", before)
    harmless = {"ld": (".param", *[".global", ".shared"] * may_load), "st": (".shared",) * may_load}
    return bool(wait) and all(space.startswith(harmless.get(op, ())) for op, space in touched)


if __name__ == "__main__":
    main()
