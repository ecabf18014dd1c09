"""The accept walk: longest root path whose drafts are the target's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptWalk:
    """Where each request's path went.

    Args:
        accept_index: [B, D + 1] i64, nodes of the path, root first; -1 past its end.
        accept_length: [B] i64, tokens committed, bonus INCLUDED (= nodes of the path).
    """

    accept_index: torch.Tensor
    accept_length: torch.Tensor


def accept_walk(
    token_ids: torch.Tensor,
    parent_index: torch.Tensor,
    target_predict: torch.Tensor,
    max_depth: int,
) -> AcceptWalk:
    """Follow, from the root, the child whose token the target sampled at its parent.

    Args:
        token_ids: [B, N] i64, root included; padding nodes have parent -2.
        parent_index: [B, N] i64, topological, root = -1.
        target_predict: [B, N] i64, the target's token at each node.
        max_depth: Depth of the deepest tree; bounds the walk.
    Returns: AcceptWalk. No host-device sync.
    Source: arXiv:2305.09781 (tree verification), greedy walk over sampled tokens.
    """
    batch = token_ids.shape[0]
    current = torch.zeros(batch, 1, dtype=torch.int64, device=token_ids.device)
    is_alive = torch.ones(batch, 1, dtype=torch.bool, device=token_ids.device)
    steps = [current]
    for _ in range(max_depth):
        wanted = target_predict.gather(1, current)  # [B, 1]
        is_child = (parent_index == current) & (token_ids == wanted) & is_alive  # [B, N]
        # First such child: siblings are distinct, and a malformed tree must not matter.
        found, child = is_child.to(torch.int8).max(dim=1, keepdim=True)
        is_alive = found.bool()
        current = torch.where(is_alive, child, current)
        steps.append(torch.where(is_alive, child, -1))
    accept_index = torch.cat(steps, dim=1)
    return AcceptWalk(accept_index=accept_index, accept_length=(accept_index >= 0).sum(dim=1))
