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

Source: EAGLE-2, arXiv:2406.16858.
"""

from __future__ import annotations

import torch

from draft_service.growth_masks import GrowthMasks
from draft_service.phases import DraftInput
from shared.kernels.embedding import embed
from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kernels.tree_beams import Candidates, next_beams
from shared.kernels.tree_children import best_children
from shared.kernels.tree_select import select_nodes
from shared.kv.pool import KVPool
from shared.models.draft import DraftModel


class TreeGrower:
    """Grow trees with one draft model over one KV pool."""

    def __init__(self, model: DraftModel, pool: KVPool, *, window: int) -> None:
        self._model = model
        self._pool = pool
        self._window = window
        self._has_recurrent = model.recurrent_width > 0
        ids = torch.arange(model.vocab_size, device=pool.device)
        self._target_ids = model.to_target_ids(ids)  # [Vd]

    def grow(
        self,
        inputs: DraftInput,
        last_hidden: torch.Tensor,
        masks: GrowthMasks | None = None,
    ) -> torch.Tensor:
        """Return one tree per request, as `select_nodes` packs them; launches only.

        Args:
            last_hidden: [max_num_requests + 1, h], by req_idx: hidden of the last committed row.
            masks: Say what the grammars of the requests allow, for which they wait for the device
                at every depth; None: they are free.
        Mutates: KV slots past kv_len of each request (scratch), and the sink.
        """
        trees, bounds = inputs.trees, inputs.bounds
        batch, topk = trees.topk.shape[0], bounds.topk
        device = self._pool.device
        candidates = Candidates.allocate(batch, topk, bounds.num_steps, device)
        row_indptr = torch.arange(0, batch * topk + 1, topk, dtype=torch.int32, device=device)
        is_chain = torch.zeros(batch, dtype=torch.bool, device=device)
        beams = None
        # `embed` looks up rows of any kind, and begins before the kernel before it ends.
        hidden = embed(trees.req_idx, last_hidden)  # [B, h]
        for step in range(bounds.num_steps):
            if beams is not None:
                attention = TreeAttentionMetadata(
                    page_table=trees.page_table,
                    req_idx=trees.req_idx,
                    prefix_len=beams.prefix_len,
                    row_indptr=row_indptr,
                    path_len=beams.path_len,
                    path_offset=beams.path_offset,
                    is_chain=is_chain,
                    page_size=trees.page_size,
                    window=self._window,
                )
                hidden = self._model.forward(
                    beams.token_ids,
                    beams.position_ids,
                    embed(beams.parent_row, hidden) if self._has_recurrent else None,
                    self._pool,
                    attention,
                    beams.slot_mapping,
                )  # [B * K, h]
            noise = inputs.noise(step) if inputs.is_random else None
            logits = self._model.logits(hidden)
            if masks is not None:
                masks.apply(logits, beams, self._target_ids)
            score, token = best_children(logits, self._target_ids, topk, noise)
            beams = next_beams(
                trees, candidates, beams, score, token, step=step, most_steps=bounds.num_steps
            )
        return select_nodes(candidates, inputs.num_nodes, most_nodes=bounds.num_draft_tokens - 1)
