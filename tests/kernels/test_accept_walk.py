"""The accept walk against a naive one, batched and padded, with the moves that it asks for."""

from __future__ import annotations

import os
import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.kernels.accept_walk import AcceptWalk, accept_walk
from shared.kernels.dispatch import launch_counts, use_triton
from shared.messages import MAX_TREE_NODES
from tests.unit.test_tree import trees

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Tree = tuple[list[int], list[int], list[int]]  # tokens, parents, the target's tokens


def naive_walk(tokens: list[int], parents: list[int], predict: list[int]) -> list[int]:
    path = [0]
    while True:
        children = [
            node
            for node, parent in enumerate(parents)
            if parent == path[-1] and tokens[node] == predict[path[-1]]
        ]
        if not children:
            return path
        path.append(children[0])


def walk_trees(
    batch: list[Tree], device: torch.device, *, width: int, max_depth: int, page_size: int = 4
) -> tuple[AcceptWalk, list[list[int]], list[int]]:
    """Return the walk, and per request its slots by logical slot and its first logit row.

    Checks the requests' newest tokens: nothing else knows where they lie.
    """
    rng = random.Random(len(batch))
    seq_len = [rng.randrange(3 * page_size) for _ in batch]
    num_pages = -(-(3 * page_size + width) // page_size)
    pages = rng.sample(range(1, 1 + num_pages * (len(batch) + 1)), num_pages * (len(batch) + 1))
    table = torch.tensor(pages, dtype=torch.int32).view(len(batch) + 1, num_pages)
    req_idx = rng.sample(range(len(batch) + 1), len(batch))
    slots = [
        [
            int(table[row, s // page_size]) * page_size + s % page_size
            for s in range(start, start + width)
        ]
        for row, start in zip(req_idx, seq_len, strict=True)
    ]
    # The logit rows of the trees lie in some other order than the requests.
    first, order, total = [0] * len(batch), rng.sample(range(len(batch)), len(batch)), 0
    predict: list[int] = []
    for i in order:
        first[i], total = total, total + len(batch[i][0])
        predict += batch[i][2]

    def padded(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (width - len(row)) for row in values]).to(device)

    rows = [list(range(first[i], first[i] + len(tree[0]))) for i, tree in enumerate(batch)]
    roots = torch.full((len(batch) + 1,), -5)
    expected = roots.clone()
    for row, tree in zip(req_idx, batch, strict=True):
        expected[row] = tree[2][naive_walk(*tree)[-1]]
    roots, newest_slot = roots.to(device), torch.full_like(roots, -5).to(device)
    walk = accept_walk(
        padded([tree[0] for tree in batch], 0),
        padded([tree[1] for tree in batch], -2),
        padded(rows, 0),
        torch.tensor(predict, dtype=torch.int32).to(device),
        torch.tensor(seq_len).to(device),
        torch.tensor(req_idx).to(device),
        table.to(device),
        roots,
        newest_slot,
        page_size=page_size,
        max_depth=max_depth,
    )
    assert torch.equal(roots.cpu(), expected)
    ends = torch.full_like(expected, -5)
    ends[req_idx] = torch.tensor(seq_len) + walk.accept_length.cpu()
    assert torch.equal(newest_slot.cpu(), ends)
    return walk, slots, first


def check_walk(
    batch: list[Tree], device: torch.device, *, width: int, max_depth: int, page_size: int = 4
) -> None:
    """Compare everything that the walk returns with the naive paths."""
    walk, slots, first = walk_trees(
        batch, device, width=width, max_depth=max_depth, page_size=page_size
    )
    for row, tree in enumerate(batch):
        path = naive_walk(*tree)
        rest = max_depth + 1 - len(path)
        assert walk.accept_index[row].tolist() == path + [-1] * rest
        assert int(walk.accept_length[row]) == len(path)
        assert walk.path_rows[row].tolist() == [first[row] + node for node in path + [0] * rest]
        moves = [
            (slots[row][node], slots[row][step]) if node != step else (0, 0)
            for step, node in enumerate(path)
        ]
        found = zip(walk.move_src[row].tolist(), walk.move_dst[row].tolist(), strict=True)
        assert list(found) == moves + [(0, 0)] * rest


@st.composite
def verified_trees(draw: st.DrawFn) -> Tree:
    parents = draw(trees(max_nodes=24))
    # Two tokens only: paths get long, and siblings share a token now and then.
    ids = st.integers(0, draw(st.sampled_from([0, 1, 2, 40])))
    tokens = [draw(ids) for _ in parents]
    return tokens, parents, [draw(ids) for _ in parents]


@settings(
    max_examples=20 if IS_INTERPRETED else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(verified_trees(), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([1, 2, 16]),
)
def test_walk_equals_the_naive_walk(
    device: torch.device, batch: list[Tree], extra_nodes: int, extra_depth: int, page_size: int
) -> None:
    width = max(len(tokens) for tokens, _, _ in batch) + extra_nodes
    max_depth = max(max(_depths(parents)) for _, parents, _ in batch) + extra_depth
    check_walk(batch, device, width=width, max_depth=max_depth, page_size=page_size)


def test_a_dead_end_does_not_come_alive_again(device: torch.device) -> None:
    # The root predicts 9, which no child has; node 1 would go on to node 2.
    check_walk([([5, 6, 7], [-1, 0, 1], [9, 7, 7])], device, width=3, max_depth=2)
    assert launch_counts().get("accept_walk", 0) == int(use_triton(torch.empty(0, device=device)))


def test_the_largest_trees(device: torch.device) -> None:
    """A chain that is accepted whole, a path of odd nodes, a star, and no tree."""
    count = MAX_TREE_NODES
    chain: Tree = ([7] * count, list(range(-1, count - 1)), [7] * count)
    odd_parents = [-1] + [
        0 if node < 3 else (node - 2 if node % 2 else 0) for node in range(1, count)
    ]
    odd: Tree = ([node % 2 for node in range(count)], odd_parents, [1] * count)
    star: Tree = (list(range(count)), [-1] + [0] * (count - 1), [count - 1] * count)
    root: Tree = ([3], [-1], [3])
    check_walk([chain, odd, star, root], device, width=count, max_depth=count - 1)


def test_roots_only(device: torch.device) -> None:
    check_walk([([3], [-1], [token]) for token in (3, 4, 5)], device, width=1, max_depth=0)


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def test_padding_trees_change_a_spare_root_only(device: torch.device) -> None:
    """As captured steps have them: 64 nodes a tree, and a row that the page table does not have."""
    tokens = torch.zeros((3, MAX_TREE_NODES), dtype=torch.int64)
    parents = torch.full_like(tokens, -2)
    rows = torch.zeros_like(tokens)
    tokens[0, :3] = torch.tensor([7, 5, 6])
    parents[0, :3] = torch.tensor([-1, 0, 0])
    rows[0, :3] = torch.arange(3)
    roots = torch.full((3,), -5).to(device)
    newest_slot = roots.clone()
    walk = accept_walk(
        tokens.to(device),
        parents.to(device),
        rows.to(device),
        torch.tensor([6, 1, 9, 0], dtype=torch.int32).to(device),
        torch.tensor([3, 0, 0]).to(device),
        torch.tensor([1, 2, 2]).to(device),
        torch.arange(1, 41, dtype=torch.int32).view(2, 20).to(device),
        roots,
        newest_slot,
        page_size=4,
        max_depth=MAX_TREE_NODES - 1,
    )
    assert walk.accept_index[0, :3].tolist() == [0, 2, -1]
    assert walk.accept_length.tolist() == [2, 1, 1]
    assert roots[:2].tolist() == [-5, 9]
    moves = torch.stack((walk.move_src, walk.move_dst), dim=-1)
    assert moves[0, 1].tolist() == [22 * 4 + 1, 22 * 4]
    moves[0, 1] = 0
    assert not moves.any()
