"""Run the target: extend -> verify -> commit. Only `commit_kv` touches committed KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.accept import accept_walk
from shared.buckets import ROW_BUCKETS
from shared.graphs import GraphCache
from shared.kernels.move_kv import move_kv
from shared.kv.pool import KVPool
from shared.models.llama import CausalLM
from shared.packing import pack_rows, to_device
from shared.staging import Staging
from shared.topk import stable_topk
from shared.types import FeatureSpec
from target_service.batch import SampledTree, StepBatch
from target_service.phases import (
    ExtendInput,
    ExtendOutput,
    NodeOutputs,
    VerifyInput,
    VerifyOutput,
)
from target_service.sampler import Sampler

# Far more than a step of trees takes; longer steps go round it.
STAGING_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOutputs:
    """What each request's accepted path carries, on the host. [B, D + 1, ...] each; padding past
    it.

    Args:
        accept_index: Nodes of the path, root first, -1 padded.
        accept_length: [B], bonus included.
        token_ids: The target's token at each path node.
        logprobs: Of those tokens; None when nobody asked.
        top_ids, top_logprobs: [B, D + 1, num_top].
        features: [B, D + 1, row_bytes] u8; None when the target captures none.
    """

    accept_index: NDArray[np.int64]
    accept_length: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    features: NDArray[np.uint8] | None = None


class TargetRunner:
    """The target model over its KV pool.

    Args:
        features: What to capture for a draft.
        pads_rows: Pad steps up to buckets; None: where graphs are captured.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        sampler: Sampler,
        features: FeatureSpec,
        *,
        pads_rows: bool | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self.features = features
        self.staging = Staging(pool.device, STAGING_BYTES)
        # The newest token of every request, by row of the page table.
        self._roots = torch.zeros(pool.max_num_requests, dtype=torch.int64, device=pool.device)
        self._graphs = GraphCache(pool.device)
        self.pads_rows = self._graphs.is_capturing if pads_rows is None else pads_rows

    @torch.inference_mode()
    def extend(self, inputs: ExtendInput) -> ExtendOutput:
        """Compute rows of new tokens.

        Returns: Valid until the next step.
        Mutates: KV slots of the rows, all of them past their request's seq_len.
        """
        if inputs.bucket is None:
            return self._forward(inputs)
        output: ExtendOutput = self._graphs.run(
            inputs.bucket,
            lambda: self._forward(inputs),
            (inputs.token_ids, inputs.position_ids, *inputs.rows.tensors),
        )
        return output

    def capture(self, *, window: int, progress: Callable[[float], None]) -> None:
        """Make the graph of every bucket, from rows of padding. Mutates: the sink page."""
        for done, bucket in enumerate(ROW_BUCKETS):
            progress(done / len(ROW_BUCKETS))
            self.staging.begin()
            nothing = np.zeros(bucket, dtype=np.int64)
            inputs = ExtendInput(
                token_ids=self.staging.add(nothing),
                position_ids=self.staging.add(nothing),
                rows=pack_rows([], self.pool, window=window, staging=self.staging, num_rows=bucket),
                bucket=bucket,
            )
            self.staging.flush()
            self.extend(inputs)

    def _forward(self, inputs: ExtendInput) -> ExtendOutput:
        output = self.model.forward(
            inputs.token_ids,
            inputs.position_ids,
            self.pool,
            inputs.rows.attention,
            inputs.rows.slot_mapping,
            capture_layers=self.features.layer_ids,
            roots=self._roots,
        )
        features = output.captured
        if self.features.width and not self.features.layer_ids:
            features = output.hidden
        return ExtendOutput(hidden=output.hidden, features=features)

    @torch.inference_mode()
    def verify(
        self, inputs: VerifyInput, extended: ExtendOutput, trees: Sequence[SampledTree]
    ) -> VerifyOutput:
        """Sample at every node and walk each tree. Mutates: the requests' roots on the device."""
        logits = self.model.logits(extended.hidden[inputs.logit_rows])  # [L, V]
        tokens = self.sampler.sample(logits, trees, inputs.position)  # [L]
        outputs = NodeOutputs(len(tokens))
        outputs.register("token_ids", tokens)
        if extended.features is not None:
            outputs.register("features", extended.features[inputs.logit_rows])
        if inputs.logprob_rows is not None:
            self._register_logprobs(outputs, logits, tokens, inputs)
        walk = accept_walk(
            inputs.token_ids, inputs.parent_index, tokens[inputs.node_rows], inputs.max_depth
        )
        last_node = walk.accept_index.gather(1, walk.accept_length[:, None] - 1)
        last_row = inputs.node_rows.gather(1, last_node).squeeze(1)
        self._roots.index_copy_(0, inputs.req_idx, tokens[last_row])
        return VerifyOutput(node_outputs=outputs, walk=walk)

    @torch.inference_mode()
    def commit_kv(self, batch: StepBatch, verified: VerifyOutput) -> None:
        """Move the KV of each accepted path to the front of its round's slots.

        Mutates: KV slots [seq_len, seq_len + accept_length) of each request.
        """
        if all(tree.is_chain for tree in batch.trees):
            return  # every path is in place
        pool, page_size = self.pool, self.pool.page_size
        node = verified.walk.accept_index  # [B, D + 1]
        seq_len = to_device(
            np.array([[tree.seq_len] for tree in batch.trees], dtype=np.int64), pool.device
        )
        req_idx = to_device(
            np.array([tree.request.req_idx for tree in batch.trees], dtype=np.int64), pool.device
        )
        table = pool.page_table[req_idx].long()  # [B, max_pages_per_req]
        step = torch.arange(node.shape[1], device=pool.device).expand_as(node)
        is_moved = node > step

        def slot(logical: torch.Tensor) -> torch.Tensor:
            page = table.gather(1, logical // page_size)
            slots = page * page_size + logical % page_size
            return torch.where(is_moved, slots, 0).flatten().to(torch.int32)

        src = slot(torch.where(is_moved, seq_len + node, 0))
        dst = slot(torch.where(is_moved, seq_len + step, 0))
        move_kv([*pool.k, *pool.v], src, dst)

    @torch.inference_mode()
    def read_paths(self, batch: StepBatch, verified: VerifyOutput) -> PathOutputs:
        """Gather every node-indexed output along the accepted paths and bring it to the host.

        The one read of a step's result: shapes are fixed, so nothing else waits for the device.
        """
        assert batch.verify is not None
        node = verified.walk.accept_index
        rows = batch.verify.node_rows.gather(1, node.clamp(min=0))  # [B, D + 1]
        gathered = {
            name: tensor.view(*rows.shape, *tensor.shape[1:])
            for name, tensor in verified.node_outputs.gather(rows.flatten()).items()
        }
        if "features" in gathered:
            gathered["features"] = _as_bytes(gathered["features"])
        host = {name: tensor.cpu().numpy() for name, tensor in gathered.items()}
        # Whatever was registered has a field there, or this raises: nothing is dropped silently.
        return PathOutputs(
            accept_index=node.cpu().numpy(),
            accept_length=verified.walk.accept_length.cpu().numpy(),
            **host,
        )

    def read_features(self, extended: ExtendOutput, first_row: int, count: int) -> NDArray:
        """Return feature rows [first_row, first_row + count) as bytes, [count, row_bytes] u8."""
        assert extended.features is not None
        return _as_bytes(extended.features[first_row : first_row + count]).cpu().numpy()

    def _register_logprobs(
        self,
        outputs: NodeOutputs,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        inputs: VerifyInput,
    ) -> None:
        """Register the raw-logit logprobs of the rows that asked; others stay 0."""
        rows = inputs.logprob_rows
        assert rows is not None
        table = torch.log_softmax(logits[rows], dim=-1)  # [P, V]
        logprobs = table.new_zeros(len(tokens))
        logprobs[rows] = table.gather(1, tokens[rows, None]).squeeze(1)
        outputs.register("logprobs", logprobs)
        # The most that anybody in the batch asked for: ties must not depend on it.
        num_top = min(inputs.num_top_logprobs, table.shape[1])
        top_logprobs = table.new_zeros((len(tokens), num_top))
        top_ids = torch.zeros_like(top_logprobs, dtype=torch.int64)
        if num_top:
            top_logprobs[rows], top_ids[rows] = stable_topk(table, num_top)
        outputs.register("top_logprobs", top_logprobs)
        outputs.register("top_ids", top_ids)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View the last dimension as bytes."""
    return rows.contiguous().view(torch.uint8)
