"""Run the target: extend -> verify. Only a verify touches committed KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from shared.kernels.mailbox_trees import TakenTrees
from shared.kernels.tree_attention import few_rows_of
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES, FeatureSpec
from shared.models.config import ModelConfig
from shared.models.eagle3 import FeatureProjection
from shared.models.llama import CausalLM
from shared.step.buckets import row_buckets_up_to
from shared.step.graphs import GraphCache
from shared.step.read_back import PendingRead, ReadBack, ReadClock
from shared.step.staging import Staging
from target_service.batch import StepBatch, build_batch
from target_service.phases import (
    ExtendInput,
    ExtendOutput,
    PathOutputs,
    StepOutputs,
    VerifyInput,
    VerifyOutput,
)
from target_service.sampler import Sampler
from target_service.scheduler import StepPlan
from target_service.tree_source import TreeSource
from target_service.verify import PostPaths, Verifier
from target_service.verify_input import build_verify

# What a row of a step and its tree take in staging, and what else there is.
_BYTES_PER_ROW = 512
_BYTES_PER_TREE = 3 * 8 * MAX_TREE_NODES + 64
_STAGED_BYTES = 4 << 20


class TargetRunner:
    """The target model over its KV pool.

    Args:
        features: What to capture for a draft.
        max_batch_rows: Of a step.
        projection: Of captured rows; None: they are sent as they are.
        is_quantized: The model's weights are.
        newest_slot: [max_num_requests + 1] i64, logical slot of the newest token of every request
            as far as the device has come, by row of the page table; the last is a spare.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        features: FeatureSpec,
        *,
        max_batch_rows: int,
        projection: FeatureProjection | None,
        is_quantized: bool,
    ) -> None:
        self.model = model
        self.pool = pool
        self.sampler = Sampler(
            max_num_requests=pool.max_num_requests,
            vocab_size=model.config.vocab_size,
            device=pool.device,
        )
        self.features = features
        self._projection = projection
        # A step of one tree alone may have more rows than the others.
        self.row_counts = row_buckets_up_to(
            max(max_batch_rows, MAX_TREE_NODES), is_quantized=is_quantized
        )
        """What rows are padded to, if they are padded."""
        num_bytes = self.row_counts[-1] * _BYTES_PER_ROW + _STAGED_BYTES
        self.extend_staging = Staging(pool.device, num_bytes)
        num_bytes = self.row_counts[-1] * _BYTES_PER_ROW + _STAGED_BYTES
        num_bytes += pool.max_num_requests * _BYTES_PER_TREE
        self.verify_staging = Staging(pool.device, num_bytes)
        # The newest token of every request, by row of the page table; the last is a spare.
        num_roots = pool.max_num_requests + 1
        self._roots = torch.zeros(num_roots, dtype=torch.int64, device=pool.device)
        self.newest_slot = torch.zeros_like(self._roots)
        self.step_clock = ReadClock()
        """When the last step ended that was read."""
        self.graphs = GraphCache(pool.device)
        self.pads_rows = self.graphs.is_capturing  # then steps are padded up to buckets
        self.few_rows = _few_rows_of(model.config)
        """Rows of each request, at most, of a step that is captured apart; 0: no step is."""
        self.padded, self._captured = self._place_rows()
        """Where padded forwards leave their rows, and verifies look for them."""
        self._verifier = Verifier(
            model,
            pool,
            self.sampler,
            self.graphs,
            roots=self._roots,
            newest_slot=self.newest_slot,
            extended=self.padded,
        )

    def _place_rows(self) -> tuple[ExtendOutput, torch.Tensor | None]:
        """Return memory for the rows of the largest step, and for captured ones to project."""
        config, num_rows = self.model.config, self.row_counts[-1]

        def rows(width: int) -> torch.Tensor | None:
            shape = (num_rows, width)
            if not width:
                return None
            return torch.zeros(shape, dtype=self.model.dtype, device=self.pool.device)

        hidden = rows(config.hidden_size)
        assert hidden is not None
        is_projected = self._projection is not None
        captured_width = config.hidden_size * len(self.features.layer_ids) if is_projected else 0
        features = rows(self.features.width)
        expert_ids = self._expert_ids(num_rows)
        padded = ExtendOutput(hidden=hidden, features=features, expert_ids=expert_ids)
        return padded, rows(captured_width)

    def _expert_ids(self, num_rows: int) -> torch.Tensor | None:
        """Return memory for the experts of rows; None if the model has none."""
        config, experts = self.model.config, self.model.config.experts
        if experts is None:
            return None
        num_rows = -(-num_rows // 4) * 4  # every layer's begin at 16 bytes, as memory of their own
        shape = (experts.index_of(config.num_layers), num_rows, experts.num_experts_per_tok)
        return torch.zeros(shape, dtype=torch.int32, device=self.pool.device)

    @property
    def window(self) -> int:
        """Return the sliding window of the model's attention, tokens; 0 = none."""
        return self.model.config.sliding_window

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the row counts that steps are padded to; empty: they are not padded."""
        return self.row_counts if self.pads_rows else ()

    def pack(self, plan: StepPlan, source: TreeSource) -> StepBatch:
        """Pack the rows of a step, and start to bring them over."""
        return build_batch(
            plan,
            self.pool,
            self.extend_staging,
            source,
            window=self.window,
            buckets=self.buckets,
            few_rows=self.few_rows,
        )

    def take_trees(self, batch: StepBatch, source: TreeSource) -> TakenTrees | None:
        """Let the device take the first trees of a step from the mailbox; None: all are here.

        Mutates: their rows of the step.
        """
        if batch.mailbox_trees is None:
            return None
        assert batch.trees is not None
        num_rows = batch.trees.num_device_nodes
        return source.take_trees(
            batch.mailbox_trees, batch.extend, self.newest_slot, num_rows=num_rows
        )

    def compute(self, batch: StepBatch) -> ExtendOutput:
        """Compute the rows of a step, and the features of it that some request keeps.

        Returns: Valid until the next step.
        Mutates: KV slots of the rows, all of them past their request's seq_len.
        """
        extended = self.extend(batch.extend)
        if extended.features is None or not batch.wants_features:
            return replace(extended, features=None)
        return self.project(extended, batch.extend.bucket)

    def extend(self, inputs: ExtendInput) -> ExtendOutput:
        """Compute rows of new tokens; features are as captured.

        Returns: Valid until the next step.
        Mutates: KV slots of the rows, all of them past their request's seq_len.
        """
        if inputs.bucket is None:
            num_rows = len(inputs.token_ids) if inputs.wants_experts else 0
            return self._forward(inputs, self._expert_ids(num_rows) if num_rows else None)
        output: ExtendOutput = self.graphs.run(
            ("extend", inputs.bucket, inputs.rows.attention.most_rows),
            lambda: self._forward_padded(inputs),
            (inputs.token_ids, inputs.position_ids, inputs.root_idx, *inputs.rows.tensors),
        )
        return output

    def project(self, extended: ExtendOutput, bucket: int | None) -> ExtendOutput:
        """Replace captured rows by those that a draft gets, [T, features.width]."""
        captured = extended.features
        if self._projection is None or captured is None:
            return extended
        if bucket is None:
            return replace(extended, features=self._project(captured))
        rows: torch.Tensor = self.graphs.run(
            ("project", bucket), lambda: self._project_padded(captured), (captured,)
        )
        return replace(extended, features=rows)

    def bring_page_table(self) -> None:
        """Bring the page table on the device up to date, so that the next step need not."""
        if self.pool.is_page_table_behind:
            self.extend_staging.begin()
            self.pool.stage_page_table(self.extend_staging)
            self.extend_staging.flush()

    @torch.inference_mode()
    def _forward(self, inputs: ExtendInput, expert_ids: torch.Tensor | None) -> ExtendOutput:
        rows = inputs.rows.forward_input(inputs.token_ids, inputs.position_ids, self.pool)
        output = self.model.forward(
            rows,
            capture_layers=self.features.layer_ids,
            capture_kv=self.features.kv_layer_ids,
            roots=self._roots,
            root_idx=inputs.root_idx,
            expert_ids=expert_ids,
        )
        features = output.captured
        if self.features.width and not self.features.layer_ids:
            features = output.hidden
        if output.stored is not None:
            features = torch.cat([output.stored, output.hidden], dim=1)
        return ExtendOutput(hidden=output.hidden, features=features, expert_ids=expert_ids)

    def _forward_padded(self, inputs: ExtendInput) -> ExtendOutput:
        """Do what `_forward` does; leave its rows where the next graphs look for them."""
        output = self._forward(inputs, self.padded.expert_ids)
        num_rows = len(output.hidden)
        features = self.padded.features if self._projection is None else self._captured
        if output.features is not None:
            assert features is not None
            features = features[:num_rows].copy_(output.features)
        hidden = self.padded.hidden[:num_rows].copy_(output.hidden)
        return ExtendOutput(hidden=hidden, features=features, expert_ids=output.expert_ids)

    @torch.inference_mode()
    def _project(self, captured: torch.Tensor) -> torch.Tensor:
        """Return the rows that a draft gets, [T, features.width]."""
        assert self._projection is not None
        return self._projection(captured)

    def _project_padded(self, captured: torch.Tensor) -> torch.Tensor:
        assert self.padded.features is not None
        return self.padded.features[: len(captured)].copy_(self._project(captured))

    def verify_trees(
        self,
        batch: StepBatch,
        taken: TakenTrees | None,
        extended: ExtendOutput,
        source: TreeSource,
    ) -> VerifyOutput | None:
        """Lay out how a step's trees are sampled and walked, and do what `verify` does; None: the
        step samples nothing.

        Args:
            taken: Of `take_trees`.
        """
        if batch.trees is None:
            return None
        inputs = build_verify(
            batch,
            batch.trees,
            self.pool,
            self.verify_staging,
            self.sampler,
            source,
            buckets=self.buckets,
            taken=taken,
        )
        return self.verify(inputs, extended, source.post_paths)

    def verify(self, inputs: VerifyInput, extended: ExtendOutput, post: PostPaths) -> VerifyOutput:
        """Sample at every node, walk each tree, post accepted paths and move their KV; launches
        only.

        Returns: Valid until the next step.
        Mutates: KV slots [seq_len, seq_len + accept_length) of each request, and its root on the
            device.
        """
        return self._verifier.run(inputs, extended, post)

    @torch.inference_mode()
    def start_read(
        self, batch: StepBatch, extended: ExtendOutput, verified: VerifyOutput | None
    ) -> PendingRead:
        """Start to bring a step's result to the host: the accepted paths, and the features of its
        chains. The one read of a step: shapes are fixed, so nothing else waits for the device.
        """
        read = ReadBack(self.pool.device)
        if verified is not None:
            walk = verified.walk
            read.add("accept_index", walk.accept_index)
            read.add("accept_length", walk.accept_length)
            _read_taken(read, batch, verified)
            verified.node_outputs.read(read, walk.path_rows)
        for i, chain in enumerate(batch.chains):
            if chain.work.request.keeps_rows:
                assert extended.features is not None
                count = chain.work.stop - chain.work.start
                rows = extended.features[chain.first_row : chain.first_row + count]
                read.add(f"chain {i}", rows)
        return read.start()

    def finish_read(self, batch: StepBatch, pending: PendingRead) -> StepOutputs:
        """Wait for what `start_read` started."""
        arrays = pending.wait()
        self.step_clock.note(pending)
        chain_features = [
            arrays.pop(name).view(np.uint8) if name in arrays else None
            for name in (f"chain {i}" for i in range(len(batch.chains)))
        ]
        if "features" in arrays:
            arrays["features"] = arrays["features"].view(np.uint8)
        # Whatever was registered has a field there, or this raises: nothing is dropped silently.
        paths = PathOutputs(**arrays) if arrays else None
        return StepOutputs(paths=paths, chain_features=chain_features)


def _read_taken(read: ReadBack, batch: StepBatch, verified: VerifyOutput) -> None:
    """Read how many nodes trees from the mailbox have; all of them if some request wants that."""
    if verified.num_nodes is None:
        return
    read.add("num_nodes", verified.num_nodes)
    token_ids, parents, trees = verified.taken_token_ids, verified.taken_parents, batch.trees
    assert token_ids is not None and parents is not None and trees is not None
    if any([request.open.wants_trees for request in trees.requests[: trees.num_on_device]]):
        read.add("taken_token_ids", token_ids)
        read.add("taken_parents", parents)


def _few_rows_of(config: ModelConfig) -> int:
    if config.latent is not None:
        return 0
    return min(few_rows_of(heads, shape.num_heads) for heads, shape in config.head_shapes)
