"""Engines of every family, on a CPU and on a GPU: trees of every draft it has change no token.

A CPU computes in float32, a GPU in bfloat16; KV is NaN wherever nothing is committed, on a GPU
only between steps that do not overlap.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.messages import TokenTree
from tests import checkpoints, deepseek, families
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    graft,
    make_draft,
    make_target,
    plain_of,
)
from tests.gpt_oss import write_gpt_oss
from tests.marks import EXHAUSTIVE
from tests.mimo_v2 import OTHER_HEADS, write_mimo_v2
from tests.quantized import write_fp8
from tests.unit.test_engine_exactness import requests_of
from tests.unit.test_models_glm_mtp import write_glm


def write_deepseek(directory: Path, **options: Any) -> Path:
    return deepseek.write_deepseek(directory, branch_scale=0.3, **options)


def write_in_fp8(directory: Path, write: Callable[[Path], Path]) -> Path:
    source = write(directory.with_name(f"{directory.name}-source"))
    return write_fp8(source, directory, "block")


TARGETS: dict[str, Callable[[Path], Path]] = {
    **families.WRITERS,
    "llama-two-layer-head": checkpoints.write_llama,
    "mimo-three-mtp": lambda d: checkpoints.write_mimo(d, branch_scale=0.3, num_mtp_layers=3),
    "qwen2": checkpoints.write_qwen2,
    "phi3": lambda d: families.write(d, "phi3", **families.PHI3),
    "internlm3": lambda d: families.write_internlm3(d, **families.INTERNLM3_BIASES),
    "qwen3-moe-three-layer-head": checkpoints.write_qwen3_moe,
    "qwen3-moe-fp8": lambda d: write_in_fp8(d, checkpoints.write_qwen3_moe),
    "glm4-moe-mtp": lambda d: write_glm(d, "glm4_moe"),
    "glm4v-moe-mtp": lambda d: write_glm(d, "glm4v_moe"),
    "deepseek-v3": lambda d: write_deepseek(d, num_layers=3),
    "deepseek-v3-three-mtp": lambda d: write_deepseek(d, num_mtp_layers=3),
    "deepseek-v3-fp8": lambda d: write_in_fp8(d, lambda d: write_deepseek(d, num_mtp_layers=2)),
    "glm4-moe-lite-mtp": lambda d: write_glm(d, "glm4_moe_lite"),
    "mimo-v2-three-mtp": lambda d: write_mimo_v2(d, branch_scale=0.3, **OTHER_HEADS),
    "mimo-v2-fp8": lambda d: write_in_fp8(d, lambda d: write_mimo_v2(d, branch_scale=0.3)),
    "gpt-oss-mxfp4": lambda d: write_gpt_oss(d, is_mxfp4=True),
}
DRAFTS = {
    "gemma4": ("eagle3", "standalone", "frozen_kv_mtp"),
    "gemma4-experts": ("eagle3", "standalone", "frozen_kv_mtp"),
    "gemma4-e": ("eagle3", "standalone", "frozen_kv_mtp"),
    "deepseek-v3": ("eagle3", "standalone", "mtp"),
    "deepseek-v3-three-mtp": ("mtp",),
    "deepseek-v3-fp8": ("mtp",),
    "glm4-moe-mtp": ("mtp",),
    "glm4v-moe-mtp": ("mtp",),
    "glm4-moe-lite-mtp": ("mtp",),
    "mimo-three-mtp": ("mtp",),
    "mimo-v2-three-mtp": ("mtp",),
    "mimo-v2-fp8": ("mtp",),
    "llama-two-layer-head": ("eagle3",),
    "qwen3-moe-three-layer-head": ("eagle3",),
}
HEADS: dict[str, dict[str, Any]] = {
    "llama-two-layer-head": {"is_speculators": True, "num_layers": 2},
    "qwen3-moe-three-layer-head": {"is_speculators": True, "num_layers": 3, "heads": (8, 16)},
}
IN_EVERY_RUN = ("phi3", "gemma2", "gemma4-e", "deepseek-v3")
CASES = [
    pytest.param(name, algorithm, marks=pytest.mark.slow if name in IN_EVERY_RUN else EXHAUSTIVE)
    for name in TARGETS
    for algorithm in DRAFTS.get(name, ("eagle3", "standalone"))
]
SOME_SHAPES = SHAPES[2:4]
# A GPU records graphs of all row counts and tree shapes that it may serve: few here.
_SMALL = {"device": "cuda", "dtype": "bfloat16", "max_num_requests": 8, "max_context_len": 160}
_TREES = ",".join(f"{s.num_steps}/{s.topk}/{s.num_draft_tokens}" for s in SOME_SHAPES)
TARGET_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": _SMALL | {"max_batch_rows": 64}}
DRAFT_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": _SMALL | {"warm_up_trees": _TREES}}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def pairing_of(models: Models, family: str, algorithm: str) -> Pairing:
    """Return a target with a draft: itself, its layers of MTP, a head or an assistant for it."""
    target = draft = models.get(family, TARGETS[family])
    if algorithm == "eagle3":
        head = HEADS.get(family, {})
        draft = models.get(
            f"{family}-eagle3", lambda d: checkpoints.write_eagle3(d, target, **head)
        )
    if algorithm == "frozen_kv_mtp":
        draft = models.get(f"{family}-assistant", families.write_gemma4_assistant)
    return Pairing(target=target, draft=draft, algorithm=algorithm)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
@pytest.mark.parametrize(("family", "algorithm"), CASES)
def test_speculation_changes_no_token(
    models: Models, family: str, algorithm: str, device: str
) -> None:
    """What a family computes holds in every row: chunks, trees, root-only rounds, and in drafts.

    Random heads and layers of MTP are seldom right: the truth is written into half their trees.
    """
    pairing = pairing_of(models, family, algorithm)
    options = {"page_size": 4, "prefill_chunk_len": 24, **TARGET_OPTIONS[device]}
    target = make_target(pairing, self_test=True, **options)
    requests = [r for r in requests_of(1, (1, 9, 40)) if r.shape in SOME_SHAPES]
    plain = plain_of(target, requests, alone=True)
    speculative = [fresh(request) for request in requests]
    pair = PoisonedPair(target, make_draft(pairing, page_size=16, **DRAFT_OPTIONS[device]))
    rng = random.Random(1)

    def edit(tree: TokenTree) -> TokenTree:
        if algorithm == "standalone" or rng.random() < 0.5:
            return tree
        truth = plain[int(tree.request_id[1:]) - 1].output
        return graft(tree, truth[len(pair.requests[tree.request_id].output) :], rng)

    pair.edit_tree = edit
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        which = f"{got.request_id}: {got.shape}, {got.sampling}"
        assert got.output == want.output, which
        assert got.logprob_rows == want.logprob_rows, which
        assert len(got.trees) == len(got.paths) - 1, f"{which}: a round had no tree"
    assert any(path.num_accepted_drafts for r in speculative for path in r.paths)
