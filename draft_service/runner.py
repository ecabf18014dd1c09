"""Run the draft model: extend committed tokens, grow trees. Builds the tensors of each phase.

Where graphs are captured, batches are padded to a few sizes: the rows of an extend as buckets.py
says, the requests of a growth to a power of 2 as growth.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.growth import TreeGrower
from draft_service.phases import DraftExtendInput, DraftInput, DraftOutput
from draft_service.request import DraftRequest
from shared.buckets import ROW_BUCKETS, bucket_of
from shared.graphs import GraphCache
from shared.kernels.tree_beams import GrowingTrees
from shared.kv.pool import KVPool
from shared.models.draft import DraftModel
from shared.packing import RowBlock, pack_rows
from shared.staging import Staging
from shared.types import MAX_TREE_NODES, DraftRound, TokenTree, TreeShape

# Beside features: a few numbers per row and request.
_STAGED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendWork:
    """The next `num_rows` rows of a request."""

    request: DraftRequest
    num_rows: int


class DraftRunner:
    """The draft model over its own KV pool.

    Args:
        window: Tokens that a row attends to; 0 = everything.
        pads_rows: Pad batches to a few sizes; None: where graphs are captured.
    """

    def __init__(
        self, model: DraftModel, pool: KVPool, *, window: int, pads_rows: bool | None = None
    ) -> None:
        device = pool.device
        self.model = model
        self.pool = pool
        self.window = window
        self._grower = TreeGrower(model, pool, window=window)
        self._graphs = GraphCache(device)
        self.pads_rows = self._graphs.is_capturing if pads_rows is None else pads_rows
        feature_bytes = 4 * model.feature_spec.width  # of the widest dtype
        self._staging = Staging(device, ROW_BUCKETS[-1] * feature_bytes + _STAGED_BYTES)
        # Hidden row of every request's last committed row, by req_idx; the last is a spare.
        self._last_hidden = torch.zeros(
            (pool.max_num_requests + 1, model.hidden_size), dtype=model.dtype, device=device
        )
        self._results = _Results(device, _padded(pool.max_num_requests))

    @torch.inference_mode()
    def extend(self, works: Sequence[ExtendWork]) -> None:
        """Run true inputs through the draft, overwriting what it computed from its own guesses.

        Mutates: KV slots of the rows; the hidden row that the next tree grows from; takes features
            from the requests.
        """
        inputs = self._build_extend(works)
        if inputs.bucket is None:
            self._extend(inputs)
            return
        dtype = None if inputs.features is None else inputs.features.dtype
        key = ("extend", inputs.bucket, dtype)
        self._graphs.run(key, lambda: self._extend(inputs), inputs.tensors)

    @torch.inference_mode()
    def grow(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Answer each request's pending round with a tree.

        Mutates: scratch KV slots past each request's kv_len.
        """
        orders = [_order(request) for request in requests]
        inputs = self._build_grow(requests, orders)
        packed = self._graphs.run(
            ("grow", len(inputs.seed), inputs.bounds, inputs.is_random),
            lambda: self._grower.grow(inputs, self._last_hidden),
            inputs.tensors,
        )
        output = DraftOutput.unpack(self._results.read(packed))
        return [
            _tree(request, order, output, i)
            for i, (request, order) in enumerate(zip(requests, orders, strict=True))
        ]

    def num_scratch_slots(self, request: DraftRequest) -> int:
        """Return how many slots past kv_len the pending tree needs."""
        shape = _order(request).shape
        return (shape.num_steps - 1) * shape.topk

    def _extend(self, inputs: DraftExtendInput) -> None:
        recurrent = None
        if inputs.features is not None:
            recurrent = self.model.project_features(inputs.features)
        hidden = self.model.forward(
            inputs.token_ids,
            inputs.position_ids,
            recurrent,
            self.pool,
            inputs.rows.attention,
            inputs.rows.slot_mapping,
        )
        last = hidden.index_select(0, inputs.last_rows)
        self._last_hidden.index_copy_(0, inputs.hidden_idx, last)

    def _build_extend(self, works: Sequence[ExtendWork]) -> DraftExtendInput:
        """Pack the next rows of several requests; takes their features."""
        num_live = sum(work.num_rows for work in works)
        bucket = bucket_of(num_live) if self.pads_rows else None
        num_rows, num_reqs = bucket or num_live, bucket or len(works)
        tokens = np.zeros(num_rows, dtype=np.int64)
        positions = np.zeros(num_rows, dtype=np.int64)
        hidden_idx = np.full(num_reqs, self.pool.max_num_requests, dtype=np.int64)
        blocks, features = [], []
        begin = 0
        for i, work in enumerate(works):
            request, count = work.request, work.num_rows
            end = begin + count
            start = request.next_position
            shifted = start + request.input_shift
            tokens[begin:end] = request.tokens[shifted : shifted + count]
            positions[begin:end] = np.arange(start, start + count)
            begin = end
            hidden_idx[i] = request.req_idx
            blocks.append(
                RowBlock(
                    req_idx=request.req_idx,
                    prefix_len=request.kv_len,
                    num_rows=count,
                    first_slot=request.kv_len,
                )
            )
            if request.input_shift:
                features += request.take_features(count)
        staging = self._staging
        staging.begin()
        rows = pack_rows(blocks, self.pool, window=self.window, staging=staging, num_rows=bucket)
        last_rows = _column(rows.row_indptr[1:] - 1, num_reqs, np.int64)
        inputs = DraftExtendInput(
            token_ids=staging.add(tokens),
            position_ids=staging.add(positions),
            rows=rows,
            last_rows=staging.add(last_rows),
            hidden_idx=staging.add(hidden_idx),
            features=_stage_features(features, staging, num_rows),
            bucket=bucket,
        )
        staging.flush()
        return inputs

    def _build_grow(
        self, requests: Sequence[DraftRequest], orders: Sequence[DraftRound]
    ) -> DraftInput:
        """Bring what the requests' trees depend on to the device."""
        batch = _padded(len(requests)) if self.pads_rows else len(requests)
        shapes = [order.shape for order in orders]
        samplings = [request.open.sampling for request in requests]
        req_idx = _column([request.req_idx for request in requests], batch, np.int32)
        kv_len = _column([request.kv_len for request in requests], batch, np.int32)
        topk = _column([shape.topk for shape in shapes], batch, np.int32)
        num_steps = _column([shape.num_steps for shape in shapes], batch, np.int32)
        num_slots = (num_steps - 1) * topk
        has_slots = num_slots > 0
        self.pool.slots(req_idx[has_slots], (kv_len + num_slots - 1)[has_slots])  # checks them
        page_table = self.pool.page_table
        staging = self._staging
        staging.begin()
        inputs = DraftInput(
            trees=GrowingTrees(
                req_idx=staging.add(req_idx),
                kv_len=staging.add(kv_len),
                node_position=staging.add(
                    _column([request.next_position for request in requests], batch, np.int64)
                ),
                topk=staging.add(topk),
                num_steps=staging.add(num_steps),
                page_table=page_table,
                page_size=self.pool.page_size,
            ),
            num_nodes=staging.add(
                _column([shape.num_draft_tokens - 1 for shape in shapes], batch, np.int32)
            ),
            temperature=staging.add(
                _column([sampling.temperature for sampling in samplings], batch, np.float32)
            ),
            seed=staging.add(
                _column([sampling.seed for sampling in samplings], batch, np.uint64).view(np.int64)
            ),
            child_position=staging.add(
                _column([len(request.tokens) for request in requests], batch, np.int64)
            ),
            bounds=TreeShape(
                num_steps=max(shape.num_steps for shape in shapes),
                topk=max(shape.topk for shape in shapes),
                num_draft_tokens=max(shape.num_draft_tokens for shape in shapes),
            ),
            is_random=any(sampling.temperature > 0 for sampling in samplings),
        )
        staging.flush()
        return inputs


class _Results:
    """Read what a step computed; on a GPU by one copy to pinned memory."""

    def __init__(self, device: torch.device, max_batch: int) -> None:
        self._is_cpu = device.type == "cpu"
        if not self._is_cpu:
            size = max_batch * (1 + 3 * (MAX_TREE_NODES - 1))
            self._buffer = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._event = torch.cuda.Event()

    def read(self, packed: torch.Tensor) -> NDArray[np.int32]:
        """Return a tensor on the host, valid until the next read; waits for the device."""
        if self._is_cpu:
            return packed.numpy()
        on_host = self._buffer[: packed.numel()].view(packed.shape)
        on_host.copy_(packed, non_blocking=True)
        self._event.record()
        self._event.synchronize()
        return on_host.numpy()


def _order(request: DraftRequest) -> DraftRound:
    assert request.pending is not None
    return request.pending


def _tree(request: DraftRequest, order: DraftRound, output: DraftOutput, i: int) -> TokenTree:
    count = output.num_nodes[i]
    return TokenTree(
        request_id=order.request_id,
        target_epoch=order.target_epoch,
        draft_epoch=order.draft_epoch,
        round_idx=order.round_idx,
        seq_len=order.seq_len,
        token_ids=(request.tokens[-1], *output.token_ids[i, :count].tolist()),
        parent_index=(-1, *output.parent_index[i, :count].tolist()),
        cumulative_logprobs=(0.0, *output.cumulative_logprobs[i, :count].tolist()),
    )


def _padded(count: int) -> int:
    """Return the least power of 2 that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _column(values: Sequence[float] | NDArray, size: int, dtype: type[np.generic]) -> NDArray:
    """Return the values, then 0 up to `size`."""
    column = np.zeros(size, dtype=dtype)
    column[: len(values)] = values
    return column


def _stage_features(
    features: Sequence[torch.Tensor], staging: Staging, num_rows: int
) -> torch.Tensor | None:
    """Return [num_rows, width] in the features' own dtype: the device converts them."""
    if not features:
        return None
    joined = torch.cat(list(features))
    if len(joined) < num_rows:
        joined = torch.nn.functional.pad(joined, (0, 0, 0, num_rows - len(joined)))
    return staging.add(joined.view(torch.uint8).numpy()).view(joined.dtype)
