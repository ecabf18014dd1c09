"""Words of a mailbox that nobody posted, in any round: no token changes, and rounds go on."""

from __future__ import annotations

import random

import pytest
import torch

from draft_service.device_rounds.mailbox_io import MailboxPaths
from target_service.phases import MailboxTrees
from tests.device_pair import Make, PoisonedDevicePair, check, requests_of
from tests.engines import KINDS, SHAPES, plain_of
from tests.marks import EXHAUSTIVE
from tests.unit.test_engine_device_rounds import WRONG_PATHS, WRONG_TREES, words_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_WORDS = [500, pytest.param(10_000, marks=EXHAUSTIVE)]
EDIT_SHARE = 0.5


class Noise:
    """Edits words before a device reads them, in half of the rounds."""

    def __init__(self, rng: random.Random) -> None:
        self.num_words = 0
        self._rng = rng

    def edit_trees(self, trees: MailboxTrees) -> None:
        """Edit trees, and words of slots that nobody reads now."""
        for words, tag in words_of(trees):
            self._edit(words, tag, self._rng.choice([*WRONG_TREES, flip_bits]))
        other = self._rng.randrange(len(trees.words))
        if other not in trees.slot.tolist():
            self._edit(trees.words[other], 2, flip_bits)

    def edit_paths(self, paths: MailboxPaths) -> None:
        """Edit accepted paths and their rows."""
        mailbox = paths.mailboxes[0]
        for slot, tag in zip(paths.slot[0].tolist(), paths.round_tag.tolist(), strict=True):
            self._edit(mailbox.paths[slot], tag, self._rng.choice([*WRONG_PATHS, flip_bits]))
            if mailbox.rows is not None and self._rng.random() < EDIT_SHARE / 2:
                mailbox.rows[:, slot].fill_(self._rng.choice([float("nan"), float("inf"), 1e30]))

    def _edit(self, words: torch.Tensor, tag: int, edit: object) -> None:
        if self._rng.random() < EDIT_SHARE:
            before = words.clone()
            assert callable(edit)
            edit(words, tag, self._rng)
            self.num_words += int((before != words).sum())


def flip_bits(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    """Tear words: some of their bits are others."""
    for _ in range(rng.randrange(1, 8)):
        words[rng.randrange(len(words))] ^= 1 << rng.randrange(63)


@pytest.mark.parametrize("num_words", NUM_WORDS)
def test_no_word_in_a_mailbox_changes_a_token(make: Make, num_words: int) -> None:
    rng = random.Random(4)
    noise = Noise(rng)
    num_trees = seed = 0
    while noise.num_words < num_words:
        seed += 1
        target, draft, _ = make(KINDS[seed % len(KINDS)], (rng.choice([3, 16]), 16))
        requests = requests_of(3, seed, rng.choice(SHAPES[2:4]))
        expected = plain_of(target, requests)
        pair = PoisonedDevicePair(
            target, draft, edit_trees=noise.edit_trees, edit_paths=noise.edit_paths
        )
        pair.run(requests)
        check(requests, expected)
        num_trees += pair.num_device_trees
    assert num_trees > seed
