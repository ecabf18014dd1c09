"""Moving accepted paths: as if every source were read before any destination is written."""

from __future__ import annotations

import random

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.move_kv import group_caches, move_paths, move_paths_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
NUM_SLOTS = 24


def random_caches(
    num_caches: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    shape: tuple[int, int] = (2, 5),
) -> list[torch.Tensor]:
    """Return caches of random values in which slot 20 and all above it are poison."""
    caches = [torch.randn(NUM_SLOTS, *shape).to(device, dtype) for _ in range(num_caches)]
    for cache in caches:
        cache[20:] = torch.nan
    return caches


def move(caches: list[torch.Tensor], moves: list[tuple[int, int]]) -> None:
    """Move one path, given as (source, destination) of each row."""
    src, dst = torch.tensor(moves, dtype=torch.int32).to(caches[0].device).unbind(1)
    move_paths(group_caches(caches), src.contiguous()[None], dst.contiguous()[None])


def check_moves(caches: list[torch.Tensor], moves: list[tuple[int, int]]) -> None:
    """Move and compare every slot of every cache, bit for bit, with a copy made row by row."""
    before = [cache.clone() for cache in caches]
    move(caches, moves)
    came_from = dict.fromkeys(range(NUM_SLOTS)) | {to: slot for slot, to in moves}
    for cache, old in zip(caches, before, strict=True):
        for slot, origin in came_from.items():
            expected = old[slot if origin is None else origin]
            assert torch.equal(cache[slot].view(torch.uint8), expected.view(torch.uint8)), (
                f"slot {slot} should hold what was in {origin}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "moves",
    [
        [(7, 3)],
        [(5, 4), (6, 5), (7, 6), (8, 7)],
        [(4, 4), (6, 5), (9, 6)],
        [(5, 5), (6, 6)],
        [(9, 5), (12, 6), (0, 0), (15, 7), (0, 0), (0, 0)],
        [(0, 0), (0, 0)],
        [(21, 4), (22, 21)],
    ],
    ids=lambda moves: " ".join(f"{src}-{dst}" for src, dst in moves),
)
def test_chains_and_padding(
    device: torch.device, moves: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    caches = random_caches(2, device, dtype)
    check_moves(caches, moves)
    assert launch_counts().get("move_paths", 0) == int(use_triton(caches[0]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (1, 80), (2, 128)])
def test_row_shapes_and_many_layers(device: torch.device, shape: tuple[int, int]) -> None:
    check_moves(
        random_caches(10, device, torch.float16, shape=shape), [(6, 5), (9, 6), (10, 7), (0, 0)]
    )


def test_the_accepted_path_of_random_trees(device: torch.device) -> None:
    """Accepted nodes move to the front in order: sources ascend and never lie below targets."""
    rng = random.Random(0)
    for _ in range(8):
        nodes = sorted(rng.sample(range(1, 16), rng.randint(1, 6)))
        moves = [(4 + node, 5 + rank) for rank, node in enumerate(nodes)]
        moves += [(0, 0)] * (8 - len(moves))
        check_moves(random_caches(4, device, torch.float32), moves)


def test_slices_of_one_pool(device: torch.device) -> None:
    """The caches of a pool are slices of one tensor; what lies between them stays."""
    pool = torch.randn(5, NUM_SLOTS, 2, 3).to(device)
    before = pool.clone()
    check_moves([pool[1], pool[3]], [(8, 4), (9, 8)])
    for layer in (0, 2, 4):
        assert torch.equal(pool[layer], before[layer])


def test_slots_beyond_32_bit_addresses(device: torch.device) -> None:
    """On a GPU the last slot lies past 2^31 values."""
    row = 4096
    num_slots = 2**31 // row + 3 if device.type == "cuda" else 8
    cache = torch.zeros((num_slots, 1, row), dtype=torch.float16, device=device)
    cache[-1], cache[2] = 1, 2
    move([cache], [(2, 1), (num_slots - 1, num_slots - 2)])
    assert cache[:, 0, 0].nonzero().flatten().tolist() == [1, 2, num_slots - 2, num_slots - 1]
    assert bool((cache[1] == 2).all()) and bool((cache[-2] == 1).all())


def test_rows_in_place_are_not_touched(device: torch.device) -> None:
    """Neither read nor written: what lies there may change meanwhile."""
    caches = random_caches(3, device, torch.float32)
    before = [cache.clone() for cache in caches]
    move(caches, [(4, 4), (9, 5), (21, 21), (0, 0)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[5], old[9])
        kept = [slot for slot in range(NUM_SLOTS) if slot != 5]
        assert torch.equal(cache[kept].view(torch.int32), old[kept].view(torch.int32))


def test_accepted_paths_move_like_any_rows(device: torch.device) -> None:
    """Of several requests at once, in their own slots; sources ascend above their destinations."""
    rng = random.Random(2)
    for width in (1, 5, 8):
        moves = []
        for first in (1, 9, 17):
            nodes = sorted(rng.sample(range(7), rng.randint(1, min(width, 7))))
            path = [(first + node, first + rank) for rank, node in enumerate(nodes)]
            path = [(src, dst) if src != dst else (0, 0) for src, dst in path]
            moves.append(path + [(0, 0)] * (width - len(path)))
        table = torch.tensor(moves, dtype=torch.int32)
        for dtype in DTYPES:
            caches = [torch.randn(25, 3, 17).to(device, dtype) for _ in range(4)]
            expected = [cache.clone() for cache in caches]
            move_paths_ref(expected, *table.to(device).unbind(2))
            src, dst = (side.contiguous() for side in table.to(device).unbind(2))
            move_paths(group_caches(caches), src, dst)
            assert all(map(torch.equal, caches, expected))


def test_layers_of_two_shapes_move_with_one_launch_each(device: torch.device) -> None:
    caches = random_caches(2, device, torch.float32, shape=(4, 8))
    caches += random_caches(4, device, torch.float32, shape=(1, 16))
    caches += random_caches(2, device, torch.float32, shape=(4, 8))
    assert [len(group.caches) for group in group_caches(caches)] == [4, 4]
    check_moves(caches, [(5, 4), (6, 5), (9, 6)])
    assert launch_counts().get("move_paths", 0) == 2 * int(use_triton(caches[0]))


def test_no_path_moves(device: torch.device) -> None:
    none = torch.empty((0, 3), dtype=torch.int32, device=device)
    caches = random_caches(2, device, torch.float32)
    move_paths(group_caches(caches), none, none)
    assert launch_counts() == {}
