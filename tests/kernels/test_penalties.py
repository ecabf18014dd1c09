"""Logit processors against a loop over rows and tokens."""

from __future__ import annotations

import torch

from shared.kernels.penalties import apply_logit_bias, apply_min_new_tokens, apply_penalties


def test_bias_adds_to_single_logits(device):
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


def test_min_new_tokens_forbids_ids_in_the_named_rows(device):
    logits = torch.randn(3, 10).to(device)
    expected = logits.clone()
    expected[1, [0, 9]] = -torch.inf
    apply_min_new_tokens(logits, torch.tensor([1, 1]).to(device), torch.tensor([0, 9]).to(device))
    assert torch.equal(logits, expected)


def test_penalties_count_prompt_output_and_own_path(device):
    vocab, prompts, outputs = 12, [[0, 1, 1, 2], [5]], [[2, 3, 3], []]
    rows = [  # request, own path, repetition, presence, frequency
        (0, [], 1.3, 0.0, 0.0),
        (0, [3, 4, 4], 1.0, 0.5, 0.25),
        (1, [5, 6], 2.0, 0.3, -0.1),
        (1, [], 1.0, 0.0, 0.0),
        (0, [11], 0.5, -0.5, 0.0),
    ]
    logits = torch.randn(len(rows), vocab)
    logits[0, 3], logits[0, 1] = 0.0, -1.0
    expected = logits.clone()
    for row, (request, path, repetition, presence, frequency) in enumerate(rows):
        generated = outputs[request] + path
        for token in range(vocab):
            if token in prompts[request] or token in generated:
                value = expected[row, token]
                expected[row, token] = value / repetition if value > 0 else value * repetition
            expected[row, token] -= frequency * generated.count(token)
            expected[row, token] -= presence * (token in generated)
    prompt_mask = torch.zeros(2, vocab, dtype=torch.bool)
    output_counts = torch.zeros(2, vocab, dtype=torch.int32)
    for request in range(2):
        prompt_mask[request, prompts[request]] = True
        for token in outputs[request]:
            output_counts[request, token] += 1
    counts_before = output_counts.clone()
    paths = torch.full((len(rows), 4), -1)
    for row, (_, path, *_) in enumerate(rows):
        paths[row, : len(path)] = torch.tensor(path)
    _, _, repetition, presence, frequency = zip(*rows, strict=True)
    output_counts = output_counts.to(device)
    out = logits.clone().to(device)
    apply_penalties(
        out,
        request_index=torch.tensor([row[0] for row in rows]).to(device),
        prompt_mask=prompt_mask.to(device),
        output_counts=output_counts,
        path_token_ids=paths.to(device),
        repetition=torch.tensor(repetition).to(device),
        presence=torch.tensor(presence).to(device),
        frequency=torch.tensor(frequency).to(device),
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[3].cpu(), logits[3])
    assert torch.equal(output_counts.cpu(), counts_before)
