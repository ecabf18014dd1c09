"""The nodes of a tree: the best of all candidates, in candidate order, ties by the lower one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.tree_beams import Candidates
from shared.kernels.tree_select import select_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The candidates of one request."""

    score: list[float]
    token: list[int]
    parent: list[int]


def random_tree(rng: random.Random, total: int, topk: int, *, coarse: bool) -> Tree:
    """Return candidates of whom each scores at most what its parent does."""
    score, parent = [], []
    for candidate in range(total):
        above = -1 if candidate < topk else rng.randrange(candidate)
        drop = rng.choice((0, 0, 1, math.inf)) if coarse else rng.expovariate(1)
        parent.append(above)
        score.append(float(np.float32((0.0 if above < 0 else score[above]) - drop)))
    return Tree(score=score, token=[rng.randrange(2**31) for _ in score], parent=parent)


def oracle(tree: Tree, num_nodes: int) -> tuple[list[int], list[int], list[float]]:
    possible = [i for i, score in enumerate(tree.score) if score > -math.inf]
    nodes = sorted(sorted(possible, key=lambda i: -tree.score[i])[:num_nodes])
    number = {-1: 0} | {candidate: i for i, candidate in enumerate(nodes, start=1)}
    return (
        [tree.token[i] for i in nodes],
        [number[tree.parent[i]] for i in nodes],
        [tree.score[i] for i in nodes],
    )


def check(trees: list[Tree], num_nodes: list[int], most: int, device: torch.device) -> None:
    candidates = Candidates(
        score=torch.tensor([tree.score for tree in trees]).to(device),
        token=torch.tensor([tree.token for tree in trees], dtype=torch.int32).to(device),
        parent=torch.tensor([tree.parent for tree in trees], dtype=torch.int32).to(device),
    )
    wanted = torch.tensor(num_nodes, dtype=torch.int32).to(device)
    packed = select_nodes(candidates, wanted, most_nodes=most).cpu()
    assert packed.shape == (len(trees), 1 + 3 * most) and packed.dtype == torch.int32
    for tree, want, row in zip(trees, num_nodes, packed, strict=True):
        token, parent, score = oracle(tree, want)
        count = int(row[0])
        assert count == len(token)
        fields = row[1:].view(3, most)
        assert fields[0, :count].tolist() == token
        assert fields[1, :count].tolist() == parent
        assert fields[2].view(torch.float32)[:count].tolist() == score
        assert not fields[:, count:].any()


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 5), (4, 1), (3, 4), (8, 5), (16, 16)])
def test_random_trees(device: torch.device, topk: int, num_steps: int, *, coarse: bool) -> None:
    rng = random.Random(topk)
    total = topk + (num_steps - 1) * topk**2
    most = min(63, total + 2)
    num_nodes = [most, 1, 0, most // 2]
    trees = [random_tree(rng, total, topk, coarse=coarse) for _ in num_nodes]
    check(trees, num_nodes, most, device)
    assert launch_counts().get("select_nodes", 0) == int(use_triton(torch.empty(0, device=device)))


def test_ties_go_to_the_lower_candidate(device: torch.device) -> None:
    scores = [-1.0, -1.0, -2.0, -1.0, -2.0, -2.0, -1.0, -2.0]
    tree = Tree(score=scores, token=list(range(8)), parent=[-1, -1, -1, 0, 0, 1, 3, 2])
    for want in range(1, 9):
        check([tree], [want], 8, device)
    assert oracle(tree, 5) == ([0, 1, 2, 3, 6], [0, 0, 0, 1, 4], [-1.0, -1.0, -2.0, -1.0, -1.0])


def test_nothing_is_possible(device: torch.device) -> None:
    tree = Tree(score=[-math.inf] * 6, token=[5] * 6, parent=[-1, -1, 0, 0, 1, 1])
    check([tree, tree], [4, 0], 5, device)
