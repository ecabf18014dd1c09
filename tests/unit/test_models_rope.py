"""Rotary embeddings as config.json says them; their values are in test_models_llama.py, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.models.config import ModelConfig
from shared.models.rope import rope_cos_sin, rope_frequencies
from shared.models.rope_config import RopeConfig, RopeKind
from tests import checkpoints
from tests.checkpoints import edit_checkpoint
from tests.families import longrope

CPU = torch.device("cpu")


def read(directory: Path) -> ModelConfig:
    return ModelConfig.from_checkpoint(directory)


def test_plain_rope_table_by_hand(tmp_path: Path) -> None:
    config = read(checkpoints.write_llama(tmp_path, rope={"rope_type": "default"}))
    cos, sin = rope_cos_sin(config, 5, CPU, context_len=5)
    assert cos.shape == sin.shape == (5, 8)
    assert cos.dtype is torch.float32
    angle = torch.tensor(3 * 20000.0 ** (-2 * 2 / 16), dtype=torch.float64)
    assert cos[3, 2] == angle.cos().float()
    assert sin[3, 2] == angle.sin().float()


def test_llama3_rope_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = rope_frequencies(RopeConfig(theta=10000.0), 64, context_len=4096)
    scaled = rope_frequencies(
        RopeConfig(
            theta=10000.0, kind=RopeKind.LLAMA3, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position=1024,
        ),
        64,
        context_len=4096,
    )  # fmt: skip
    wavelength = 2 * torch.pi / plain
    is_fast, is_slow = wavelength < 1024 / 4, wavelength > 1024
    assert torch.equal(scaled[is_fast], plain[is_fast])
    torch.testing.assert_close(scaled[is_slow], plain[is_slow] / 8)
    between = ~is_fast & ~is_slow
    assert between.any()
    assert ((scaled > plain / 8) & (scaled < plain))[between].all()


def test_phi3_config_of_either_era(tmp_path: Path) -> None:
    scaling = longrope(6)
    shared = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 32}
    new = checkpoints.write_llama(tmp_path / "new")
    parameters = scaling | {"partial_rotary_factor": 0.75}
    edit_checkpoint(new, config=lambda c: c.update(shared, rope_parameters=parameters))
    old = checkpoints.write_llama(tmp_path / "old", old_names=True)
    scaling = {"type": "su"} | {key: scaling[key] for key in ("short_factor", "long_factor")}
    edit_checkpoint(
        old, config=lambda c: c.update(shared, rope_scaling=scaling, partial_rotary_factor=0.75)
    )
    assert read(old) == read(new)
    assert read(new).rope.rotary_dim(16) == 12
    assert read(new).rope.attention_factor == (1 + math.log(512 / 32) / math.log(32)) ** 0.5


@pytest.mark.parametrize("share", [0, 1.5, 0.2, "half"])
def test_an_odd_share_of_rotated_values_is_refused(tmp_path: Path, share: Any) -> None:
    directory = checkpoints.write_llama(tmp_path, rope={"rope_type": "default"})
    fields = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": share}
    edit_checkpoint(directory, config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read(directory)
