"""The noise is the hash that it says it is, over its whole range, and Gumbel distributed."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, launch_counts, use_triton
from shared.kernels.gumbel import gumbel_bound_block, gumbel_noise_ref
from tests.kernels.gumbel_noise import gumbel_noise
from tests.kernels.noise_seeds import GOLDEN, MASK, int64, mix64, seed_for_hash
from tests.reference.noise import gumbel

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def assert_within_an_ulp(out: torch.Tensor, expected: np.ndarray) -> None:
    """Compare float32 noise whose logarithms may differ in the last bit of float64."""
    values = out.cpu().numpy()
    assert values.dtype == np.float32 and values.shape == expected.shape
    error = np.abs(values.astype(np.float64) - expected.astype(np.float64))
    assert (error <= np.spacing(np.abs(expected.astype(np.float32)))).all()


def test_the_hash_is_splitmix64() -> None:
    """The generator's published first outputs for seeds 0 and 1234567."""
    assert mix64(GOLDEN) == 0xE220A8397B1DCDAF
    outputs = [mix64((1234567 + step * GOLDEN) & MASK) for step in (1, 2)]
    assert outputs == [6457827717110365317, 3203168211198807973]
    # With this seed and position the key of a row is 0: its hashes are the outputs for seed 0.
    seed = mix64((9 + GOLDEN) & MASK)
    for token_id, bits in enumerate((0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)):
        uniform = ((bits >> 11) + 0.5) * 2.0**-53
        assert gumbel(seed, 9, token_id) == np.float32(-math.log(-math.log(uniform)))


def test_all_bits_of_seed_and_position_count(device: torch.device) -> None:
    seeds = [0, 1, *(1 << bit for bit in (31, 32, 40, 62, 63)), MASK, 0xDEADBEEFCAFEF00D]
    positions = [0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 5, 2**63 - 1]
    ids = [0, 1, 31999, 128255, 2**31 - 1, 2**31, 2**40]
    pairs = [(seed, position) for seed in seeds for position in positions]
    columns = [list(column) for column in zip(*pairs, strict=True)]
    out = gumbel_noise(*(int64(column, device) for column in columns), int64(ids, device))
    expected = [[gumbel(seed, position, token) for token in ids] for seed, position in pairs]
    assert_within_an_ulp(out, np.array(expected, dtype=np.float32))
    assert len(set(out.flatten().tolist())) == out.numel()
    assert launch_counts().get("gumbel_noise", 0) == int(use_triton(out))


def test_every_id_of_a_large_vocabulary_has_noise_of_its_own(device: torch.device) -> None:
    width = 128256
    seed, position = int64([7], device), int64([2**31 + 12], device)
    ids = torch.arange(width)
    out = gumbel_noise(seed, position, ids.to(device))
    assert_within_an_ulp(out, gumbel_noise_ref(seed.cpu(), position.cpu(), ids).numpy())
    tail = ids[-300:]
    assert torch.equal(out[:, -300:], gumbel_noise(seed, position, tail.to(device)))
    expected = [[gumbel(7, 2**31 + 12, token) for token in tail.tolist()]]
    assert_within_an_ulp(out[:, -300:], np.array(expected, dtype=np.float32))


def test_noise_does_not_depend_on_the_batch(device: torch.device) -> None:
    seed = torch.randint(-(2**63), 2**63 - 1, (6,)).to(device)
    position = torch.randint(0, 2**40, (6,)).to(device)
    ids = torch.randint(0, 128256, (6, 37)).to(device)
    full = gumbel_noise(seed, position, ids)
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(gumbel_noise(seed[one], position[one], ids[one]), full[one])
        assert torch.equal(gumbel_noise(seed[one], position[one], ids[row]), full[one])
    order = torch.tensor([4, 0, 5, 2], device=device)
    assert torch.equal(gumbel_noise(seed[order], position[order], ids[order]), full[order])
    columns = torch.randperm(37).to(device)
    assert torch.equal(gumbel_noise(seed, position, ids[:, columns]), full[:, columns])


def test_layouts_of_the_arguments(device: torch.device) -> None:
    requests = torch.randint(0, 2**60, (4, 2)).to(device)
    ids = torch.randint(0, 128256, (9, 4)).to(device).T
    seed, position = requests.unbind(1)
    expected = gumbel_noise(seed.clone(), position.clone(), ids.contiguous())
    assert torch.equal(gumbel_noise(seed, position, ids), expected)
    shared = gumbel_noise(seed[:1].expand(4), position, ids)
    assert torch.equal(shared, gumbel_noise(seed[:1].repeat(4), position.clone(), ids))


def test_no_rows_and_no_ids(device: torch.device) -> None:
    none, one = int64([], device), int64([3], device)
    assert gumbel_noise(none, none, int64([1, 2], device)).shape == (0, 2)
    assert gumbel_noise(one, one, none).shape == (1, 0)
    assert launch_counts() == {}


@pytest.mark.parametrize(("position", "token_id"), [(0, 0), (1234, 128255)])
def test_both_tails_are_finite_and_not_cut(
    device: torch.device, position: int, token_id: int
) -> None:
    """Seeds are chosen by clients: no hash may give infinite noise, which a mask cannot hide."""
    hashes = [0, 1 << 11, 1 << 63, MASK - (1 << 20), MASK - (1 << 11), MASK]
    seeds = [seed_for_hash(bits, position, token_id) for bits in hashes]
    out = gumbel_noise(
        int64(seeds, device), int64([position] * len(seeds), device), int64([token_id], device)
    )
    expected = [
        -math.log(54 * math.log(2)),
        -math.log(54 * math.log(2) - math.log(3)),
        -math.log(math.log(2)),
        44 * math.log(2),
        52 * math.log(2),
        52 * math.log(2),
    ]
    torch.testing.assert_close(
        out.flatten().double().cpu(), torch.tensor(expected).double(), rtol=1e-3, atol=1e-6
    )


@triton.jit
def _bound_kernel(seed_ptr, position_ptr, out_ptr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, WIDTH).to(tl.int64)
    bound = gumbel_bound_block(tl.load(seed_ptr + row), tl.load(position_ptr + row), ids)
    tl.store(out_ptr + row * WIDTH + ids, bound)


@pytest.mark.kernel_only
def test_the_bound_lies_above_the_noise_and_close_to_it_where_it_is_large(
    device: torch.device,
) -> None:
    """Above it everywhere; sampling would lose tokens otherwise, and be slow if it were far."""
    width = 512
    extremes = [MASK - (1 << shift) + 1 for shift in range(0, 64, 3)]
    extremes += [1 << shift for shift in range(0, 64, 3)] + [0, MASK >> 1]
    extremes += [(step << 32) - 1 for step in (1, 2, 0xFFFFFFFF, 0xFFFFFFFE, 0x80000000)]
    seeds = int64([seed_for_hash(bits, 9, 3) for bits in extremes] + list(range(40)), device)
    position = torch.full_like(seeds, 9)
    bound = torch.empty(len(seeds), width, device=device)
    _bound_kernel[(len(seeds),)](seeds, position, bound, WIDTH=width, **LAUNCH_OPTIONS)
    noise = gumbel_noise(seeds, position, torch.arange(width).to(device))
    assert (bound >= noise).all()
    # Most of the slack is left: a device's logarithms are not exact.
    assert ((bound - noise)[noise < 15] > 5e-5).all()
    is_large = (noise > 3) & (noise < 15)
    assert is_large.any() and ((bound - noise)[is_large] < 0.06).all()


def draws(axis: str, count: int, device: torch.device) -> np.ndarray:
    """Return noise along one axis with the other two fixed."""
    many, one = torch.arange(count).to(device), int64([5], device)
    if axis == "ids":
        values = gumbel_noise(one, one, many)
    elif axis == "positions":
        values = gumbel_noise(one.expand(count), many, one)
    else:
        values = gumbel_noise(many, one.expand(count), one)
    return values.flatten().double().cpu().numpy()


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_noise_is_gumbel_distributed_along_every_axis(device: torch.device, axis: str) -> None:
    count = 300 if IS_INTERPRETED else 100_000
    values = draws(axis, count, device)
    assert np.isfinite(values).all()
    deviation = math.pi / math.sqrt(6)
    assert abs(values.mean() - 0.5772156649) < 4 * deviation / math.sqrt(count)
    # The variance of the variance is (kurtosis - 1) variance^2 / n; the kurtosis is 5.4.
    assert abs(values.var() - deviation**2) < 4 * math.sqrt(4.4 / count) * deviation**2
    cdf = np.exp(-np.exp(-np.sort(values)))
    rank = np.arange(count)
    distance = max((cdf - rank / count).max(), ((rank + 1) / count - cdf).max())
    assert distance < 1.95 / math.sqrt(count)  # p = 0.001
    for lag in (1, 2, 7, 64):
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(count - lag), f"lag {lag}"
