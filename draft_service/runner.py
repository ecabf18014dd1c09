"""Run the draft model: launch extends and growths, and read what was grown."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.extend_input import ExtendPacker, ExtendWork, parts_of
from draft_service.growth import Growth, TreeGrower
from draft_service.growth_input import pack_growth
from draft_service.growth_masks import GrowthMasks, MaskBuffers
from draft_service.phases import DraftExtendInput, DraftInput, DraftOutput
from draft_service.request import DraftRequest
from shared.kernels.mailbox_words import MAX_PATH
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES, TreeShape
from shared.models.draft import DraftModel
from shared.step.buckets import BATCH_BUCKETS, bucket_of, buckets_up_to, row_buckets_up_to
from shared.step.graphs import GraphCache
from shared.step.staging import Staging
from shared.step.step_timer import StepTimer

# Rows of the largest extend: more take several.
MAX_EXTEND_ROWS = 1024
# Beside features: a few numbers per row and request.
STAGED_BYTES = 1 << 20
# Of a request: a tree as `select_nodes` packs it, and a path as `take_paths` has it.
_MOST_NUMBERS = 1 + 3 * (MAX_TREE_NODES - 1) + 1 + MAX_PATH


class DraftRunner:
    """The draft model over its own KV pool.

    Args:
        window: Tokens that a row attends to; 0 = everything.
        vocab_size: Of the target.
        max_batch_rows: Of a step.
        is_quantized: The model's weights are.
    """

    def __init__(
        self,
        model: DraftModel,
        pool: KVPool,
        *,
        window: int,
        vocab_size: int,
        max_batch_rows: int,
        is_quantized: bool,
    ) -> None:
        device = pool.device
        self.model = model
        self.pool = pool
        self.window = window
        self.vocab_size = vocab_size
        self._grower = TreeGrower(model, pool, window=window)
        self.graphs = GraphCache(device)
        self.pads_rows = self.graphs.is_capturing  # then batches are padded to a few sizes
        self.row_buckets = row_buckets_up_to(
            min(max_batch_rows, MAX_EXTEND_ROWS), is_quantized=is_quantized
        )
        self.batch_buckets = buckets_up_to(pool.max_num_requests, BATCH_BUCKETS)
        self._ready_shapes: list[TreeShape] = []
        feature_bytes = 4 * model.feature_spec.width  # of the widest dtype
        staging = Staging(device, self.row_buckets[-1] * feature_bytes + STAGED_BYTES)
        self.packer = ExtendPacker(pool, staging, window=window)
        self._growth_staging = Staging(device, STAGED_BYTES)
        self._masks = MaskBuffers(vocab_size, device)
        # Hidden row of every request's last committed row, by req_idx; the last is a spare.
        self.last_hidden = torch.zeros(
            (pool.max_num_requests + 1, model.hidden_size), dtype=model.dtype, device=device
        )
        self.results = StepResults(device, self.batch_buckets[-1])

    def set_ready_shapes(self, shapes: Sequence[TreeShape]) -> None:
        """Let trees of other shapes grow by the graph of one of these, if it is as large."""
        self._ready_shapes = sorted(shapes, key=_growth_cost)

    def extend(self, works: Sequence[ExtendWork], timer: StepTimer) -> None:
        """Run true inputs through the draft, overwriting what it computed from its own guesses;
        launches only.

        Where graphs are captured, no launch has more rows than the largest of them: beyond it every
        kernel would be launched for itself, from memory that is pinned for the occasion.

        Mutates: KV slots of the rows; the hidden rows that trees grow from; takes features from the
            requests.
        """
        *first, last = parts_of(works, self.row_buckets[-1]) if self.pads_rows else [works]
        for part in first:
            self.launch_extend(self.packer.pack(part, self.bucket_of(part)))
        inputs = self.packer.pack(last, self.bucket_of(last)) if last else None
        timer.host("pack")
        if inputs is not None:
            self.launch_extend(inputs)
        timer.device("extend")

    def bucket_of(self, works: Sequence[ExtendWork]) -> int | None:
        """Return what the rows of works are padded to; None: they are not padded."""
        return self.row_bucket(sum([work.num_rows for work in works]))

    def row_bucket(self, num_rows: int) -> int | None:
        """Return what so many rows are padded to; None: they are not padded."""
        return bucket_of(num_rows, self.row_buckets) if self.pads_rows else None

    def launch_extend(self, inputs: DraftExtendInput) -> None:
        """Extend packed rows; launches only.

        Mutates: KV slots of the rows; the hidden rows that trees grow from.
        """
        if inputs.bucket is None:
            self._forward(inputs)
            return
        dtype = None if inputs.features is None else inputs.features.dtype
        key = ("extend", inputs.bucket, dtype)
        self.graphs.run(key, lambda: self._forward(inputs), inputs.tensors)

    def pack_growth(
        self, requests: Sequence[DraftRequest], shapes: Sequence[TreeShape]
    ) -> DraftInput:
        """Stage trees to grow, valid until the next call."""
        size = bucket_of(len(requests), self.batch_buckets) if self.pads_rows else None
        inputs = pack_growth(
            requests, shapes, self.pool, self._growth_staging, num_places=size or len(requests)
        )
        return replace(inputs, bounds=self._ready_bounds(inputs.bounds))

    def _ready_bounds(self, bounds: TreeShape) -> TreeShape:
        """Return the cheapest bounds whose growth is captured and that hold these; if there are
        none, these.
        """
        return next((shape for shape in self._ready_shapes if _holds(shape, bounds)), bounds)

    def launch_growth(self, inputs: DraftInput) -> torch.Tensor:
        """Grow trees, while the device may still extend; launches only.

        Mutates: Scratch KV slots past kv_len.
        Returns: As `select_nodes` packs them, valid until the next growth.
        """
        packed: torch.Tensor = self.graphs.run(
            ("grow", len(inputs.seed), inputs.bounds, inputs.is_random),
            lambda: self._grower.grow(inputs, self.last_hidden),
            inputs.tensors,
        )
        return packed

    def launch_masked_growth(self, inputs: DraftInput, masks: GrowthMasks) -> torch.Tensor:
        """Grow trees as `launch_growth` does, kept to what masks allow; waits at every depth."""
        key = (len(inputs.seed), inputs.bounds, inputs.is_random)
        grower, last_step = self._grower, inputs.bounds.num_steps - 1
        growth: Growth = self.graphs.run(
            ("begin growth", *key), lambda: grower.begin(inputs, self.last_hidden), inputs.tensors
        )
        for step in range(last_step):
            mask = self._masks.filled(masks, growth)
            growth = self.graphs.run(
                ("deepen growth", step, *key, growth.logits.data_ptr()),
                functools.partial(grower.deepen, inputs, growth, step, mask),
                [*inputs.tensors, mask],
            )
        mask = self._masks.filled(masks, growth)
        packed: torch.Tensor = self.graphs.run(
            ("finish growth", *key, growth.logits.data_ptr()),
            functools.partial(grower.finish, inputs, growth, mask),
            [*inputs.tensors, mask],
        )
        return packed

    def read(self, timer: StepTimer) -> DraftOutput:
        """Return what was grown last, valid until the next growth; waits for the device."""
        (result,) = self.results.finish()
        timer.host("read")
        return DraftOutput.unpack(result)

    def bring_page_table(self) -> None:
        """Bring the page table on the device up to date, so that the next step need not."""
        if self.pool.is_page_table_behind:
            staging = self.packer.staging
            staging.begin()
            self.pool.stage_page_table(staging)
            staging.flush()

    @torch.inference_mode()
    def _forward(self, inputs: DraftExtendInput) -> None:
        recurrent = None
        if inputs.features is not None:
            recurrent = self.model.project_features(inputs.features)
        rows = inputs.rows.forward_input(inputs.token_ids, inputs.position_ids, self.pool)
        hidden = self.model.extend(rows, recurrent, carried=self.last_hidden)
        last = hidden.index_select(0, inputs.last_rows)
        self.last_hidden.index_copy_(0, inputs.hidden_idx, last)


def _growth_cost(shape: TreeShape) -> tuple[int, int]:
    """Return what orders shapes by the rows that their growth computes."""
    return shape.num_steps * shape.topk, shape.num_draft_tokens


def _holds(shape: TreeShape, other: TreeShape) -> bool:
    """Return whether trees of another shape can grow in the memory of this one."""
    return (
        shape.num_steps >= other.num_steps
        and shape.topk >= other.topk
        and shape.num_draft_tokens >= other.num_draft_tokens
    )


class StepResults:
    """What the device computed last.

    Args:
        max_batch: Requests, padding included.
    """

    def __init__(self, device: torch.device, max_batch: int) -> None:
        self._is_cpu = device.type == "cpu"
        self._on_host: list[NDArray[np.int32]] = []
        if not self._is_cpu:
            size = max_batch * _MOST_NUMBERS
            self._buffer = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._event = torch.cuda.Event()

    def start(self, *tensors: torch.Tensor) -> None:
        """Start to copy tensors, i32, to the host."""
        if self._is_cpu:
            self._on_host = [tensor.numpy() for tensor in tensors]
            return
        self._on_host, begin = [], 0
        for tensor in tensors:
            part = self._buffer[begin : begin + tensor.numel()].view(tensor.shape)
            part.copy_(tensor, non_blocking=True)
            self._on_host.append(part.numpy())
            begin += tensor.numel()
        self._event.record()

    def finish(self) -> list[NDArray[np.int32]]:
        """Return what was started last, valid until the next start; waits for the device."""
        if not self._is_cpu:
            self._event.synchronize()
        return self._on_host
