"""Deterministic engines without a model, and workers around them, for tests of everything else.

next token   = hash of the tokens so far (and of the seed, at T > 0)
feature row  = known function of (position, token at that position)

async with fake_target() as target, fake_draft() as draft:
    target.address, target.engine, target.worker ...
"""

from tests.fakes.draft import FakeDraft
from tests.fakes.local import FakeWorker, LocalEngine, eventually, fake_draft, fake_target
from tests.fakes.model import VOCAB_SIZE, WIDTH, feature_rows, generate, next_token, routed_row
from tests.fakes.target import FakeTarget

__all__ = [
    "VOCAB_SIZE",
    "WIDTH",
    "FakeDraft",
    "FakeTarget",
    "FakeWorker",
    "LocalEngine",
    "eventually",
    "fake_draft",
    "fake_target",
    "feature_rows",
    "generate",
    "next_token",
    "routed_row",
]
