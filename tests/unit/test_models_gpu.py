"""Every family and draft kind on a GPU: loaded straight there, same numbers as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared.models.draft import DraftModel, load_draft
from shared.models.llama import CausalLM
from tests import checkpoints
from tests.paged import PagedKV

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
NUM_TOKENS = 21
TARGETS = {
    "llama": checkpoints.write_llama,
    "mistral": checkpoints.write_mistral,
    "qwen2": checkpoints.write_qwen2,
    "qwen3": checkpoints.write_qwen3,
    "mimo": checkpoints.write_mimo,
}
DRAFTS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle3": checkpoints.write_eagle3,
    "eagle3-speculators": lambda path, target: checkpoints.write_eagle3(
        path, target, is_speculators=True, norm_before_fc=True, heads=(8, 16)
    ),
    "eagle3-1": lambda path, target: checkpoints.write_eagle3(
        path, target, tap_norms=("fc_norm.0", "fc_norm.1"), feeds_back_norm=True
    ),
    "eagle3-pickled": lambda path, target: checkpoints.pickle_weights(
        checkpoints.write_eagle3(path.with_suffix(".safe"), target), path
    ),
    "eagle": checkpoints.write_eagle,
    "mtp": lambda _, target: target,
    "standalone": checkpoints.write_standalone,
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def token_ids() -> torch.Tensor:
    return torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def pool_for(model: DraftModel, device: torch.device) -> PagedKV:
    return PagedKV(model.kv_layout, dtype=model.dtype, device=device)


def target_logits(directory: Path, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    model = CausalLM.from_checkpoint(directory, device, dtype)
    assert model.device.type == device.type
    config = model.config
    kv = PagedKV(config.kv_layout, dtype=dtype, device=device)
    hidden = model.forward(kv.chain(token_ids(), window=config.sliding_window)).hidden
    return model.logits(hidden).cpu()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_target_on_a_gpu(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    directory = TARGETS[name](tmp_path)
    want = target_logits(directory, torch.device("cpu"), torch.float32)
    got = target_logits(directory, torch.device("cuda"), dtype)
    tolerance = 1e-3 if dtype is torch.float32 else 0.3
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def draft_logits(kind: str, draft: Path, target: Path, device: torch.device) -> torch.Tensor:
    algorithm = kind.partition("-")[0]
    model = load_draft(algorithm, draft, target, device=device, dtype=torch.float32)
    kv = pool_for(model, device)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(NUM_TOKENS, model.feature_spec.width, generator=generator)
    hidden = model.extend(
        kv.chain(token_ids()),
        model.project_features(features) if model.recurrent_width else None,
        carried=torch.zeros(1, model.hidden_size, device=device),
    )
    ids = model.to_target_ids(torch.arange(model.vocab_size, device=device))
    assert ids.device.type == device.type
    return model.logits(hidden).cpu()


@pytest.mark.parametrize("kind", DRAFTS)
def test_draft_on_a_gpu(tmp_path: Path, kind: str) -> None:
    write = checkpoints.write_mimo if kind == "mtp" else checkpoints.write_llama
    target = write(tmp_path / "target")
    draft = DRAFTS[kind](tmp_path / "draft", target)
    want = draft_logits(kind, draft, target, torch.device("cpu"))
    got = draft_logits(kind, draft, target, torch.device("cuda"))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
