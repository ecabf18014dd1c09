"""A product of 16 rows has the bits of one of 64, whatever instruction computes either.

Attention relies on it: tiles that rows share are multiplied 64 rows at a time, a row's own tiles
by the heads of its group alone.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS
from shared.kernels.tree_attention import choose_own_queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

NUM_PRODUCTS = 256
NUM_ROWS = 16


@triton.jit
def _product_kernel(
    a_ptr,  # [P, 16, K]
    b_ptr,  # [P, N, K], or [P, K, N]
    c_ptr,  # [P, 16, N] f32
    out_ptr,  # [P, 16, N] f32 mutated
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):
    product = tl.program_id(0)
    row, n, k = tl.arange(0, ROWS), tl.arange(0, N), tl.arange(0, K)
    is_live = (row < 16)[:, None]
    a = tl.load(a_ptr + (product * 16 + row[:, None]) * K + k, mask=is_live, other=0.0)
    b_ptr += product * N * K
    if IS_TRANSPOSED:
        b = tl.trans(tl.load(b_ptr + n[:, None] * K + k))
    else:
        b = tl.load(b_ptr + k[:, None] * N + n)
    offset = (product * 16 + row[:, None]) * N + n
    c = tl.load(c_ptr + offset, mask=is_live, other=0.0)
    tl.store(out_ptr + offset, tl.dot(a, b, c, input_precision="ieee"), mask=is_live)


def multiply(a, b, c, *, rows, num_warps, is_transposed):
    """Return a b + c, or a b^T + c, and the instruction that computed it."""
    out = torch.full_like(c, torch.nan)
    kernel = _product_kernel[(len(a),)](
        a,
        b,
        c,
        out,
        N=c.shape[2],
        K=a.shape[2],
        ROWS=rows,
        IS_TRANSPOSED=is_transposed,
        num_warps=num_warps,
        **LAUNCH_OPTIONS,
    )
    return out, "wgmma" if "wgmma" in kernel.asm["ptx"] else "mma.sync"


@pytest.mark.parametrize("is_cancelling", [False, True])
@pytest.mark.parametrize("log2_range", [0, 12, 40])
@pytest.mark.parametrize("size", [(64, 128, True), (128, 64, False), (256, 64, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_any_height_have_the_same_bits(dtype, size, log2_range, is_cancelling):
    """Of values of all sizes, and of pairs that cancel, so that what was cut off is left."""
    own_rows = choose_own_queries(tl.bfloat16, torch.device("cuda"))
    width_n, width_k, is_transposed = size
    log2_range = min(log2_range, 12) if dtype == torch.float16 else log2_range
    generator = torch.Generator("cuda").manual_seed(width_n + log2_range)

    def values(*shape):
        x = torch.randn(shape, generator=generator, device="cuda")
        exponent = torch.randint(
            -log2_range, log2_range + 1, shape, generator=generator, device="cuda"
        )
        return x * torch.exp2(exponent.float())

    a = values(NUM_PRODUCTS, NUM_ROWS, width_k).to(dtype)
    b = values(NUM_PRODUCTS, width_k, width_n).to(dtype)
    c = values(NUM_PRODUCTS, NUM_ROWS, width_n)
    if is_cancelling:
        a[..., 1::2] = -a[..., ::2]
        b[:, 1::2] = b[:, ::2] * (1 + 2**-6)
    if is_transposed:
        b = b.mT.contiguous()
    wide, instruction = multiply(a, b, c, rows=64, num_warps=4, is_transposed=is_transposed)
    assert wide.isfinite().all()
    if torch.cuda.get_device_capability()[0] == 9:
        assert instruction == "wgmma"
    for num_warps in (2, 4):
        narrow, instruction = multiply(
            a, b, c, rows=own_rows, num_warps=num_warps, is_transposed=is_transposed
        )
        assert instruction == "mma.sync" or own_rows != NUM_ROWS
        assert torch.equal(narrow, wide), num_warps
