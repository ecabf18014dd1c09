"""Steps of models of random weights that have experts, against their bytes and their operations.

Bytes are those that a checkpoint has of the weights that the rows pass, the experts that they
choose counted, and of the keys, values or latents that they read; a request's rows read them once.
Operations are those of all products, of latent attention in the form that reads latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.random_model import random_model
from benchmarks.rows import build_rows, fill_noise, new_pool, tree_of
from benchmarks.timing import time_ms
from shared.kernels.expert_choice import ChosenExperts, choose_experts
from shared.kernels.quantized import SCALE_BLOCK
from shared.kv.pool import KVPool
from shared.models import experts as experts_module
from shared.models.attention import ForwardInput
from shared.models.decoder_config import ModelConfig
from shared.models.latent_config import LatentConfig
from shared.models.llama import CausalLM

# Of the values in FP8 that share a scale in a checkpoint.
_FP8_BYTES = 1 + 4 / SCALE_BLOCK**2


@dataclass(kw_only=True)
class Line:
    """One line of the table.

    Args:
        weights: Form of experts and projections: "bfloat16" or another dtype, or "fp8".
        rows: requests x rows each, a tree where there are several.
        num_experts: Distinct experts of a layer that the rows pass, on average.
        us: Of one call, microseconds.
        torch_us: None: torch has nothing to compare with, or it failed.
        bytes_us, flop_us: The limits of memory and of products, microseconds.
        share: The larger limit / us.
    """

    op: str
    weights: str
    rows: str
    num_experts: float
    us: float
    torch_us: float | None = None
    bytes_us: float
    flop_us: float
    share: float = field(init=False)
    is_right: bool

    def __post_init__(self) -> None:
        self.share = max(self.bytes_us, self.flop_us) / self.us


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the device was measured to do per second."""

    copied_bytes: float
    product_flop: float


def bytes_per_value(weights: str, itemsize: int) -> float:
    """Return the bytes of a value of experts and projections.

    Args:
        weights: As in Line.
        itemsize: Bytes of a value that is not in FP8.
    """
    return _FP8_BYTES if weights == "fp8" else itemsize


def measure_steps(
    config: ModelConfig,
    shapes: Sequence[tuple[int, int]],
    context: int,
    rates: Rates,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
) -> Iterator[Line]:
    """Yield the forward with logits of every row, for each of the shapes.

    Args:
        shapes: (requests, rows of each).
        context: Tokens before the rows, noise.
    """
    num_tokens = context + max(num_nodes for _, num_nodes in shapes)
    model = random_model(config, device, dtype, context_len=num_tokens)
    pool, req_idx = new_pool(
        config.kv_layout,
        num_requests=max(count for count, _ in shapes),
        num_tokens=num_tokens,
        dtype=dtype,
        device=device,
    )
    fill_noise(pool)
    rng = np.random.default_rng(0)
    op = f"step {name}, {config.num_layers} layers, context {context}"
    weights = config.quantization or str(dtype).removeprefix("torch.")
    for count, num_nodes in shapes:
        ids = rng.integers(0, config.vocab_size, (count, num_nodes))
        parents = tree_of(num_nodes) if num_nodes > 1 else None
        rows = build_rows(pool, req_idx[:count], ids, prefix_len=context, parents=parents)
        together, num_experts = _count_experts(model, rows)
        is_right = _is_alone(model, pool, req_idx[count - 1], ids[-1], context, together)
        us = time_ms([lambda rows=rows: _logits(model, rows)], device) * 1e3  # type: ignore[misc]
        num_bytes = _dense_bytes(config, weights, dtype.itemsize)
        num_bytes += count * context * config.kv_layout.bytes_per_token(dtype.itemsize)
        num_bytes += num_experts * _num_sparse(config) * _expert_bytes(config, weights, dtype)
        yield Line(
            op=op,
            weights=weights,
            rows=f"{count} x {num_nodes}",
            num_experts=num_experts,
            us=us,
            bytes_us=num_bytes / rates.copied_bytes * 1e6,
            flop_us=count * num_nodes * _row_flop(config, context) / rates.product_flop * 1e6,
            is_right=is_right,
        )


def _logits(model: CausalLM, rows: ForwardInput) -> torch.Tensor:
    return model.logits(model.forward(rows).hidden)


def _is_alone(
    model: CausalLM,
    pool: KVPool,
    req_idx: int,
    token_ids: NDArray[np.int64],
    context: int,
    together: torch.Tensor,
) -> bool:
    """Compare a request's deepest path, in the batch, with the same tokens alone, as a chain.

    Args:
        req_idx: The last request of the batch.
        token_ids: Its own. [N].
        together: Logits of the batch.
    """
    path = [len(token_ids) - 1]
    while path[0] > 0:
        path.insert(0, int(tree_of(len(token_ids))[path[0]]))
    chain = build_rows(pool, [req_idx], token_ids[None, path], prefix_len=context)
    want = together[-len(token_ids) :][path]
    return bool(want.isfinite().all()) and torch.equal(want, _logits(model, chain))


def _count_experts(model: CausalLM, rows: ForwardInput) -> tuple[torch.Tensor, float]:
    """Return the logits of rows, and how many experts of a layer they pass on average."""
    counts: list[int] = []

    def choose(*args: Any) -> ChosenExperts:
        chosen = choose_experts(*args)
        counts.append(len(chosen.ids.unique()))
        return chosen

    with mock.patch.object(experts_module, "choose_experts", choose):
        logits = _logits(model, rows)
    return logits.clone(), float(np.mean(counts or [0]))


def _num_sparse(config: ModelConfig) -> int:
    """Return how many layers have experts."""
    assert config.experts is not None
    return config.num_layers - len(config.experts.dense_layers)


def _expert_bytes(config: ModelConfig, weights: str, dtype: torch.dtype) -> float:
    return _expert_values(config) * bytes_per_value(weights, dtype.itemsize)


def _expert_values(config: ModelConfig) -> int:
    assert config.experts is not None
    return 3 * config.hidden_size * config.experts.width


def _dense_bytes(config: ModelConfig, weights: str, itemsize: int) -> float:
    """Return the bytes of weights that every row passes."""
    projections = _projection_values(config) * bytes_per_value(weights, itemsize)
    return projections + _other_values(config) * itemsize


def _row_flop(config: ModelConfig, context: int) -> float:
    """Return the operations of a row."""
    assert config.experts is not None
    chosen = config.experts.num_experts_per_tok * _num_sparse(config) * _expert_values(config)
    read = 2 * config.head_dim
    if config.latent is not None:
        read = config.latent.cached_width + config.latent.kv_lora_rank
    attended = config.num_layers * config.num_heads * context * read
    return 2.0 * (_projection_values(config) + _other_values(config) + chosen + attended)


def _projection_values(config: ModelConfig) -> int:
    """Return the values in the projections that every row passes."""
    assert config.experts is not None
    hidden, experts = config.hidden_size, config.experts
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    if config.latent is not None:
        attention = _latent_values(config, config.latent)
    dense = len(experts.dense_layers) * config.intermediate_size
    shared = _num_sparse(config) * experts.shared_width
    return config.num_layers * attention + 3 * hidden * (dense + shared)


def _other_values(config: ModelConfig) -> int:
    """Return the values of the routers and of the head, which are never quantised."""
    assert config.experts is not None
    routers = _num_sparse(config) * config.experts.num_experts
    return config.hidden_size * (config.vocab_size + routers)


def _latent_values(config: ModelConfig, widths: LatentConfig) -> int:
    """Return the values in the matrices of a layer's latent attention."""
    hidden, heads = config.hidden_size, config.num_heads
    rank = widths.q_lora_rank
    queries = (rank or hidden) * heads * widths.qk_head_dim + rank * hidden
    made = widths.kv_lora_rank * heads * (widths.qk_nope_head_dim + widths.v_head_dim)
    return queries + hidden * widths.cached_width + made + heads * widths.v_head_dim * hidden
