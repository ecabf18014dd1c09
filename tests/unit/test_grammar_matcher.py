"""A matcher against itself, token by token: masks of trees, trees that are pruned and grafted."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xgrammar

from draft_service.growth_masks import GrowthMasks
from shared.errors import InvalidArgumentError
from shared.grammar import compile as compile_module
from shared.grammar.compile import compile_grammar
from shared.grammar.matcher import MAX_FORCED, OutputMatcher
from shared.messages import MAX_TREE_NODES
from tests.checkpoints import EOS_ID, VOCAB_SIZE, write_tokenizer
from tests.grammars import CASES, matcher_of, text_of, vocabulary_of

pytestmark = pytest.mark.usefixtures("patient_grammars")

NUM_WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokens"))


def allowed(mask: torch.Tensor) -> list[int]:
    """Return the tokens of a mask, [W] i32."""
    bits = (mask.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten()[:VOCAB_SIZE].nonzero().flatten().tolist()


def after(matcher: OutputMatcher, path: Sequence[int]) -> list[int]:
    """Return the tokens that may follow a path."""
    mask = torch.empty(1, NUM_WORDS, dtype=torch.int32)
    matcher.fill_mask_after(mask, path)
    return allowed(mask[0])


def random_tree(
    matcher: OutputMatcher, rng: random.Random, num_nodes: int
) -> tuple[list[int], tuple[int, ...]]:
    """Return a tree of which some nodes may be there and some may not."""
    tokens, parents, paths = [7], [-1], [[]]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(tokens))
        legal = after(matcher, paths[parent])
        token = rng.choice(legal) if legal and rng.random() < 0.8 else rng.randrange(VOCAB_SIZE)
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return tokens, tuple(parents)


def path_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens below the root, down to a node."""
    path: list[int] = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def is_legal(matcher: OutputMatcher, path: Sequence[int]) -> bool:
    """Return whether a path may be there, by the masks of its parts."""
    return all(token in after(matcher, path[:i]) for i, token in enumerate(path))


@pytest.mark.parametrize("name", CASES)
def test_a_trees_masks_are_those_of_each_path(directory: Path, name: str) -> None:
    """Wherever the output stands; nothing moves the matcher but `accept`."""
    rng, matcher = random.Random(name), matcher_of(directory, name)
    while True:
        tokens, parents = random_tree(matcher, rng, 12)
        masks = torch.empty(12, NUM_WORDS, dtype=torch.int32)
        shut = matcher.fill_masks(masks, tokens, parents)
        for node in range(12):
            path = path_to(node, tokens, parents)
            if is_legal(matcher, path) and EOS_ID not in path:
                assert allowed(masks[node]) == after(matcher, path)
                assert node not in shut
            else:
                assert len(allowed(masks[node])) == VOCAB_SIZE, "rows of what may not be there"
                assert node in shut
        choices = after(matcher, [])
        token = rng.choice(choices)
        assert matcher.accept([token])
        if token == EOS_ID:
            break
    assert not matcher.accept([5]), "nothing follows the end"
    assert after(matcher, []) == []


@pytest.mark.parametrize("name", CASES)
def test_a_tree_keeps_what_may_be_there_and_gets_what_must_follow(
    directory: Path, name: str
) -> None:
    rng, matcher = random.Random(name), matcher_of(directory, name)
    num_forced = 0
    while True:
        tokens, parents = random_tree(matcher, rng, rng.choice([1, 2, 9, 30]))
        kept, kept_parents = matcher.prune_and_graft(tokens, parents, most_nodes=MAX_TREE_NODES)
        paths = {tuple(path_to(i, kept, kept_parents)) for i in range(len(kept))}
        assert kept[0] == tokens[0] and kept_parents[0] == -1
        assert all(parent < i for i, parent in enumerate(kept_parents))
        before = {tuple(path_to(i, tokens, parents)) for i in range(len(tokens))}
        legal = {path for path in before if is_legal(matcher, path)}
        assert legal <= paths, "a node that may be there has gone"
        assert all(is_legal(matcher, path) for path in paths)
        assert len(paths - legal) <= MAX_FORCED
        num_forced += len(paths - legal)
        for path in paths - legal:
            assert one_text_follows(matcher, directory, path)
        token = rng.choice(after(matcher, []))
        assert matcher.accept([token])
        if token == EOS_ID:
            break
    assert num_forced, "nothing was ever certain"


def one_text_follows(matcher: OutputMatcher, directory: Path, path: Sequence[int]) -> bool:
    """Return whether all that may stand in the place of a path's last token begins with the same
    letter: another token there would only spell the same text otherwise.
    """
    others = after(matcher, path[:-1])
    if path[-1] == EOS_ID:
        return others == [EOS_ID]
    first = text_of(directory, [path[-1]])[:1]
    return all(text_of(directory, [token])[:1] == first for token in others)


def test_a_full_tree_gets_no_more_nodes(directory: Path) -> None:
    matcher = matcher_of(directory, "schema")
    assert len(matcher.forced()) > 3
    kept, _ = matcher.prune_and_graft([7], (-1,), most_nodes=3)
    assert len(kept) == 3
    tokens, parents = matcher.prune_and_graft([7], (-1,), most_nodes=MAX_TREE_NODES)
    assert tokens[1:] == matcher.forced()
    assert parents == tuple(range(-1, len(tokens) - 1))


def test_nodes_that_take_too_long_are_shut(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root never is: a token must be sampled there."""
    matcher = matcher_of(directory, "schema")
    forced = matcher.forced()
    chain, parents = [7, *forced], tuple(range(-1, len(forced)))
    masks = torch.empty(len(chain), NUM_WORDS, dtype=torch.int32)
    assert matcher.fill_masks(masks, chain, parents) == []
    monkeypatch.setattr("shared.grammar.matcher.TREE_BUDGET_S", 1e-9)
    assert matcher.fill_masks(masks, chain, parents) == [*range(1, len(chain))]
    assert allowed(masks[0]) == after(matcher, [])
    assert matcher.accept(forced)


def test_several_threads_fill_in_the_same_masks(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []
    for num_cores in (1, 16):
        cores = set(range(num_cores))
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        growth = GrowthMasks([matcher_of(directory, name) for name in CASES], num_places=len(CASES))
        masks.append(torch.zeros(len(CASES), NUM_WORDS, dtype=torch.int32))
        growth.fill_in(masks[-1], None)
    assert all(map(allowed, masks[0]))
    assert torch.equal(*masks)


def test_a_compiler_that_has_to_wait_for_a_core_refuses_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what keeps a core busy for too long is refused."""
    compiler = xgrammar.GrammarCompiler(vocabulary_of(directory).info, max_threads=1)
    passed_s = itertools.count(step=1.0)  # between any two looks
    clocks = SimpleNamespace(monotonic=lambda: next(passed_s), thread_time=time.thread_time)
    monkeypatch.setattr(compile_module, "time", clocks)
    assert compile_grammar(compiler, CASES["schema"].grammar)
    clocks.thread_time = clocks.monotonic
    with pytest.raises(InvalidArgumentError, match="may follow takes more than 0.5 s"):
        compile_grammar(compiler, CASES["schema"].grammar)
