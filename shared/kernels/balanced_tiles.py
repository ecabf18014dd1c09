"""Tiles of a product dealt out evenly, so that no program waits for others that have one more.

A product of 448 tiles on 132 multiprocessors takes as long as one of 528: in the last of four turns
half of a GPU has nothing to do. Here as many programs as there are multiprocessors take equal
shares of all tiles' K. Rows are cut into tiles of T; of each of these, a *group* of programs, its
members, walks over all tiles of N: so the groups read the same weights at about the same time.

A share begins and ends inside of tiles. Its member computes the beginning of its last tile first,
and hands what it has added up over to the next member, which computes the end of that tile as the
last it does: nobody waits for long. The sum of a tile goes on where it was, in the same order, so
the bits are those of a program that walks the tile alone.

A member waits for one before it, which waits for nobody before it hands over. Programs start in
order of their numbers, so this ends however few run at once.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Deal(NamedTuple):
    """Who takes what; none of it changes a bit.

    Args:
        num_groups: One per tile of rows.
        num_members: Of a group, no more than there are tiles of N.
    """

    num_groups: int
    num_members: int


def deal_tiles(num_tiles_t: int, num_tiles_n: int, num_programs: int) -> Deal | None:
    """Return how tiles are dealt to programs; None: there are too few for it."""
    num_members = num_programs // num_tiles_t
    if num_members == 0 or num_tiles_n < num_members:
        return None
    return Deal(num_groups=num_tiles_t, num_members=num_members)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many programs of large tiles run at once on a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def handover(device: torch.device, deal: Deal, num_values: int) -> torch.Tensor:
    """Return where programs leave what they hand over, the same memory at every call.

    Products that run at the same time must not share it: those of a process run one by one.

    Args:
        num_values: That a program leaves at most.
    Returns: [programs, 4 + num_values] f32. The first word says, as 0 or 1, whether the values are
        there; it is 0 again once they were taken.
    """
    num_programs = deal.num_groups * deal.num_members
    if device.type == "cuda":
        num_programs = max(num_programs, num_multiprocessors(device))
    return _places(device, num_programs, num_values)


@cache
def _places(device: torch.device, num_programs: int, num_values: int) -> torch.Tensor:
    # Values lie at multiples of 16 bytes.
    return torch.zeros((num_programs, 4 + num_values), dtype=torch.float32, device=device)


@triton.jit
def share_of(member, num_members, num_units):
    """Return the units [begin, end) that a member takes; device function."""
    begin = (member * num_units) // num_members
    end = ((member + 1) * num_units) // num_members
    return begin, end


@triton.jit
def place_of(handover_ptr, program, NUM_VALUES: tl.constexpr):
    """Return a program's word, and its values; device function."""
    word_ptr = handover_ptr + program.to(tl.int64) * (4 + NUM_VALUES)
    return word_ptr, word_ptr + 4


@triton.jit
def say_it_is_there(word_ptr):
    """Let the next member read what all threads of this program have stored; device function."""
    tl.debug_barrier()
    flag_ptr = word_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_it(word_ptr):
    """Wait until the member before has handed over, and forget that it has; device function."""
    flag_ptr = word_ptr.to(tl.pointer_type(tl.int32))
    while tl.atomic_cas(flag_ptr, 1, 0, sem="acquire", scope="gpu") != 1:
        pass
