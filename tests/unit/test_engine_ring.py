"""Features by the ring, or projected by the target: the very trees of raw bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.engine import DraftEngine
from shared.device import DTYPES
from shared.messages import FeatureChunk, FeatureSpec, RingSpan, SamplingParams
from shared.models.digest import model_hash
from shared.peer.ring import RING_DIR, RingReader
from target_service.engine import TargetEngine
from target_service.phases import StepOutputs
from tests import checkpoints
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalRequest


def requests_of(count: int = 4) -> list[LocalRequest]:
    rng = random.Random(5)
    return [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=24,
            shape=SHAPES[2 + i % 3],
            sampling=SamplingParams(temperature=0.5 * (i % 2), seed=i),
        )
        for i, length in zip(range(count), (1, 17, 40, 64), strict=False)
    ]


class Wire:
    """Counts what goes over the stream, and notes every row."""

    def __init__(self) -> None:
        self.num_bytes = self.num_spans = self.num_lost = 0
        self.reader = RingReader()
        self.rows: dict[tuple[str, int], bytes] = {}

    def __call__(self, chunk: FeatureChunk) -> FeatureChunk:
        self.num_bytes += chunk.num_inline_bytes
        if isinstance(chunk.data, RingSpan):
            self.num_spans += 1
            data = self.reader.read(chunk.data)
            self.num_lost += data is None
            if data is not None:
                self._note(replace(chunk, data=data.tobytes()))
        else:
            self._note(chunk)
        return chunk

    def _note(self, chunk: FeatureChunk) -> None:
        for i in range(chunk.shape[0]):
            row = chunk.rows(i, i + 1)
            assert isinstance(row.data, bytes)
            assert self.rows.setdefault((row.request_id, row.start), row.data) == row.data


def run(target: TargetEngine, draft: DraftEngine, wire: Wire) -> list[LocalRequest]:
    requests = requests_of()
    PoisonedPair(target, draft, edit_chunk=wire).run(requests)
    return requests


def results(requests: list[LocalRequest]) -> list[object]:
    return [(r.output, r.accept_length, r.trees) for r in requests]


@pytest.fixture(scope="module")
def pairing(models: Models) -> Pairing:
    return models.pairing("eagle3")


@pytest.fixture(scope="module")
def by_bytes(pairing: Pairing) -> tuple[list[LocalRequest], Wire]:
    wire = Wire()
    target = make_target(pairing, project_features=False)
    return run(target, make_draft(pairing, project_features=False), wire), wire


@pytest.fixture
def target(pairing: Pairing) -> Iterator[TargetEngine]:
    engine = make_target(pairing, project_features=False, feature_ring_mb=1)
    assert (RING_DIR / engine.info.feature_ring).exists()
    yield engine
    assert engine.features.ring is not None
    engine.features.ring.close()


@pytest.fixture
def draft(pairing: Pairing) -> DraftEngine:
    return make_draft(pairing, project_features=False)


def overwrite(target: TargetEngine) -> None:
    """Let the target's ring be lapped."""
    ring = target.features.ring
    assert ring is not None
    for _ in range(9):
        ring.start_step()
        ring.write(torch.full((1, ring.capacity // 8), 0xFF, dtype=torch.uint8).numpy())
    ring.start_step()


def test_trees_by_the_ring_are_those_by_bytes(
    target: TargetEngine, draft: DraftEngine, by_bytes: tuple[list[LocalRequest], Wire]
) -> None:
    wire = Wire()
    requests = run(target, draft, wire)
    assert results(requests) == results(by_bytes[0])
    assert wire.rows == by_bytes[1].rows
    assert wire.num_bytes == wire.num_lost == 0 < wire.num_spans
    assert by_bytes[1].num_spans == 0 < by_bytes[1].num_bytes


def test_rows_that_the_draft_reads_too_late_come_again_as_bytes(
    target: TargetEngine, draft: DraftEngine, by_bytes: tuple[list[LocalRequest], Wire]
) -> None:
    class LateWire(Wire):
        def __call__(self, chunk: FeatureChunk) -> FeatureChunk:
            super().__call__(chunk)
            if isinstance(chunk.data, RingSpan) and self.num_spans == 2:
                overwrite(target)
            return chunk

    wire = LateWire()
    requests = run(target, draft, wire)
    assert results(requests) == results(by_bytes[0])
    assert wire.rows == by_bytes[1].rows
    assert wire.num_bytes > 0, "those that were lost"
    assert wire.num_lost == 2 and wire.num_spans > 9, "the other one goes on through the ring"


def test_a_lapped_request_asks_once_however_much_is_under_way(
    target: TargetEngine, draft: DraftEngine
) -> None:
    """Chunks that were under way behind the lost one are no reason to ask again."""
    held: list[FeatureChunk] = []
    pair = PoisonedPair(target, draft, edit_chunk=lambda chunk: held.append(chunk))
    (request,) = requests_of(1)
    pair.open(request)
    for _ in range(3):
        pair.step()
    first = held[0]
    assert isinstance(first.data, RingSpan)
    overwrite(target)
    behind = [replace(first, start=first.start + i) for i in range(1, 5)]
    for chunk in (first, *behind):
        draft.submit(chunk)
    (asked,) = draft.step()
    assert asked.avoids_ring and asked.command.from_position == 0
    pair.edit_chunk = lambda chunk: chunk
    target.submit(asked.command)
    pair.finish()
    assert request.output == run_plain(target, [request])[0].output


def test_a_new_target_has_a_new_ring_and_spans_of_the_old_one_are_refused(
    pairing: Pairing, target: TargetEngine, draft: DraftEngine
) -> None:
    chunks: list[FeatureChunk] = []

    def keep(chunk: FeatureChunk) -> FeatureChunk:
        chunks.append(chunk)
        return chunk

    first = requests_of(2)
    PoisonedPair(target, draft, edit_chunk=keep).run(first)
    assert target.features.ring is not None
    target.features.ring.close()
    # The same draft goes on with another target process; what it had mapped is gone.
    successor = make_target(pairing, project_features=False, feature_ring_mb=1)
    assert successor.info.feature_ring != target.info.feature_ring
    second = requests_of(2)

    PoisonedPair(successor, draft, edit_chunk=keep).run(second)
    assert results(second) == results(first)
    (newest,) = {chunk.data.ring for chunk in chunks[-4:] if isinstance(chunk.data, RingSpan)}
    assert newest == successor.info.feature_ring

    def mix_up(chunk: FeatureChunk) -> FeatureChunk:
        is_first = isinstance(chunk.data, RingSpan) and chunk.start == 0
        return replace(chunk, data=chunks[0].data) if is_first else chunk

    third = requests_of(1)
    fresh_draft = make_draft(pairing, project_features=False)
    PoisonedPair(successor, fresh_draft, edit_chunk=mix_up).run(third)
    assert results(third) == results(first[:1])


def test_a_draft_that_proves_nothing_gets_bytes(
    target: TargetEngine,
    draft: DraftEngine,
    by_bytes: tuple[list[LocalRequest], Wire],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tests.local_pair.read_nonce", lambda name: b"of another ring!")
    wire = Wire()
    assert results(run(target, draft, wire)) == results(by_bytes[0])
    assert wire.num_spans == 0
    assert "another feature ring" in caplog.text


def test_a_ring_that_somebody_removed_does_no_harm(
    target: TargetEngine, draft: DraftEngine, by_bytes: tuple[list[LocalRequest], Wire]
) -> None:
    """The draft has proved that it can read the ring, but has not mapped it yet."""

    class Removing(Wire):
        def __call__(self, chunk: FeatureChunk) -> FeatureChunk:
            (RING_DIR / target.info.feature_ring).unlink(missing_ok=True)
            self.num_bytes += chunk.num_inline_bytes
            return chunk

    wire = Removing()
    requests = requests_of()
    PoisonedPair(target, draft, edit_chunk=wire).run(requests)
    assert results(requests) == results(by_bytes[0])
    assert wire.num_bytes > 0


def test_without_room_features_go_as_bytes(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("/dev/shm has 3 MiB left")

    monkeypatch.setattr("shared.peer.shared_files._require_room", refuse)
    engine = make_target(pairing, feature_ring_mb=1)
    assert engine.info.feature_ring == "" and engine.features.ring is None
    assert "features go as bytes: /dev/shm has 3 MiB left" in caplog.text


def test_a_ring_is_as_large_as_a_few_steps_and_only_if_there_are_features(
    pairing: Pairing, models: Models
) -> None:
    engine = make_target(pairing, feature_ring_mb=64, max_batch_rows=64)
    assert engine.features.ring is not None
    row_bytes = 4 * engine.info.features.width
    assert 4 * 64 * row_bytes <= engine.features.ring.capacity < 4 * 64 * row_bytes + 4096
    engine.features.ring.close()
    standalone = make_target(models.pairing("standalone"), feature_ring_mb=64)
    assert standalone.features.ring is None and standalone.info.feature_ring == ""


# --- projected by the target ----------------------------------------------------------------------


@pytest.mark.parametrize("ring_mb", [0, 1])
def test_trees_of_projected_features_are_those_of_raw_ones(
    pairing: Pairing, by_bytes: tuple[list[LocalRequest], Wire], ring_mb: int
) -> None:
    """Bit for bit, scores included; and rows are as wide as one of the head's two layers."""
    target = make_target(pairing, feature_ring_mb=ring_mb)
    wire = Wire()
    requests = run(target, make_draft(pairing), wire)
    assert results(requests) == results(by_bytes[0])
    raw = by_bytes[1].rows
    assert wire.rows.keys() == raw.keys()
    assert {2 * len(row) for row in wire.rows.values()} == {len(row) for row in raw.values()}


def test_projected_rows_are_fc_of_the_raw_ones(
    pairing: Pairing, by_bytes: tuple[list[LocalRequest], Wire]
) -> None:
    wire = Wire()
    run(make_target(pairing), make_draft(pairing), wire)
    weight = checkpoints.read_tensors(pairing.draft)["fc.weight"].double()
    for key, row in list(wire.rows.items())[:20]:
        raw = torch.frombuffer(bytearray(by_bytes[1].rows[key]), dtype=torch.float32).double()
        got = torch.frombuffer(bytearray(row), dtype=torch.float32).double()
        torch.testing.assert_close(got, weight @ raw, atol=1e-5, rtol=1e-4)


def test_rows_that_nobody_keeps_are_neither_projected_nor_read(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(pairing)
    runner = target.runner
    project, read = runner._project, runner.finish_read
    num_projected, has_features = [], []

    def count(captured: torch.Tensor) -> torch.Tensor:
        num_projected.append(len(captured))
        return project(captured)

    def note(*args: Any) -> StepOutputs:
        outputs = read(*args)
        has_features.append(outputs.paths is not None and outputs.paths.features is not None)
        return outputs

    monkeypatch.setattr(runner, "_project", count)
    monkeypatch.setattr(runner, "finish_read", note)
    run_plain(target, requests_of())
    assert num_projected == [] and not any(has_features)
    run(target, make_draft(pairing), Wire())
    assert num_projected and any(has_features)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_say_the_same_head(pairing: Pairing, dtype: str) -> None:
    target, draft = make_target(pairing, dtype=dtype).info, make_draft(pairing).info
    hidden = checkpoints.read_tensors(pairing.draft)["fc.weight"].shape[0]
    assert target.features == replace(draft.features, dtype=dtype)
    assert draft.features == FeatureSpec(
        layer_ids=target.features.layer_ids, width=hidden, projection=model_hash(pairing.draft)
    )
    raw = make_draft(pairing, project_features=False).info.features
    assert (raw.width, raw.projection) == (2 * hidden, "")


def test_the_bias_is_part_of_it(models: Models) -> None:
    target = models.llama
    head = models.get(
        "eagle3-bias", lambda d: checkpoints.write_eagle3(d, target, has_fc_bias=True)
    )
    pairing = Pairing(target=target, draft=head, algorithm="eagle3")
    raw = run(
        make_target(pairing, project_features=False),
        make_draft(pairing, project_features=False),
        Wire(),
    )
    assert results(run(make_target(pairing), make_draft(pairing), Wire())) == results(raw)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_draft_of_another_dtype_converts_projected_rows(
    pairing: Pairing, dtypes: tuple[str, str]
) -> None:
    target = make_target(pairing, dtype=dtypes[0])
    requests = run(target, make_draft(pairing, dtype=dtypes[1]), Wire())
    plain = run_plain(target, requests)
    assert [r.output for r in requests] == [r.output for r in plain]
    assert DTYPES[target.info.features.dtype] == getattr(torch, dtypes[0])


@pytest.mark.parametrize("kind", ["eagle", "mtp", "standalone", "frozen_kv_mtp"])
def test_other_kinds_of_drafts_get_rows_as_they_were_captured(models: Models, kind: str) -> None:
    target = make_target(models.pairing(kind)).info.features
    assert target.projection == "" and make_draft(models.pairing(kind)).info.features == replace(
        target, dtype=""
    )


def test_a_head_that_makes_rows_no_narrower_projects_by_itself(models: Models) -> None:
    target = models.llama
    head = models.get("eagle3-wide", lambda d: checkpoints.write_eagle3(d, target, layer_ids=(1,)))
    pairing = Pairing(target=target, draft=head, algorithm="eagle3")
    assert make_target(pairing).info.features.projection == ""
    requests = run(make_target(pairing), make_draft(pairing), Wire())
    assert all(r.finish_reason for r in requests)
