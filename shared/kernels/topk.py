"""Largest values of a row with a defined order of ties."""

from __future__ import annotations

import torch


def stable_topk(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest values of each row and their columns, ties by lower column.

    torch.topk leaves the order of ties open, and another `count` may change it. Here it sees keys
    that have none: the ordered bits of the value above those of the column.

    Args:
        values: [R, V] f32, no NaN; -0 counts as 0.
    Returns: values [R, count] f32 and columns [R, count] i64, best first.
    """
    if values.device.type == "cpu":
        # Keys of 64 bits are slow here, and hardly ever needed: nobody ties with the last one in.
        value, index = values.topk(count, dim=1)
        if int((values >= value[:, -1:]).sum()) == index.numel():
            index, _ = index.sort(dim=1)
            value, order = values.gather(1, index).sort(dim=1, descending=True, stable=True)
            return value, index.gather(1, order)
    bits = (values + 0.0).view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    column = torch.arange(values.shape[1], device=values.device)
    _, index = ((ascending << 32) - column).topk(count, dim=1)
    return values.gather(1, index), index
