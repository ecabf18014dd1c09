"""Steps padded up to the rows of a captured graph: the same bits, only the sink is touched."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from shared.messages import SamplingParams
from shared.step.buckets import (
    BATCH_BUCKETS,
    ROW_BUCKETS,
    bucket_of,
    buckets_up_to,
    row_buckets_up_to,
)
from shared.step.packing import RowBlocks, pack_rows
from target_service.engine import TargetEngine
from target_service.phases import TOKEN_IS_KNOWN, ExtendInput, ExtendOutput
from target_service.start_up import capture_forwards
from tests import checkpoints
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    make_draft,
    make_target,
    pool_of,
    random_tokens,
    row_blocks,
    run_plain,
)
from tests.local_pair import LocalPair, LocalRequest

PREFIX_LEN = 70
PAGE_SIZE = 4


def tree_of(rng: random.Random, num_nodes: int) -> list[int]:
    """Return parents of a random tree."""
    return [-1, *[rng.randrange(node) for node in range(1, num_nodes)]]


class Trees:
    """Requests with a committed prefix, whose next trees are extended padded and as they are."""

    def __init__(self, target: TargetEngine, num_reqs: int) -> None:
        self.runner = target.runner
        self.pool = pool_of(target)
        self._rng = random.Random(5)
        self.rows = []
        for _ in range(num_reqs):
            row = self.pool.acquire()
            self.pool.reserve(row, PREFIX_LEN + 64)
            self.rows.append(row)
            self._extend([row], [None], None)

    def extend(self, sizes: Sequence[int], bucket: int | None) -> ExtendOutput:
        """Extend a tree of `sizes[i]` nodes for request i; the same trees for the same sizes."""
        self._rng.seed(sum(sizes))
        trees = [tree_of(self._rng, size) for size in sizes]
        return self._extend(self.rows[: len(sizes)], trees, bucket)

    def kv(self) -> torch.Tensor:
        """Return all K and V but the sink's."""
        return torch.stack([cache[PAGE_SIZE:] for cache in self.pool.caches])

    @torch.inference_mode()
    def _extend(
        self, rows: Sequence[int], trees: Sequence[list[int] | None], bucket: int | None
    ) -> ExtendOutput:
        blocks, position = row_blocks(
            [
                (row, 0, PREFIX_LEN, None)
                if parents is None
                else (row, PREFIX_LEN, len(parents), parents)
                for row, parents in zip(rows, trees, strict=True)
            ]
        )
        token_ids = np.array(random_tokens(self._rng, len(position)), dtype=np.int64)
        padding = (0, max(0, (bucket or 0) - len(token_ids)))
        staging = self.runner.extend_staging
        staging.begin()
        inputs = ExtendInput(
            token_ids=staging.add(np.pad(token_ids, padding)),
            position_ids=staging.add(np.pad(position, padding)),
            root_idx=staging.add(np.full(len(position) + padding[1], TOKEN_IS_KNOWN)),
            rows=pack_rows(blocks, self.pool, staging=staging, num_rows=bucket),
            bucket=bucket,
        )
        staging.flush()
        return self.runner.extend(inputs)


@pytest.fixture(params=["llama", "qwen3-moe"])
def trees(request: pytest.FixtureRequest, models: Models) -> Trees:
    pairing = models.pairing("eagle3")
    if request.param != "llama":
        path = models.get("qwen3-moe", checkpoints.write_qwen3_moe)
        head = models.get("qwen3-moe-eagle3", lambda d: checkpoints.write_eagle3(d, path))
        pairing = Pairing(target=path, draft=head, algorithm="eagle3")
    target = make_target(pairing, page_size=PAGE_SIZE, num_pages=200)
    return Trees(target, 5)


def test_buckets_hold_what_they_are_asked_for() -> None:
    assert [bucket_of(count) for count in (1, 2, 3, 9, 16, 65, 129, 193, 257, 4097)] == [
        1, 2, 4, 16, 16, 128, 192, 256, 384, None,
    ]  # fmt: skip
    assert list(ROW_BUCKETS) == sorted(ROW_BUCKETS)
    assert buckets_up_to(5) == (1, 2, 4, 5) and buckets_up_to(8) == (1, 2, 4, 8)
    assert bucket_of(5, buckets_up_to(5)) == 5 and bucket_of(6, buckets_up_to(5)) is None
    assert bucket_of(1, ()) is None
    assert row_buckets_up_to(256, is_quantized=False)[-3:] == (128, 192, 256)
    assert row_buckets_up_to(256, is_quantized=True)[-3:] == (64, 128, 256)
    assert buckets_up_to(20, BATCH_BUCKETS) == (1, 2, 4, 8, 16, 20)


def test_padding_changes_no_bit_and_touches_the_sink_only(trees: Trees) -> None:
    """Around every edge of a bucket, growing and shrinking; unread slots are poisoned."""
    around_edges = [
        [1], [2], [1, 2], [7], [3, 5], [9], [8, 8], [17], [20, 4, 1], [31], [16, 16], [11, 11, 11],
        [50], [1, 1, 1, 1, 1], [13, 13, 13, 13, 12], [3],
    ]  # fmt: skip
    for cache in trees.pool.caches:
        cache[0:PAGE_SIZE] = torch.nan
    for sizes in around_edges:
        count = sum(sizes)
        plain = trees.extend(sizes, None)
        hidden, features = plain.hidden.clone(), plain.features
        assert features is not None
        features, kv = features.clone(), trees.kv().clone()
        padded = trees.extend(sizes, bucket_of(count))
        assert len(padded.hidden) == bucket_of(count)
        assert padded.features is not None
        assert torch.equal(padded.hidden[:count], hidden), sizes
        assert torch.equal(padded.features[:count], features), sizes
        assert torch.equal(trees.kv(), kv), sizes


FEW = [
    # Rows of the requests, padded to, whether requests have few rows.
    ([1, 4, 2], 32, True),
    ([1, 5], 32, False),
    ([1, 1], 16, False),  # too small a step
    ([4] * 20, 128, True),
    ([4] * 20, 256, False),  # more rows than all requests have, at 4 each
    ([4] * 16, 64, True),
    ([1], None, False),
]


@pytest.mark.parametrize(("num_rows", "bucket", "are_few"), FEW)
def test_steps_whose_requests_have_few_rows_are_known(
    models: Models, num_rows: list[int], bucket: int | None, *, are_few: bool
) -> None:
    target = make_target(models.pairing("eagle3"), max_num_requests=20, num_pages=200)
    pool = target.runner.pool
    blocks = RowBlocks(
        req_idx=[0] * len(num_rows),
        prefix_len=[0] * len(num_rows),
        num_rows=num_rows,
        writes_kv=[False] * len(num_rows),
    )
    staging = target.runner.extend_staging
    staging.begin()
    rows = pack_rows(blocks, pool, staging=staging, num_rows=bucket, few_rows=4)
    assert rows.attention.most_rows == (4 if are_few else 0)


def test_a_step_of_nothing_but_padding_touches_the_sink_only(trees: Trees) -> None:
    kv = trees.kv().clone()
    capture_forwards(trees.runner, progress=lambda *_: None)
    assert torch.equal(trees.kv(), kv)
    trees.pool.check_integrity()


def test_rows_that_do_not_fit_their_bucket_are_refused(trees: Trees) -> None:
    with pytest.raises(AssertionError, match="5 rows do not fit 4"):
        trees.extend([5], 4)


@pytest.mark.parametrize("kind", ["eagle3", "standalone"])
def test_padded_engines_give_the_plain_output(models: Models, kind: str) -> None:
    rng = random.Random(11)
    pairing = models.pairing(kind)
    target = make_target(pairing, page_size=PAGE_SIZE)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, 3 + 20 * i),
            max_new_tokens=24,
            sampling=SamplingParams(temperature=i % 2, seed=i),
            shape=SHAPES[i],
            joins_at=i,
        )
        for i in range(len(SHAPES))
    ]
    plain = run_plain(target, requests, alone=True)
    target.runner.pads_rows = True
    LocalPair(target, make_draft(pairing, page_size=2)).run(requests)
    for request, expected in zip(requests, plain, strict=True):
        assert request.output == expected.output
    assert any(len(path.token_ids) > 1 for request in requests for path in request.paths[1:])
