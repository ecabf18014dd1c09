"""A kernel that does nothing but draw noise: what tests see of the device function."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton
from shared.kernels.gumbel import gumbel_block, gumbel_noise_ref


@triton.jit
def _gumbel_noise_kernel(
    seed_ptr,  # [R] i64
    position_ptr,  # [R] i64
    ids_ptr,  # [V] (ids_stride 0) or [R, V] i64
    out_ptr,  # [R, V] f32 mutated
    width,
    ids_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    ids = tl.load(ids_ptr + row * ids_stride + column, mask=in_row, other=0)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    tl.store(out_ptr + row * width + column, gumbel_block(seed, position, ids), mask=in_row)


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Do what `gumbel_noise_ref` does, by the device function where kernels run."""
    if not use_triton(seed):
        return gumbel_noise_ref(seed, position, ids)
    num_rows, width = seed.shape[0], ids.shape[-1]
    seed, position, ids = seed.contiguous(), position.contiguous(), ids.contiguous()
    out = torch.empty((num_rows, width), dtype=torch.float32, device=seed.device)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(width))
    ids_stride = 0 if ids.dim() == 1 else width
    count_launch("gumbel_noise")
    _gumbel_noise_kernel[(num_rows, triton.cdiv(width, block))](
        seed, position, ids, out, width, ids_stride, BLOCK=block, num_warps=4, **LAUNCH_OPTIONS
    )
    return out
