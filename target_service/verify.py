"""Sample the target's token at every node, walk each tree, and move the KV of accepted paths.

Where graphs are captured, all of it is one graph per bucket of logit rows, with the filters of
sampling and without: trees are padded to 64 nodes, and their number to what the bucket or the page
table can have. What few requests ask for (penalties, a bias, tokens that may not be sampled yet,
logprobs) has other shapes in every step, and is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from shared.kernels.accept_walk import accept_walk
from shared.kernels.logprobs import chosen_logprobs
from shared.kernels.mailbox_trees import num_nodes_of
from shared.kernels.move_kv import move_paths
from shared.kv.pool import KVPool
from shared.messages.routed_experts import expert_id_bytes
from shared.models.llama import CausalLM
from shared.step.graphs import GraphCache
from target_service.phases import ExtendOutput, NodeOutputs, VerifyInput, VerifyOutput
from target_service.sampler import Sampler

# Rows whose logits are in memory at once: 0.3 GB of a vocabulary of 128k.
_LOGIT_ROWS = 512

PostPaths = Callable[[VerifyInput, VerifyOutput], None]
"""Lets the device post accepted paths; launches only."""


class Verifier:
    """Launches what follows a forward.

    Args:
        roots, newest_slot: [max_num_requests + 1] i64, the newest token of every request and its
            logical slot, by row of the page table; the last is a spare.
        extended: Where padded forwards leave their rows, as many as a step has at most.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        sampler: Sampler,
        graphs: GraphCache,
        *,
        roots: torch.Tensor,
        newest_slot: torch.Tensor,
        extended: ExtendOutput,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._graphs = graphs
        self._roots = roots
        self._newest_slot = newest_slot
        self._extended = extended

    def run(self, inputs: VerifyInput, extended: ExtendOutput, post: PostPaths) -> VerifyOutput:
        """Sample, walk, post what is accepted, move its KV; launches only.

        Args:
            extended: What the forward computed.
        Returns: Valid until the next step.
        Mutates: KV slots [seq_len, seq_len + accept_length) of each request, and its root on the
            device, and where that is.
        """
        posts = inputs.mailbox_paths is not None
        key = ("verify", inputs.bucket, inputs.sampling.has_filters, posts)
        if inputs.bucket is None:
            verified = self._launch(inputs, extended, post)
        elif inputs.is_rare or (self._graphs.is_serving and key not in self._graphs):
            # A capture computes twice, and paths of requests can be moved but once.
            verified = self._launch(inputs, self._extended, post)
        else:
            verified = self._graphs.run(
                key, lambda: self._launch(inputs, self._extended, post), inputs.tensors
            )
        if inputs.wants_experts:  # few do: outside of graphs
            outputs = verified.node_outputs
            outputs = outputs.beside("routed_experts", self._experts(inputs, extended))
            verified = replace(verified, node_outputs=outputs)
        return _of_step(inputs, verified)

    @torch.inference_mode()
    def _experts(self, inputs: VerifyInput, extended: ExtendOutput) -> torch.Tensor:
        """Return the experts of the logit rows, [L, layers with experts, top_k], as sent."""
        experts, ids = self._model.config.experts, extended.expert_ids
        assert experts is not None and ids is not None
        # Signed, of which torch has all operations: the bits are those of u16.
        is_byte = expert_id_bytes(experts.num_experts) == 1
        ids = ids.index_select(1, inputs.logit_rows).to(torch.uint8 if is_byte else torch.int16)
        return ids.transpose(0, 1).contiguous()

    @torch.inference_mode()
    def _launch(self, inputs: VerifyInput, extended: ExtendOutput, post: PostPaths) -> VerifyOutput:
        outputs = self._sampled(inputs, inputs.gather(extended.hidden))
        if extended.features is not None:
            outputs.register("features", inputs.gather(extended.features))
        walk = accept_walk(
            inputs.token_ids,
            inputs.parent_index,
            inputs.node_rows,
            outputs["token_ids"],
            inputs.seq_len,
            inputs.req_idx,
            self._pool.page_table,
            self._roots,
            self._newest_slot,
            page_size=self._pool.page_size,
            max_depth=inputs.max_depth,
        )
        takes_trees = inputs.mailbox_paths is not None
        num_nodes = num_nodes_of(inputs.parent_index) if takes_trees else None
        verified = VerifyOutput(node_outputs=outputs, walk=walk, num_nodes=num_nodes)
        post(inputs, verified)
        if inputs.may_move_kv:
            move_paths(self._pool.cache_groups, walk.move_src, walk.move_dst)
        return verified

    def _sampled(self, inputs: VerifyInput, hidden: torch.Tensor) -> NodeOutputs:
        """Return tokens, whether logits are numbers, and logprobs of the rows [L, h]."""
        outputs = NodeOutputs(len(hidden))
        if inputs.is_rare:
            self._sample_rare(inputs, self._model.logits(hidden), outputs)
            return outputs
        tokens, is_finite = [], []
        for first in range(0, len(hidden), _LOGIT_ROWS):
            part = slice(first, first + _LOGIT_ROWS)
            sampled = self._sampler.sample(
                self._model.logits(hidden[part]),
                inputs.sampling.part(part),
                inputs.position[part],
            )
            tokens.append(sampled[0])
            is_finite.append(sampled[1])
        outputs.register("token_ids", _joined(tokens))
        outputs.register("is_finite", _joined(is_finite))
        return outputs

    def _sample_rare(self, inputs: VerifyInput, logits: torch.Tensor, outputs: NodeOutputs) -> None:
        """Register what is sampled of logits [L, V] by the rules of all requests, and logprobs."""
        raw, raw_rows = logits, inputs.logprob_rows
        if raw_rows is not None and inputs.sampling.edits_logits:
            raw = logits[raw_rows]
            raw_rows = torch.arange(len(raw), device=raw.device)
        tokens, is_finite = self._sampler.sample(logits, inputs.sampling, inputs.position)
        outputs.register("token_ids", tokens)
        outputs.register("is_finite", is_finite)
        if inputs.logprob_rows is None:
            return
        assert raw_rows is not None
        found = chosen_logprobs(
            raw, raw_rows, tokens[inputs.logprob_rows], num_top=inputs.num_top_logprobs
        )
        # Rows that did not ask have 0.
        for name, values in (
            ("logprobs", found.chosen),
            ("top_logprobs", found.top),
            ("top_ids", found.top_ids),
        ):
            table = values.new_zeros((len(tokens), *values.shape[1:]))
            outputs.register(name, table.index_copy_(0, inputs.logprob_rows, values))


def _of_step(inputs: VerifyInput, verified: VerifyOutput) -> VerifyOutput:
    """Return what belongs to the trees of the step, without padding."""
    walk, outputs = verified.walk, verified.node_outputs
    batch, num_steps = inputs.num_trees, inputs.path_width
    if walk.accept_index.shape != (batch, num_steps):
        walk = replace(
            walk,
            accept_index=walk.accept_index[:batch, :num_steps],
            accept_length=walk.accept_length[:batch],
            path_rows=walk.path_rows[:batch, :num_steps].contiguous(),
        )
    if not inputs.wants_features:
        outputs = outputs.without("features")
    count = inputs.num_device_trees
    if not count or verified.num_nodes is None:
        return VerifyOutput(node_outputs=outputs, walk=walk)
    return VerifyOutput(
        node_outputs=outputs,
        walk=walk,
        num_nodes=verified.num_nodes[:count],
        taken_token_ids=inputs.token_ids[:count],
        taken_parents=inputs.parent_index[:count],
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
