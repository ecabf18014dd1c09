"""Token-tree algebra against naive implementations, by hypothesis."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgumentError, InvalidTreeError, StatusCode
from shared.messages import MAX_TREE_NODES, TreeShape, check_shape
from shared.tree import are_trees, check_tree, depths_of, lay_out_tree, paths_of

VOCAB_SIZE = 50


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = MAX_TREE_NODES) -> list[int]:
    """Draw parents of a topological tree, from chains to stars."""
    num_nodes = draw(st.integers(1, max_nodes))
    reach = draw(st.sampled_from([1, 2, 5, max_nodes]))
    return [-1] + [draw(st.integers(max(0, n - reach), n - 1)) for n in range(1, num_nodes)]


def naive_path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@given(st.lists(trees(), max_size=3))
def test_paths_are_the_climb_to_the_root(forest: list[list[int]]) -> None:
    layouts = [lay_out_tree(tuple(parents)) for parents in forest]
    want = [naive_path(parents, node) for parents in forest for node in range(len(parents))]
    assert depths_of(layouts).tolist() == [len(path) - 1 for path in want]
    padded = [path + [0] * (MAX_TREE_NODES - len(path)) for path in want]
    assert paths_of(layouts).tolist() == padded
    for parents, layout in zip(forest, layouts, strict=True):
        assert layout.max_depth == max(layout.path_len) - 1
        assert layout.is_chain == (parents == list(range(-1, len(parents) - 1)))


@given(trees(), st.data())
def test_a_good_tree_is_accepted(parents: list[int], data: st.DataObject) -> None:
    tokens = [data.draw(st.integers(0, VOCAB_SIZE - 1)) for _ in parents]
    check_tree(tokens, parents, root_token_id=tokens[0], vocab_size=VOCAB_SIZE)
    if len(parents) > 1:
        with pytest.raises(InvalidTreeError, match="nodes, expected 1.."):
            check_tree(
                tokens, parents, root_token_id=tokens[0], vocab_size=VOCAB_SIZE,
                max_num_nodes=len(parents) - 1,
            )  # fmt: skip


@given(
    st.lists(st.integers(-3, VOCAB_SIZE + 2), max_size=8),
    st.lists(st.integers(-3, 9), max_size=8),
    st.integers(0, VOCAB_SIZE - 1),
    st.booleans(),
)
def test_whatever_is_wrong_is_refused(
    tokens: list[int],
    parents: list[int],
    root: int,
    is_rooted: bool,  # noqa: FBT001
) -> None:
    if is_rooted and tokens and parents:
        tokens[0], parents[0] = root, -1
    is_good = (
        1 <= len(tokens) == len(parents)
        and tokens[0] == root
        and parents[0] == -1
        and all(0 <= parent < node for node, parent in enumerate(parents) if node)
        and all(0 <= token < VOCAB_SIZE for token in tokens)
    )
    try:
        check_tree(tokens, parents, root_token_id=root, vocab_size=VOCAB_SIZE)
    except InvalidTreeError as error:
        assert not is_good
        assert error.field in ("tree.token_ids", "tree.parent_index")
        assert error.code == StatusCode.INVALID_ARGUMENT
    else:
        assert is_good


ANY_PARENTS = trees(6) | st.lists(st.integers(-2, 6), min_size=1, max_size=6)


@given(
    st.lists(ANY_PARENTS, min_size=1, max_size=4),
    st.sampled_from([0, 0, -1, VOCAB_SIZE]),
    st.data(),
)
def test_many_trees_are_good_where_each_is(
    parents: list[list[int]], shift: int, data: st.DataObject
) -> None:
    tokens = [[data.draw(st.integers(0, VOCAB_SIZE - 1)) for _ in tree] for tree in parents]
    data.draw(st.sampled_from(tokens))[-1] += shift

    def is_good(tree: int) -> bool:
        root = tokens[tree][0]
        try:
            check_tree(tokens[tree], parents[tree], root_token_id=root, vocab_size=VOCAB_SIZE)
        except InvalidTreeError:
            return False
        return True

    assert are_trees(
        list(itertools.chain(*tokens)),
        list(itertools.chain(*parents)),
        [len(tree) for tree in parents],
        vocab_size=VOCAB_SIZE,
    ) == all(map(is_good, range(len(parents))))


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "0 nodes"),
        ([7] * 65, [-1, *range(64)], "65 nodes"),
        ([7, 1], [-1], "1 parents for 2 nodes"),
        ([7, 1], [0, 0], r"parent_index\[0\] must be -1"),
        ([7, 1, 2], [-1, 2, 0], r"parent_index\[1\] is 2, expected 0..0"),
        ([7, 1, 2], [-1, 0, 2], r"parent_index\[2\] is 2, expected 0..1"),
        ([7, 1, 2], [-1, 0, -1], r"parent_index\[2\] is -1"),
        ([7, VOCAB_SIZE], [-1, 0], r"token_ids\[1\] is 50, expected 0..49"),
        ([7, -1], [-1, 0], r"token_ids\[1\] is -1"),
        ([8, 1], [-1, 0], "the root is token 8, the bonus token is 7"),
    ],
)
def test_the_message_says_what_is_wrong(
    tokens: list[int], parents: list[int], message: str
) -> None:
    with pytest.raises(InvalidTreeError, match=message):
        check_tree(tokens, parents, root_token_id=7, vocab_size=VOCAB_SIZE)


def grown_nodes(num_steps: int, topk: int) -> int:
    """Count the candidates of a tree that is really grown, beam by beam, and the root."""
    beams, total = 1, 1
    for _ in range(num_steps):
        children = beams * topk
        total += children
        beams = min(topk, children)
    return total


def test_every_shape_that_can_be_grown_is_accepted_and_no_other() -> None:
    for num_steps, topk in itertools.product(range(0, 18), range(0, 18)):
        in_range = 1 <= num_steps <= 16 and 1 <= topk <= 16
        most = min(64, grown_nodes(num_steps, topk)) if in_range else 0
        for num_draft_tokens in (0, 1, 2, 3, most - 1, most, most + 1, 64, 65):
            shape = TreeShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
            is_good = in_range and 2 <= num_draft_tokens <= most
            try:
                check_shape(shape)
            except InvalidArgumentError as error:
                assert not is_good, f"{shape} was refused: {error}"
                assert error.reason == "INVALID_TREE_SHAPE"
                assert error.field.startswith("speculation.")
            else:
                assert is_good, f"{shape} was accepted"


@pytest.mark.parametrize(
    ("shape", "field"),
    [((0, 1, 2), "num_steps"), ((17, 1, 2), "num_steps"), ((1, 0, 2), "topk"), ((1, 17, 2), "topk"),
     ((1, 1, 1), "num_draft_tokens"), ((5, 8, 65), "num_draft_tokens"),
     ((5, 1, 7), "num_draft_tokens"), ((1, 4, 6), "num_draft_tokens")],
)  # fmt: skip
def test_the_field_to_blame_is_named(shape: tuple[int, int, int], field: str) -> None:
    num_steps, topk, num_draft_tokens = shape
    with pytest.raises(InvalidArgumentError) as caught:
        check_shape(
            TreeShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens),
            prefix="a.",
        )
    assert caught.value.field == f"a.{field}"
