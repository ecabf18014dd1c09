"""Run the draft model: extend committed tokens, grow trees. Builds the tensors of each phase.

Where graphs are captured, batches are padded to a few sizes: the rows of an extend as buckets.py
says, the requests of a growth to a power of 2 as growth.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.growth import TreeGrower
from draft_service.mailbox_io import compile_mailbox, place_paths, stage_trees, take_from_mailbox
from draft_service.phases import DraftExtendInput, DraftInput, DraftOutput, MailedPaths
from draft_service.request import DraftRequest, FeatureRows
from shared.kernels.mailbox_trees import post_trees
from shared.kernels.mailbox_words import MAX_PATH
from shared.kernels.tree_beams import GrowingTrees
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES, TreeShape
from shared.models.draft import DraftModel
from shared.peer.mailbox import MailboxEnd
from shared.step.buckets import ROW_BUCKETS, bucket_of
from shared.step.graphs import GraphCache
from shared.step.packing import RowBlocks, pack_rows
from shared.step.staging import Fields, Staging
from shared.step.step_timer import StepTimer

# Beside features: a few numbers per row and request.
_STAGED_BYTES = 1 << 20


class ExtendWork(NamedTuple):
    """The next `num_rows` rows of a request, at KV index `kv_len`."""

    request: DraftRequest
    kv_len: int
    num_rows: int


class DraftRunner:
    """The draft model over its own KV pool.

    Args:
        window: Tokens that a row attends to; 0 = everything.
        vocab_size: Of the target.
        pads_rows: Pad batches to a few sizes; None: where graphs are captured.
    """

    def __init__(
        self,
        model: DraftModel,
        pool: KVPool,
        *,
        window: int,
        vocab_size: int,
        pads_rows: bool | None = None,
    ) -> None:
        device = pool.device
        self.model = model
        self.pool = pool
        self.window = window
        self.vocab_size = vocab_size
        self._grower = TreeGrower(model, pool, window=window)
        self._graphs = GraphCache(device)
        self.pads_rows = self._graphs.is_capturing if pads_rows is None else pads_rows
        feature_bytes = 4 * model.feature_spec.width  # of the widest dtype
        self._staging = Staging(device, ROW_BUCKETS[-1] * feature_bytes + _STAGED_BYTES)
        self._growth_staging = Staging(device, _STAGED_BYTES)
        self._mailbox_staging = Staging(device, _STAGED_BYTES)
        # Hidden row of every request's last committed row, by req_idx; the last is a spare.
        self._last_hidden = torch.zeros(
            (pool.max_num_requests + 1, model.hidden_size), dtype=model.dtype, device=device
        )
        self._results = _Results(device, _padded(pool.max_num_requests))
        # Read by the device while it waits: not 0 when it should not.
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._deferred: Callable[[], None] | None = None

    def extend(self, works: Sequence[ExtendWork], timer: StepTimer) -> None:
        """Run true inputs through the draft, overwriting what it computed from its own guesses;
        launches only.

        Where graphs are captured, no launch has more rows than the largest of them: beyond it every
        kernel would be launched for itself, from memory that is pinned for the occasion.

        Mutates: KV slots of the rows; the hidden rows that trees grow from; takes features from the
            requests.
        """
        *first, last = _parts(works, ROW_BUCKETS[-1]) if self.pads_rows else [works]
        for part in first:
            self._extend(self._build_extend(part))
        inputs = self._build_extend(last) if last else None
        timer.host("pack")
        if inputs is not None:
            self._extend(inputs)
        timer.device("extend")

    def grow(self, growing: Sequence[DraftRequest], timer: StepTimer) -> None:
        """Grow a tree for each pending round; launches only, while the device may still extend.

        Args:
            growing: Requests all of whose committed rows were extended; kv_len counts them.
        Mutates: Scratch KV slots past kv_len.
        """
        inputs = self._build_grow(growing, [request.pending_order.shape for request in growing])
        packed = self._grow(replace(inputs, mail=stage_trees(growing, self._mailbox_staging)))
        timer.device("grow")
        self._results.start(packed)

    def run_ahead(
        self,
        requests: Sequence[DraftRequest],
        shape: TreeShape,
        mailbox: MailboxEnd,
        timer: StepTimer,
    ) -> None:
        """Extend what the target will accept of the requests' newest trees, as soon as its device
        says so, grow the next trees, and post those; launches only.

        On a CPU it is all done when it is read.

        Args:
            requests: All caught up, with slots for the longest path and the next tree reserved.
            shape: Of the newest trees and of the next ones.
        Mutates: KV slots past kv_len of each request.
        """
        path_width = shape.num_steps + 1
        extend, paths = self._build_ahead(requests, path_width, mailbox)
        grow = self._build_grow(requests, [shape] * len(requests))
        grow = replace(grow, mail=(paths.trees,))
        self._stop.zero_()
        timer.host("pack")

        def launch() -> None:
            self._launch_ahead(paths, extend, grow, timer)

        if self.pool.device.type == "cuda":
            launch()
        else:
            self._deferred = launch

    def read_ahead(self, timer: StepTimer) -> tuple[NDArray[np.int32], DraftOutput]:
        """Return what `run_ahead` did, valid until the next growth; waits for the device, which
        waits no longer for paths that are not there.

        Returns: [B, 1 + MAX_PATH], of each request the tokens of the path that was extended (0:
            nothing was done), and their ids; and the trees.
        """
        if self._deferred is not None:
            self._deferred()
            self._deferred = None
        self._stop.fill_(1)
        result, taken = self._results.finish()
        timer.host("read")
        return taken, DraftOutput.unpack(result)

    def compile_mailbox(self, dtype: torch.dtype) -> None:
        """Compile what reads and writes mailboxes; nothing comes and nothing is posted.

        Args:
            dtype: Of the features that will come.
        """
        compile_mailbox(
            self._stop,
            width=self.model.feature_spec.width,
            vocab_size=self.vocab_size,
            dtype=dtype,
            device=self.pool.device,
        )

    def read(self, timer: StepTimer) -> DraftOutput:
        """Return what was grown last, valid until the next growth; waits for the device."""
        (result,) = self._results.finish()
        timer.host("read")
        return DraftOutput.unpack(result)

    def bring_page_table(self) -> None:
        """Bring the page table on the device up to date, so that the next step need not."""
        if self.pool.is_page_table_behind:
            self._staging.begin()
            self.pool.stage_page_table(self._staging)
            self._staging.flush()

    @staticmethod
    def num_scratch_slots(shape: TreeShape) -> int:
        """Return how many slots past kv_len a tree needs."""
        return (shape.num_steps - 1) * shape.topk

    def _launch_ahead(
        self, paths: MailedPaths, extend: DraftExtendInput, grow: DraftInput, timer: StepTimer
    ) -> None:
        taken = take_from_mailbox(
            paths,
            extend,
            grow,
            self._stop,
            spare_idx=self.pool.max_num_requests,
            vocab_size=self.vocab_size,
        )
        timer.device("await")
        self._extend(extend)
        timer.device("extend")
        packed = self._grow(grow)
        timer.device("grow")
        self._results.start(packed, taken)

    def _extend(self, inputs: DraftExtendInput) -> None:
        if inputs.bucket is None:
            self._forward(inputs)
            return
        dtype = None if inputs.features is None else inputs.features.dtype
        key = ("extend", inputs.bucket, dtype)
        self._graphs.run(key, lambda: self._forward(inputs), inputs.tensors)

    def _grow(self, inputs: DraftInput) -> torch.Tensor:
        """Return the trees as `select_nodes` packs them, valid until the next growth; those that a
        target's device waits for are posted there.
        """
        packed: torch.Tensor = self._graphs.run(
            ("grow", len(inputs.seed), inputs.bounds, inputs.is_random),
            lambda: self._forward_growth(inputs),
            inputs.tensors,
        )
        for mail in inputs.mail:
            post_trees(mail.words, packed, mail.slot, mail.seq)
        return packed

    @torch.inference_mode()
    def _forward_growth(self, inputs: DraftInput) -> torch.Tensor:
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
        """Stage the next rows of several requests; takes their features."""
        staging, pool = self._staging, self.pool
        token_ids: list[int] = []
        position_ids: list[int] = []
        last_rows: list[int] = []
        features: list[FeatureRows] = []
        for request, kv_len, count in works:
            position = request.base + kv_len
            shifted = position + request.input_shift
            token_ids += request.tokens[shifted : shifted + count]
            position_ids += range(position, position + count)
            last_rows.append(len(token_ids) - 1)
            if request.input_shift:
                features += request.take_features(count)
        num_live, num_reqs = len(token_ids), len(works)
        bucket = bucket_of(num_live) if self.pads_rows else None
        staging.begin()
        host, device = staging.place_zeros(_extend_fields, bucket or num_live, bucket or num_reqs)
        blocks = RowBlocks(
            req_idx=[work.request.req_idx for work in works],
            prefix_len=[work.kv_len for work in works],
            num_rows=[work.num_rows for work in works],
        )
        rows = pack_rows(blocks, pool, window=self.window, staging=staging, num_rows=bucket)
        host["token_ids"][:num_live] = token_ids
        host["position_ids"][:num_live] = position_ids
        host["last_rows"][:num_reqs] = last_rows
        host["hidden_idx"][:num_reqs] = blocks.req_idx
        host["hidden_idx"][num_reqs:] = pool.max_num_requests
        staged = _stage_features(features, staging, bucket or num_live)
        staging.flush()
        return DraftExtendInput(**device, rows=rows, features=staged, bucket=bucket)

    def _build_ahead(
        self, requests: Sequence[DraftRequest], path_width: int, mailbox: MailboxEnd
    ) -> tuple[DraftExtendInput, MailedPaths]:
        """Stage rows for the longest path of each request, and where its path and its tree are."""
        staging, pool = self._staging, self.pool
        num_reqs = len(requests)
        num_live = num_reqs * path_width
        bucket = bucket_of(num_live) if self.pads_rows else None
        staging.begin()
        host, device = staging.place_zeros(_extend_fields, bucket or num_live, bucket or num_reqs)
        blocks = RowBlocks(
            req_idx=[request.req_idx for request in requests],
            prefix_len=[request.kv_len for request in requests],
            num_rows=[path_width] * num_reqs,
        )
        rows = pack_rows(blocks, pool, window=self.window, staging=staging, num_rows=bucket)
        position = np.array([request.next_position for request in requests])
        host["position_ids"][:num_live] = (position[:, None] + np.arange(path_width)).ravel()
        host["hidden_idx"][:num_reqs] = blocks.req_idx
        host["hidden_idx"][num_reqs:] = pool.max_num_requests
        features = None
        if mailbox.dtype is not None and mailbox.rows is not None and self.model.input_shift:
            width = mailbox.rows.shape[-1]
            fill, staged = staging.place(features=(mailbox.dtype, (bucket or num_live, width)))
            fill["features"][num_live:] = 0  # the others come from the mailbox
            features = staged["features"]
        paths = place_paths(requests, mailbox, path_width, staging)
        staging.flush()
        inputs = DraftExtendInput(**device, rows=rows, features=features, bucket=bucket)
        return inputs, paths

    def _build_grow(
        self, requests: Sequence[DraftRequest], shapes: Sequence[TreeShape]
    ) -> DraftInput:
        """Stage what the requests' trees depend on."""
        staging, pool = self._growth_staging, self.pool
        count = len(requests)
        staging.begin()
        host, device = staging.place_zeros(
            _growth_fields, _padded(count) if self.pads_rows else count
        )
        for request, shape in zip(requests, shapes, strict=True):
            stop = request.kv_len + self.num_scratch_slots(shape)
            assert pool.holds(request.req_idx, request.kv_len, stop), "a node's slot is in the sink"
        columns = zip(*map(_growth_numbers, requests, shapes), strict=True)
        numbers = dict(zip(_GROWTH_NUMBERS, columns, strict=True))
        for name, values in numbers.items():
            host[name][:count] = values
        samplings = [request.open.sampling for request in requests]
        is_random = any([sampling.temperature > 0 for sampling in samplings])
        if is_random:
            host["temperature"][:count] = [sampling.temperature for sampling in samplings]
            host["seed"][:count] = [_signed(sampling.seed) for sampling in samplings]
        page_table = pool.stage_page_table(staging)
        staging.flush()
        return DraftInput(
            trees=GrowingTrees(
                req_idx=device["req_idx"],
                kv_len=device["kv_len"],
                node_position=device["node_position"],
                topk=device["topk"],
                num_steps=device["num_steps"],
                page_table=page_table,
                page_size=pool.page_size,
            ),
            num_nodes=device["num_nodes"],
            temperature=device["temperature"],
            seed=device["seed"],
            child_position=device["child_position"],
            bounds=TreeShape(
                num_steps=max(numbers["num_steps"]),
                topk=max(numbers["topk"]),
                num_draft_tokens=1 + max(numbers["num_nodes"]),
            ),
            is_random=is_random,
        )


# Of each request, in the order of `_growth_numbers`.
_GROWTH_NUMBERS = {
    "req_idx": torch.int32,
    "kv_len": torch.int32,
    "node_position": torch.int64,
    "topk": torch.int32,
    "num_steps": torch.int32,
    "num_nodes": torch.int32,
    "child_position": torch.int64,
}


def _growth_numbers(request: DraftRequest, shape: TreeShape) -> tuple[int, ...]:
    return (
        request.req_idx,
        request.kv_len,
        request.next_position,
        shape.topk,
        shape.num_steps,
        shape.num_draft_tokens - 1,
        len(request.tokens),
    )


def _growth_fields(num_reqs: int) -> Fields:
    """Return what a growth reads of each of its requests."""
    dtypes = {**_GROWTH_NUMBERS, "temperature": torch.float32, "seed": torch.int64}
    return {name: (dtype, (num_reqs,)) for name, dtype in dtypes.items()}


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
        self._on_host: list[NDArray[np.int32]] = []
        if not self._is_cpu:
            size = max_batch * (1 + 3 * (MAX_TREE_NODES - 1) + 1 + MAX_PATH)
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


def _parts(works: Sequence[ExtendWork], max_rows: int) -> list[list[ExtendWork]]:
    """Cut works into parts of at most so many rows each, in order; the last one may be empty."""
    parts: list[list[ExtendWork]] = [[]]
    num_rows = 0
    for work in works:
        num_rows += work.num_rows
        if num_rows > max_rows and parts[-1]:
            parts.append([])
            num_rows = work.num_rows
        parts[-1].append(work)
    return parts


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
    """Yield the rows of all parts; those of a batch, which follow each other, at once."""
    _, data, first, stop = parts[0]
    for part in parts[1:]:
        if part.data is not data or part.first != stop:
            yield data[first:stop]
            data, first = part.data, part.first
        stop = part.stop
    yield data[first:stop]
