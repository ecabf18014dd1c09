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
from shared.packing import RowBlocks, pack_rows
from shared.staging import Staging
from shared.step_timer import StepTimer
from shared.types import MAX_TREE_NODES, DraftRound, TokenTree, TreeShape

# Beside features: a few numbers per row and request.
_STAGED_BYTES = 1 << 20
# What a growth reads of each of its requests.
_GROWTH = {
    "req_idx": torch.int32,
    "kv_len": torch.int32,
    "node_position": torch.int64,
    "topk": torch.int32,
    "num_steps": torch.int32,
    "num_nodes": torch.int32,
    "temperature": torch.float32,
    "seed": torch.int64,
    "child_position": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendWork:
    """The next `num_rows` rows of a request, at KV index `kv_len`."""

    request: DraftRequest
    kv_len: int
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
        self._extend_staging = Staging(device, ROW_BUCKETS[-1] * feature_bytes + _STAGED_BYTES)
        self._growth_staging = Staging(device, _STAGED_BYTES)
        # Hidden row of every request's last committed row, by req_idx; the last is a spare.
        self._last_hidden = torch.zeros(
            (pool.max_num_requests + 1, model.hidden_size), dtype=model.dtype, device=device
        )
        self._results = _Results(device, _padded(pool.max_num_requests))

    @torch.inference_mode()
    def run(
        self, works: Sequence[ExtendWork], growing: Sequence[DraftRequest], timer: StepTimer
    ) -> list[TokenTree]:
        """Run true inputs through the draft, overwriting what it computed from its own guesses;
        then answer pending rounds, each with a tree.

        Growth is laid out while the device extends, and only the trees are waited for.

        Args:
            growing: Requests whose kv_len counts their rows among `works`.
        Mutates: KV slots of the rows; the hidden rows that trees grow from; scratch KV slots past
            kv_len; takes features from the requests.
        """
        extend = self._build_extend(works) if works else None
        timer.host("pack")
        if extend is not None:
            self._extend(extend)
        timer.device("extend")
        if not growing:
            return []
        growth = self._build_grow(growing)
        packed = self._graphs.run(
            ("grow", len(growth.seed), growth.bounds, growth.is_random),
            lambda: self._grower.grow(growth, self._last_hidden),
            growth.tensors,
        )
        timer.device("grow")
        result = self._results.read(packed)
        timer.host("read")
        return _trees(growing, DraftOutput.unpack(result))

    def num_scratch_slots(self, request: DraftRequest) -> int:
        """Return how many slots past kv_len the pending tree needs."""
        shape = _order(request).shape
        return (shape.num_steps - 1) * shape.topk

    def _extend(self, inputs: DraftExtendInput) -> None:
        if inputs.bucket is None:
            self._forward(inputs)
            return
        dtype = None if inputs.features is None else inputs.features.dtype
        key = ("extend", inputs.bucket, dtype)
        self._graphs.run(key, lambda: self._forward(inputs), inputs.tensors)

    def _forward(self, inputs: DraftExtendInput) -> None:
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
        tokens: list[int] = []
        features: list[torch.Tensor] = []
        columns = []
        for work in works:
            request, count = work.request, work.num_rows
            position = request.base + work.kv_len
            shifted = position + request.input_shift
            tokens += request.tokens[shifted : shifted + count]
            columns.append((request.req_idx, work.kv_len, count, position))
            if request.input_shift:
                features += request.take_features(count)
        req_idx, kv_len, num_rows, position = np.array(columns, dtype=np.int64).T
        num_live = len(tokens)
        bucket = bucket_of(num_live) if self.pads_rows else None
        total, num_reqs = bucket or num_live, bucket or len(works)
        staging = self._extend_staging
        staging.begin()
        host, device = staging.place(
            token_ids=(torch.int64, (total,)),
            position_ids=(torch.int64, (total,)),
            last_rows=(torch.int64, (num_reqs,)),
            hidden_idx=(torch.int64, (num_reqs,)),
        )
        blocks = RowBlocks(req_idx=req_idx, prefix_len=kv_len, num_rows=num_rows)
        rows = pack_rows(blocks, self.pool, window=self.window, staging=staging, num_rows=bucket)
        first_row = rows.row_indptr[:-1]
        step = np.arange(num_live) - np.repeat(first_row, num_rows)
        _fill(host["token_ids"], tokens)
        _fill(host["position_ids"], np.repeat(position, num_rows) + step)
        _fill(host["last_rows"], rows.row_indptr[1:] - 1)
        _fill(host["hidden_idx"], req_idx, padding=self.pool.max_num_requests)
        staged = _stage_features(features, staging, total)
        staging.flush()
        return DraftExtendInput(**device, rows=rows, features=staged, bucket=bucket)

    def _build_grow(self, requests: Sequence[DraftRequest]) -> DraftInput:
        """Lay out what the requests' trees depend on."""
        orders = [_order(request) for request in requests]
        shapes = [order.shape for order in orders]
        samplings = [request.open.sampling for request in requests]
        batch = _padded(len(requests)) if self.pads_rows else len(requests)
        staging = self._growth_staging
        staging.begin()
        host, device = staging.place(**{name: (dtype, (batch,)) for name, dtype in _GROWTH.items()})
        for name, values in (
            ("req_idx", [request.req_idx for request in requests]),
            ("kv_len", [request.kv_len for request in requests]),
            ("node_position", [request.next_position for request in requests]),
            ("topk", [shape.topk for shape in shapes]),
            ("num_steps", [shape.num_steps for shape in shapes]),
            ("num_nodes", [shape.num_draft_tokens - 1 for shape in shapes]),
            ("temperature", [sampling.temperature for sampling in samplings]),
            ("seed", np.array([sampling.seed for sampling in samplings], np.uint64).view(np.int64)),
            ("child_position", [len(request.tokens) for request in requests]),
        ):
            _fill(host[name], values)
        num_slots = (host["num_steps"] - 1) * host["topk"]
        has_slots = num_slots > 0
        last = host["kv_len"] + num_slots - 1
        self.pool.slots(host["req_idx"][has_slots], last[has_slots])  # checks them
        page_table = self.pool.stage_page_table(staging)
        staging.flush()
        return DraftInput(
            trees=GrowingTrees(
                req_idx=device["req_idx"],
                kv_len=device["kv_len"],
                node_position=device["node_position"],
                topk=device["topk"],
                num_steps=device["num_steps"],
                page_table=page_table,
                page_size=self.pool.page_size,
            ),
            num_nodes=device["num_nodes"],
            temperature=device["temperature"],
            seed=device["seed"],
            child_position=device["child_position"],
            bounds=TreeShape(
                num_steps=max(shape.num_steps for shape in shapes),
                topk=max(shape.topk for shape in shapes),
                num_draft_tokens=max(shape.num_draft_tokens for shape in shapes),
            ),
            is_random=any(sampling.temperature > 0 for sampling in samplings),
        )


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
        array: NDArray[np.int32] = on_host.numpy()
        self._event.synchronize()
        return array


def _order(request: DraftRequest) -> DraftRound:
    assert request.pending is not None
    return request.pending


def _trees(requests: Sequence[DraftRequest], output: DraftOutput) -> list[TokenTree]:
    """Answer the pending round of every request."""
    trees = []
    for request, count, token_ids, parents, scores in zip(
        requests,
        output.num_nodes.tolist(),
        output.token_ids.tolist(),
        output.parent_index.tolist(),
        output.cumulative_logprobs.tolist(),
        strict=False,  # the batch is padded
    ):
        order = _order(request)
        trees.append(
            TokenTree(
                request_id=order.request_id,
                target_epoch=order.target_epoch,
                draft_epoch=order.draft_epoch,
                round_idx=order.round_idx,
                seq_len=order.seq_len,
                token_ids=(request.tokens[-1], *token_ids[:count]),
                parent_index=(-1, *parents[:count]),
                cumulative_logprobs=(0.0, *scores[:count]),
            )
        )
    return trees


def _padded(count: int) -> int:
    """Return the least power of 2 that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _fill(array: NDArray, values: Sequence[float] | NDArray, padding: int = 0) -> None:
    """Write the values, then padding."""
    array[: len(values)] = values
    array[len(values) :] = padding


def _stage_features(
    parts: Sequence[torch.Tensor], staging: Staging, num_rows: int
) -> torch.Tensor | None:
    """Return [num_rows, width] in the features' own dtype: the device converts them."""
    if not parts:
        return None
    if len({part.dtype for part in parts}) > 1:  # of targets that differ
        parts = [torch.cat(list(parts))]
    dtype, width = parts[0].dtype, parts[0].shape[1]
    host, device = staging.place(features=(dtype, (num_rows, width)))
    array, row = host["features"], 0
    for part in parts:
        if dtype == torch.bfloat16:
            part = part.view(torch.int16)
        array[row : row + len(part)] = part.numpy()
        row += len(part)
    array[row:] = 0
    return device["features"]
