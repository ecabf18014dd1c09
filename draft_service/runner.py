"""Run the draft model: extend committed tokens, grow trees. Builds the tensors of each phase.

Where graphs are captured, batches are padded to a few sizes: the rows of an extend as buckets.py
says, the requests of a growth to a power of 2 as growth.py says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.growth import TreeGrower
from draft_service.phases import DraftExtendInput, DraftInput, DraftOutput
from draft_service.request import DraftRequest, FeatureRows
from shared.buckets import ROW_BUCKETS, bucket_of
from shared.graphs import GraphCache
from shared.kernels.tree_beams import GrowingTrees
from shared.kv.pool import KVPool
from shared.models.draft import DraftModel
from shared.packing import RowBlocks, pack_rows
from shared.staging import Fields, Staging, num_bytes_of
from shared.step_timer import StepTimer
from shared.types import MAX_TREE_NODES, DraftRound, TreeShape

# Beside features: a few numbers per row and request.
_STAGED_BYTES = 1 << 20


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
        self._staging = Staging(device, ROW_BUCKETS[-1] * feature_bytes + _STAGED_BYTES)
        # What is staged of a growth, and then of an extend, begins at one place each.
        self._growth_bytes = num_bytes_of(_growth_fields(_padded(pool.max_num_requests)))
        # Hidden row of every request's last committed row, by req_idx; the last is a spare.
        self._last_hidden = torch.zeros(
            (pool.max_num_requests + 1, model.hidden_size), dtype=model.dtype, device=device
        )
        self._results = _Results(device, _padded(pool.max_num_requests))

    def run(
        self, works: Sequence[ExtendWork], growing: Sequence[DraftRequest], timer: StepTimer
    ) -> DraftOutput | None:
        """Run true inputs through the draft, overwriting what it computed from its own guesses;
        then grow a tree for each pending round. Only the trees are waited for.

        Args:
            growing: Requests whose kv_len counts their rows among `works`.
        Returns: The trees, valid until the next run; None if none is to grow.
        Mutates: KV slots of the rows; the hidden rows that trees grow from; scratch KV slots past
            kv_len; takes features from the requests.
        """
        self._staging.begin()
        growth = self._build_grow(growing) if growing else None
        extend = self._build_extend(works) if works else None
        self._staging.flush()
        timer.host("pack")
        if extend is not None:
            self._extend(extend)
        timer.device("extend")
        if growth is None:
            return None
        packed = self._graphs.run(
            ("grow", len(growth.seed), growth.bounds, growth.is_random),
            lambda: self._grow(growth),
            growth.tensors,
        )
        timer.device("grow")
        result = self._results.read(packed)
        timer.host("read")
        return DraftOutput.unpack(result)

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

    @torch.inference_mode()
    def _grow(self, inputs: DraftInput) -> torch.Tensor:
        return self._grower.grow(inputs, self._last_hidden)

    @torch.inference_mode()
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
        staging, pool = self._staging, self.pool
        staging.skip_to(self._growth_bytes)
        token_ids: list[int] = []
        position_ids: list[int] = []
        features: list[FeatureRows] = []
        for work in works:
            request, count = work.request, work.num_rows
            position = request.base + work.kv_len
            shifted = position + request.input_shift
            token_ids += request.tokens[shifted : shifted + count]
            position_ids += range(position, position + count)
            if request.input_shift:
                features += request.take_features(count)
        num_live, num_reqs = len(token_ids), len(works)
        bucket = bucket_of(num_live) if self.pads_rows else None
        host, device = staging.place_zeros(_extend_fields, bucket or num_live, bucket or num_reqs)
        blocks = RowBlocks(
            req_idx=[work.request.req_idx for work in works],
            prefix_len=[work.kv_len for work in works],
            num_rows=[work.num_rows for work in works],
        )
        rows = pack_rows(blocks, pool, window=self.window, staging=staging, num_rows=bucket)
        host["token_ids"][:num_live] = token_ids
        host["position_ids"][:num_live] = position_ids
        host["last_rows"][:num_reqs] = [stop - 1 for stop in rows.row_indptr[1:]]
        host["hidden_idx"][:num_reqs] = blocks.req_idx
        host["hidden_idx"][num_reqs:] = pool.max_num_requests
        staged = _stage_features(features, staging, bucket or num_live)
        return DraftExtendInput(**device, rows=rows, features=staged, bucket=bucket)

    def _build_grow(self, requests: Sequence[DraftRequest]) -> DraftInput:
        """Lay out what the requests' trees depend on."""
        staging, pool = self._staging, self.pool
        count = len(requests)
        host, device = staging.place_zeros(
            _growth_fields, _padded(count) if self.pads_rows else count
        )
        shapes = [_order(request).shape for request in requests]
        samplings = [request.open.sampling for request in requests]
        for request in requests:
            kv_len = request.kv_len
            stop = kv_len + self.num_scratch_slots(request)
            assert pool.holds(request.req_idx, kv_len, stop), "a node's slot is in the sink page"
        for name, values in (
            ("req_idx", [request.req_idx for request in requests]),
            ("kv_len", [request.kv_len for request in requests]),
            ("node_position", [request.next_position for request in requests]),
            ("topk", [shape.topk for shape in shapes]),
            ("num_steps", [shape.num_steps for shape in shapes]),
            ("num_nodes", [shape.num_draft_tokens - 1 for shape in shapes]),
            ("temperature", [sampling.temperature for sampling in samplings]),
            ("seed", [_signed(sampling.seed) for sampling in samplings]),
            ("child_position", [len(request.tokens) for request in requests]),
        ):
            host[name][:count] = values
        return DraftInput(
            trees=GrowingTrees(
                req_idx=device["req_idx"],
                kv_len=device["kv_len"],
                node_position=device["node_position"],
                topk=device["topk"],
                num_steps=device["num_steps"],
                page_table=pool.stage_page_table(staging),
                page_size=pool.page_size,
            ),
            num_nodes=device["num_nodes"],
            temperature=device["temperature"],
            seed=device["seed"],
            child_position=device["child_position"],
            bounds=TreeShape(
                num_steps=max([shape.num_steps for shape in shapes]),
                topk=max([shape.topk for shape in shapes]),
                num_draft_tokens=max([shape.num_draft_tokens for shape in shapes]),
            ),
            is_random=any([sampling.temperature > 0 for sampling in samplings]),
        )


def _growth_fields(num_reqs: int) -> Fields:
    """Return what a growth reads of each of its requests."""
    shape = (num_reqs,)
    return {
        "req_idx": (torch.int32, shape),
        "kv_len": (torch.int32, shape),
        "node_position": (torch.int64, shape),
        "topk": (torch.int32, shape),
        "num_steps": (torch.int32, shape),
        "num_nodes": (torch.int32, shape),
        "temperature": (torch.float32, shape),
        "seed": (torch.int64, shape),
        "child_position": (torch.int64, shape),
    }


def _extend_fields(num_rows: int, num_reqs: int) -> Fields:
    return {
        "token_ids": (torch.int64, (num_rows,)),
        "position_ids": (torch.int64, (num_rows,)),
        "last_rows": (torch.int64, (num_reqs,)),
        "hidden_idx": (torch.int64, (num_reqs,)),
    }


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


def _padded(count: int) -> int:
    """Return the least power of 2 that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _signed(seed: int) -> int:
    """Return the number that has the bits of an unsigned seed."""
    return seed - (1 << 64) if seed >> 63 else seed


def _stage_features(
    parts: Sequence[FeatureRows], staging: Staging, num_rows: int
) -> torch.Tensor | None:
    """Return [num_rows, width] in the features' own dtype: the device converts them."""
    if not parts:
        return None
    if len({part.dtype for part in parts}) > 1:  # of targets that differ
        parts = [FeatureRows.of(torch.cat([part.tensor for part in parts]))]
    dtype = parts[0].dtype
    host, device = staging.place(features=(dtype, (num_rows, parts[0].data.shape[1])))
    array, row = host["features"], 0
    for rows in _joined(parts):
        stop = row + len(rows)
        array[row:stop] = rows
        row = stop
    array[row:] = 0
    return device["features"]


def _joined(parts: Sequence[FeatureRows]) -> Iterator[NDArray[Any]]:
    """Yield the rows of all parts; those of a burst, which follow each other, at once."""
    _, data, first, stop = parts[0]
    for part in parts[1:]:
        if part.data is not data or part.first != stop:
            yield data[first:stop]
            data, first = part.data, part.first
        stop = part.stop
    yield data[first:stop]
