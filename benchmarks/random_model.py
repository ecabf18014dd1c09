"""Models of random weights, made straight in the memory of a device, whatever their size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shared.kernels.products_cpu import CpuProducts
from shared.models.checkpoint import CheckpointReader
from shared.models.decoder_config import ModelConfig
from shared.models.experts_config import ExpertsConfig
from shared.models.latent_config import LatentConfig
from shared.models.llama import CausalLM
from shared.models.rope_config import RopeConfig

CONFIGS = {
    "qwen3-30b-a3b": ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1e6),
        has_qk_norm=True,
        dtype="bfloat16",
        experts=ExpertsConfig(num_experts=128, num_experts_per_tok=8, width=768),
    ),
    "deepseek-v2-lite": ModelConfig(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        head_dim=192,
        rms_norm_eps=1e-6,
        max_position_embeddings=163840,
        rope=RopeConfig(theta=1e4, is_interleaved=True),
        dtype="bfloat16",
        latent=LatentConfig(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        experts=ExpertsConfig(
            num_experts=64,
            num_experts_per_tok=6,
            width=1408,
            is_normalised=False,
            shared_width=2816,
            dense_layers=frozenset({0}),
        ),
    ),
    "small-latent": ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=24,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope=RopeConfig(theta=1e4, is_interleaved=True),
        latent=LatentConfig(
            kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
        ),
        experts=ExpertsConfig(num_experts=8, num_experts_per_tok=2, width=32),
    ),
    "small": ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope=RopeConfig(theta=1e4),
        has_qk_norm=True,
        experts=ExpertsConfig(num_experts=8, num_experts_per_tok=2, width=32, shared_width=32),
    ),
}


class RandomReader(CheckpointReader):
    """Makes tensors as they are asked for: norms of ones, matrices that keep the size of values."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.products = CpuProducts()
        self.directory = Path("random")
        self._device = device
        self._dtype = dtype
        self._quantization = ""
        self._infos = {}
        self._generator = torch.Generator(device=device).manual_seed(0)

    def load(
        self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a random tensor; of any name."""
        values = torch.empty(*shape, dtype=dtype or self._dtype, device=self._device)
        if "norm" in name:
            return values.fill_(1.0)
        std = 1.0 if "embed" in name else shape[-1] ** -0.5
        return values.normal_(std=std, generator=self._generator)


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, context_len: int
) -> CausalLM:
    """Make a model of random weights.

    Args:
        context_len: Longest sequence, tokens.
    """
    return CausalLM(RandomReader(device, dtype), config, context_len=context_len)
