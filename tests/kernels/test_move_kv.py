"""Moving K/V rows between slots: as if every source were read before any destination is written."""

from __future__ import annotations

import random

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.move_kv import cache_addresses, move_kv, move_kv_ref, move_paths

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
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


def check_moves(caches: list[torch.Tensor], moves: list[tuple[int, int]]) -> None:
    """Move and compare every slot of every cache, bit for bit, with a copy made row by row."""
    before = [cache.clone() for cache in caches]
    src, dst = torch.tensor(moves, dtype=torch.int32).to(caches[0].device).unbind(1)
    move_kv(caches, src.contiguous(), dst.contiguous())
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
        [(7, 8), (6, 7), (5, 6), (4, 5)],
        [(4, 5), (5, 6), (6, 7), (7, 8)],
        [(4, 9), (9, 4)],
        [(4, 5), (5, 9), (9, 4)],
        [(6, 4), (6, 5), (6, 7)],
        [(5, 5), (6, 6)],
        [(9, 5), (12, 6), (0, 0), (15, 7), (0, 0), (0, 0)],
        [(0, 0), (0, 0)],
        [(21, 4), (4, 21)],
    ],
    ids=lambda moves: " ".join(f"{src}-{dst}" for src, dst in moves),
)
def test_chains_cycles_and_padding(
    device: torch.device, moves: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    caches = random_caches(2, device, dtype)
    check_moves(caches, moves)
    assert launch_counts().get("move_kv", 0) == int(use_triton(caches[0]))


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


def test_random_permutations(device: torch.device) -> None:
    rng = random.Random(1)
    for _ in range(4):
        order = list(range(NUM_SLOTS))
        rng.shuffle(order)
        check_moves(random_caches(2, device, torch.float16), list(enumerate(order)))


def test_slices_of_one_pool(device: torch.device) -> None:
    """The caches of a pool are slices of one tensor; what lies between them stays."""
    pool = torch.randn(5, NUM_SLOTS, 2, 3).to(device)
    before = pool.clone()
    check_moves([pool[1], pool[3]], [(8, 4), (4, 8)])
    for layer in (0, 2, 4):
        assert torch.equal(pool[layer], before[layer])


def test_columns_of_a_table_of_moves(device: torch.device) -> None:
    cache = torch.arange(10.0).view(10, 1, 1).to(device)
    moves = torch.tensor([[7, 3], [8, 4]], dtype=torch.int32).to(device)
    move_kv([cache], moves[:, 0], moves[:, 1])
    assert cache.flatten().tolist() == [0, 1, 2, 7, 8, 5, 6, 7, 8, 9]


def test_nothing_to_move(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int32, device=device)
    one = torch.tensor([3], dtype=torch.int32, device=device)
    cache = torch.arange(10.0).view(10, 1, 1).to(device)
    move_kv([cache], none, none)
    move_kv([], one, one - 1)
    assert cache.flatten().tolist() == list(range(10))
    assert launch_counts() == {}


def test_slots_beyond_32_bit_addresses(device: torch.device) -> None:
    """On a GPU the last slot lies past 2^31 values."""
    row = 4096
    num_slots = 2**31 // row + 3 if device.type == "cuda" else 8
    cache = torch.zeros((num_slots, 1, row), dtype=torch.float16, device=device)
    cache[-1], cache[2] = 1, 2
    src = torch.tensor([num_slots - 1, 2], dtype=torch.int32, device=device)
    dst = torch.tensor([4, num_slots - 2], dtype=torch.int32, device=device)
    move_kv([cache], src, dst)
    assert cache[:, 0, 0].nonzero().flatten().tolist() == [2, 4, num_slots - 2, num_slots - 1]
    assert bool((cache[4] == 1).all()) and bool((cache[-2] == 2).all())


def test_rows_in_place_are_not_touched(device: torch.device) -> None:
    """Neither read nor written: what lies there may change meanwhile."""
    caches = random_caches(3, device, torch.float32)
    moves = torch.tensor([[4, 4], [9, 5], [21, 21], [0, 0]], dtype=torch.int32).to(device)
    before = [cache.clone() for cache in caches]
    move_kv(caches, moves[:, 0], moves[:, 1], addresses=cache_addresses(caches))
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
            move_kv_ref(expected, *table.flatten(0, 1).to(device).unbind(1))
            src, dst = (side.contiguous() for side in table.to(device).unbind(2))
            move_paths(caches, src, dst, addresses=cache_addresses(caches))
            assert all(map(torch.equal, caches, expected))


def test_no_path_moves(device: torch.device) -> None:
    none = torch.empty((0, 3), dtype=torch.int32, device=device)
    caches = random_caches(2, device, torch.float32)
    move_paths(caches, none, none, addresses=cache_addresses(caches))
    assert launch_counts() == {}
