"""Grow token trees: EAGLE-2 dynamic growth, batched over requests of different shapes.

Per depth: the `topk` best nodes of the depth before are expanded, each keeps its `topk` best
children, and cumulative draft log-probabilities rank them. Of all candidates the best
num_draft_tokens - 1 form the tree. Candidate c of a request, K = the largest topk of the batch:

    [0, K)                                   children of the root
    [K + (s - 1) K^2, K + s K^2)             children of the beams expanded at step s

A parent has a smaller candidate index and at least its child's score, so sorting by (score, then
index) closes the selection under ancestors, also for ties. At T > 0 candidates are ranked with the
target's own Gumbel noise: the draft guesses what the target will sample.

Source: EAGLE-2, arXiv:2406.16858.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.phases import DraftInput, DraftOutput
from shared.kernels.gumbel import gumbel_noise
from shared.kv.pool import KVPool
from shared.models.draft import DraftModel
from shared.packing import RowBlock, pack_rows, to_device
from shared.topk import stable_topk

NEG_INF = float("-inf")


@dataclass(slots=True, kw_only=True)
class _Candidates:
    """Everything that may enter the trees. [B, C] each."""

    score: torch.Tensor  # f32, -inf: no such candidate
    token: torch.Tensor  # i64 target ids
    parent: torch.Tensor  # i64 candidate index, -1 = the root


@dataclass(slots=True, kw_only=True)
class _Beams:
    """The nodes to expand next. [B, K, ...] each."""

    candidate: torch.Tensor  # i64
    score: torch.Tensor  # f32
    token: torch.Tensor  # i64 target ids
    hidden: torch.Tensor  # [B, K, h] of the parent's row
    path: torch.Tensor  # [B, K, S - 1] i32, offsets from kv_len of the expanded ancestors


class TreeGrower:
    """Grow trees with one draft model over one KV pool."""

    def __init__(self, model: DraftModel, pool: KVPool, *, window: int) -> None:
        self._model = model
        self._pool = pool
        self._window = window
        ids = torch.arange(model.vocab_size, device=pool.device)
        self._target_ids = model.to_target_ids(ids)  # [Vd]

    def grow(self, inputs: DraftInput) -> DraftOutput:
        """Return one tree per request.

        Mutates: KV slots past kv_len of each request (scratch).
        """
        num_topk = np.array([shape.topk for shape in inputs.shapes])
        num_steps = np.array([shape.num_steps for shape in inputs.shapes])
        candidates, beams = self._expand_root(inputs, num_topk, int(num_steps.max()))
        for step in range(1, int(num_steps.max())):
            beams = self._expand(inputs, candidates, beams, num_topk, num_steps, step)
        return _select(candidates, inputs, self._pool.device)

    def _expand_root(
        self, inputs: DraftInput, num_topk: NDArray, most_steps: int
    ) -> tuple[_Candidates, _Beams]:
        """Score the root's children; its row was extended already, so no forward runs."""
        batch, width = len(inputs.shapes), int(num_topk.max())
        device = self._pool.device
        rows = np.arange(batch)
        logprobs = self._logprobs(inputs, inputs.hidden, rows, inputs.root_position + 1)
        score, token = self._best_children(logprobs, width, num_topk)
        total = width + (most_steps - 1) * width * width
        candidates = _Candidates(
            score=torch.full((batch, total), NEG_INF, device=device),
            token=torch.zeros((batch, total), dtype=torch.int64, device=device),
            parent=torch.full((batch, total), -1, dtype=torch.int64, device=device),
        )
        candidates.score[:, :width] = score
        candidates.token[:, :width] = token
        beams = _Beams(
            candidate=torch.arange(width, device=device).expand(batch, width),
            score=score,
            token=token,
            hidden=inputs.hidden[:, None].expand(-1, width, -1),
            path=torch.zeros(
                (batch, width, max(most_steps - 1, 1)), dtype=torch.int32, device=device
            ),
        )
        return candidates, beams

    def _expand(
        self,
        inputs: DraftInput,
        candidates: _Candidates,
        beams: _Beams,
        num_topk: NDArray,
        num_steps: NDArray,
        step: int,
    ) -> _Beams:
        """Run the beams of depth `step` through the draft and pick those of the next depth."""
        batch, width = beams.score.shape
        device = self._pool.device
        blocks, request_of_row, beam_of_row = [], [], []
        for b in np.flatnonzero(num_steps > step):
            topk = int(num_topk[b])
            blocks.append(
                RowBlock(
                    req_idx=int(inputs.req_idx[b]),
                    prefix_len=int(inputs.kv_len[b]),
                    num_rows=topk,
                    first_slot=int(inputs.kv_len[b]) + (step - 1) * topk,
                    depth=np.full(topk, step - 1, dtype=np.int32),
                )
            )
            request_of_row.append(np.full(topk, b))
            beam_of_row.append(np.arange(topk))
        requests, beam = np.concatenate(request_of_row), np.concatenate(beam_of_row)
        flat = to_device(requests * width + beam, device)  # [T] row -> flattened beam

        own = to_device(((step - 1) * num_topk[requests] + beam).astype(np.int32), device)
        paths = beams.path.reshape(batch * width, -1)
        paths[flat, step - 1] = own
        packed = pack_rows(
            blocks, self._pool, window=self._window, path=paths[flat, :step].contiguous()
        )
        hidden = self._model.forward(
            beams.token.reshape(-1)[flat],
            to_device(inputs.node_position[requests] + step - 1, device),
            beams.hidden.reshape(batch * width, -1)[flat] if self._model.recurrent_width else None,
            self._pool,
            packed.attention,
            packed.slot_mapping,
        )  # [T, h]
        logprobs = self._logprobs(
            inputs, hidden, requests, inputs.root_position[requests] + step + 1
        )
        value, token = self._best_children(logprobs, width, num_topk[requests])

        score = torch.full((batch * width, width), NEG_INF, device=device)
        score[flat] = beams.score.reshape(-1)[flat][:, None] + value
        tokens = torch.zeros((batch * width, width), dtype=torch.int64, device=device)
        tokens[flat] = token
        hiddens = hidden.new_zeros((batch * width, hidden.shape[1]))
        hiddens[flat] = hidden
        score, tokens = score.view(batch, -1), tokens.view(batch, -1)  # [B, K * K]

        first = width + (step - 1) * width * width
        block = slice(first, first + width * width)
        candidates.score[:, block] = score
        candidates.token[:, block] = tokens
        candidates.parent[:, block] = beams.candidate.repeat_interleave(width, dim=1)

        if width == 1:  # a chain: its one child is the next beam
            return _Beams(
                candidate=torch.full((batch, 1), first, device=device),
                score=score,
                token=tokens,
                hidden=hiddens.view(batch, 1, -1),
                path=paths.view(batch, 1, -1),
            )
        best, child = torch.sort(score, dim=1, descending=True, stable=True)
        best, child = best[:, :width], child[:, :width]  # [B, K]
        is_beam = torch.arange(width, device=device) < to_device(num_topk[:, None], device)
        parent = (child // width)[..., None]
        return _Beams(
            candidate=first + child,
            score=torch.where(is_beam, best, NEG_INF),
            token=tokens.gather(1, child),
            hidden=hiddens.view(batch, width, -1).gather(1, parent.expand(-1, -1, hidden.shape[1])),
            path=paths.view(batch, width, -1).gather(1, parent.expand(-1, -1, paths.shape[1])),
        )

    def _logprobs(
        self, inputs: DraftInput, hidden: torch.Tensor, requests: NDArray, position: NDArray
    ) -> torch.Tensor:
        """Return [T, Vd] log-probabilities that rank candidates; NaN counts as impossible."""
        logits = torch.nan_to_num(self._model.logits(hidden), nan=NEG_INF)
        temperature = inputs.temperature[requests]
        if (temperature > 0).any():
            device = self._pool.device
            noise = gumbel_noise(
                to_device(inputs.seed[requests], device),
                to_device(position, device),
                self._target_ids,
            )
            heat = to_device(temperature, device)[:, None]
            logits = torch.where(heat > 0, logits / heat.clamp(min=1e-6) + noise, logits)
        return torch.nan_to_num(torch.log_softmax(logits, dim=-1), nan=NEG_INF)

    def _best_children(
        self, logprobs: torch.Tensor, width: int, num_topk: NDArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and target ids of the best children, [T, K]; -inf past a row's own topk."""
        value, draft_id = stable_topk(logprobs, min(width, logprobs.shape[1]))
        if value.shape[1] < width:
            missing = width - value.shape[1]
            value = torch.nn.functional.pad(value, (0, missing), value=NEG_INF)
            draft_id = torch.nn.functional.pad(draft_id, (0, missing))
        if (num_topk < width).any():
            column = torch.arange(width, device=value.device)
            value = torch.where(column < to_device(num_topk[:, None], value.device), value, NEG_INF)
        return value, self._model.to_target_ids(draft_id)


def _select(candidates: _Candidates, inputs: DraftInput, device: torch.device) -> DraftOutput:
    """Keep the best num_draft_tokens - 1 candidates of each request, in candidate order."""
    batch, total = candidates.score.shape
    want = np.array([shape.num_draft_tokens - 1 for shape in inputs.shapes])
    most = min(int(want.max()), total)
    best, index = torch.sort(candidates.score, dim=1, descending=True, stable=True)
    best, index = best[:, :most], index[:, :most]
    rank = torch.arange(most, device=device)
    is_node = (rank < to_device(want[:, None], device)) & (best > NEG_INF)  # [B, N - 1]
    node, _ = torch.sort(torch.where(is_node, index, total), dim=1)  # padding last
    is_node = node < total
    safe = node.clamp(max=total - 1)

    node_of_candidate = torch.zeros((batch, total + 1), dtype=torch.int64, device=device)
    node_of_candidate.scatter_(1, node, (rank + 1).expand(batch, most))
    parent = candidates.parent.gather(1, safe)
    parent = torch.where(parent < 0, 0, node_of_candidate.gather(1, parent.clamp(min=0)))
    root = to_device(inputs.root_token_id[:, None], device)
    zero = torch.zeros((batch, 1), device=device)
    return DraftOutput(
        token_ids=torch.cat([root, candidates.token.gather(1, safe)], dim=1),
        parent_index=torch.cat([torch.full_like(root, -1), parent], dim=1),
        cumulative_logprobs=torch.cat([zero, candidates.score.gather(1, safe)], dim=1),
        num_nodes=1 + is_node.sum(dim=1),
    )
