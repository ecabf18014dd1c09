"""KV caches in FP8: speculation changes no token of them, what they hold, and who says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.stack.config import stack_config
from orchestrator.pairing import ModelIdentity, target_problem
from shared.device import resolve_kv_dtype
from shared.errors import CheckpointError, ConfigError
from shared.kernels.quantized import E4M3_MAX
from shared.messages import SamplingParams, TokenTree
from shared.models.llama import CausalLM
from tests import checkpoints, gpt_oss
from tests.checkpoints import Tensors, edit_checkpoint
from tests.deepseek import write_deepseek
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    committed_kv,
    fresh,
    graft,
    make_draft,
    make_target,
    prefilled_kv,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalRequest
from tests.paged import PagedKV
from tests.quantized import compressed_config, write_fp8

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
ATTENTION = "model.layers.0.self_attn"


def pairing_of(models: Models, kind: str) -> Pairing:
    """Return a pairing; of "gpt-oss", with sinks and windows, the target drafts for itself."""
    if kind != "gpt-oss":
        return models.pairing(kind)
    path = models.get(kind, gpt_oss.write_gpt_oss)
    return Pairing(target=path, draft=path, algorithm="standalone")


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [
        *(("eagle3", 16), ("window", 4), ("mtp", 1), ("gpt-oss", 2)),
        *(("frozen_kv_mtp", 8), ("shared-kv", 2)),
    ],
)
def test_speculation_changes_no_token(models: Models, kind: str, page_size: int) -> None:
    pairing = pairing_of(models, kind)
    target = make_target(pairing, kv_cache_dtype="fp8", page_size=page_size, self_test=True)
    rng = random.Random(5)
    samplings = (SamplingParams(), SamplingParams(temperature=1.0, seed=9))
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length), max_new_tokens=12, shape=shape, sampling=sampling
        )
        for length, shape, sampling in zip((7, 61), SHAPES[3:5], samplings, strict=True)
    ]
    plain = run_plain(target, requests, alone=True)
    by_id = {f"r{i + 1}": request for i, request in enumerate(plain)}
    draft = make_draft(pairing, kv_cache_dtype="fp8", page_size=4)
    for engine in (target, draft):
        assert {cache.dtype for cache in engine.runner.pool.caches} == {FP8}
    pair = PoisonedPair(target, draft)

    def edit(tree: TokenTree) -> TokenTree:
        done = len(pair.requests[tree.request_id].output)
        return graft(tree, by_id[tree.request_id].output[done:], rng)

    pair.edit_tree = edit
    speculative = [fresh(request) for request in requests]
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
    assert max(request.accept_length for request in speculative) > 1.5


def run(
    directory: Path, kv_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of a prompt, and what K and V of the first layer are then. [20, Hkv, d]."""
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    kv = PagedKV(model.config.kv_layout, page_size=4, dtype=kv_dtype)
    rows = kv.chain(random_tokens(random.Random(0), 20))
    with torch.inference_mode():
        logits = model.logits(model.forward(rows).hidden)
        return logits, [cache[rows.slot_mapping.long()] for cache in kv.layers[0]]


def with_scales(directory: Path, k: str = "k_scale", v: str = "v_scale") -> Path:
    """Write a checkpoint that has scales of K and V under these names."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".k_proj.weight")]:
            prefix = name.removesuffix("k_proj.weight")
            tensors[f"{prefix}{k}"] = torch.tensor(0.02)
            tensors[f"{prefix}{v}"] = torch.tensor([0.03], dtype=torch.bfloat16)

    return edit_checkpoint(checkpoints.write_llama(directory), tensors=edit)


def test_logits_are_close_to_those_of_unquantised_caches(models: Models) -> None:
    exact, _ = run(models.llama)
    quantised, _ = run(models.llama, FP8)
    error = (quantised - exact).norm(dim=1) / exact.norm(dim=1)
    assert 1e-4 < error.max() < 0.06  # a value of e4m3 is off by 1/16 at most, others average out
    assert torch.equal(quantised[:1].argmax(1), exact[:1].argmax(1))


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)  # fmt: skip
def test_scales_of_a_checkpoint_are_those_of_its_caches(
    models: Models, tmp_path: Path, names: tuple[str, str]
) -> None:
    directory = with_scales(tmp_path / "scaled", *names)
    logits, exact = run(directory)
    assert torch.equal(logits, run(models.llama)[0]), "other caches need no scales"
    quantised, stored = run(directory, FP8)
    scales = (0.02, float(torch.tensor(0.03, dtype=torch.bfloat16)))
    for want, got, scale in zip(exact, stored, scales, strict=True):
        scaled = (want * torch.tensor(1 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)
        assert torch.equal(got.view(torch.uint8), scaled.view(torch.uint8))
    assert 1e-4 < ((quantised - logits).norm() / logits.norm()) < 0.06


BROKEN: list[tuple[Callable[[Tensors], Any], str]] = [
    (lambda t: t.update({f"{ATTENTION}.k_scale": torch.ones(2)}), "shape .2.*one scale for its K"),
    (lambda t: t.update({f"{ATTENTION}.v_scale": torch.tensor(0.0)}), "v_scale' is 0.0.*> 0"),
    (lambda t: t.update({f"{ATTENTION}.k_scale": torch.tensor(torch.nan)}), "k_scale' is nan"),
    (
        lambda t: t.update(
            {f"{ATTENTION}.{name}": torch.ones(1) for name in ("k_scale", "k_proj.k_scale")}
        ),
        "k_scale' and .*k_proj.k_scale'.*one scale",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_other_scales_are_refused_by_tensor(
    tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    directory = edit_checkpoint(checkpoints.write_llama(tmp_path / "llama"), tensors=change)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic": True}, "kv_cache_scheme.dynamic = True"),
        ({"strategy": "attn_head"}, "kv_cache_scheme.strategy = 'attn_head'"),
        ({"num_bits": 4}, "kv_cache_scheme.num_bits = 4"),
        ({"type": "int"}, "kv_cache_scheme.type = 'int'"),
        (None, "kv_cache_scheme must be an object, got 8"),
    ],
)
def test_a_scheme_is_read_or_refused_by_field(
    models: Models, tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    config = compressed_config("channel")

    def write(name: str, scheme: Any) -> Path:
        directory = write_fp8(models.llama, tmp_path / name, "channel")
        change = {"quantization_config": config | {"kv_cache_scheme": scheme}}
        return edit_checkpoint(directory, config=lambda fields: fields.update(change))

    if changes is not None:
        CausalLM.from_checkpoint(write("read", SCHEME), CPU, torch.float32)
    refused = write("refused", 8 if changes is None else SCHEME | changes)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(refused, CPU, torch.float32)


def test_latents_are_refused_by_both_workers(tmp_path: Path) -> None:
    path = write_deepseek(tmp_path / "deepseek")
    pairing = Pairing(target=path, draft=path, algorithm="mtp")
    for make in (make_target, make_draft):
        with pytest.raises(ConfigError, match="--kv-cache-dtype fp8.*latent attention.*leave it"):
            make(pairing, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8', expected auto or one of fp8"):
        resolve_kv_dtype("int8", dtype=torch.float32, has_latents=False)


def test_a_target_says_it_and_moves_to_none_in_another_dtype(models: Models) -> None:
    pairing = Pairing(target=models.llama, draft=models.llama, algorithm="none")
    plain, quantised, same = (
        make_target(pairing, kv_cache_dtype=name).info for name in ("auto", "fp8", "fp8_e4m3")
    )
    assert (plain.kv_cache_dtype, quantised.kv_cache_dtype) == ("", "fp8_e4m3")
    assert plain.model_hash == quantised.model_hash and plain.logits_hash != quantised.logits_hash
    mine = ModelIdentity.of(quantised)
    assert mine == ModelIdentity.of(same)
    other = ModelIdentity.of(replace(plain, logits_hash=quantised.logits_hash))
    assert mine.fingerprint != other.fingerprint
    assert mine.difference(other) == "kv_cache_dtype 'fp8_e4m3' instead of ''"
    problem = target_problem(plain, tokenizer_hash="", others=mine)
    assert "kv_cache_dtype ''" in problem and "--kv-cache-dtype" in problem


def test_the_same_memory_holds_as_many_more_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.kv.sizing.CPU_POOL_BYTES", 1 << 20)
    pairing = models.pairing("standalone")
    for make in (make_target, make_draft):
        for dtype, factor in (("bfloat16", 2), ("float32", 4)):
            plain, quantised = (
                make(pairing, dtype=dtype, kv_cache_dtype=name, num_pages=0).runner.pool
                for name in ("auto", "fp8")
            )
            # The page of padding is one of them.
            assert quantised.num_pages + 1 == factor * (plain.num_pages + 1)
            num_bytes = sum(cache.nbytes for cache in quantised.caches)
            assert num_bytes == sum(cache.nbytes for cache in plain.caches) <= 1 << 20


def test_a_stack_tells_its_workers_apart() -> None:
    config = stack_config({"kv_cache_dtype": "fp8"})
    assert (config.target.kv_cache_dtype, config.draft.kv_cache_dtype) == ("fp8", "auto")
    config = stack_config({"draft_kv_cache_dtype": "fp8_e4m3"})
    assert (config.target.kv_cache_dtype, config.draft.kv_cache_dtype) == ("auto", "fp8_e4m3")


def test_kv_after_trees_is_that_of_a_prefill(models: Models) -> None:
    """Accepted rows move as bytes."""
    pairing = models.pairing("standalone")
    target = make_target(pairing, kv_cache_dtype="fp8", page_size=4)
    request = LocalRequest(
        prompt=random_tokens(random.Random(3), 9), max_new_tokens=20, shape=SHAPES[4]
    )
    pair = PoisonedPair(target, make_draft(pairing))
    pair.open(request)
    while len(request.output) < 12:
        assert pair.step()
    tokens = [*request.prompt, *request.output]
    stored = committed_kv(target, request.request_id, len(tokens) - 1)
    assert target.load.num_moved_rounds > 0
    pair.finish()
    expected = prefilled_kv(make_target(pairing, kv_cache_dtype="fp8"), tokens[:-1])
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
