"""What a target says about itself tells it from every target that may compute other bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.pairing import ModelIdentity
from orchestrator.pool import WorkerPool
from orchestrator.workers import WorkerSession
from shared.errors import CheckpointError, ConfigError
from shared.kernels.tree_attention import AttentionParams, TreeAttentionMetadata, tree_attention
from shared.messages import WorkerInfo
from tests import checkpoints
from tests.checkpoints import Tensors, edit_checkpoint
from tests.engines import Pairing, make_target

MLP = "model.layers.1.mlp.down_proj.weight"


def info_of(directory: Path, **options: Any) -> WorkerInfo:
    pairing = Pairing(target=directory, draft=directory, algorithm="none")
    return make_target(pairing, **options).info


def change_the_middle(tensors: Tensors) -> None:
    """Change what a look at both ends of the tensor would miss."""
    flat = tensors[MLP].view(-1)
    assert flat.numel() * flat.element_size() > 4096
    flat[flat.numel() // 2] += 0.5


def test_targets_that_differ_in_the_middle_of_one_tensor_do_not_serve_together(
    tmp_path: Path,
) -> None:
    first = info_of(checkpoints.write_llama(tmp_path / "first"))
    same = info_of(checkpoints.write_llama(tmp_path / "same", num_shards=2), page_size=4)
    other = info_of(
        edit_checkpoint(checkpoints.write_llama(tmp_path / "other"), tensors=change_the_middle)
    )
    assert first.model_hash != other.model_hash
    assert first.logits_hash != other.logits_hash
    assert ModelIdentity.of(first) == ModelIdentity.of(same)

    pool = WorkerPool()
    assert pool.open_target(WorkerSession(address="t:1", info=first)) == ""
    assert pool.open_target(WorkerSession(address="t:2", info=same)) == ""
    problem = pool.open_target(WorkerSession(address="t:3", info=other))
    assert "model_hash" in problem and "logits_hash" in problem
    assert "dtype '" not in problem  # what is equal is not named


def test_the_fingerprint_says_what_computes(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    info = info_of(directory)
    assert len(info.logits_hash) == 64
    assert info.cpu_threads == torch.get_num_threads()
    assert f"torch {torch.__version__}" in info.versions
    assert torch.backends.cpu.get_cpu_capability() in info.device_model
    half = info_of(directory, dtype="bfloat16")
    assert half.model_hash == info.model_hash and half.logits_hash != info.logits_hash


@pytest.mark.parametrize(
    "field", ["model_hash", "quantization", "device_model", "versions", "logits_hash"]
)
def test_every_field_counts(tmp_path: Path, field: str) -> None:
    info = info_of(checkpoints.write_llama(tmp_path))
    changed = replace(info, **{field: "other"})
    mine, others = ModelIdentity.of(info), ModelIdentity.of(changed)
    assert mine != others and mine.fingerprint != others.fingerprint
    assert mine.difference(others).startswith(f"{field} ")
    threads = ModelIdentity.of(replace(info, cpu_threads=info.cpu_threads + 1))
    assert threads.fingerprint != mine.fingerprint


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("self_test", [True, False])
def test_weights_that_are_no_numbers_end_the_start_and_are_named(
    tmp_path: Path, value: float, *, self_test: bool
) -> None:
    directory = edit_checkpoint(
        checkpoints.write_llama(tmp_path), tensors=lambda t: t[MLP].view(-1)[7:8].fill_(value)
    )
    with pytest.raises(CheckpointError, match=f"NaN or infinite.*1 tensors: {MLP}"):
        info_of(directory, self_test=self_test)


def test_an_overflow_without_a_broken_tensor_is_told_apart(tmp_path: Path) -> None:
    directory = edit_checkpoint(
        checkpoints.write_llama(tmp_path),
        tensors=lambda t: t["model.norm.weight"].mul_(1e38),
    )
    with pytest.raises(CheckpointError, match="no tensor is to blame by itself.*float32"):
        info_of(directory)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "-1e-5", "0", '"1e-5"', "true"])
def test_an_impossible_epsilon_is_refused_by_name(tmp_path: Path, text: str) -> None:
    directory = checkpoints.write_llama(tmp_path)
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    fields["rms_norm_eps"] = json.loads(text)
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="rms_norm_eps must be a finite number > 0"):
        info_of(directory)


def test_a_failed_self_test_ends_the_start_unless_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_node(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: TreeAttentionMetadata,
        params: AttentionParams,
        **options: Any,
    ) -> torch.Tensor:
        out = tree_attention(q, k, v, metadata, params, **options)
        return out if metadata.is_chain.all() else out * 3 / 3

    directory = checkpoints.write_llama(tmp_path)
    monkeypatch.setattr("shared.models.attention.tree_attention", by_node)
    with pytest.raises(ConfigError, match="--allow-inexact"):
        info_of(directory, self_test=True)
    assert info_of(directory, self_test=True, allow_inexact=True).logits_hash
