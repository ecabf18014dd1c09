"""The accept walk against a naive one, batched and padded."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.accept import accept_walk
from tests.unit.test_tree import trees


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


@st.composite
def verified_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    parents = draw(trees(max_nodes=24))
    # Two tokens only: paths get long, and siblings share a token now and then.
    ids = st.integers(0, draw(st.sampled_from([0, 1, 2, 40])))
    tokens = [draw(ids) for _ in parents]
    return tokens, parents, [draw(ids) for _ in parents]


@given(st.lists(verified_trees(), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_walk_equals_the_naive_walk(
    batch: list[tuple[list[int], list[int], list[int]]], extra_nodes: int, extra_depth: int
) -> None:
    width = max(len(tokens) for tokens, _, _ in batch) + extra_nodes
    paths = [naive_walk(*tree) for tree in batch]
    max_depth = max(max(_depths(parents)) for _, parents, _ in batch) + extra_depth

    def padded(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (width - len(row)) for row in values])

    walk = accept_walk(
        padded([tokens for tokens, _, _ in batch], 0),
        padded([parents for _, parents, _ in batch], -2),
        padded([predict for _, _, predict in batch], 0),
        max_depth,
    )
    assert walk.accept_index.shape == (len(batch), max_depth + 1)
    assert walk.accept_length.tolist() == [len(path) for path in paths]
    for row, path in zip(walk.accept_index.tolist(), paths, strict=True):
        assert row == path + [-1] * (len(row) - len(path))


def test_a_dead_end_does_not_come_alive_again() -> None:
    # The root predicts 9, which no child has; node 1 would go on to node 2.
    walk = accept_walk(
        torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[9, 7, 7]]), 2
    )
    assert walk.accept_index.tolist() == [[0, -1, -1]]


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
