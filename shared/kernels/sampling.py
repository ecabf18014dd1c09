"""Choose a token per row: temperature, top-k, top-p, min-p, then argmax of logit + Gumbel noise."""

from __future__ import annotations

import torch

from shared.kernels.gumbel import gumbel_noise

# Probabilities relative to the largest one, in fixed point: their sums do not depend on the order.
_MASS_BITS = 40


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    has_filters: bool = True,
) -> torch.Tensor:
    """Sample one token per row, as a pure function of that row's arguments.

    Args:
        logits: [R, V] f32, after bias, penalties and masks. NaN counts as -inf.
        temperature: [R] f32, 0 = argmax, ties by lower id.
        top_k: [R] i32, 0 = off. Exactly that many survive, ties by lower id.
        top_p: [R] f32, 1 = off. The smallest prefix, in descending (logit, lower id) order, whose
            mass among the survivors of top-k reaches top_p; at least one token.
        min_p: [R] f32, 0 = off. Least probability relative to the largest.
        seed: [R] i64 bit pattern of the unsigned seed.
        position: [R] i64. Absolute position of the token being sampled.
        has_filters: False promises that top_k, top_p and min_p are off in every row.
    Returns: [R] i32 token ids.
    """
    return sample_ref(
        logits, temperature, top_k, top_p, min_p, seed, position, has_filters=has_filters
    )


def sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    has_filters: bool = True,
) -> torch.Tensor:
    """Do what `sample` does in plain torch, with a sort."""
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    greedy = logits.argmax(-1)
    if not bool((temperature > 0).any()):
        return greedy.int()
    scaled = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    if has_filters:
        scaled = _filter(scaled, top_k, top_p, min_p)
    ids = torch.arange(logits.shape[1], device=logits.device)
    noisy = scaled + gumbel_noise(seed, position, ids)
    return torch.where(temperature > 0, noisy.argmax(-1), greedy).int()


def _filter(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set what top-k, top-p and min-p drop to -inf; [R, V]."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1]).unsqueeze(1)
    is_kept = rank < limit
    difference = ordered.double() - ordered[:, :1].double()
    mass = (difference.exp() * 2.0**_MASS_BITS).round().nan_to_num(nan=0.0).long()
    mass = mass.masked_fill(~is_kept, 0)
    mass_before = mass.cumsum(-1) - mass
    total = mass.sum(-1, keepdim=True)
    needed = (top_p.double().unsqueeze(1) * total.double()).ceil().long()
    is_kept &= (mass_before < needed) | (top_p.unsqueeze(1) >= 1) | (rank == 0)
    is_kept &= mass >= (min_p.double().unsqueeze(1) * 2.0**_MASS_BITS).round().long()
    is_kept_by_id = torch.zeros_like(is_kept).scatter_(1, order, is_kept)
    return scaled.masked_fill(~is_kept_by_id, -torch.inf)
