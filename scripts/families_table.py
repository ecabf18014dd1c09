"""Write docs/families.md: which models are served, and what is known of each.

`python scripts/families_table.py [--check]`; with --check it writes nothing and fails if the file
is not what it would write. What an architecture computes comes from `FAMILIES`, what is tested from
the tests' own registries of checkpoints, what was measured from files in benchmarks/results. Needs
the packages of the tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "families.md"
sys.path.insert(0, str(ROOT))

from shared.models.experts_config import ExpertsFamily, Scoring  # noqa: E402
from shared.models.families import FAMILIES  # noqa: E402
from shared.models.family import (  # noqa: E402
    NORMS_BEHIND,
    Family,
    NormRule,
    Window,
)
from shared.models.refused_families import REFUSED  # noqa: E402

Registry = Mapping[str, Callable[[Path], Path]]

MODELS = {
    "LlamaForCausalLM": "Llama 3, 3.1, 3.2, 3.3 (text)",
    "MistralForCausalLM": "Mistral 7B, Nemo 12B",
    "MinistralForCausalLM": "Ministral 8B",
    "Ministral3ForCausalLM": "Ministral 3, Devstral 2 (their language models alone)",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2, Mistral Small 4, Ministral 3 "
    "(their language models)",
    "Qwen2ForCausalLM": "Qwen 2, 2.5",
    "Qwen3ForCausalLM": "Qwen 3 (dense)",
    "Qwen3VLForConditionalGeneration": "Qwen 3 VL (its language model)",
    "Qwen2VLForConditionalGeneration": "Qwen 2 VL (its language model)",
    "Qwen2_5_VLForConditionalGeneration": "Qwen 2.5 VL (its language model)",
    "MiMoForCausalLM": "MiMo-7B",
    "Phi3ForCausalLM": "Phi-3, Phi-4, Phi-4-mini",
    "GlmForCausalLM": "GLM-4 9B",
    "Glm4ForCausalLM": "GLM-4-0414 9B, 32B",
    "Glm4vForConditionalGeneration": "GLM-4.1V, GLM-4.6V-Flash (their language models)",
    "Glm46VForConditionalGeneration": "GLM-4.6V-Flash, where config.json calls it so",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B (its language model)",
    "Gemma4ForCausalLM": "Gemma 4 E2B, E4B, 31B, 26B-A4B (their language models alone)",
    "Gemma4ForConditionalGeneration": "Gemma 4 E2B, E4B, 31B, 26B-A4B (their language models)",
    "Gemma4UnifiedForCausalLM": "Gemma 4 12B (its language model alone)",
    "Gemma4UnifiedForConditionalGeneration": "Gemma 4 12B (its language model)",
    "CohereForCausalLM": "Command R (not R+), Aya Expanse, Aya 23",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "ArceeForCausalLM": "Arcee AFM 4.5B",
    "ApertusForCausalLM": "Apertus 8B, 70B",
    "CwmForCausalLM": "CWM",
    "IQuestCoderForCausalLM": "IQuest-Coder-V1",
    "GraniteForCausalLM": "Granite 3 (dense)",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "Exaone4ForCausalLM": "EXAONE 4.0",
    "SeedOssForCausalLM": "Seed-OSS 36B",
    "InternLM3ForCausalLM": "InternLM3-8B",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, 235B-A22B",
    "Qwen3VLMoeForConditionalGeneration": "Qwen 3 VL 30B-A3B, 235B-A22B (its language model)",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6, 4.7, GLM-4.5-Air",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V, GLM-4.6V (their language models)",
    "SolarOpenForCausalLM": "Solar Open 100B",
    "ExaoneMoEForCausalLM": "K-EXAONE",
    "ExaoneMoeForCausalLM": "K-EXAONE, where config.json calls it so",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B",
    "MiniMaxM2ForCausalLM": "MiniMax-M2, M2.1, M2.5",
    "OlmoeForCausalLM": "OLMoE 7B-A1B",
    "Dots1ForCausalLM": "dots.llm1",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B, 1.8B, 4B, 7B, Hunyuan-MT",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "GptOssForCausalLM": "gpt-oss-20b, gpt-oss-120b",
    "MiMoV2FlashForCausalLM": "MiMo-V2-Flash",
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1, Kimi K2",
    "KimiK2ForCausalLM": "Kimi K2, where config.json calls it so",
    "KimiK25ForConditionalGeneration": "Kimi K2.5, K2.6 (their language models)",
    "Kimi_K25ForConditionalGeneration": "Kimi K2.5, K2.6, where config.json calls them so",
    "Mistral4ForCausalLM": "Mistral Small 4 (its language model alone)",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A file of benchmarks/results, and what in it is of a family.

    Args:
        contains: Text that the file must have.
        what: What was measured; "": steps of the whole model.
    """

    file: str
    contains: str
    what: str = ""


MEASURED = {
    "LlamaForCausalLM": Measurement(file="h200_decode.json", contains="llama-3.1-8b"),
    "MixtralForCausalLM": Measurement(
        file="h200_30b_a3b.json", contains="Mixtral", what="a pair of another size"
    ),
    "Qwen3MoeForCausalLM": Measurement(
        file="h200_experts.json",
        contains="step qwen3-30b-a3b",
        what="a step, random weights, no draft",
    ),
    "DeepseekV3ForCausalLM": Measurement(
        file="h200_experts_fp8.json",
        contains="step deepseek-v3, 8 layers",
        what="a step of 8 layers, random weights, no draft",
    ),
    "DeepseekV2ForCausalLM": Measurement(
        file="h200_latents.json", contains='"heads": 16', what="a layer's attention"
    ),
}


EXACT_ON_GPU = "h200_families.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A model with the draft that comes with it, or was made for it.

    Args:
        equals: Tests that compare the draft's rows with another implementation, as pytest names
            them, from tests/ on.
        exact: Tests that speculation by it changes no token.
        on_gpu: Rows of EXACT_ON_GPU in which it drafted.
    """

    model: str
    draft: str
    special: str
    equals: tuple[str, ...]
    exact: tuple[str, ...]
    on_gpu: tuple[str, ...] = ()


_ROWS = "unit/test_models_drafts.py::test_true_rows_match_the_reference"
_HEADS = "unit/test_engine_heads.py::test_a_wide_head_of_experts_changes_no_token"
_FAMILIES = "unit/test_engine_families.py::test_speculation_changes_no_token"
_GLM = "unit/test_models_glm_mtp.py"
_FROZEN_KV = (
    "unit/test_engine_frozen_kv.py::test_trees_of_any_shape_are_those_that_transformers_would_grow"
)
DRAFTS = (
    Draft(
        model="MiMo-7B-RL",
        draft="its layer of MTP",
        special="hidden state first; the embedding at position 0 is zero",
        equals=(f"{_ROWS}[mtp]",),
        exact=("unit/test_engine_exactness.py::test_output_equals_the_solo_plain_run[mtp-64]",),
    ),
    Draft(
        model="DeepSeek-V3, R1",
        draft="its layer of MTP",
        special="embedding first; latent attention, experts",
        equals=(f"{_ROWS}[mtp-deepseek]",),
        exact=(f"{_FAMILIES}[deepseek-v3-mtp-cpu]",),
        on_gpu=("deepseek-v3",),
    ),
    Draft(
        model="GLM-4.5, 4.6, 4.7, GLM-4.5-Air",
        draft="its layer of MTP",
        special="embedding first; experts; half of each head rotated",
        equals=(f"{_GLM}::test_the_layer_is_one_of_transformers[glm4_moe]",),
        exact=(f"{_FAMILIES}[glm4-moe-mtp-mtp-cpu]",),
        on_gpu=("glm4-moe-mtp",),
    ),
    Draft(
        model="GLM-4.5V",
        draft="its layer of MTP, if the files have it",
        special="embedding first; experts; half of each head rotated",
        equals=(f"{_GLM}::test_the_layer_is_one_of_transformers[glm4v_moe]",),
        exact=(f"{_FAMILIES}[glm4v-moe-mtp-mtp-cpu]",),
    ),
    Draft(
        model="GLM-4.7-Flash",
        draft="its layer of MTP",
        special="embedding first; latent attention, experts",
        equals=(f"{_GLM}::test_the_layer_is_one_of_transformers[glm4_moe_lite]",),
        exact=(f"{_FAMILIES}[glm4-moe-lite-mtp-mtp-cpu]",),
        on_gpu=("glm4-moe-lite-mtp",),
    ),
    Draft(
        model="DeepSeek-V3, GLM-4.5 or MiMo with several layers of MTP",
        draft="all of them, the last one again past its depth",
        special="layer k drafts depth k + 1; KV of each",
        equals=(
            "unit/test_models_mtp_layers.py::test_drafts_are_those_of_transformers[3]",
            "unit/test_models_mtp_layers.py::test_served_trees_equal_the_reference[mimo-3-0]",
        ),
        exact=(
            "unit/test_models_mtp_layers.py::test_speculation_changes_no_token[mimo]",
            "unit/test_models_mtp_layers.py::test_speculation_changes_no_token[deepseek]",
        ),
        on_gpu=("deepseek-v3-three-mtp", "deepseek-v3-fp8", "mimo-three-mtp"),
    ),
    Draft(
        model="MiMo-V2-Flash",
        draft="its three layers of MTP",
        special="embedding first; a window, heads and sinks as layers with a window have them; an "
        "MLP; no class in transformers: compared with a reference of our own",
        equals=(
            "unit/test_models_mtp_layers.py::test_served_trees_equal_the_reference[mimo-v2-3-13]",
        ),
        exact=(
            "unit/test_models_mtp_layers.py::test_speculation_changes_no_token[mimo-v2]",
            f"{_FAMILIES}[mimo-v2-three-mtp-mtp-cpu]",
        ),
    ),
    Draft(
        model="Gemma 4 E2B, E4B, 12B, 31B, 26B-A4B",
        draft="its assistant",
        special="frozen-KV MTP: attends to K and V of two layers of the target; keeps no row of a "
        "node",
        equals=(
            "unit/test_models_frozen_kv.py::test_guesses_are_those_of_transformers[chunks1]",
            "unit/test_models_frozen_kv.py::test_a_target_with_shared_kv_has_such_a_draft_as_well",
            f"{_FROZEN_KV}[True]",
        ),
        exact=(
            "unit/test_engine_exactness.py::test_output_equals_the_solo_plain_run[frozen_kv_mtp-4]",
            f"{_FAMILIES}[gemma4-frozen_kv_mtp-cpu]",
            f"{_FAMILIES}[gemma4-e-frozen_kv_mtp-cpu]",
            f"{_FAMILIES}[gemma4-experts-frozen_kv_mtp-cpu]",
        ),
    ),
    Draft(
        model="any target",
        draft="an EAGLE-3 head of several layers (speculators)",
        special="the first layer alone reads the embedding",
        equals=(f"{_ROWS}[eagle3-three-layers-speculators]", f"{_ROWS}[eagle3-two-layers]"),
        exact=(f"{_HEADS}[layers-False]",),
        on_gpu=("llama-two-layer-head", "qwen3-moe-three-layer-head"),
    ),
    Draft(
        model="Qwen3-235B-A22B",
        draft="its EAGLE-3 head (SpecForge)",
        special="q is wider than the hidden state (8192 over 4096); own vocabulary of 32,000",
        equals=(f"{_ROWS}[eagle3-wide-heads]",),
        exact=(f"{_HEADS}[speculators-True]", f"{_HEADS}[eagle3.1-True]"),
    ),
)


def special_of(family: Family) -> str:
    """Return what an architecture computes otherwise than Llama, in words."""
    parts = [
        *_attention_of(family),
        *_rope_of(family),
        *_window_of(family),
        *_norms_of(family),
        *_experts_of(family.experts),
    ]
    if family.has_mtp:
        parts.append("layers of MTP")
    if family.text_types:
        parts.append("the vision tower is left out")
    parts += [
        f"as {' or '.join(one.text_types)}: {special_of(replace(one, text_types=()))}"
        for one in family.variants
    ]
    return "; ".join(parts) or "-"


def _attention_of(family: Family) -> list[str]:
    named = {
        "latent attention (MLA)": family.has_latent_attention,
        "attention sinks": bool(family.sinks) and not family.has_window_heads,
        "other heads in layers with a window, sinks in these": family.has_window_heads,
        "values narrower than keys, and scaled": family.has_window_heads,
        "norms of q and k": bool(family.has_qk_norm),
        "norms of q and k over all heads": family.has_wide_qk_norm,
        "norms of q and k after rope": family.has_late_qk_norm,
        "norms of v": family.has_v_norm,
        "other K/V heads in layers without a window, V from K's projection": family.has_layer_heads,
        "the last layers attend to K and V of layers before them, if config.json says so": (
            family.has_shared_kv
        ),
        "biases of q, k, v": family.qkv_bias is True or family.defaults.get("attention_bias", False)
        or family.defaults.get("qkv_bias", False),
        "soft cap of scores": "attn_logit_softcapping" in family.implemented,
        "soft cap of logits": "final_logit_softcapping" in family.implemented,
        "multipliers": "residual_multiplier" in family.implemented,
        "queries grow with positions": family.has_query_scaling,
        "fused projections": bool(family.fused),
    }  # fmt: skip
    return [name for name, is_so in named.items() if is_so]


def _rope_of(family: Family) -> list[str]:
    parts = []
    if family.has_latent_attention:
        parts.append("rope on a part of q and one shared k")
    if family.rotary_share is not None:
        share = "half" if family.rotary_share == 0.5 else "a part"
        parts.append(f"{share} of each head rotated")
    if family.is_interleaved:
        parts.append("rope in neighbouring pairs")
    if "rope_parameters" in family.defaults:
        parts.append("a part of the pairs rotated in layers without a window")
    if family.has_local_rope:
        parts.append("another rope in layers with a window")
    if family.rotates_windows_only:
        parts.append("no rope in layers without a window")
    if "no_rope_layers" in family.implemented:
        parts.append("layers without rope")
    return parts


_WINDOWS = {
    Window.NEVER: "",
    Window.IF_SET: "a window, if config.json has one",
    Window.PATTERN: "a window in all but every {period}th layer",
    Window.PATTERN_FROM_FULL: "a window in all but every {period}th layer",
    Window.IF_USED: "a window in the last layers, if used",
    Window.IF_USED_BY_ALL: "a window, if used",
    Window.IF_USED_EVEN: "a window in every other layer, if used",
    Window.IF_USED_UNROTATED: "a window in layers without rope, if used",
}


def _window_of(family: Family) -> list[str]:
    text = _WINDOWS[family.window].format(period=family.window_period)
    text = text.replace("all but every 2th layer", "every other layer")
    return [text] if text else []


def _norms_of(family: Family) -> list[str]:
    parts = []
    if family.layer_norms == NORMS_BEHIND:
        parts.append("norms behind attention and MLP")
    elif family.layer_norms.after_attention is not None:
        parts.append("norms before and behind attention and MLP")
    if family.layer_norms.is_parallel:
        parts.append("attention and MLP in parallel")
    if family.norm_rule is NormRule.OFFSET:
        parts.append("norms by 1 + weight")
    if family.norm_rule is NormRule.CENTERED:
        parts.append("LayerNorms without biases")
    if "logit_scale" in family.implemented:
        parts.append("scaled logits")
    if family.ungated is not None:
        parts.append(f"MLPs without a gate ({family.ungated})")
    if family.activation_field != "hidden_act":
        parts.append("gelu")
    if family.has_scaled_embedding:
        parts.append("scaled embeddings")
    if family.has_per_layer_inputs:
        parts.append("embeddings per layer, if config.json says so")
    if family.has_layer_scalar:
        parts.append("a factor of each layer's output")
    return parts


def _experts_of(experts: ExpertsFamily | None) -> list[str]:
    if experts is None:
        return []
    traits = {
        "shared ones": experts.has_shared or bool(experts.shared_width_field),
        "sigmoid router": experts.scoring is Scoring.SIGMOID,
        "correction bias": experts.router_bias.endswith("e_score_correction_bias"),
        "groups": experts.has_groups,
        "in some models, beside an MLP": experts.is_beside_mlp,
        "biases, limited activation": experts.has_bias,
    }
    named = [name for name, is_so in traits.items() if is_so]
    return ["experts" + (f" ({', '.join(named)})" if named else "")]


def evidence() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return, of every architecture, the checkpoints of it that are compared with transformers, and
    those whose speculative output is compared with the plain one.
    """
    from transformers.utils import logging

    from tests import checkpoints
    from tests.gpt_oss import write_gpt_oss
    from tests.unit import test_engine_exactness as exactness
    from tests.unit import test_engine_families as engines
    from tests.unit import test_models_llama as logits

    logging.disable_progress_bar()
    compared = _architectures(logits.FAMILIES | logits.BY_TRANSFORMERS)
    served: Registry = {
        **exactness.FAMILIES,
        "mimo": checkpoints.write_mimo,  # the kind mtp of every test of engines
        "gpt-oss": write_gpt_oss,  # unit/test_gpt_oss.py
        **engines.TARGETS,
    }
    return compared, _architectures(served)


def _architectures(registry: Registry) -> dict[str, list[str]]:
    """Return the names of a registry by the architecture of what they write."""
    found: dict[str, list[str]] = {}
    for name, write in registry.items():
        with tempfile.TemporaryDirectory() as directory:
            config = json.loads((write(Path(directory) / name) / "config.json").read_text())
        found.setdefault(config["architectures"][0], []).append(name)
    return found


def check_tests(names: Sequence[str]) -> None:
    """Raise ValueError unless pytest finds tests of these names."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *(f"tests/{name}" for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise ValueError(f"docs/families.md would name tests that there are not: {found.stdout}")


def measured(measurement: Measurement | None) -> str:
    """Return what a table says of a measurement.

    Raises: ValueError if its file is not of a GPU, or does not have what it should.
    """
    if measurement is None:
        return "no"
    path = ROOT / "benchmarks" / "results" / measurement.file
    text = path.read_text()
    if measurement.contains not in text or not json.loads(text)["gpus"]:
        raise ValueError(f"{path.name} measures no {measurement.contains!r} on a GPU")
    link = f"[{measurement.file}](../benchmarks/results/{measurement.file})"
    return f"{link} ({measurement.what})" if measurement.what else link


def exact_on_gpu(file: str) -> frozenset[str]:
    """Return the checkpoints whose speculative output was seen to be the plain one on a GPU.

    Raises: ValueError if the file is not of a GPU, or says of any that it was not.
    """
    found = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    if not found["gpus"] or not all(row.get("is_exact") for row in found["rows"]):
        raise ValueError(f"{file} does not say that all it names was exact on a GPU")
    return frozenset(row["family"] for row in found["rows"])


_HEAD = """# Families

Written by `scripts/families_table.py` from the registries of the code, the tests and the files of measurements; a test fails when it is stale.

- *Loads*: every tensor of a checkpoint is accounted for, fields of config.json that are not implemented are refused by name.
- *Logits equal transformers*: a small random checkpoint of the class, float32 on a CPU, to 1e-4, prompts and decoded rows (`tests/unit/test_models_llama.py`).
- *Speculation exact*: speculative output equals plain output token for token, batched, on pages that are NaN elsewhere (`tests/unit/test_engine_families.py`, `tests/unit/test_engine_exactness.py`; gpt-oss: `tests/unit/test_gpt_oss.py`).
- *Exact on a GPU*: so it was seen to be by engines on an H200 in bfloat16, with one of its drafts ([h200_families.json](../benchmarks/results/h200_families.json)); "no": that file does not say it. `tests/unit/test_engine_families.py` looks at all where there is a GPU.
- *Measured on a GPU*: the file, or "no": then its speed is not known. No weights of these models themselves were at hand: shapes are theirs, weights are random or inflated.

Rope is default, linear, llama3, yarn, longrope, proportional or dynamic by config.json in every family, in half-split pairs unless the table says otherwise.

"""  # noqa: E501


def document() -> str:
    """Return what docs/families.md should be.

    Raises: ValueError if a registry, a test or a measurement is not as this module says.
    """
    lines = [*_target_table(), "", *_draft_table(), "", *_unsupported_table()]
    return _HEAD + "\n".join(lines) + "\n"


def _target_table() -> list[str]:
    """Return the lines about models."""
    if set(MODELS) != set(FAMILIES):
        raise ValueError(f"MODELS and FAMILIES differ in {sorted(set(MODELS) ^ set(FAMILIES))}")
    compared, served = evidence()
    if set(FAMILIES) != set(compared):
        names = sorted(set(FAMILIES) ^ set(compared))
        raise ValueError(f"these are not both supported and compared with transformers: {names}")
    seen = exact_on_gpu(EXACT_ON_GPU)
    known = {name for names in served.values() for name in names}
    if not seen <= known or not seen.issuperset(name for row in DRAFTS for name in row.on_gpu):
        raise ValueError(f"{EXACT_ON_GPU}, DRAFTS and the tests' registries do not fit each other")
    lines = [
        "## Targets and standalone drafts",
        "",
        "| `architectures` in config.json | models | what is special | loads | logits equal "
        "transformers (tested) | speculation exact (tested) | exact on a GPU (seen) | "
        "speed measured on a GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, models in MODELS.items():
        cells = (
            f"`{name}`",
            models,
            special_of(FAMILIES[name]),
            "yes",
            _names(compared[name]),
            _names(served.get(name)),
            _names([one for one in served.get(name, ()) if one in seen]),
            measured(MEASURED.get(name)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _draft_table() -> list[str]:
    """Return the lines about the drafts that were made for a model."""
    check_tests([test for row in DRAFTS for test in (*row.equals, *row.exact)])
    lines = [
        "## With the draft that was made for them",
        "",
        "| model | draft | what is special | loads | rows equal another implementation (tested) | "
        "speculation exact (tested) | exact on a GPU (seen) | speed measured on a GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in DRAFTS:
        tests = ["<br>".join(f"`{test}`" for test in side) for side in (row.equals, row.exact)]
        on_gpu = _names(row.on_gpu)
        cells = (row.model, row.draft, row.special, "yes", *tests, on_gpu, "no")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _unsupported_table() -> list[str]:
    """Return the lines about architectures that are refused, those with one reason in a row."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    return [
        "## Refused",
        "",
        "Known architectures that have something which is not implemented: loading them fails, and "
        "the error says this (`shared/models/refused_families.py`). States of layers that are no "
        "attention (linear attention, Mamba-2, convolutions) would have to be kept for every node "
        "of a tree, and go back to that of the last accepted one.",
        "",
        "| `architectures` in config.json | what they have |",
        "|---|---|",
        *(f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()),
    ]


def _names(names: Sequence[str] | None) -> str:
    return f"yes ({', '.join(names)})" if names else "no"


def main() -> int:
    """Write the document, or check it; return an exit code."""
    parser = argparse.ArgumentParser(description="Write docs/families.md.")
    parser.add_argument("--check", action="store_true", help="fail if it is stale; write nothing")
    is_check = parser.parse_args().check
    text = document()
    if not is_check:
        DOCUMENT.write_text(text)
        return 0
    is_stale = not DOCUMENT.exists() or DOCUMENT.read_text() != text
    if is_stale:
        sys.stderr.write("docs/families.md is stale: python scripts/families_table.py\n")
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main())
