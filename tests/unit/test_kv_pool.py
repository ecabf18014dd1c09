"""The KV pool against a model of it: rows, reservations, windows, page tables."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.errors import ConfigError
from shared.kv.allocator import OutOfPagesError
from shared.kv.layout import KVLayout
from shared.kv.pool import KVPool
from shared.kv.sizing import choose_num_pages, require_room
from shared.models.checkpoint_names import resolve_model
from shared.models.weight_memory import weight_bytes
from shared.step.packing import RowBlocks, pack_rows
from shared.step.staging import Staging

MAX_TOKENS = 40


def make_pool(*, page_size: int, num_pages: int = 12, max_num_requests: int = 4) -> KVPool:
    return KVPool(
        layout=KVLayout.uniform(1, 1, 1),
        num_pages=num_pages,
        page_size=page_size,
        max_num_requests=max_num_requests,
        max_pages_per_request=-(-MAX_TOKENS // page_size),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


class PoolMachine(RuleBasedStateMachine):
    """Each row is modelled as the half-open range of pages [first, end) that it holds."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 16]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = make_pool(page_size=page_size)
        self.ranges: dict[int, tuple[int, int]] = {}
        self.written: dict[int, dict[int, int]] = {}  # row -> logical slot -> physical slot

    def held(self) -> int:
        return sum(end - first for first, end in self.ranges.values())

    @precondition(lambda self: self.pool.has_free_row)
    @rule()
    def acquire(self) -> None:
        row = self.pool.acquire()
        assert row not in self.ranges
        self.ranges[row], self.written[row] = (0, 0), {}

    @precondition(lambda self: self.ranges)
    @rule(data=st.data(), num_tokens=st.integers(0, MAX_TOKENS))
    def reserve(self, data: st.DataObject, num_tokens: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.ranges)))
        first, end = self.ranges[row]
        need = -(-num_tokens // self.page_size)
        if need - end > 11 - self.held():
            with pytest.raises(OutOfPagesError):
                self.pool.reserve(row, num_tokens)
            return
        self.pool.reserve(row, num_tokens)
        self.ranges[row] = (first, max(end, need))

    @precondition(lambda self: self.ranges)
    @rule(data=st.data(), slot=st.integers(0, MAX_TOKENS))
    def drop_before(self, data: st.DataObject, slot: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.ranges)))
        first, end = self.ranges[row]
        self.pool.drop_before(row, slot)
        self.ranges[row] = (min(max(first, slot // self.page_size), end), end)

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.ranges)))
        self.pool.release(row)
        del self.ranges[row], self.written[row]

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, size = self.pool, self.page_size
        pool.check_integrity()
        assert pool.num_free_pages == 11 - self.held()
        assert pool.has_free_row == (len(self.ranges) < 4)
        seen: set[int] = set()
        table = pool.page_table.numpy()
        for row in range(4):
            first, end = self.ranges.get(row, (0, 0))
            assert (np.delete(table[row], np.s_[first:end]) == 0).all()
            logical = np.arange(first * size, end * size)
            slots = pool.slots(row, logical).tolist()
            if row in self.ranges:
                assert pool.slot_range(row, first * size, end * size).tolist() == slots
            assert min(slots, default=size) >= size, "a slot of the sink"
            assert len(set(slots)) == len(slots) and not seen & set(slots)
            seen |= set(slots)
            # What a row keeps stays where it is: KV was written there.
            now = dict(zip(logical.tolist(), slots, strict=True))
            for position, slot in self.written.get(row, {}).items():
                assert now.get(position, slot) == slot
            if row in self.ranges:
                self.written[row] = now


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_against_its_model = PoolMachine.TestCase


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots_follow_the_one_formula(page_size: int) -> None:
    pool = make_pool(page_size=page_size)
    pool.reserve(pool.acquire(), 1)  # so that pages do not start at 1
    row = pool.acquire()
    pool.reserve(row, 9)
    table = pool.page_table[row].tolist()
    want = [table[s // page_size] * page_size + s % page_size for s in range(9)]
    assert pool.slots(row, np.arange(9)).tolist() == want
    for start, stop in itertools.combinations(range(10), 2):
        assert pool.slot_range(row, start, stop).tolist() == want[start:stop]


def test_a_row_that_would_write_to_the_sink_is_our_bug() -> None:
    pool = make_pool(page_size=4)
    row = pool.acquire()
    pool.reserve(row, 4)
    staging = Staging(pool.device, 1 << 12)
    block = RowBlocks(req_idx=[row], prefix_len=[3], num_rows=[2])
    with pytest.raises(AssertionError, match="sink"):
        pack_rows(block, pool, staging=staging)
    replay = replace(block, writes_kv=[False])
    assert pack_rows(replay, pool, staging=staging).slot_mapping.tolist() == [0, 0]


def test_a_dropped_slot_is_not_writable_again() -> None:
    pool = make_pool(page_size=2)
    row = pool.acquire()
    pool.reserve(row, 8)
    pool.drop_before(row, 5)
    assert pool.slots(row, np.arange(4, 8)).tolist() == pool.slot_range(row, 4, 8).tolist()
    assert pool.slots(row, np.arange(4, 8)).min() >= 2
    with pytest.raises(AssertionError, match="sink"):
        pool.slots(row, np.array([3]))
    assert pool.holds(row, 4, 8)
    for start, stop in ((3, 5), (7, 9)):
        assert not pool.holds(row, start, stop)
        with pytest.raises(AssertionError, match="sink"):
            pool.slot_range(row, start, stop)


def test_more_tokens_than_the_table_has_columns_is_our_bug() -> None:
    pool = make_pool(page_size=16)
    with pytest.raises(AssertionError, match="exceed the page table row"):
        pool.reserve(pool.acquire(), 49)


def test_integrity_notices_a_wrong_table() -> None:
    pool = make_pool(page_size=4)
    row = pool.acquire()
    pool.reserve(row, 12)
    pool.check_integrity()
    pool._table[row, 1], pool._table[row, 2] = pool._table[row, 2], pool._table[row, 1]
    with pytest.raises(AssertionError, match="is wrong"):
        pool.check_integrity()


def test_num_pages_follow_memory_need_and_configuration() -> None:
    common = {
        "page_size": 16, "max_num_requests": 2, "max_request_tokens": 100,
        "memory_fraction": 0.5, "device": torch.device("cpu"),
    }  # fmt: skip
    assert choose_num_pages(num_pages=7, bytes_per_page=1 << 40, **common) == 7
    assert choose_num_pages(num_pages=0, bytes_per_page=1, **common) == 1 + 2 * 8
    assert choose_num_pages(num_pages=0, bytes_per_page=1 << 24, **common) == 17
    scarce = common | {"max_num_requests": 64}
    assert choose_num_pages(num_pages=0, bytes_per_page=1 << 24, **scarce) == 32
    with pytest.raises(Exception, match="--kv-memory-fraction"):
        choose_num_pages(num_pages=0, bytes_per_page=1 << 26, **common)


def test_weights_that_do_not_fit_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(9.5e9), int(24e9)))
    gpu = torch.device("cuda", 0)
    require_room(num_bytes=int(9.5e9), what="model", device=gpu)
    require_room(num_bytes=int(1e15), what="model", device=torch.device("cpu"))
    numbers = r"model takes 16\.1 GB, cuda:0 has 9\.5 GB of 24\.0 GB free"
    with pytest.raises(ConfigError, match=numbers):
        require_room(num_bytes=int(16.06e9), what="model", device=gpu)


def test_weight_bytes_are_those_of_the_file_at_its_own_dtype() -> None:
    directory = resolve_model("demo", "target")
    on_disk = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert 0 <= on_disk - weight_bytes(directory, 2) < 20_000  # the header
    assert weight_bytes(directory, 4) == 2 * weight_bytes(directory, 2)
