"""Grow token trees: EAGLE-2 dynamic growth, batched over requests of different shapes.

Per depth: the `topk` best nodes of the depth before are expanded, each keeps its `topk` best
children, and cumulative draft log-probabilities rank them. Of all candidates the best
num_draft_tokens - 1 form the tree. At T > 0 candidates are ranked with the target's own Gumbel
noise: the draft guesses what the target will sample.

Everything lies on the device and has a shape that B, K (the largest topk), S (num_steps) and N
(num_draft_tokens) of the batch decide: every depth runs B * K rows. Rows without a beam are
padding, which nothing reads:

    field                   beam past a request's topk    step past its num_steps, or no request
    token_ids               0                             0
    position_ids            0                             0
    parent_row              the request's first row       the request's first row
    slot_mapping            0 (the sink)                  0 (the sink)
    prefix_len              the request's kv_len          0
    path_len, path_offset   1, 0: the first beam of       1, 0: logical slot 0
                            step 1
    score                   -inf                          -inf

where no request has req_idx 0, kv_len 0, topk 0 and num_steps 0.

A growth is one function of device tensors, or, where grammars say which children there may be, one
for each depth, between which the host fills in masks.

Source: EAGLE-2, arXiv:2406.16858.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from draft_service.phases import DraftInput
from shared.kernels.embedding import embed
from shared.kernels.token_mask import apply_token_masks
from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kernels.tree_beams import Beams, Candidates, next_beams
from shared.kernels.tree_children import best_children
from shared.kernels.tree_select import select_nodes
from shared.kv.pool import KVPool
from shared.models.attention import ForwardInput
from shared.models.draft import DraftModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Trees of which some depths are grown.

    Args:
        candidates: Of these depths.
        row_indptr, is_chain: Of their forwards, as TreeAttentionMetadata has them.
        beams: The deepest nodes, which are expanded next; None: the roots.
        hidden: [B, h] of the roots, or [B * K, h] of the beams.
        logits: [B, Vd] or [B * K, Vd] f32, of their children.
    """

    candidates: Candidates
    row_indptr: torch.Tensor
    is_chain: torch.Tensor
    beams: Beams | None
    hidden: torch.Tensor
    logits: torch.Tensor


class TreeGrower:
    """Grow trees with one draft model over one KV pool."""

    def __init__(self, model: DraftModel, pool: KVPool, *, window: int) -> None:
        self._model = model
        self._pool = pool
        self._window = window
        self._has_recurrent = model.recurrent_width > 0
        ids = torch.arange(model.vocab_size, device=pool.device)
        self._target_ids = model.to_target_ids(ids)  # [Vd]

    @torch.inference_mode()
    def grow(self, inputs: DraftInput, last_hidden: torch.Tensor) -> torch.Tensor:
        """Return one tree per request, as `select_nodes` packs them; launches only.

        Args:
            last_hidden: [max_num_requests + 1, h], by req_idx: hidden of the last committed row.
        Mutates: KV slots past kv_len of each request (scratch), and the sink.
        """
        growth = self.begin(inputs, last_hidden)
        for step in range(inputs.bounds.num_steps - 1):
            growth = self.deepen(inputs, growth, step)
        return self.finish(inputs, growth)

    @torch.inference_mode()
    def begin(self, inputs: DraftInput, last_hidden: torch.Tensor) -> Growth:
        """Return trees that are their roots; launches only, as all of the following does."""
        trees, bounds, device = inputs.trees, inputs.bounds, self._pool.device
        batch, topk = len(trees.topk), bounds.topk
        # `embed` looks up rows of any kind, and begins before the kernel before it ends.
        hidden = embed(trees.req_idx, last_hidden)  # [B, h]
        return Growth(
            candidates=Candidates.allocate(batch, topk, bounds.num_steps, device),
            row_indptr=torch.arange(0, batch * topk + 1, topk, dtype=torch.int32, device=device),
            is_chain=torch.zeros(batch, dtype=torch.bool, device=device),
            beams=None,
            hidden=hidden,
            logits=self._model.logits(hidden),
        )

    @torch.inference_mode()
    def deepen(
        self, inputs: DraftInput, growth: Growth, step: int, masks: torch.Tensor | None = None
    ) -> Growth:
        """Return trees with the children of the roots or beams, the best of which are beams now.

        Args:
            step: Depth of the roots or beams.
            masks: As `finish` has it.
        Mutates: KV slots of the new beams; the candidates, and the logits that masks forbid.
        """
        trees = inputs.trees
        beams = self._choose(inputs, growth, step, masks)
        assert beams is not None, "the last children are not expanded"
        attention = TreeAttentionMetadata(
            page_table=trees.page_table,
            req_idx=trees.req_idx,
            prefix_len=beams.prefix_len,
            row_indptr=growth.row_indptr,
            path_len=beams.path_len,
            path_offset=beams.path_offset,
            is_chain=growth.is_chain,
            page_size=trees.page_size,
            window=self._window,
        )
        rows = ForwardInput(
            token_ids=beams.token_ids,
            position_ids=beams.position_ids,
            slot_mapping=beams.slot_mapping,
            attention=attention,
            kv=self._pool,
        )
        recurrent = embed(beams.parent_row, growth.hidden) if self._has_recurrent else None
        hidden = self._model.deepen(rows, recurrent, depth=step + 1)  # [B * K, h]
        logits = self._model.logits(hidden)
        return replace(growth, beams=beams, hidden=hidden, logits=logits)

    @torch.inference_mode()
    def finish(
        self, inputs: DraftInput, growth: Growth, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the best nodes, with the children of the last beams, as `select_nodes` packs them.

        Args:
            masks: [rows, ceil(V / 32)] i32, which children the roots or beams may have, as
                `apply_token_masks` reads it; None: all.
        Mutates: The candidates, and the logits that masks forbid.
        """
        bounds = inputs.bounds
        self._choose(inputs, growth, bounds.num_steps - 1, masks)
        most_nodes = bounds.num_draft_tokens - 1
        return select_nodes(growth.candidates, inputs.num_nodes, most_nodes=most_nodes)

    def _choose(
        self, inputs: DraftInput, growth: Growth, step: int, masks: torch.Tensor | None
    ) -> Beams | None:
        """Note the best children as candidates; return the best of them, but for the last ones."""
        if masks is not None:
            rows = torch.arange(len(masks), device=masks.device)
            apply_token_masks(growth.logits, rows, masks, self._target_ids)
        bounds = inputs.bounds
        noise = inputs.noise(step) if inputs.is_random else None
        score, token = best_children(growth.logits, self._target_ids, bounds.topk, noise)
        return next_beams(
            inputs.trees,
            growth.candidates,
            growth.beams,
            score,
            token,
            step=step,
            most_steps=bounds.num_steps,
        )
