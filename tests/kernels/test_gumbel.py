"""The noise is the hash it says it is, and Gumbel distributed."""

from __future__ import annotations

import math

import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.gumbel import gumbel_noise, gumbel_noise_ref
from tests.kernels.sampling_oracle import GOLDEN, MASK, mix64, noise

SEEDS = [0, 1, -1, 1234567, -(2**63), 2**63 - 1]
POSITIONS = [0, 1, 7, 131072, 2**31, 5]


def test_mix64_is_splitmix64():
    assert mix64(GOLDEN) == 0xE220A8397B1DCDAF  # the generator's first output for seed 0
    first = mix64((1234567 + GOLDEN) & MASK)
    second = mix64((1234567 + 2 * GOLDEN) & MASK)
    assert (first, second) == (6457827717110365317, 3203168211198807973)


def test_noise_equals_the_oracle_bit_for_bit(device):
    seed, position = torch.tensor(SEEDS).to(device), torch.tensor(POSITIONS).to(device)
    ids = torch.tensor([0, 1, 2, 77, 4095, 128255, 2**31 - 2]).to(device)
    expected = torch.tensor(
        [
            [float(noise(s, p, i)) for i in ids.tolist()]
            for s, p in zip(SEEDS, POSITIONS, strict=True)
        ]
    )
    assert torch.equal(gumbel_noise(seed, position, ids).cpu(), expected)
    assert torch.equal(gumbel_noise_ref(seed, position, ids).cpu(), expected)
    per_row = ids.repeat(len(SEEDS), 1)
    assert torch.equal(gumbel_noise(seed, position, per_row).cpu(), expected)
    assert launch_counts().get("gumbel_noise", 0) == 2 * int(use_triton(seed))


def test_kernel_and_reference_agree_on_many_values(device):
    seed = torch.randint(-(2**63), 2**63 - 1, (5,)).to(device)
    position = torch.randint(0, 1 << 20, (5,)).to(device)
    ids = torch.arange(3000, device=device)
    out = gumbel_noise(seed, position, ids)
    assert torch.equal(out, gumbel_noise_ref(seed, position, ids))
    assert torch.equal(out[3:4], gumbel_noise(seed[3:4], position[3:4], ids))
    assert torch.equal(out[:, 17:40], gumbel_noise(seed, position, ids[17:40]))


def test_noise_is_gumbel_distributed_and_uncorrelated(device):
    count = 40_000
    seed = torch.tensor([3, 3, 4]).to(device)
    position = torch.tensor([10, 11, 10]).to(device)
    values = gumbel_noise(seed, position, torch.arange(count, device=device)).double().cpu()
    assert torch.isfinite(values).all()
    for row in values:
        assert abs(row.mean() - 0.57722) < 5 * 1.2825 / count**0.5
        assert abs(row.var() - math.pi**2 / 6) < 0.1
        # Kolmogorov-Smirnov against exp(-exp(-x)), p > 1e-4
        cdf = torch.exp(-torch.exp(-row.sort().values))
        steps = torch.arange(1, count + 1) / count
        assert (cdf - steps).abs().max() < 2.2 / count**0.5
        lagged = torch.corrcoef(torch.stack((row[:-1], row[1:])))[0, 1]
        assert abs(lagged) < 5 / count**0.5
    correlations = torch.corrcoef(values)
    assert (correlations - torch.eye(3)).abs().max() < 5 / count**0.5
