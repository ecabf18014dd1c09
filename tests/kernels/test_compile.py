"""Every kernel compiles to machine code; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import EXHAUSTIVE


def compiled(module: str, *args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a module that compiles kernels, with warnings as errors."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # for debuggers, and a tenth of the work
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )


@pytest.mark.slow
def test_norms_add_squares_in_one_order_whether_rows_are_wanted_in_fp8_or_not(tmp_path):
    result = compiled("tests.kernels.compile_norms", "90", cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["1536 11", "3000 11", "4096 11"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "share"),
    [
        ("bf16", "some"),
        pytest.param("bf16", "all", marks=EXHAUSTIVE),
        pytest.param("fp32", "all", marks=EXHAUSTIVE),
    ],
)
def test_every_kernel_compiles_for_hopper_and_products_use_tensor_cores(tmp_path, dtype, share):
    result = compiled("tests.kernels.compile_kernels", "90", dtype, share, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    names = {name for name, *_ in lines}
    of_any_dtype = {
        "_shared_tiles_kernel",
        "_finish_rows_kernel",
        "_linear_kernel",
        "_embed_kernel",
        "_head_input_kernel",
        "_linear_swiglu_kernel",
        "_expert_swiglu_kernel",
        "_expert_down_kernel",
        "_sum_addends_kernel",
        "_swiglu_addends_kernel",
        "_gate_rows_kernel",
        "_rms_norm_kernel",
        "_add_rms_norm_kernel",
        "_rope_store_kernel",
        "_post_rows_kernel",
        "_take_rows_kernel",
        "_move_paths_kernel",
        "_shared_latents_kernel",
        "_finish_latents_kernel",
        "_head_linear_kernel",
        "_latent_store_kernel",
    }
    of_no_dtype = {
        "_post_trees_kernel",
        "_take_trees_kernel",
        "_post_paths_kernel",
        "_take_paths_kernel",
        "_advance_growth_kernel",
        "_choose_experts_kernel",
        "_order_pairs_kernel",
        "_schedule_kernel",
        "_own_slots_kernel",
        "_accept_walk_kernel",
        "_chunk_logprobs_kernel",
        "_row_logprobs_kernel",
        "_penalties_kernel",
        "_token_masks_kernel",
        "_best_of_chunk_kernel",
        "_best_of_row_kernel",
        "_tabulate_kernel",
        "_choose_kernel",
        "_list_kernel",
        "_chunk_children_kernel",
        "_merge_children_kernel",
        "_next_beams_kernel",
        "_select_nodes_kernel",
    }
    of_hopper = {"_shared_latents_hopper_kernel"}
    of_two_tiles = {"_linear_two_tiles_kernel", "_swiglu_two_tiles_kernel"}
    of_halves = {"_balanced_linear_kernel", "_balanced_swiglu_kernel", "_quantize_rows_kernel"}
    of_halves |= of_hopper | of_two_tiles
    assert names == of_any_dtype | (of_no_dtype | of_halves if dtype == "bf16" else set())
    # All kernels of attention have the bits of each other's instruction (test_products.py). That of
    # tiles that rows share is compiled for many rows of a request, and for few.
    attention = {"_shared_tiles_kernel": {"wgmma", "mma.sync"}, "_finish_rows_kernel": {"mma.sync"}}
    attention |= {"_shared_latents_hopper_kernel": {"wgmma"}}
    attention |= {"_finish_latents_kernel": {"mma.sync"}}
    for name, _, compiled_dtype, products in lines:
        assert compiled_dtype == dtype
        of_experts = ("_expert_swiglu_kernel", "_expert_down_kernel")
        of_weights = ("_linear_kernel", "_linear_swiglu_kernel", *of_experts)
        of_latents = ("_shared_latents_kernel", "_finish_latents_kernel", "_head_linear_kernel")
        is_of_halves = name.startswith("_balanced") or name in of_hopper | of_two_tiles
        has_products = is_of_halves or name in (*attention, *of_weights, *of_latents)
        assert (products != "none") == (has_products and dtype != "fp32"), name
        assert products in ("none", *attention.get(name, {products})), name
    if dtype != "fp32":
        found = {products for name, _, _, products in lines if name == "_shared_tiles_kernel"}
        assert found == attention["_shared_tiles_kernel"]
