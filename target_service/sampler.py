"""Sample the target's token at every node, by the node's own path.

Order: logit bias, penalties, min_new_tokens mask, the grammar's mask; then temperature, filters and
Gumbel noise in the sampling kernels. The result is a function of (logits, parameters, seed,
absolute position, and what the node's own path has) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.grammar.threads import MatcherThreads
from shared.kernels.penalties import (
    Penalties,
    apply_logit_bias,
    apply_min_new_tokens,
    apply_penalties,
)
from shared.kernels.sampling import finite_rows, sample
from shared.kernels.token_mask import apply_token_masks
from shared.step.packing import to_device
from shared.step.staging import Fields, Staging
from target_service.nodes import SampledNodes
from target_service.phases import BiasInput, ForbiddenInput, MaskInput, SamplingInput
from target_service.request import TargetRequest

# What stays the same from round to round of a request.
_PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),  # bit pattern of the unsigned seed
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("has_filters", np.bool_),
        ("has_penalties", np.bool_),
        ("has_bias", np.bool_),
        ("may_end_at", np.int64),  # first position at which a stop id may be sampled
    ]
)


class Sampler:
    """Sampling state of the requests that hold a row of the page table.

    Args:
        max_num_requests: Rows of the tables, which are indexed by req_idx.
    """

    def __init__(self, *, max_num_requests: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_requests, vocab_size)
        self._device = device
        self._parameters = np.zeros(max_num_requests, dtype=_PARAMETERS)
        self._prompt_mask: torch.Tensor | None = None  # [max_num_requests, V] bool
        self._output_counts: torch.Tensor | None = None  # [max_num_requests, V] i32
        self._threads = MatcherThreads()

    @property
    def vocab_size(self) -> int:
        return self._shape[1]

    def start(self, request: TargetRequest) -> None:
        """Note the parameters, and count the tokens, of a request that was just admitted."""
        sampling, stopping = request.open.sampling, request.open.stopping
        self._parameters[request.req_idx] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            np.uint64(sampling.seed).view(np.int64),
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.temperature > 0
            and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0),
            sampling.has_penalties,
            bool(sampling.logit_bias),
            request.open.num_prompt_tokens + stopping.min_new_tokens
            if stopping.stop_token_ids
            else 0,
        )
        if not sampling.has_penalties:
            return
        if self._prompt_mask is None:
            self._prompt_mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        tokens = np.array(request.tokens, dtype=np.int64)
        prompt = np.unique(tokens[: request.open.num_prompt_tokens])
        prompt_mask = self._prompt_mask[request.req_idx].zero_()
        # Not by an assignment: torch would copy the `True` to the device, and wait for that.
        prompt_mask.index_fill_(0, to_device(prompt, self._device), value=True)
        assert self._output_counts is not None
        self._output_counts[request.req_idx] = 0
        self.count([(request, request.tokens[request.open.num_prompt_tokens :])])

    def count(self, committed: Iterable[tuple[TargetRequest, Sequence[int]]]) -> None:
        """Count committed output tokens, the bonus included, of requests with penalties."""
        if self._output_counts is None:
            return  # nobody has had any
        cells = [
            request.req_idx * self._shape[1] + np.array(token_ids, dtype=np.int64)
            for request, token_ids in committed
            if request.open.sampling.has_penalties and token_ids
        ]
        if not cells:
            return
        index = to_device(np.concatenate(cells), self._device)
        ones = torch.ones_like(index, dtype=torch.int32)
        self._output_counts.view(-1).index_add_(0, index, ones)

    def prepare(self, nodes: SampledNodes, staging: Staging, num_rows: int) -> SamplingInput:
        """Lay out what the sampling of these nodes needs; host work only.

        Args:
            staging: Between its `begin` and its `flush`; what every row has is placed first.
            num_rows: Of the nodes and of padding, which is greedy.
        """
        per_tree = self._parameters[nodes.req_idx]
        per_row = per_tree[nodes.tree]
        host, device = staging.place_zeros(sampling_fields, num_rows)
        for name, array in host.items():
            array[: len(per_row)] = per_row[name]
        return SamplingInput(
            **device,
            has_filters=bool(per_tree["has_filters"].any()),
            bias=self._biases(nodes, per_tree, staging),
            penalties=self._penalties(nodes, per_row, staging),
            forbidden=self._forbidden(nodes, per_tree, staging),
            masks=self._masks(nodes, staging),
        )

    def sample(
        self, logits: torch.Tensor, inputs: SamplingInput, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's token at each row, and whether its logits are numbers.

        Args:
            logits: [L, V] f32, raw; rows of the trees in order.
            position: [L] i64, absolute position of the token being sampled.
        Returns: [L] i32, and [L] u8: 0 where a raw logit is NaN or infinite.
        Mutates: rows of `logits` with a bias, penalties, or tokens that are still forbidden.
        """
        is_finite = torch.empty(len(logits), dtype=torch.uint8, device=logits.device)
        if inputs.edits_logits:
            is_finite.copy_(finite_rows(logits))
        if inputs.bias is not None:
            apply_logit_bias(logits, inputs.bias.rows, inputs.bias.token_ids, inputs.bias.values)
        if inputs.penalties is not None:
            assert self._prompt_mask is not None and self._output_counts is not None
            apply_penalties(logits, inputs.penalties, self._prompt_mask, self._output_counts)
        if inputs.forbidden is not None:
            apply_min_new_tokens(logits, inputs.forbidden.rows, inputs.forbidden.token_ids)
        if inputs.masks is not None:
            apply_token_masks(logits, inputs.masks.rows, inputs.masks.masks)
        tokens = sample(
            logits,
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.seed,
            position,
            has_filters=inputs.has_filters,
            # What bias, penalties and masks make infinite is as the client wants it.
            is_finite=None if inputs.edits_logits else is_finite,
        )
        return tokens, is_finite

    def _biases(self, nodes: SampledNodes, per_tree: NDArray, staging: Staging) -> BiasInput | None:
        if not per_tree["has_bias"].any():
            return None
        rows, ids, values = [], [], []
        for request, first, count in zip(
            nodes.requests, nodes.first_node.tolist(), nodes.num_nodes.tolist(), strict=True
        ):
            bias = request.open.sampling.logit_bias
            if bias:
                rows.append(np.repeat(np.arange(first, first + count), len(bias)))
                ids.append(np.tile([token_id for token_id, _ in bias], count))
                values.append(np.tile([value for _, value in bias], count))
        return BiasInput(
            rows=staging.add(np.concatenate(rows).astype(np.int64)),
            token_ids=staging.add(np.concatenate(ids).astype(np.int64)),
            values=staging.add(np.concatenate(values).astype(np.float32)),
        )

    def _forbidden(
        self, nodes: SampledNodes, per_tree: NDArray, staging: Staging
    ) -> ForbiddenInput | None:
        """Return (row, stop id) pairs of the nodes whose output may not end yet."""
        least_depth = per_tree["may_end_at"] - (nodes.seq_len + 1)  # from here on they may
        if not (least_depth > 0).any():
            return None
        early = np.flatnonzero(nodes.depth < least_depth[nodes.tree])
        stop_ids = [
            nodes.requests[tree].open.stopping.stop_token_ids for tree in nodes.tree[early].tolist()
        ]
        return ForbiddenInput(
            rows=staging.add(np.repeat(early, [len(ids) for ids in stop_ids])),
            token_ids=staging.add(np.array([i for ids in stop_ids for i in ids], dtype=np.int64)),
        )

    def _masks(self, nodes: SampledNodes, staging: Staging) -> MaskInput | None:
        """Return what the grammars of the nodes' own paths allow after each."""
        trees = [t for t, request in enumerate(nodes.requests) if request.matcher is not None]
        if not trees:
            return None
        spans = [
            slice(first, first + count)
            for first, count in zip(
                nodes.first_node[trees].tolist(), nodes.num_nodes[trees].tolist(), strict=True
            )
        ]
        rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        masks = torch.empty(
            (len(rows), -(-self.vocab_size // 32)),
            dtype=torch.int32,
            pin_memory=self._device.type == "cuda",
        )
        parts = masks.split([span.stop - span.start for span in spans])

        def fill(tree: int, span: slice, part: torch.Tensor) -> list[int]:
            matcher = nodes.requests[tree].matcher
            assert matcher is not None
            tokens, parents = nodes.token_ids[span], nodes.parent_index[span]
            shut = matcher.fill_masks(part, tokens.tolist(), parents.tolist())
            return [span.start + node for node in shut]

        shut = self._threads.map(fill, trees, spans, parts)
        return MaskInput(
            rows=staging.add(rows),
            masks=masks.to(self._device, non_blocking=True),
            shut=[row for rows in shut for row in rows],
        )

    def _penalties(
        self, nodes: SampledNodes, per_row: NDArray, staging: Staging
    ) -> Penalties | None:
        """Return the rows of the requests that ask for it; the tables hold node 0 already."""
        if not per_row["has_penalties"].any():
            return None
        rows = np.flatnonzero(per_row["has_penalties"])
        path = nodes.path[rows]
        is_on_path = np.arange(path.shape[1]) <= nodes.depth[rows, None]
        return Penalties(
            rows=staging.add(rows),
            req_idx=staging.add(nodes.req_idx[nodes.tree[rows]]),
            path_token_ids=staging.add(np.where(is_on_path, nodes.token_ids[path], -1)[:, 1:]),
            repetition=staging.add(per_row["repetition"][rows]),
            presence=staging.add(per_row["presence"][rows]),
            frequency=staging.add(per_row["frequency"][rows]),
        )


def sampling_fields(num_rows: int) -> Fields:
    """Return the fields that every row of a SamplingInput has."""
    shape = (num_rows,)
    return {
        "temperature": (torch.float32, shape),
        "top_k": (torch.int32, shape),
        "top_p": (torch.float32, shape),
        "min_p": (torch.float32, shape),
        "seed": (torch.int64, shape),
    }
