"""Rounds of both engines on the Triton kernels, interpreted: no kernel is an orphan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from draft_service.engine import DraftEngine
from shared.grammar.compile import compile_grammar
from shared.grammar.source import Grammar, GrammarKind
from shared.kernels.dispatch import launch_counts
from shared.messages import SamplingParams, TreeShape
from target_service.engine import TargetEngine
from tests import families
from tests.checkpoints import Shape, write_eagle3, write_llama, write_qwen3_moe
from tests.deepseek import write_deepseek
from tests.engines import Pairing, make_draft, make_target, run_plain
from tests.gpt_oss import write_gpt_oss
from tests.grammars import vocabulary_of
from tests.kernels.launches import counted_kernels
from tests.local_pair import LocalPair, LocalRequest
from tests.marks import EXHAUSTIVE
from tests.mimo_v2 import OTHER_HEADS, write_mimo_v2
from tests.quantized import write_fp8

# Hot enough that the noise, which draft and target share, decides most tokens.
HOT = SamplingParams(temperature=4.0, top_k=200, top_p=0.98, min_p=0.0001, seed=1)
ANYTHING = Grammar(kind=GrammarKind.EBNF, source=r"root ::= [\0-\U0010ffff]*")
PENALIZED = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)


def test_every_kernel_runs_in_an_engine(tmp_path: Path) -> None:
    """Trees with filters and T > 0 on the kernels equal plain decoding on them."""
    target_dir = write_deepseek(tmp_path / "target", seed=1, num_layers=1, num_dense=0)
    draft_dir = write_eagle3(tmp_path / "draft", target_dir, layer_ids=(0, 0))
    pairing = Pairing(target=target_dir, draft=draft_dir, algorithm="eagle3")
    # What a target computes at its start is no longer than the context.
    small = {"max_context_len": 16, "max_batch_rows": 64}
    target, draft = make_target(pairing, **small), make_draft(pairing, **small)
    compiler = xgrammar.GrammarCompiler(vocabulary_of(target_dir).info)
    requests = [
        LocalRequest(
            prompt=[72, 101, 108],
            max_new_tokens=5,
            sampling=HOT,
            shape=TreeShape(num_steps=2, topk=3, num_draft_tokens=5),
        ),
        LocalRequest(
            prompt=[72, 105],
            max_new_tokens=3,
            sampling=PENALIZED,
            logprobs=True,
            top_logprobs=2,
            shape=TreeShape(num_steps=2, topk=2, num_draft_tokens=4),
            compiled_grammar=compile_grammar(compiler, ANYTHING),
        ),
    ]
    plain = run_plain(target, requests)
    LocalPair(target, draft).run(requests)
    assert [r.output for r in requests] == [r.output for r in plain]
    assert all(len(tree.token_ids) > 1 for request in requests for tree in request.trees)
    assert target.load.num_moved_rounds > 0
    run_wide_in_fp8(tmp_path)
    run_with_embeddings_per_layer(tmp_path)
    assert {name for name, count in launch_counts().items() if count > 0} == counted_kernels()


def run_wide_in_fp8(tmp_path: Path) -> None:
    """Serve requests together and alone where rows become FP8, and an MLP of few outputs has a K of
    two splits: what only wide models in 16 bits have.
    """
    shape = Shape(hidden_size=2048, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    target_dir = write_llama(tmp_path / "wide", shape=shape)
    pairing = Pairing(target=target_dir, draft=target_dir, algorithm="standalone")
    small = {"max_context_len": 8, "max_batch_rows": 16, "num_pages": 8}
    target = make_target(pairing, dtype="bfloat16", quantization="fp8_lm_head", **small)
    requests = [LocalRequest(prompt=prompt, max_new_tokens=2) for prompt in ([72, 101], [72])]
    run_together_and_alone(target, requests)


def run_with_embeddings_per_layer(tmp_path: Path) -> None:
    """Serve requests together and alone of a model whose layers gate such embeddings."""
    fields = families.GEMMA4_E | {"num_hidden_layers": 2, "num_kv_shared_layers": 1}
    fields |= {"layer_types": ["full_attention"] * 2}
    path = families.write(tmp_path / "per-layer", "gemma4_text", **fields)
    pairing = Pairing(target=path, draft=path, algorithm="standalone")
    target = make_target(pairing, max_context_len=8, max_batch_rows=16, num_pages=8)
    requests = [LocalRequest(prompt=prompt, max_new_tokens=2) for prompt in ([72, 101], [72])]
    run_together_and_alone(target, requests)


def run_together_and_alone(target: TargetEngine, requests: Sequence[LocalRequest]) -> None:
    together = run_plain(target, requests)
    alone = run_plain(target, requests, alone=True)
    assert [r.output for r in together] == [r.output for r in alone]


@EXHAUSTIVE
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_sinks_and_experts_in_mxfp4_run_in_an_engine(tmp_path: Path, kv_cache_dtype: str) -> None:
    """Rows have the same bits in trees, in a batch, and alone; a window hides the first tokens."""
    target_dir = write_gpt_oss(
        tmp_path / "target", hidden_size=32, num_layers=2, window=6, is_mxfp4=True
    )
    draft_dir = write_eagle3(tmp_path / "draft", target_dir, layer_ids=(0, 1))
    pairing = Pairing(target=target_dir, draft=draft_dir, algorithm="eagle3")
    small = {"max_context_len": 12, "max_batch_rows": 32, "kv_cache_dtype": kv_cache_dtype}
    target, draft = make_target(pairing, **small), make_draft(pairing, **small)
    requests = [
        LocalRequest(
            prompt=prompt,
            max_new_tokens=2,
            sampling=HOT,
            logprobs=True,
            shape=TreeShape(num_steps=2, topk=2, num_draft_tokens=4),
        )
        for prompt in ([72, 101, 108, 108, 111, 44, 32, 119], [72, 105])
    ]
    run_and_compare(target, draft, requests)


def write_fp8_experts(directory: Path) -> Path:
    """Write experts whose first product has two blocks of scales along K, the second one ragged."""
    shape = Shape(hidden_size=160, num_layers=1, num_heads=2, num_kv_heads=1)
    source = write_qwen3_moe(directory / "source", shape=shape, num_experts=3, width=24)
    return write_fp8(source, directory / "fp8", "block")


@pytest.mark.parametrize("algorithm", ["eagle3", "mtp"])
def test_experts_in_fp8_and_several_layers_of_mtp_run_in_an_engine(
    tmp_path: Path, algorithm: str
) -> None:
    """Rows have the same bits in trees, in a batch, and alone; with MTP the experts of the draft
    are in FP8, too.
    """
    if algorithm == "mtp":
        source = write_deepseek(tmp_path / "source", num_layers=1, num_dense=0, num_mtp_layers=2)
        draft_dir = target_dir = write_fp8(source, tmp_path / "fp8", "block")
    else:
        target_dir = write_fp8_experts(tmp_path)
        draft_dir = write_eagle3(tmp_path / "draft", target_dir, layer_ids=(0, 0))
    pairing = Pairing(target=target_dir, draft=draft_dir, algorithm=algorithm)
    small = {"max_context_len": 12, "max_batch_rows": 32}
    target, draft = make_target(pairing, **small), make_draft(pairing, **small)
    assert target.info.quantization == "fp8"
    requests = [
        LocalRequest(
            prompt=prompt,
            max_new_tokens=2,
            sampling=HOT,
            logprobs=True,
            shape=TreeShape(num_steps=3, topk=2, num_draft_tokens=4),
        )
        for prompt in ([72, 101, 108, 108, 111, 44], [72, 105])
    ]
    run_and_compare(target, draft, requests)


@EXHAUSTIVE
@pytest.mark.parametrize("fields", [families.GEMMA4, families.GEMMA4_E], ids=["dense", "e"])
def test_kv_of_two_shapes_and_a_draft_that_attends_to_it_run_in_an_engine(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Rows have the same bits in trees, in a batch, and alone; a window hides the first tokens."""
    target_dir = families.write_gemma4_agreeable(tmp_path / "target", fields)
    draft_dir = families.write_gemma4_agreeing_assistant(tmp_path / "draft", target_dir)
    pairing = Pairing(target=target_dir, draft=draft_dir, algorithm="auto")
    small = {"max_context_len": 30, "max_batch_rows": 32}
    target, draft = make_target(pairing, **small), make_draft(pairing, **small)
    requests = [
        LocalRequest(
            prompt=[72 + i for i in range(length)],
            max_new_tokens=4,
            logprobs=True,
            shape=TreeShape(num_steps=3, topk=2, num_draft_tokens=5),
        )
        for length in (23, 2)
    ]
    run_and_compare(target, draft, requests)
    assert any(path.num_accepted_drafts for request in requests for path in request.paths[1:])


@EXHAUSTIVE
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_values_narrower_than_keys_and_layers_of_mtp_run_in_an_engine(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    """Rows have the same bits in trees, in a batch, and alone; windows hide the first tokens."""
    heads = OTHER_HEADS | {"sliding_window_size": 7}
    path = write_mimo_v2(tmp_path / "target", branch_scale=0.3, num_mtp_layers=2, **heads)
    pairing = Pairing(target=path, draft=path, algorithm="mtp")
    small = {"max_context_len": 30, "max_batch_rows": 32, "kv_cache_dtype": kv_cache_dtype}
    target, draft = make_target(pairing, **small), make_draft(pairing, **small)
    requests = [
        LocalRequest(
            prompt=[72 + i for i in range(length)],
            max_new_tokens=4,
            logprobs=True,
            shape=TreeShape(num_steps=3, topk=2, num_draft_tokens=5),
        )
        for length in (17, 2)
    ]
    run_and_compare(target, draft, requests)
    assert any(path.num_accepted_drafts for request in requests for path in request.paths[1:])


def run_and_compare(
    target: TargetEngine, draft: DraftEngine, requests: Sequence[LocalRequest]
) -> None:
    """Serve requests with trees, and compare outputs and logprobs with plain runs of each alone."""
    plain = run_plain(target, requests, alone=True)
    LocalPair(target, draft).run(requests)
    for got, want in zip(requests, plain, strict=True):
        assert got.output == want.output and got.logprob_rows == want.logprob_rows
        assert all(len(tree.token_ids) > 1 for tree in got.trees)
