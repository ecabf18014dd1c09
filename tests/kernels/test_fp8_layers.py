"""Layers of weights that want rows in FP8: what is launched for it, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shared.kernels.dispatch import launch_counts, reset_launch_counts
from shared.kernels.fp8_rows import wants_fp8_rows
from shared.models import (
    attention,
    eagle3,
    experts,
    feed_forward,
    latent_attention,
    query_attention,
)
from shared.models.draft import load_draft
from shared.models.llama import CausalLM
from shared.models.quantization import FP8, FP8_LM_HEAD, FP8_OUTPUT
from tests import checkpoints, families
from tests.checkpoints import Shape
from tests.deepseek import write_deepseek
from tests.paged import PagedKV
from tests.quantized import write_fp8

pytestmark = pytest.mark.kernel_only

DTYPE = torch.bfloat16
IDS = [(17 * i) % 60 for i in range(5)]
SMALL = Shape(num_layers=2, num_heads=2, num_kv_heads=1)
# Whoever says that a norm is to leave its rows in FP8.
READERS: list[ModuleType] = [
    *(attention, eagle3, experts, feed_forward, latent_attention, query_attention)
]
Run = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def write_olmo2(path: Path) -> Path:
    return families.write(path, "olmo2", num_hidden_layers=2)


def write_llama(path: Path) -> Path:
    return checkpoints.write_llama(path, shape=SMALL)


def write_gemma4_e(path: Path) -> Path:
    """Write a layer with K and V, and one that attends to them; both read embeddings per layer."""
    fields = families.GEMMA4_E | {"num_hidden_layers": 2, "num_kv_shared_layers": 1}
    fields |= {"layer_types": ["full_attention"] * 2}
    return families.write(path, "gemma4_text", **fields)


def target_run(directory: Path, device: torch.device) -> Run:
    """Load a target. The run returns the logits of a prompt."""
    model = CausalLM.from_checkpoint(directory, device, DTYPE)

    def run() -> torch.Tensor:
        kv = PagedKV(model.config.kv_layout, dtype=DTYPE, device=device)
        return model.logits(model.forward(kv.chain(IDS)).hidden)

    return run


def draft_run(
    directory: Path, target: Path, device: torch.device, quantization: str = FP8_LM_HEAD
) -> Run:
    """Load a draft. The run returns the logits of rows of random features."""
    place = {"device": device, "dtype": DTYPE}
    draft = load_draft("auto", directory, target, quantization=quantization, **place)
    features = torch.randn(len(IDS), draft.feature_spec.width, device=device)

    def run() -> torch.Tensor:
        kv = PagedKV(draft.kv_layout, dtype=DTYPE, device=device)
        recurrent = draft.project_features(features)
        carried = torch.zeros(1, draft.hidden_size, dtype=DTYPE, device=device)
        return draft.logits(draft.extend(kv.chain(IDS), recurrent, carried=carried))

    return run


def check(load: Callable[[], Run], monkeypatch: pytest.MonkeyPatch, fused: int, alone: int) -> None:
    """Compare with products that quantise the rows that they read, each for itself.

    Args:
        fused, alone: Launches that quantise, with and without norms that do.
    """
    torch.manual_seed(1)
    run = load()
    reset_launch_counts()
    got = run()
    assert launch_counts().get("quantize_rows", 0) == fused
    for module in READERS:
        monkeypatch.setattr(module, "wants_fp8_rows", lambda _weight: False)
    torch.manual_seed(1)
    run = load()
    reset_launch_counts()
    want = run()
    assert launch_counts().get("quantize_rows", 0) == alone
    assert want.isfinite().all() and want.std() > 0
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("write", "fused", "alone"),
    [
        # o and down of two layers; besides qkv, gate and up.
        (write_llama, 4, 8),
        # .. whose first layer reads embeddings without a norm.
        (write_olmo2, 5, 8),
        # .. of which one has q alone; what gates embeddings per layer reads rows in 16 bits.
        (write_gemma4_e, 4, 8),
        # o and down of a dense layer; o and both downs of one with experts. Besides q_a, kv_a and
        # q_b, gate and up, of routed experts and of the shared one.
        (write_deepseek, 5, 5 + 2 * 3 + 1 + 2),
    ],
)
def test_only_what_no_norm_made_is_quantised_by_itself(
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], Path],
    fused: int,
    alone: int,
) -> None:
    directory = write_fp8(write(tmp_path / "source"), tmp_path / "fp8", "block")
    check(lambda: target_run(directory, device), monkeypatch, fused, alone)


@pytest.mark.parametrize("quantization", [FP8_LM_HEAD, FP8_OUTPUT])
@pytest.mark.parametrize(
    "options", [{}, {"norm_before_residual": True}, {"feeds_back_norm": True}, {"num_layers": 2}]
)
def test_eagle3_heads(
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, bool | int],
    quantization: str,
) -> None:
    """.. of which the output layer reads what its norm left, unless that is what is fed back."""
    target = write_llama(tmp_path / "target")
    directory = checkpoints.write_eagle3(
        tmp_path / "head",
        target,
        layer_ids=(0, 1),
        **options,  # type: ignore[arg-type]
    )
    num_layers = int(options.get("num_layers", 1)) if quantization == FP8_LM_HEAD else 0
    fused = 2 * num_layers + int("feeds_back_norm" in options)
    load = partial(draft_run, directory, target, device, quantization)
    check(load, monkeypatch, fused, 4 * num_layers + 1)


def test_eagle_heads_read_a_stream_without_a_norm(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_llama(tmp_path / "target")
    directory = checkpoints.write_eagle(tmp_path / "head", target)
    check(lambda: draft_run(directory, target, device), monkeypatch, 3 + 1, 4 + 1)


def test_layers_of_multi_token_prediction(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_fp8(write_deepseek(tmp_path / "source"), tmp_path / "fp8", "block")
    check(lambda: draft_run(directory, directory, device), monkeypatch, 3 + 1, 3 + 3 + 2 + 1)


def test_nothing_is_quantised_for_weights_in_16_bits(tmp_path: Path, device: torch.device) -> None:
    run = target_run(write_llama(tmp_path), device)
    reset_launch_counts()
    run()
    assert "quantize_rows" not in launch_counts()


@pytest.mark.parametrize("vocab_size", [60, 64, 259])
def test_an_output_layer_in_fp8(tmp_path: Path, device: torch.device, vocab_size: int) -> None:
    """Its logits are near those in 16 bits, and those of a row are the same alone and among others,
    whether its vocabulary fills tiles or not.
    """
    directory = checkpoints.write_llama(tmp_path, shape=replace(SMALL, vocab_size=vocab_size))
    dense, fp8 = (
        CausalLM.from_checkpoint(directory, device, DTYPE, quantization=quantization)
        for quantization in ("", FP8_OUTPUT)
    )
    hidden = torch.randn(33, SMALL.hidden_size).to(device, DTYPE)
    reset_launch_counts()
    logits, want = fp8.logits(hidden), dense.logits(hidden)
    assert launch_counts()["quantize_rows"] == 1
    assert logits.shape == want.shape == (33, vocab_size) and logits.dtype == torch.float32
    assert ((logits - want).norm(dim=1) < 0.06 * want.norm(dim=1)).all()
    assert not torch.equal(logits, want)
    for row in (0, 16, 32):
        assert torch.equal(fp8.logits(hidden[row : row + 1]), logits[row : row + 1])


def test_who_reads_rows_in_fp8_says_so(tmp_path: Path, device: torch.device) -> None:
    directory = write_llama(tmp_path)
    for quantization in ("", FP8):
        model = CausalLM.from_checkpoint(directory, device, DTYPE, quantization=quantization)
        for layer in model._layers:
            wants = wants_fp8_rows(layer._attention._qkv)
            assert wants == (quantization == FP8)
            assert layer._attention.reads_fp8_rows == layer._feed_forward.reads_fp8_rows == wants
