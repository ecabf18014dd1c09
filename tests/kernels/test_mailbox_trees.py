"""Trees through a mailbox: what comes out is what went in, or a tree that can be verified."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.mailbox_trees import TakenTrees, post_trees, take_trees
from shared.kernels.mailbox_words import NO_NODE, NODES, TAG_BITS
from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.tree import lay_out_tree, paths_of

VOCAB_SIZE = 50
POISON = -99
PAGE_SIZE, MOST_PAGES = 16, 80
WAIT_US = 2_000_000


def word(round_tag: int, parent: int, token: int) -> int:
    return round_tag << 40 | parent << 32 | token


def mailbox(num_slots: int, device: torch.device) -> torch.Tensor:
    """Return words of the host that kernels reach, none of them of a round below 2 ** TAG_BITS."""
    words = torch.full((num_slots, NODES), -1)
    return words.pin_memory() if device.type == "cuda" else words


def int32s(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a forward whose first blocks are trees, before they are taken."""

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    attention: TreeAttentionMetadata

    @classmethod
    def of(
        cls,
        sizes: list[int],
        prefix_len: list[int],
        roots: list[int],
        device: torch.device,
        chains: tuple[int, ...] = (),
    ) -> Rows:
        indptr = [0]
        for size in sizes:
            indptr.append(indptr[-1] + size)
        total = indptr[-1] + 3
        token_ids = torch.full((total,), POISON)
        for first, size, root in zip(indptr, sizes, roots, strict=False):
            if size:
                token_ids[first] = root
        count = len(sizes) + 1
        pages = torch.randperm(count * MOST_PAGES, generator=torch.Generator().manual_seed(1))
        is_chain = torch.zeros(count, dtype=torch.bool)
        is_chain[list(chains)] = True
        attention = TreeAttentionMetadata(
            page_table=pages.view(count, MOST_PAGES).int().to(device),
            req_idx=int32s(list(range(len(sizes), 0, -1)) + [0], device),
            prefix_len=int32s([*prefix_len, POISON], device),
            row_indptr=int32s([*indptr, indptr[-1]], device),
            path_len=int32s([POISON] * total, device),
            path_offset=torch.full((total, NODES), POISON, dtype=torch.int32, device=device),
            is_chain=is_chain.to(device),
            page_size=PAGE_SIZE,
        )
        return cls(
            token_ids=token_ids.to(device),
            position_ids=torch.full((total,), POISON, device=device),
            slot_mapping=int32s([POISON] * total, device),
            attention=attention,
        )


def take(
    trees: torch.Tensor,
    slot: list[int],
    round_tag: list[int],
    rows: Rows,
    sizes: list[int],
    *,
    max_depth: int,
    timeout_us: int = 0,
    given_up: torch.Tensor | None = None,
    newest_slot: dict[int, int] | None = None,
) -> TakenTrees:
    """Take trees.

    Args:
        newest_slot: Of the trees whose roots only the device knows.
    """
    device = rows.token_ids.device
    ends = torch.full((len(sizes) + 2,), POISON)
    for tree, end in (newest_slot or {}).items():
        ends[rows.attention.req_idx[tree]] = end
    return take_trees(
        trees,
        int32s(slot, device),
        int32s(round_tag, device),
        given_up if given_up is not None else int32s([0] * len(trees), device),
        int32s([int(tree in (newest_slot or {})) for tree in range(len(sizes))], device),
        ends.to(device),
        rows.token_ids,
        rows.position_ids,
        rows.slot_mapping,
        rows.attention,
        num_trees=len(sizes),
        num_nodes=max(sizes, default=1),
        num_rows=sum(sizes),
        max_depth=max_depth,
        vocab_size=VOCAB_SIZE,
        timeout_us=timeout_us,
    )


def good_nodes(
    words: list[int], round_tag: int, max_depth: int, *, is_chain: bool = False
) -> dict[int, tuple[int, int]]:
    """Return (parent, token) of every node, by number, that the words of a slot give."""
    depth, nodes = {0: 0}, {}
    for node, value in enumerate(words[1:], start=1):
        parent, token = value >> 32 & 0xFF, value & 0xFFFFFFFF
        if (
            value >> 40 == round_tag
            and token < VOCAB_SIZE
            and depth.get(parent, max_depth) < max_depth
            and (parent == node - 1 or not is_chain)
        ):
            depth[node] = depth[parent] + 1
            nodes[node] = (parent, token)
    return nodes


def check_taken(
    trees: torch.Tensor,
    slot: list[int],
    round_tag: list[int],
    sizes: list[int],
    device: torch.device,
    *,
    max_depth: int,
    chains: tuple[int, ...] = (),
) -> None:
    """Take trees of these sizes, some in blocks of chains, and compare everything with what their
    words say.
    """
    rng = random.Random(len(sizes))
    prefix_len = [rng.randrange(1000) for _ in sizes]
    roots = [rng.randrange(VOCAB_SIZE) for _ in sizes]
    rows = Rows.of(sizes, prefix_len, roots, device, chains)
    before = trees.clone()
    # Of every other tree the host knows less than the device.
    newest_slot = {tree: prefix_len[tree] + rng.randrange(9) for tree in range(0, len(sizes), 2)}
    taken = take(trees, slot, round_tag, rows, sizes, max_depth=max_depth, newest_slot=newest_slot)
    assert torch.equal(trees, before)
    prefix_len = [newest_slot.get(tree, known) for tree, known in enumerate(prefix_len)]
    assert taken.seq_len.tolist() == prefix_len
    seen = rows.attention
    assert seen.prefix_len.tolist() == [*prefix_len, POISON]
    slots = [
        int(seen.page_table[seen.req_idx[tree], at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
        for tree, size in enumerate(sizes)
        for at in range(prefix_len[tree], prefix_len[tree] + size)
    ]
    assert rows.slot_mapping.tolist() == slots + [POISON] * 3

    tokens, parents = taken.token_ids.tolist(), taken.parent_index.tolist()
    width = max(sizes, default=1)
    assert taken.token_ids.shape == taken.parent_index.shape == (len(sizes), width)
    token_ids, position_ids, path_len, path_offset = [], [], [], []
    for tree, size in enumerate(sizes):
        words = trees[slot[tree], :size].tolist() if slot[tree] >= 0 else [-1] * size
        is_chain = tree in chains
        nodes = good_nodes(words, round_tag[tree] % 2**TAG_BITS, max_depth, is_chain=is_chain)
        there = [0, *nodes] if size else []
        assert parents[tree] == [
            -1 if node == 0 and size else nodes.get(node, (-2,))[0] for node in range(width)
        ]
        number = {node: i for i, node in enumerate(there)}
        layout = lay_out_tree((-1, *[number[nodes[node][0]] for node in there[1:]]))
        paths = paths_of([layout]).tolist()
        own = [roots[tree]] + [0] * (width - 1) if size else [0] * width
        for node in range(size):
            if node in number:
                length = layout.path_len[number[node]]
                path = [there[i] for i in paths[number[node]][:length]]
            else:
                path = [node]
            if node in nodes:
                own[node] = nodes[node][1]
            position_ids.append(prefix_len[tree] + len(path) - 1)
            path_len.append(node + 1 if is_chain else len(path))
            path_offset.append(path + [0] * (NODES - len(path)))
        assert tokens[tree] == own
        token_ids += own[:size]
    assert taken.position.tolist() == [position + 1 for position in position_ids]
    poison = [POISON] * 3
    assert rows.token_ids.tolist() == token_ids + poison
    assert rows.position_ids.tolist() == position_ids + poison
    assert seen.path_len.tolist() == path_len + poison
    assert seen.path_offset.tolist() == path_offset + [[POISON] * NODES] * 3


def random_words(rng: random.Random, round_tag: int) -> list[int]:
    """Return 64 words of a tree, some of them wrong in every way that a word can be."""
    reach = rng.choice([1, 2, 6, NODES])
    wrong = rng.choice([0, 3, 10, 40])
    words = [rng.getrandbits(63)]
    for node in range(1, NODES):
        parent, token = rng.randrange(max(0, node - reach), node), rng.randrange(VOCAB_SIZE)
        good = word(round_tag, parent, token)
        garbage = [
            word(round_tag, NO_NODE, 0),
            word(round_tag, node, token),
            word(round_tag, rng.randrange(node, 256), token),
            word(round_tag, parent, VOCAB_SIZE),
            word(round_tag, parent, rng.randrange(2**31, 2**32)),
            word((round_tag + 1) % 2**TAG_BITS, parent, token),
            good - 2**63,
            rng.getrandbits(64) - 2**63,
            0,
            -1,
        ]
        words.append(rng.choice(garbage) if rng.randrange(100) < wrong else good)
    return words


@pytest.mark.parametrize("max_depth", [0, 1, 3, 7, 63])
@pytest.mark.parametrize("seed", range(4))
def test_any_words_give_trees(device: torch.device, seed: int, max_depth: int) -> None:
    rng = random.Random(seed)
    memory = mailbox(10, device)
    trees = memory[1:]
    slot = rng.sample(range(9), 6)
    slot[3] = -1  # its words lie before the mailbox
    round_tag = [rng.randrange(1, 2**TAG_BITS) for _ in slot]
    for row, number in zip(slot, round_tag, strict=True):
        memory[1 + row] = torch.tensor(random_words(rng, number))
    sizes = [rng.choice([1, 2, 9, rng.randint(1, NODES), NODES]) for _ in slot[:-1]] + [0]
    chains = tuple(rng.sample(range(6), 3))
    check_taken(trees, slot, round_tag, sizes, device, max_depth=max_depth, chains=chains)
    assert launch_counts().get("take_trees", 0) == int(use_triton(torch.empty(0, device=device)))


@pytest.mark.parametrize(
    "wrong",
    [
        -1,
        0,
        word(3, 0, 7),
        word(5, 0, 7),
        word(4, NO_NODE, 0),
        word(4, 2, 7),
        word(4, 3, 7),
        word(4, 64, 7),
        word(4, 0, VOCAB_SIZE),
        word(4, 0, 2**32 - 1),
        word(4, 0, 7) - 2**63,
    ],
    ids=hex,
)
def test_a_wrong_word_takes_its_descendants_along(device: torch.device, wrong: int) -> None:
    trees = mailbox(1, device)
    parents = [0, 0, 2, 1, 3, 0]  # of the nodes from 1 on: 2, 3 and 5 are a chain
    for node, parent in enumerate(parents, start=1):
        trees[0, node] = word(4, parent, 10 + node)
    trees[0, 2] = wrong
    check_taken(trees, [0], [4], [7], device, max_depth=3)
    rows = Rows.of([7], [100], [9], device)
    taken = take(trees, [0], [4], rows, [7], max_depth=3)
    assert taken.parent_index.tolist() == [[-1, 0, -2, -2, 1, -2, 0]]
    assert taken.token_ids.tolist() == [[9, 11, 0, 0, 14, 0, 16]]
    assert rows.attention.path_len.tolist()[:7] == [1, 2, 1, 1, 3, 1, 2]
    own = rows.attention.path_offset[:7, :3].tolist()
    assert own == [[0, 0, 0], [0, 1, 0], [2, 0, 0], [3, 0, 0], [0, 1, 4], [5, 0, 0], [0, 6, 0]]
    assert taken.position.tolist() == [101, 102, 101, 101, 103, 101, 102]


@pytest.mark.parametrize("length", range(6))
def test_a_chain_ends_where_a_word_is_none_or_has_another_parent(
    device: torch.device, length: int
) -> None:
    trees = mailbox(2, device)
    for node in range(1, 6):
        trees[0, node] = word(4, node - 1, 10 + node)
        trees[1, node] = word(4, node - 1, 20 + node)
    if length < 5:
        trees[0, length + 1] = word(4, NO_NODE, 0)
        trees[1, length + 1] = word(4, max(length - 1, 0) if length else NO_NODE, 30)
    check_taken(trees, [0, 1], [4, 4], [6, 6], device, max_depth=5, chains=(0, 1))
    rows = Rows.of([6, 6], [100, 90], [9, 8], device, chains=(0, 1))
    taken = take(trees, [0, 1], [4, 4], rows, [6, 6], max_depth=5)
    parents = [-1, *range(length), *[-2] * (5 - length)]
    assert taken.parent_index.tolist() == [parents, parents]
    # Its rows are those of a chunk, for whoever computes them, whatever the words say.
    assert rows.attention.path_len.tolist()[:12] == [*range(1, 7), *range(1, 7)]
    # Where all are chains there may be no room for paths.
    narrow = Rows.of([6, 6], [100, 90], [9, 8], device, chains=(0, 1))
    attention = replace(narrow.attention, path_offset=narrow.attention.path_offset[:, :1].clone())
    again = take(trees, [0, 1], [4, 4], replace(narrow, attention=attention), [6, 6], max_depth=5)
    assert again.parent_index.tolist() == [parents, parents]
    assert torch.equal(again.token_ids, taken.token_ids)
    assert attention.path_len.tolist() == rows.attention.path_len.tolist()
    assert (attention.path_offset == POISON).all()


def test_rounds_count_modulo(device: torch.device) -> None:
    trees = mailbox(1, device)
    trees[0, 1] = word(5, 0, 7)
    check_taken(trees, [0], [5 + 2**TAG_BITS], [2], device, max_depth=1)
    rows = Rows.of([2], [0], [3], device)
    taken = take(trees, [0], [5 + 2**TAG_BITS], rows, [2], max_depth=1)
    assert taken.parent_index.tolist() == [[-1, 0]] and taken.token_ids.tolist() == [[3, 7]]


def test_the_longest_chain_and_the_widest_star(device: torch.device) -> None:
    trees = mailbox(2, device)
    for node in range(1, NODES):
        trees[0, node] = word(2**TAG_BITS - 1, node - 1, node % VOCAB_SIZE)
        trees[1, node] = word(1, 0, node % VOCAB_SIZE)
    slot, round_tag, sizes = [1, 0], [1, 2**TAG_BITS - 1], [NODES, NODES]
    for max_depth in (63, 62):
        check_taken(trees, slot, round_tag, sizes, device, max_depth=max_depth)


def test_no_trees(device: torch.device) -> None:
    check_taken(mailbox(1, device), [], [], [], device, max_depth=3)
    assert launch_counts() == {}


def packed_trees(forest: list[list[tuple[int, int]]], most: int) -> torch.Tensor:
    """Pack (parent, token) of the nodes of trees as `select_nodes` does; scores are poison."""
    packed = torch.full((len(forest) + 2, 1 + 3 * most), POISON, dtype=torch.int32)
    for row, nodes in zip(packed, forest, strict=False):
        row[0] = len(nodes)
        for i, (parent, token) in enumerate(nodes):
            row[1 + i], row[1 + most + i] = token, parent
    return packed


def random_forest(rng: random.Random, count: int, most: int) -> list[list[tuple[int, int]]]:
    sizes = [most, 0, *[rng.randint(0, most) for _ in range(count - 2)]]
    return [
        [(rng.randint(max(0, i - 3), i), rng.randrange(VOCAB_SIZE)) for i in range(size)]
        for size in sizes
    ]


@pytest.mark.parametrize("most", [1, 15, 63])
def test_posting_writes_the_words_of_its_slots_alone(device: torch.device, most: int) -> None:
    rng = random.Random(most)
    forest = random_forest(rng, 5, most)
    memory = mailbox(9, device)
    trees, expected = memory[1:], memory[1:].tolist()
    slot, round_tag = [4, 0, -1, 7, 2], [rng.randrange(2**TAG_BITS) for _ in range(5)]
    for row, number, nodes in zip(slot, round_tag, forest, strict=True):
        if row >= 0 and nodes:  # of nothing nothing is posted
            rest = [(NO_NODE, 0)] * (most - len(nodes))
            expected[row][1 : 1 + most] = [word(number, *node) for node in nodes + rest]
    packed = packed_trees(forest, most).to(device)
    post_trees(trees, packed, int32s(slot, device), int32s(round_tag, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert trees.tolist() == expected
    assert bool((memory[0] == -1).all())
    assert launch_counts().get("post_trees", 0) == int(use_triton(packed))


def test_tokens_are_any_32_bits(device: torch.device) -> None:
    """A token below zero touches neither the parent nor the round."""
    trees = mailbox(1, device)
    packed = packed_trees([[(0, -1)]], 1).to(device)
    post_trees(trees, packed, int32s([0], device), int32s([3 + 2**TAG_BITS], device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(trees[0, 1]) == word(3, 0, 2**32 - 1)


def test_what_is_posted_is_taken(device: torch.device) -> None:
    """The tree asked for is larger than the one grown, or as large."""
    rng = random.Random(0)
    forest = random_forest(rng, 6, 20)
    trees = mailbox(6, device)
    slot, round_tag = rng.sample(range(6), 6), list(range(1, 7))
    packed = packed_trees(forest, 20).to(device)
    post_trees(trees, packed, int32s(slot, device), int32s(round_tag, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    check_taken(trees, slot, round_tag, [21] * 6, device, max_depth=20)
    taken = take(
        trees, slot, round_tag, Rows.of([21] * 6, [0] * 6, [1] * 6, device), [21] * 6, max_depth=20
    )
    expected = [[-1, *[p for p, _ in nodes], *[-2] * (20 - len(nodes))] for nodes in forest]
    assert taken.parent_index.tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_taking_waits_for_what_another_stream_posts(device: torch.device) -> None:
    rng = random.Random(1)
    forest = [nodes or [(0, 1)] for nodes in random_forest(rng, 4, 15)]  # nothing is not posted
    trees = mailbox(4, device)
    slot, sizes = [2, 0, 3, 1], [16] * 4
    packed = packed_trees(forest, 15).to(device)
    slots, streams = int32s(slot, device), [torch.cuda.Stream() for _ in range(2)]
    for round_tag in (1, 2, 3):  # the first time may compile for longer than the other waits
        rows = Rows.of(sizes, [0] * 4, [1] * 4, device)
        seqs = int32s([round_tag] * 4, device)
        torch.cuda.synchronize()
        if round_tag == 1:
            post_trees(trees, packed, slots, seqs)
            torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            taken = take(
                trees, slot, [round_tag] * 4, rows, sizes, max_depth=15, timeout_us=WAIT_US
            )
        if round_tag > 1:
            time.sleep(0.02)
            assert not streams[0].query()
            begin = time.monotonic()
            with torch.cuda.stream(streams[1]):
                post_trees(trees, packed, slots, seqs)
            torch.cuda.synchronize()
            assert time.monotonic() - begin < 0.5
        torch.cuda.synchronize()
        expected = [[-1, *[p for p, _ in nodes], *[-2] * (15 - len(nodes))] for nodes in forest]
        assert taken.parent_index.tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_taking_gives_up(device: torch.device) -> None:
    """What came until then counts."""
    trees = mailbox(1, device)
    trees[0, 1] = word(1, 0, 5)
    for _ in range(2):  # the first time compiles
        rows = Rows.of([3], [0], [1], device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        taken = take(trees, [0], [1], rows, [3], max_depth=2, timeout_us=20_000)
        end.record()
        torch.cuda.synchronize()
    assert 20 <= begin.elapsed_time(end) < 40
    assert taken.parent_index.tolist() == [[-1, 0, -2]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_host_ends_a_wait(device: torch.device) -> None:
    """Of the round that it names, and of no other."""
    trees = mailbox(2, device)
    given_up = torch.zeros(2, dtype=torch.int32).pin_memory()
    for round_tag in (2, 3, 4):  # the first time compiles
        rows = Rows.of([3, 1], [0, 0], [1, 1], device)
        torch.cuda.synchronize()
        options = {"max_depth": 2, "timeout_us": WAIT_US, "given_up": given_up}
        begin = time.monotonic()
        if round_tag == 2:
            given_up[1] = 2
        taken = take(trees, [1, 0], [round_tag, round_tag], rows, [3, 1], **options)  # type: ignore[arg-type]
        if round_tag > 2:
            time.sleep(0.02)
            assert not torch.cuda.current_stream().query()
            given_up[1] = round_tag
        torch.cuda.synchronize()
        assert round_tag == 2 or time.monotonic() - begin < 0.5
        assert taken.parent_index[0].tolist() == [-1, -2, -2]
