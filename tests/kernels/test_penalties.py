"""Logit processors against a loop over rows and tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from shared.kernels.penalties import (
    Penalties,
    apply_logit_bias,
    apply_min_new_tokens,
    apply_penalties,
)

# numpy, which interprets the kernel, warns of products beyond float32.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def test_bias_adds_to_single_logits(device: torch.device) -> None:
    logits = torch.randn(3, 10).to(device)
    expected = logits.clone()
    expected[0, 4] += 2.5
    expected[0, 5] -= 100.0
    expected[2, 4] += 2.5
    apply_logit_bias(
        logits,
        torch.tensor([0, 0, 2]).to(device),
        torch.tensor([4, 5, 4]).to(device),
        torch.tensor([2.5, -100.0, 2.5]).to(device),
    )
    assert torch.equal(logits, expected)


def test_min_new_tokens_forbids_ids_in_the_named_rows(device: torch.device) -> None:
    logits = torch.randn(3, 10).to(device)
    expected = logits.clone()
    expected[1, [0, 9]] = -torch.inf
    apply_min_new_tokens(logits, torch.tensor([1, 1]).to(device), torch.tensor([0, 9]).to(device))
    assert torch.equal(logits, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and what it has seen."""

    logits: Sequence[float]
    request: int = 0
    path: Sequence[int] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def penalised(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Return the logits after the penalties, token by token."""
        generated, values = [*output, *self.path], []
        for token, value in enumerate(self.logits):
            if token in prompt or token in generated:
                value = value / self.repetition if value > 0 else value * self.repetition
            value -= self.frequency * generated.count(token)
            values.append(value - self.presence * (token in generated))
        return values


def apply(
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    device: torch.device,
    *,
    vocab_size: int,
    depth: int,
) -> torch.Tensor:
    """Return the penalised logits; the padding of a path lies anywhere in it."""
    prompt_mask = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    output_counts = torch.zeros(len(prompts), vocab_size, dtype=torch.int32)
    for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for token in prompt:
            prompt_mask[request, token] = True
        for token in output:
            output_counts[request, token] += 1
    paths = torch.full((len(rows), depth), -1)
    rng = random.Random(depth)
    for index, row in enumerate(rows):
        where = sorted(rng.sample(range(depth), len(row.path)))
        paths[index, where] = torch.tensor(row.path, dtype=torch.int64)
    logits = torch.tensor([row.logits for row in rows]).view(len(rows), vocab_size)
    # The rows lie among others, in another order.
    row_index = torch.tensor(rng.sample(range(2 * len(rows)), len(rows)), dtype=torch.int64)
    among = torch.randn(2 * len(rows), vocab_size)
    among[row_index] = logits
    untouched = torch.ones(len(among), dtype=torch.bool)
    untouched[row_index] = False
    before, among = among, among.to(device)
    tables = prompt_mask.to(device), output_counts.to(device)
    penalties = Penalties(
        rows=row_index.to(device),
        req_idx=torch.tensor([row.request for row in rows], dtype=torch.int64).to(device),
        path_token_ids=paths.to(device),
        repetition=torch.tensor([row.repetition for row in rows]).to(device),
        presence=torch.tensor([row.presence for row in rows]).to(device),
        frequency=torch.tensor([row.frequency for row in rows]).to(device),
    )
    apply_penalties(among, penalties, *tables)
    assert torch.equal(tables[0].cpu(), prompt_mask)
    assert torch.equal(tables[1].cpu(), output_counts)
    after = among.cpu()
    assert torch.equal(after[untouched], before[untouched])
    return after[row_index]


def test_penalties_count_prompt_output_and_own_path(device: torch.device) -> None:
    logits = torch.randn(12).tolist()
    logits[3], logits[1] = 0.0, -1.0
    prompts, outputs = [[0, 1, 1, 2], [5]], [[2, 3, 3], []]
    rows = [
        Row(logits=logits, request=0, repetition=1.3),
        Row(logits=logits, request=0, path=[3, 4, 4], presence=0.5, frequency=0.25),
        Row(logits=logits, request=1, path=[5, 6], repetition=2.0, presence=0.3, frequency=-0.1),
        Row(logits=logits, request=1),
        Row(logits=logits, request=0, path=[11], repetition=0.5, presence=-0.5),
    ]
    out = apply(rows, prompts, outputs, device, vocab_size=12, depth=4)
    expected = [row.penalised(prompts[row.request], outputs[row.request]) for row in rows]
    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[3], torch.tensor(logits))


def test_random_rows_and_each_of_them_alone(device: torch.device) -> None:
    rng = random.Random(0)
    for vocab_size, depth in ((1, 1), (9, 3), (40, 8)):
        tokens = range(vocab_size)
        prompts = [rng.choices(tokens, k=rng.randint(0, 6)) for _ in range(5)]
        outputs = [rng.choices(tokens, k=rng.randint(0, 9)) for _ in range(5)]
        rows = [
            Row(
                logits=[rng.gauss(0, 3) for _ in tokens],
                request=rng.randrange(5),
                path=rng.choices(tokens, k=rng.randint(0, depth)),
                repetition=rng.choice((1.0, 0.7, 1.2)),
                presence=rng.choice((0.0, 0.4, -1.0)),
                frequency=rng.choice((0.0, 0.3, -0.2)),
            )
            for _ in range(30)
        ]
        out = apply(rows, prompts, outputs, device, vocab_size=vocab_size, depth=depth)
        expected = [row.penalised(prompts[row.request], outputs[row.request]) for row in rows]
        torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        for index, row in enumerate(rows):
            alone = apply(
                [row], prompts, outputs, device, vocab_size=vocab_size, depth=depth + index % 3
            )
            assert torch.equal(alone[0], out[index])


def test_rows_without_penalties_keep_their_bits(device: torch.device) -> None:
    logits = [1e-45, -0.0, 3e38, -math.inf, math.inf, 0.1]
    rows = [Row(logits=logits, path=[0, 1, 2]), Row(logits=logits, path=[3, 4, 4], repetition=1.5)]
    out = apply(rows, [[0, 1, 2, 3, 4]], [[5, 5, 0]], device, vocab_size=6, depth=3)
    plain = torch.tensor(logits)
    assert torch.equal(out[0].view(torch.int32), plain.view(torch.int32))


def test_forbidden_tokens_stay_forbidden(device: torch.device) -> None:
    logits = [-math.inf, -math.inf, -math.inf, 1.0]
    row = Row(logits=logits, path=[1], repetition=0.5, presence=-9.0, frequency=-9.0)
    rows = [row, replace(row, repetition=3.0)]
    out = apply(rows, [[0, 3]], [[2]], device, vocab_size=4, depth=1)
    assert out[:, :3].eq(-math.inf).all()
    torch.testing.assert_close(out[:, 3], torch.tensor([2.0, 1 / 3]))


def test_no_rows_and_no_paths(device: torch.device) -> None:
    assert apply([], [[0]], [[1]], device, vocab_size=3, depth=2).shape == (0, 3)
    row = Row(logits=[1.0, 2.0, 4.0], repetition=2.0, presence=0.25)
    out = apply([row], [[0]], [[1]], device, vocab_size=3, depth=0)
    assert out.tolist() == [[0.5, 0.75, 4.0]]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    logits = torch.randn(2, 3).to(device)
    before = logits.clone()
    apply_logit_bias(logits, none, none, none.float())
    apply_min_new_tokens(logits, none, none)
    assert torch.equal(logits, before)
