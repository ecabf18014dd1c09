"""Root-mean-square normalisation of rows, in float32 inside. Grid: (num_rows,)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, aligned, count_launch, use_triton


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, h]
    weight_ptr,  # [h]
    out_ptr,  # [num_rows, h] mutated
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=in_row, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / WIDTH
    dtype = out_ptr.dtype.element_ty
    normalised = (x * (1.0 / tl.sqrt(mean_square + eps))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (normalised * weight).to(dtype), mask=in_row)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise every row by its root mean square and scale it.

    Args:
        x: [..., h].
        weight: [h], dtype of x.
        eps: Added to the mean square.
    Returns: [..., h] in the dtype of x.
    Source: LlamaRMSNorm of transformers (rounds to the dtype of x before the weight).
    """
    if not use_triton(x):
        return rms_norm_ref(x, weight, eps)
    assert x.dtype == weight.dtype and weight.is_contiguous()
    x = aligned(x)
    out = torch.empty_like(x)
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return out
    count_launch("rms_norm")
    _rms_norm_kernel[(num_rows,)](
        x,
        weight,
        out,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return out


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Do what `rms_norm` does in plain torch."""
    wide = x.float().contiguous()  # a mean over strided rows adds in another order
    mean_square = (wide * wide).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
