"""Arrays of a step reach the device with their values, and where those of other steps lay."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from shared.step.staging import ALIGNMENT, Fields, Staging


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_every_dtype_and_shape_arrives(device: torch.device) -> None:
    staging = Staging(device, 1 << 14)
    rng = np.random.default_rng(0)
    for _ in range(5):
        staging.begin()
        host, there = staging.place(
            ids=(torch.int64, (3, 5)),
            flags=(torch.bool, (7,)),
            none=(torch.int32, (0,)),
            rows=(torch.bfloat16, (2, 4)),
        )
        ids, flags = rng.integers(-(2**62), 2**62, (3, 5)), rng.random(7) < 0.5
        rows = torch.from_numpy(rng.normal(size=(2, 4))).bfloat16()
        host["ids"][:], host["flags"][:] = ids, flags
        host["rows"][:] = rows.view(torch.int16).numpy()
        added = staging.add(ids[:, 1])
        staging.flush()
        assert np.array_equal(there["ids"].cpu().numpy(), ids)
        assert np.array_equal(there["flags"].cpu().numpy(), flags)
        assert there["none"].shape == (0,)
        assert torch.equal(there["rows"].cpu(), rows)
        assert added.tolist() == ids[:, 1].tolist()


def test_the_same_sizes_get_the_same_tensors(device: torch.device) -> None:
    staging = Staging(device, 1 << 14)
    seen = []
    for extra in (1, 300, 2):
        staging.begin()
        _, first = staging.place(a=(torch.int32, (10,)), b=(torch.float32, (3,)))
        _, behind = staging.place(c=(torch.int32, (extra,)))
        staging.flush()
        seen.append((first["a"], first["b"]))
        assert first["a"].data_ptr() < first["b"].data_ptr() < behind["c"].data_ptr()
    assert all(a is b for step in seen[1:] for a, b in zip(seen[0], step, strict=True))


def of_sizes(num_rows: int, num_reqs: int) -> Fields:
    return {"rows": (torch.int64, (num_rows, 2)), "flags": (torch.bool, (num_reqs,))}


@pytest.mark.parametrize("num_bytes", [1 << 14, ALIGNMENT])
def test_zeros_are_zero_whatever_was_there_before(device: torch.device, num_bytes: int) -> None:
    staging = Staging(device, num_bytes)
    for num_rows in (40, 3, 40, 17):
        staging.begin()
        ones, _ = staging.place(ones=(torch.int64, (200,)))
        ones["ones"][:] = -1
        staging.flush()
        staging.begin()
        host, there = staging.place_zeros(of_sizes, num_rows, 5)
        host["rows"][1] = (7, 8)
        staging.flush()
        assert there["rows"].tolist() == [[0, 0], [7, 8]] + [[0, 0]] * (num_rows - 2)
        assert there["flags"].tolist() == [False] * 5


def test_a_step_that_does_not_fit_goes_round(device: torch.device) -> None:
    staging = Staging(device, 2 * ALIGNMENT)
    for step in range(4):
        staging.begin()
        small = staging.add(np.arange(5) + step)
        large = staging.add(np.arange(1000) + step)
        other = staging.add(np.arange(6) + step)
        staging.flush()
        for tensor in (small, large, other):
            assert tensor.tolist() == (np.arange(len(tensor)) + step).tolist()


def test_entries_of_a_table_are_set_at_the_flush(device: torch.device) -> None:
    staging = Staging(device, 1 << 12)
    table = torch.zeros(6, dtype=torch.int32, device=device)
    staging.begin()
    staging.update(table, np.array([4, 1, 4]), np.array([7, 8, 7], dtype=np.int32))
    assert table.tolist() == [0] * 6
    staging.flush()
    assert table.tolist() == [0, 8, 0, 0, 7, 0]
    staging.begin()
    table.zero_()
    staging.flush()
    assert table.tolist() == [0] * 6, "an update is made once"


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(kept), torch.Tensor) for kept in gc.get_objects())


def test_what_is_kept_of_steps_of_all_sizes_on_a_cpu_is_bounded() -> None:
    """Prompts of hours would otherwise take tens of megabytes."""
    staging = Staging(torch.device("cpu"), 1 << 14)
    before = num_tensors()
    for size in range(1, 1000):
        staging.begin()
        staging.place(a=(torch.int32, (size,)))
    assert num_tensors() - before < 2000, "of each size there are four"
