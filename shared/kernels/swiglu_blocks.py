"""How blocks of gate and up become one; device functions of kernels that compute both."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.quantized import scale_rows, scale_sum
from shared.kernels.swiglu import GELU_A, GELU_B

_GELU_A = tl.constexpr(GELU_A)
_GELU_B = tl.constexpr(GELU_B)


@triton.jit
def gelu_argument(gate):
    """Return y of `swiglu`, by which gelu is gate / (1 + exp(-y))."""
    return gate * tl.fma(gate * gate, tl.full(gate.shape, _GELU_B, tl.float32), _GELU_A)


@triton.jit
def combine(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return f(gate) * up, both rounded before and the result after."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = gelu_argument(gate)
    return (tl.div_rn(gate, 1.0 + tl.exp(-inner)) * up).to(dtype)


@triton.jit
def store_swiglu(
    out_ptr,  # [T, F] mutated
    scales_ptr,  # see `QuantizedWeight`, unread unless SCALING is "channel"
    row_scales_ptr,  # [T] f32, unread unless HAS_FP8_ROWS
    bias_ptr,  # [2 F], unread unless HAS_BIAS
    gate,
    up,
    first_t,
    first_n,
    num_rows,
    width_f,
    SCALING: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Store a block of f(gate) * up, [BLOCK_N, BLOCK_T] of [F, T]; device function."""
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    in_n = n < width_f
    in_rows = t < num_rows
    gate = scale_sum(gate, scales_ptr, n, width_f, SCALING)
    up = scale_sum(up, scales_ptr + width_f, n, width_f, SCALING)
    gate = scale_rows(gate, row_scales_ptr, t, in_rows, HAS_FP8_ROWS)
    up = scale_rows(up, row_scales_ptr, t, in_rows, HAS_FP8_ROWS)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + width_f + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    dtype = out_ptr.dtype.element_ty
    out = combine(gate, up, dtype, ACTIVATION)
    out_ptrs = out_ptr + t.to(tl.int64)[None, :] * width_f + n[:, None]
    tl.store(out_ptrs, out, mask=in_rows[None, :] & in_n[:, None])
