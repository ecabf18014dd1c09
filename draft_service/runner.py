"""Run the draft model: extend committed tokens, grow trees. Builds the tensors of each phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.growth import TreeGrower
from draft_service.phases import DraftExtendInput, DraftExtendOutput, DraftInput
from draft_service.request import DraftRequest
from shared.kv.pool import KVPool
from shared.models.draft import DraftModel
from shared.packing import RowBlock, pack_rows, to_device
from shared.types import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendWork:
    """The next `num_rows` rows of a request."""

    request: DraftRequest
    num_rows: int


class DraftRunner:
    """The draft model over its own KV pool.

    Args:
        window: Tokens that a row attends to; 0 = everything.
    """

    def __init__(self, model: DraftModel, pool: KVPool, *, window: int) -> None:
        self.model = model
        self.pool = pool
        self.window = window
        self._grower = TreeGrower(model, pool, window=window)

    @torch.inference_mode()
    def extend(self, inputs: DraftExtendInput) -> DraftExtendOutput:
        """Run true inputs through the draft, overwriting what it computed from its own guesses.

        Mutates: KV slots of the rows.
        """
        model = self.model
        recurrent = None
        if inputs.features is not None:
            recurrent = model.project_features(inputs.features)
        hidden = model.forward(
            inputs.token_ids,
            inputs.position_ids,
            recurrent,
            self.pool,
            inputs.rows.attention,
            inputs.rows.slot_mapping,
        )
        return DraftExtendOutput(last_hidden=hidden[inputs.last_rows])

    def build_extend(self, works: Sequence[ExtendWork]) -> DraftExtendInput:
        """Pack the next rows of several requests; takes their features."""
        blocks, tokens, positions, features = [], [], [], []
        for work in works:
            request, count = work.request, work.num_rows
            start = request.next_position
            shifted = start + request.input_shift
            blocks.append(
                RowBlock(
                    req_idx=request.req_idx,
                    prefix_len=request.kv_len,
                    num_rows=count,
                    first_slot=request.kv_len,
                )
            )
            tokens.append(np.array(request.tokens[shifted : shifted + count], dtype=np.int64))
            positions.append(np.arange(start, start + count, dtype=np.int64))
            if request.input_shift:
                features.append(request.take_features(count))
        device = self.pool.device
        rows = pack_rows(blocks, self.pool, window=self.window)
        return DraftExtendInput(
            token_ids=to_device(np.concatenate(tokens), device),
            position_ids=to_device(np.concatenate(positions), device),
            features=torch.cat(features).to(device) if features else None,
            rows=rows,
            last_rows=to_device(rows.row_indptr[1:] - 1, device),
        )

    @torch.inference_mode()
    def grow(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Answer each request's pending round with a tree.

        Mutates: scratch KV slots past each request's kv_len.
        """
        orders = [request.pending for request in requests]
        output = self._grower.grow(self._build_grow(requests))
        num_nodes = output.num_nodes.tolist()
        token_ids = output.token_ids.tolist()
        parents = output.parent_index.tolist()
        scores = output.cumulative_logprobs.tolist()
        return [
            TokenTree(
                request_id=order.request_id,
                target_epoch=order.target_epoch,
                draft_epoch=order.draft_epoch,
                round_idx=order.round_idx,
                seq_len=order.seq_len,
                token_ids=tuple(token_ids[i][: num_nodes[i]]),
                parent_index=tuple(parents[i][: num_nodes[i]]),
                cumulative_logprobs=tuple(scores[i][: num_nodes[i]]),
            )
            for i, order in enumerate(orders)
            if order is not None
        ]

    def num_scratch_slots(self, request: DraftRequest) -> int:
        """Return how many slots past kv_len the pending tree needs."""
        assert request.pending is not None
        shape = request.pending.shape
        return (shape.num_steps - 1) * shape.topk

    @staticmethod
    def _build_grow(requests: Sequence[DraftRequest]) -> DraftInput:
        hidden, shapes = [], []
        for request in requests:
            assert request.last_hidden is not None and request.pending is not None
            hidden.append(request.last_hidden)
            shapes.append(request.pending.shape)
        seeds = np.array([r.open.sampling.seed for r in requests], dtype=np.uint64)
        return DraftInput(
            hidden=torch.stack(hidden),
            req_idx=np.array([r.req_idx for r in requests], dtype=np.int32),
            kv_len=np.array([r.kv_len for r in requests], dtype=np.int64),
            node_position=np.array([r.next_position for r in requests], dtype=np.int64),
            root_position=np.array([len(r.tokens) - 1 for r in requests], dtype=np.int64),
            root_token_id=np.array([r.tokens[-1] for r in requests], dtype=np.int64),
            temperature=np.array([r.open.sampling.temperature for r in requests], dtype=np.float32),
            seed=seeds.view(np.int64),
            shapes=shapes,
        )
