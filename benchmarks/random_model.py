"""Models of random weights, made straight in the memory of a device, whatever their size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shared.kernels.products_cpu import CpuProducts
from shared.kernels.quantized import SCALE_BLOCK, GpuWeight, QuantizedWeight, spread_scales
from shared.models.checkpoint import CheckpointReader
from shared.models.decoder_config import ModelConfig
from shared.models.experts_config import ExpertsConfig, Scoring
from shared.models.latent_config import LatentConfig
from shared.models.llama import CausalLM
from shared.models.rope_config import RopeConfig, RopeKind

# Of values in FP8 before they are scaled: the largest of a billion are far from 448.
_FP8_STD = 32.0

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
    "deepseek-v3": ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        rms_norm_eps=1e-6,
        max_position_embeddings=163840,
        rope=RopeConfig(
            theta=1e4,
            kind=RopeKind.YARN,
            factor=40.0,
            original_max_position=4096,
            mscale_all_dim=1.0,
            is_interleaved=True,
        ),
        dtype="bfloat16",
        quantization="fp8",
        latent=LatentConfig(
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        experts=ExpertsConfig(
            num_experts=256,
            num_experts_per_tok=8,
            width=2048,
            scoring=Scoring.SIGMOID,
            router_bias="gate.e_score_correction_bias",
            scaling_factor=2.5,
            num_groups=8,
            num_chosen_groups=4,
            shared_width=2048,
            dense_layers=frozenset({0, 1, 2}),
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
    """Makes tensors as they are asked for: norms of ones, matrices that keep the size of values.

    Args:
        is_fp8: Projections and experts are FP8, with a scale for each block, as those of
            DeepSeek-V3 are.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_fp8: bool = False) -> None:
        self.products = CpuProducts()
        self.directory = Path("random")
        self._device = device
        self._dtype = dtype
        self._quantization = ""
        self._is_fp8 = is_fp8
        self._infos = {}
        self._generator = torch.Generator(device=device).manual_seed(0)

    def read_ahead(self, stacks: Iterable[Sequence[str]]) -> None:
        """Do nothing: there is nothing to read."""

    def load(
        self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a random tensor; of any name."""
        values = torch.empty(*shape, dtype=dtype or self._dtype, device=self._device)
        if "norm" in name:
            return values.fill_(1.0)
        std = 1.0 if "embed" in name else shape[-1] ** -0.5
        return values.normal_(std=std, generator=self._generator)

    def load_matrix(self, name: str, shape: Sequence[int]) -> GpuWeight:
        """Return the weight of a projection."""
        if self._is_fp8:
            return random_fp8(shape, self._device, self._dtype, self._generator)
        return self.load(name, shape)

    def load_expert(self, name: str, shape: Sequence[int]) -> torch.Tensor | QuantizedWeight:
        """Return a weight of an expert."""
        if self._is_fp8:
            return random_fp8(shape, self._device, self._dtype, self._generator)
        return self.load(name, shape)


def random_fp8(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> QuantizedWeight:
    """Return a weight that keeps the size of values, each of whose blocks has its own scale, and
    rows are in FP8 as well.

    Args:
        shape: (N, K).
        dtype: Of the rows that are multiplied by it.
    """
    values = torch.empty(*shape, dtype=torch.bfloat16, device=device)
    values.normal_(std=_FP8_STD, generator=generator)
    blocks = [-(-width // SCALE_BLOCK) for width in shape]
    scales = torch.rand(blocks, generator=generator, device=device) + 0.5
    scales *= shape[-1] ** -0.5 / _FP8_STD
    spread = spread_scales(scales[None], shape)
    assert spread is not None
    return QuantizedWeight(
        values=values.to(torch.float8_e4m3fn), scales=spread[0], dtype=dtype, has_fp8_rows=True
    )


def shortened(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return the config of a model's first layers, under its head."""
    experts = config.experts
    if experts is not None:
        dense = frozenset(layer for layer in experts.dense_layers if layer < num_layers)
        experts = replace(experts, dense_layers=dense)
    return replace(config, num_layers=num_layers, experts=experts)


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, context_len: int
) -> CausalLM:
    """Make a model of random weights, in FP8 if its config says so.

    Args:
        context_len: Longest sequence, tokens.
    """
    reader = RandomReader(device, dtype, is_fp8=config.quantization == "fp8")
    return CausalLM(reader, config, context_len=context_len)
