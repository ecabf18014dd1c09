"""Sample the target's token at every node, by the node's own path.

Order: logit bias, penalties, min_new_tokens mask; then temperature, filters and Gumbel noise in the
sampling kernel. The result is a function of (logits, parameters, seed, absolute position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.penalties import apply_logit_bias, apply_min_new_tokens, apply_penalties
from shared.kernels.sampling import sample
from shared.packing import to_device
from shared.tree import tree_paths
from target_service.batch import SampledTree
from target_service.request import TargetRequest


class Sampler:
    """Sampling state of the requests that hold a row of the page table.

    Args:
        max_num_requests: Rows of the penalty tables, which are indexed by req_idx.
    """

    def __init__(self, *, max_num_requests: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_requests, vocab_size)
        self._device = device
        self._prompt_mask: torch.Tensor | None = None  # [max_num_requests, V] bool
        self._output_counts: torch.Tensor | None = None  # [max_num_requests, V] i32

    def start(self, request: TargetRequest) -> None:
        """Count the tokens of a request that was just admitted."""
        if not request.open.sampling.has_penalties:
            return
        if self._prompt_mask is None:
            self._prompt_mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        tokens = np.array(request.tokens, dtype=np.int64)
        prompt = np.unique(tokens[: request.open.num_prompt_tokens])
        self._prompt_mask[request.req_idx] = False
        self._prompt_mask[request.req_idx, to_device(prompt, self._device)] = True
        assert self._output_counts is not None
        self._output_counts[request.req_idx] = 0
        self.count(request, tokens[request.open.num_prompt_tokens :].tolist())

    def count(self, request: TargetRequest, token_ids: Sequence[int]) -> None:
        """Count committed output tokens, the bonus included."""
        if not request.open.sampling.has_penalties or not token_ids:
            return
        assert self._output_counts is not None
        ids = to_device(np.array(token_ids, dtype=np.int64), self._device)
        row = self._output_counts[request.req_idx]
        row.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def sample(
        self, logits: torch.Tensor, trees: Sequence[SampledTree], position: torch.Tensor
    ) -> torch.Tensor:
        """Return the target's token at each row.

        Args:
            logits: [L, V] f32, raw; rows of the trees in order. Not modified.
            position: [L] i64, absolute position of the token being sampled.
        Returns: [L] i64.
        """
        processed = self._process(logits, trees)
        num_nodes = [len(tree.token_ids) for tree in trees]
        params = [tree.request.open.sampling for tree in trees]

        def per_row(name: str, dtype: type) -> torch.Tensor:
            values: NDArray = np.array([getattr(p, name) for p in params], dtype=dtype)
            return to_device(np.repeat(values, num_nodes), self._device)

        seeds = np.array([p.seed for p in params], dtype=np.uint64).view(np.int64)
        return sample(
            processed,
            per_row("temperature", np.float32),
            per_row("top_k", np.int32),
            per_row("top_p", np.float32),
            per_row("min_p", np.float32),
            to_device(np.repeat(seeds, num_nodes), self._device),
            position,
            has_filters=any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params),
        ).long()

    def _process(self, logits: torch.Tensor, trees: Sequence[SampledTree]) -> torch.Tensor:
        """Apply bias, penalties and the min_new_tokens mask to a copy, if anyone asked for them."""
        biases = self._logit_biases(trees)
        forbidden = self._forbidden(trees)
        penalised = any(tree.request.open.sampling.has_penalties for tree in trees)
        if biases is None and forbidden is None and not penalised:
            return logits
        logits = logits.clone()
        if biases is not None:
            apply_logit_bias(logits, *biases)
        if penalised:
            self._penalise(logits, trees)
        if forbidden is not None:
            apply_min_new_tokens(logits, *forbidden)
        return logits

    def _logit_biases(
        self, trees: Sequence[SampledTree]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        rows, ids, values, row = [], [], [], 0
        for tree in trees:
            count, bias = len(tree.token_ids), tree.request.open.sampling.logit_bias
            if bias:
                rows.append(np.repeat(np.arange(row, row + count), len(bias)))
                ids.append(np.tile([token_id for token_id, _ in bias], count))
                values.append(np.tile([value for _, value in bias], count))
            row += count
        if not rows:
            return None
        return (
            to_device(np.concatenate(rows).astype(np.int64), self._device),
            to_device(np.concatenate(ids).astype(np.int64), self._device),
            to_device(np.concatenate(values).astype(np.float32), self._device),
        )

    def _forbidden(self, trees: Sequence[SampledTree]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (row, stop id) pairs of the nodes whose output may not end yet."""
        rows, ids, row = [], [], 0
        for tree in trees:
            stopping = tree.request.open.stopping
            sampled = tree.seq_len + 1 + tree.depth - tree.request.open.num_prompt_tokens
            early = row + np.flatnonzero(sampled < stopping.min_new_tokens)
            rows.append(np.repeat(early, len(stopping.stop_token_ids)))
            ids.append(np.tile(stopping.stop_token_ids, len(early)))
            row += len(tree.token_ids)
        pairs = np.concatenate(rows).astype(np.int64)
        if not len(pairs):
            return None
        return (
            to_device(pairs, self._device),
            to_device(np.concatenate(ids).astype(np.int64), self._device),
        )

    def _penalise(self, logits: torch.Tensor, trees: Sequence[SampledTree]) -> None:
        """Penalise the rows of the requests that ask for it; the tables hold node 0 already."""
        assert self._prompt_mask is not None and self._output_counts is not None
        chosen, rows, paths, row = [], [], [], 0
        for tree in trees:
            count = len(tree.token_ids)
            if tree.request.open.sampling.has_penalties:
                _, path = tree_paths(tree.parent_index)
                is_on_path = np.arange(path.shape[1]) <= tree.depth[:, None]
                tokens = np.where(is_on_path, tree.token_ids[path], -1)[:, 1:]
                chosen.append(tree)
                paths.append(tokens)
                rows.append(np.arange(row, row + count))
            row += count
        width = max(path.shape[1] for path in paths)
        padded = [
            np.pad(path, ((0, 0), (0, width - path.shape[1])), constant_values=-1) for path in paths
        ]
        counts = [len(tree.token_ids) for tree in chosen]

        def per_row(values: list[float], dtype: type) -> torch.Tensor:
            return to_device(np.repeat(np.array(values, dtype=dtype), counts), self._device)

        params = [tree.request.open.sampling for tree in chosen]
        index = to_device(np.concatenate(rows).astype(np.int64), self._device)
        selected = logits[index]
        apply_penalties(
            selected,
            request_index=per_row([tree.request.req_idx for tree in chosen], np.int64),
            prompt_mask=self._prompt_mask,
            output_counts=self._output_counts,
            path_token_ids=to_device(np.concatenate(padded).astype(np.int64), self._device),
            repetition=per_row([p.repetition_penalty for p in params], np.float32),
            presence=per_row([p.presence_penalty for p in params], np.float32),
            frequency=per_row([p.frequency_penalty for p in params], np.float32),
        )
        logits[index] = selected
