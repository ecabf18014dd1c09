"""Batches of the draft padded as captured graphs need them: same trees, same KV, nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.answers import settle_orders, token_tree
from draft_service.engine import DraftEngine
from draft_service.engine_factory import create_engine
from draft_service.extend_input import joined, stage_features
from draft_service.features import FeatureRows
from draft_service.growth_input import num_scratch_slots
from draft_service.phases import DraftExtendInput
from draft_service.request import DraftRequest
from shared.config import DraftConfig
from shared.device import DTYPES
from shared.messages import (
    DraftOpen,
    DraftRound,
    FeatureChunk,
    SamplingParams,
    TokenTree,
    TreeShape,
)
from shared.step.buckets import buckets_up_to
from shared.step.graphs import GraphCache
from shared.step.staging import Staging
from shared.step.step_timer import StepTimer
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    keep_table_apart,
    make_draft,
    make_target,
    pool_of,
)
from tests.engines import random_tokens as tokens_of
from tests.local_pair import LocalRequest
from tests.marks import exhaustive
from tests.waits import forbidden_waits

UNTIMED = StepTimer(torch.device("cpu"), is_on=False)


def draft_engine(pairing: Pairing, *, pads: bool, **options: int) -> DraftEngine:
    """Return an engine that pads its batches, or one that does not."""
    engine = make_draft(pairing, **options)
    engine.runner.pads_rows = pads
    return engine


def trees_of(request: LocalRequest) -> list[TokenTree]:
    return [replace(tree, request_id="") for tree in request.trees]


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp-layers", "standalone", "frozen_kv_mtp"])
@pytest.mark.parametrize("num_requests", [1, 5, *exhaustive([3, 4])])
def test_padded_batches_give_the_same_trees(models: Models, kind: str, num_requests: int) -> None:
    """Requests of other shapes and temperatures end one by one: buckets shrink, rows are ragged."""
    pairing = models.pairing(kind)
    results = []
    for pads in (False, True):
        rng = random.Random(num_requests)
        requests = [
            LocalRequest(
                prompt=tokens_of(rng, 2 + 9 * i),
                max_new_tokens=4 + 4 * i,
                shape=SHAPES[(2 * i + num_requests) % len(SHAPES)],
                sampling=SamplingParams(temperature=0.8 * (i % 2), seed=i),
            )
            for i in range(num_requests)
        ]
        target = make_target(pairing, page_size=4)
        draft = draft_engine(pairing, pads=pads, page_size=2, max_num_requests=6)
        PoisonedPair(target, draft).run(requests)
        results.append([trees_of(request) for request in requests])
        assert all(results[-1])
    assert results[0] == results[1]


def test_padded_trees_in_a_sliding_window(models: Models) -> None:
    """Where the first pages are gone, padding sees the sink."""
    pairing = models.pairing("eagle3")
    results = []
    for pads in (False, True):
        requests = [
            LocalRequest(prompt=tokens_of(random.Random(i), 20), max_new_tokens=9, shape=shape)
            for i, shape in enumerate(SHAPES[2:5])
        ]
        draft = draft_engine(pairing, pads=pads, page_size=2, window=16)
        PoisonedPair(make_target(pairing), draft).run(requests)
        results.append([trees_of(request) for request in requests])
    assert results[0] == results[1]


def open_requests(
    engine: DraftEngine,
    lengths: list[int],
    shapes: list[TreeShape],
    sampling: SamplingParams,
    feature_dtype: str = "float32",
) -> None:
    """Open requests and give them features; nothing is extended yet."""
    width = engine.info.features.width
    for i, (length, shape) in enumerate(zip(lengths, shapes, strict=True)):
        request_id = f"r{i}"
        rng = np.random.default_rng(i)
        token_ids = tuple(rng.integers(0, 200, length).tolist())
        engine.submit(
            DraftOpen(
                request_id=request_id, target_epoch=1, draft_epoch=1, target_address="local",
                token_ids=token_ids, sampling=sampling,
            )
        )  # fmt: skip
        normal = torch.from_numpy(rng.normal(size=(length - 1, width)))
        features = normal.to(torch.bfloat16).to(DTYPES[feature_dtype])
        engine.submit(
            FeatureChunk(
                request_id=request_id, target_epoch=1, start=0, shape=(length - 1, width),
                dtype=feature_dtype, data=features.view(torch.uint8).numpy().tobytes(),
            )
        )  # fmt: skip
        engine.submit(
            DraftRound(
                request_id=request_id, target_epoch=1, draft_epoch=1, round_idx=0,
                seq_len=length - 1, token_offset=length, token_ids=(), shape=shape,
            )
        )  # fmt: skip


def extended(engine: DraftEngine) -> list[DraftRequest]:
    """Extend what was given; return the requests that can grow."""
    works = engine.pipeline.plan_extend()
    engine.runner.extend(works, UNTIMED)
    for work in works:
        work.request.kv_len += work.num_rows
    return engine.pipeline.plan_growth()


def grown(engine: DraftEngine, growing: list[DraftRequest]) -> list[TokenTree]:
    """Grow the ordered trees. The orders stay pending: they can be grown again."""
    engine.pipeline.launch_growth(growing, UNTIMED)
    rows = range(len(growing))
    output = engine.runner.read(UNTIMED)
    trees = settle_orders(growing, rows, output, UNTIMED)
    for request, order in zip(growing, trees.orders, strict=True):
        request.pending = order
    return [token_tree(trees, row) for row in rows]


def test_growth_writes_its_scratch_and_the_sink_only(models: Models) -> None:
    engine = draft_engine(models.pairing("eagle3"), pads=True, page_size=4)
    shapes = [*SHAPES[3:6], TreeShape(num_steps=1, topk=9, num_draft_tokens=4), SHAPES[0]]
    lengths = [2, 9, 17, 12, 8]
    open_requests(engine, lengths, shapes, SamplingParams())
    runner, pool = engine.runner, pool_of(engine)
    growing = extended(engine)
    assert len(growing) == len(shapes)

    num_slots = len(pool.caches[0])
    keeps = torch.ones(num_slots, dtype=torch.bool)
    keeps[0] = False  # the sink's first slot
    committed = torch.zeros(num_slots, dtype=torch.bool)
    for request in growing:
        own = request.kv_len + np.arange(num_scratch_slots(request.pending_tree.order.shape))
        keeps[torch.from_numpy(pool.slots(request.req_idx, own)).long()] = False
        rows = np.arange(request.kv_len)
        committed[torch.from_numpy(pool.slots(request.req_idx, rows)).long()] = True
    for cache in pool.caches:
        cache[~committed] = torch.nan
    before = [cache.clone() for cache in pool.caches]
    hidden = runner.last_hidden.clone()
    trees = grown(engine, growing)
    assert [len(tree.token_ids) for tree in trees] == [s.num_draft_tokens for s in shapes]
    assert torch.equal(runner.last_hidden, hidden)
    for cache, old in zip(pool.caches, before, strict=True):
        assert torch.equal(cache[keeps].view(torch.int32), old[keeps].view(torch.int32))
        written = ~keeps
        written[0] = False
        assert cache[written].isfinite().all()


@pytest.mark.parametrize("num_rows", [3, 4, 5, 511, 512, 513])
def test_padded_extends_write_the_same_rows(models: Models, num_rows: int) -> None:
    """KV of the rows and the last hidden rows are the same bits; padding goes to the sink.

    Features of another dtype are converted by the device, with no more than their own precision.
    """
    pairing = models.pairing("eagle3")
    third = num_rows // 3
    lengths = [third + 1, third + 1, num_rows - 2 * third + 1]  # a row per token but the last
    caches, hiddens = [], []
    for pads, dtype in ((False, "float32"), (True, "float32"), (True, "bfloat16")):
        options = {"page_size": 4, "max_num_requests": 4, "max_batch_rows": 1024}
        engine = draft_engine(pairing, pads=pads, **options)
        open_requests(engine, lengths, [SHAPES[0]] * 3, SamplingParams(), dtype)
        runner, pool = engine.runner, pool_of(engine)
        for cache in pool.caches:
            cache.fill_(torch.nan)
        works = engine.pipeline.plan_extend()
        assert sum(work.num_rows for work in works) == num_rows
        runner.extend(works, UNTIMED)
        caches.append([cache[pool.page_size :].view(torch.int32) for cache in pool.caches])
        assert all(cache[1 : pool.page_size].isnan().all() for cache in pool.caches)
        hiddens.append(runner.last_hidden[:4].clone())
    for alone, *padded in zip(*caches, strict=True):
        assert all(torch.equal(alone, cache) for cache in padded)
    assert all(torch.equal(hiddens[0], hidden) for hidden in hiddens[1:])
    assert hiddens[0].count_nonzero(dim=1).bool().tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_staged_row_by_row_whatever_they_came_in(dtype: torch.dtype) -> None:
    """Rows of one batch that follow each other are one copy; padding is 0."""
    batch = FeatureRows.of(torch.arange(32.0).view(8, 4))
    other = FeatureRows.of(torch.arange(50.0, 70.0).view(5, 4).to(dtype))
    parts = [batch.part(0, 2), batch.part(2, 3), batch.part(4, 6), other.part(1, 4)]
    parts += [other.part(4, 5), batch.part(6, 8).part(1, 2), batch.part(3, 4)]
    expected = [0, 1, 2, 4, 5], [1, 2, 3, 4], [7], [3]
    values = [*batch.tensor[expected[0]], *other.tensor[expected[1]].float()]
    values += [*batch.tensor[expected[2]], *batch.tensor[expected[3]]]
    assert [len(rows) for rows in joined(parts)] == [3, 2, 4, 1, 1]

    staging = Staging(torch.device("cpu"), 1 << 12)
    staging._on_device.fill_(0xFF)  # NaN
    staging.begin()
    staged = stage_features(parts, staging, 16)
    staging.flush()
    assert staged is not None
    assert torch.equal(staged[:11], torch.stack(values))
    assert torch.equal(staged[11:], torch.zeros(5, 4))


def test_the_pages_of_a_round_are_on_the_device_before_it(models: Models) -> None:
    """Of its rows and of its tree; as on a GPU, where the page table has a copy."""
    chain = TreeShape(num_steps=4, topk=1, num_draft_tokens=5)
    engine = draft_engine(models.pairing("eagle3"), pads=False, page_size=1)
    pool = pool_of(engine)
    keep_table_apart(pool)
    open_requests(engine, [9, 4], [chain, SHAPES[5]], SamplingParams())
    engine.step()
    assert not pool.is_page_table_behind
    assert torch.equal(pool.page_table, torch.from_numpy(pool._table))
    for request, shape in zip(engine.requests.values(), (chain, SHAPES[5]), strict=True):
        end = request.kv_len + shape.num_steps + 1 + (shape.num_steps - 1) * shape.topk
        assert pool.holds(request.req_idx, 0, end)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(
    ("kind", "temperature"), [("eagle3", 0.0), ("eagle3", 0.7), ("mtp-layers", 0.7)]
)
def test_replayed_graphs_grow_the_same_trees_without_waiting(
    models: Models, kind: str, temperature: float
) -> None:
    """But for the one read of the result, which is an event's and not counted."""
    pairing = models.pairing(kind)
    config = DraftConfig(
        model=str(pairing.draft), target_model=str(pairing.target), algorithm=pairing.algorithm,
        device="cuda", num_pages=600, page_size=4,
    )  # fmt: skip
    trees = []
    for is_capturing in (False, True):
        engine = create_engine(config, lambda *_: None)
        runner = engine.runner
        runner.graphs = GraphCache(runner.pool.device)
        runner.graphs.is_capturing = is_capturing
        sampling = SamplingParams(temperature=temperature, seed=1)
        open_requests(engine, [2, 9, 17], list(SHAPES[3:6]), sampling)
        growing = extended(engine)
        trees.append(grown(engine, growing))
        with forbidden_waits():
            trees += [grown(engine, growing) for _ in range(2)]
        assert len(runner.graphs) == 2 * is_capturing
    assert all(again == trees[0] for again in trees)


def test_prompts_of_more_rows_than_a_graph_has_are_extended_in_parts(models: Models) -> None:
    lengths, shapes = [200, 250, 30, 256, 257], list(SHAPES[1:6])
    trees = []
    for pads in (False, True):
        engine = draft_engine(models.pairing("eagle"), pads=pads, max_batch_rows=4096)
        open_requests(engine, lengths, shapes, SamplingParams())
        runner = engine.runner
        runner.row_buckets = buckets_up_to(512)
        num_rows: list[int] = []
        launch = runner.launch_extend

        def note(inputs: DraftExtendInput, launch: Any = launch, num_rows: Any = num_rows) -> Any:
            num_rows.append(inputs.rows.row_indptr[-1])
            return launch(inputs)

        runner.launch_extend = note  # type: ignore[method-assign]
        growing = extended(engine)
        assert len(growing) == len(lengths)
        trees.append(grown(engine, growing))
        assert num_rows == ([477, 511] if pads else [988])
    assert trees[0] == trees[1]
