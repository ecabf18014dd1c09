"""Layers of experts: whom routers choose, what config.json and checkpoints may say, step costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.kernels.expert_choice import ChosenExperts, choose_experts
from shared.kernels.fp8_experts import QuantizedExperts
from shared.kernels.products_cpu import CpuProducts
from shared.kernels.quantized import QuantizedWeight, stack_rows
from shared.messages import SamplingParams
from shared.messages.routed_experts import join_routed
from shared.models import experts as experts_module
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.expert_weights import load_expert_weights
from shared.models.experts_config import ExpertsConfig, ExpertTensors, GroupScore, Scoring
from shared.models.llama import CausalLM
from shared.models.tensor_files import TensorInfo
from shared.models.tensor_reads import TensorReads
from target_service.start_up import measure_costs
from tests import checkpoints, families
from tests.checkpoints import Shape, Tensors, edit_checkpoint
from tests.engines import Models, Pairing, make_target, pool_of
from tests.int4 import write_int4
from tests.local_pair import LocalPair, LocalRequest
from tests.quantized import write_fp8
from tests.unit.test_models_llama import Runner, load_transformers, tokens_of

CPU = torch.device("cpu")
EVERY_LAYER = frozenset(
    ("mixtral", "gpt_oss", "minimax_m2", "olmoe", "gemma4_experts", "solar_open", "hunyuan_v1_moe")
)
# What has a vision tower beside it, or is no AutoModelForCausalLM.
WRITTEN: dict[str, Callable[[Path], Path]] = {
    name.replace("-", "_"): families.WRITERS[name]
    for name in ("qwen3-vl-moe", "glm4v-moe", "kimi-k2.5", "mistral3-mistral4")
}
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[ChosenExperts]:
    """Return what routers choose from now on, layer by layer."""
    seen: list[ChosenExperts] = []

    def choose(*args: Any) -> ChosenExperts:
        seen.append(choose_experts(*args))
        return seen[-1]

    monkeypatch.setattr(experts_module, "choose_experts", choose)
    return seen


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        *("glm4_moe_lite", "minimax_m2", "olmoe", "dots1", "ernie4_5_moe", "qwen3_vl_moe"),
        *("mimo_v2_flash", "gemma4_experts", "mistral4", "exaone_moe", "solar_open"),
        *("hunyuan_v1_moe", *WRITTEN),
    ],
)
def test_routers_choose_whom_those_of_transformers_choose(
    tmp_path: Path, name: str, chosen: list[ChosenExperts]
) -> None:
    """By value: the classes in transformers return their choice in no order."""
    if name in WRITTEN:
        directory = WRITTEN[name](tmp_path)
    else:
        kind = "gemma4_text" if name == "gemma4_experts" else name
        directory = families.write(tmp_path, kind, **getattr(families, name.upper()))
    oracle = load_transformers(directory)
    outputs: list[Any] = []
    layers = getattr(oracle.model, "language_model", oracle.model).layers
    for layer in layers:
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        router = router or getattr(layer, "router", None)
        if router is not None:
            router.register_forward_hook(lambda *call: outputs.append(call[2]))
    ids = tokens_of(64)
    oracle(torch.tensor([ids]))
    Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32)).extend(ids)
    num_layers = len(layers) if name in EVERY_LAYER else 2
    assert len(chosen) == len(outputs) == num_layers
    for ours, (_, weights, want) in zip(chosen, outputs, strict=True):
        order = want.argsort(dim=1)
        assert torch.equal(ours.ids.long(), want.gather(1, order))
        torch.testing.assert_close(ours.weights, weights.gather(1, order), rtol=1e-4, atol=1e-6)
        assert len(ours.ids.unique()) > 3, "few experts are chosen: the comparison proves little"


SERVED: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda d: families.write(d, "mixtral", **families.MIXTRAL),
    "a dense layer": lambda d: families.write(d, "qwen3_moe", **families.QWEN3_MOE),
    "two bytes": lambda d: families.write(
        d,
        "qwen3_moe",
        **families.QWEN3_MOE | {"num_experts": 400, "moe_intermediate_size": 4},
        num_hidden_layers=2,
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_clients_hear_is_whom_routers_of_transformers_choose(
    tmp_path: Path, name: str
) -> None:
    """At the positions from the last prompt token to the last but one; ascending in every row."""
    path = SERVED[name](tmp_path)
    target = make_target(Pairing(target=path, draft=path, algorithm="none"), prefill_chunk_len=8)
    requests = [
        LocalRequest(
            prompt=tokens_of(21, seed=i),
            max_new_tokens=12,
            sampling=SamplingParams(temperature=i, seed=5),
            wants_routed_experts=True,
        )
        for i in range(2)
    ]
    LocalPair(target).run(requests)
    oracle = load_transformers(path)
    outputs: list[Any] = []
    for layer in oracle.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda *call: outputs.append(call[2][2]))
    for request in requests:
        outputs.clear()
        oracle(torch.tensor([request.tokens]))
        want = torch.stack(outputs, dim=1).sort(dim=2).values
        found = join_routed(path.routed_experts for path in request.paths)
        assert found is not None
        first = len(request.prompt) - 1
        want = want[first : first + len(request.output)]
        assert found.tolist() == want.tolist()
        assert found.shape == want.shape
        assert len(want.unique()) > 4, "few experts are chosen: the comparison proves little"
        assert (int(want.max()) > 255) == (name == "two bytes")


def test_config_of_glm(tmp_path: Path) -> None:
    config = ModelConfig.from_checkpoint(families.write(tmp_path, "glm4_moe", **families.GLM4_MOE))
    assert config.experts == ExpertsConfig(
        num_experts=8,
        num_experts_per_tok=3,
        width=40,
        scoring=Scoring.SIGMOID,
        router_bias="gate.e_score_correction_bias",
        is_normalised=True,
        scaling_factor=1.5,
        num_groups=4,
        num_chosen_groups=2,
        group_score=GroupScore.BEST_TWO,
        shared_width=80,
        dense_layers=frozenset({0}),
        tensors=ExpertTensors(),
    )


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"mlp_only_layers": [1]}, {1}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, None),
        ({"num_experts": 0}, None),
    ],
)
def test_which_layers_have_experts(
    tmp_path: Path, fields: dict[str, Any], dense: set[int] | None
) -> None:
    directory = checkpoints.write_qwen3_moe(tmp_path)
    edit_checkpoint(directory, config=lambda c: c.update(fields))
    experts = ModelConfig.from_checkpoint(directory).experts
    assert (experts and set(experts.dense_layers)) == dense


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "num_experts must be an integer from 0 on, got None"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer, got 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than the 6 experts"),
        ({"moe_intermediate_size": "24"}, "moe_intermediate_size must be a positive integer"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers must list layers, got '1'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor must be a finite number > 0"),
    ],
)
def test_fields_that_say_no_experts_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    directory = checkpoints.write_qwen3_moe(tmp_path)
    edit_checkpoint(directory, config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_checkpoint(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, "n_group = 3 must divide the 8 experts"),
        ({"topk_group": 5}, "topk_group = 5 must not exceed it"),
        ({"topk_group": 1}, "num_experts_per_tok = 3 is more than the 2 experts"),
        ({"n_group": 8, "topk_group": 4}, "n_group = 8 leaves one expert to a group"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    directory = families.write(tmp_path, "glm4_moe", **families.GLM4_MOE)
    edit_checkpoint(directory, config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_checkpoint(directory)


def _rename(tensors: Tensors) -> None:
    tensors[DOWN.replace("down_proj", "w2")] = tensors.pop(DOWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), f"missing tensor '{DOWN}' of shape \\[48, 24\\]"),
        (_rename, f"missing tensor '{DOWN}'"),
        (lambda t: t.update({DOWN: t[DOWN][:, :23].contiguous()}), f"'{DOWN}' has shape \\[48, 23"),
        (
            lambda t: t.update({DOWN.replace("experts.3", "experts.6"): t[DOWN].clone()}),
            "1 left-over tensors.*experts.6.down_proj.weight",
        ),
    ],
)
def test_tensors_of_experts_are_accounted_for_by_name(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    directory = edit_checkpoint(checkpoints.write_qwen3_moe(tmp_path), tensors=change)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


# A multiple of 32 throughout, as groups of int4 are.
INT4_SHAPE = Shape(
    hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24
)
WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "plain": lambda source, _: source,
    "fp8": lambda source, to: write_fp8(source, to, "block"),
    "fp8 by channels": lambda source, to: write_fp8(source, to, "channel"),
    "awq": lambda source, to: write_int4(source, to, "awq")[0],
    "gptq": lambda source, to: write_int4(source, to, "gptq")[0],
    "int4 of compressed-tensors": lambda source, to: write_int4(source, to, "compressed")[0],
}


def noted_reads(
    directory: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[str]], list[list[str]]]:
    """Load a checkpoint, and return what was announced and what was read but for small tensors.

    Were they in another order, threads would read ahead what is not wanted next: slow, but right.
    """
    announced: list[list[str]] = []
    was_read: list[list[str]] = []
    read_stack = TensorReads.read_stack
    scales = ("_scale", "_scale_inv") if form.startswith("fp8") else ()
    small = ("g_idx", "weight_shape", "bias", *scales)

    def note(reads: TensorReads, infos: Sequence[TensorInfo], *args: Any) -> torch.Tensor:
        if not infos[0].name.endswith(small):
            was_read.append([info.name for info in infos])
        return read_stack(reads, infos, *args)

    def note_announced(_: TensorReads, stacks: Iterable[Sequence[TensorInfo]]) -> None:
        announced.extend([info.name for info in infos] for infos in stacks)

    monkeypatch.setattr(TensorReads, "read_ahead", note_announced)
    monkeypatch.setattr(TensorReads, "read_stack", note)
    CausalLM.from_checkpoint(directory, CPU, torch.float32)
    return announced, was_read


@pytest.mark.parametrize("form", WRITERS)
def test_projections_without_experts_are_announced_in_the_order_in_which_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    source = checkpoints.write_llama(tmp_path / "source", shape=INT4_SHAPE)
    directory = WRITERS[form](source, tmp_path / "quantized")
    announced, was_read = noted_reads(directory, form, monkeypatch)
    assert announced == [names for names in was_read if "_proj." in names[0]]
    assert len(announced) >= INT4_SHAPE.num_layers * 7


def test_what_gemma4_e_has_beside_projections_is_announced_and_kv_that_no_layer_reads_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.write_gemma4_e_with_vision(tmp_path)
    announced, was_read = noted_reads(directory, "plain", monkeypatch)
    large = re.compile(r"_proj\.|embed_tokens_per_layer|per_layer_(input_gate|\w*projection)\.")
    assert announced == [names for names in was_read if large.search(names[0])]
    # Of three layers with K and V, and three without; a table and its projection.
    assert len(announced) == 3 * (4 + 3 + 2) + 3 * (2 + 3 + 2) + 2


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("form", WRITERS)
def test_tensors_of_experts_are_announced_in_the_order_in_which_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, *, is_packed: bool
) -> None:
    source = checkpoints.write_qwen3_moe(tmp_path / "source", shape=INT4_SHAPE, width=32)
    directory = WRITERS[form](source, tmp_path / "quantized")
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: is_packed)
    announced, was_read = noted_reads(directory, form, monkeypatch)
    assert announced == [names for names in was_read if "_proj." in names[0]]
    of_experts = [names for names in announced if ".experts." in names[0]]
    assert sum(map(len, of_experts)) >= INT4_SHAPE.num_layers * 6 * 3
    if not is_packed and (form == "plain" or form.startswith("fp8")):
        assert len(of_experts) == INT4_SHAPE.num_layers * 2


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        # Latents; a layer without experts, then experts and what every token passes besides.
        ("deepseek_v3", families.DEEPSEEK_V3),
        ("deepseek_v2", families.DEEPSEEK_V2),
        ("qwen2_moe", families.QWEN2_MOE),
        # Projections of other names; tensors of all experts.
        ("mixtral", families.MIXTRAL),
        ("gpt_oss", families.GPT_OSS),
        # An MLP beside experts. K of some layers is V as well, and read twice.
        ("gemma4_text", families.GEMMA4_EXPERTS),
    ],
)
def test_all_layers_are_announced_in_order_whatever_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    directory = families.write(tmp_path, kind, **fields)
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: False)
    announced, was_read = noted_reads(directory, "plain", monkeypatch)
    large = re.compile(r"_proj\b|_proj_with_mqa|\.w[123]\.")
    assert announced == [names for names, _ in groupby(was_read) if large.search(names[0])]
    assert any(".experts." in names[0] for names in announced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_not_packed_are_read_to_where_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    directory = checkpoints.write_qwen3_moe(tmp_path / "moe")
    config = ModelConfig.from_checkpoint(directory)
    assert config.experts is not None
    prefix = "model.layers.0.mlp"
    with CheckpointReader(directory, device=CPU, dtype=dtype) as reader:
        monkeypatch.setattr(CpuProducts, "packs", lambda *_: False)
        held = load_expert_weights(reader, prefix, config.experts, config.hidden_size)
        assert isinstance(held.gate_up, torch.Tensor) and isinstance(held.down, torch.Tensor)
        width, hidden = config.experts.width, config.hidden_size
        for expert in range(config.experts.num_experts):
            gate, up, down = (
                reader.load(f"{prefix}.experts.{expert}.{name}_proj.weight", shape)
                for name, shape in (
                    ("gate", (width, hidden)),
                    ("up", (width, hidden)),
                    ("down", (hidden, width)),
                )
            )
            assert torch.equal(held.gate_up[expert], torch.cat([gate, up]))
            assert torch.equal(held.down[expert], down)
        with pytest.raises(CheckpointError, match="shape"):
            load_expert_weights(reader, prefix, config.experts, hidden + 1)


@pytest.mark.parametrize("form", ["block", "channel"])
def test_experts_in_fp8_are_read_to_where_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    source = checkpoints.write_qwen3_moe(tmp_path / "source", width=160)
    directory = write_fp8(source, tmp_path / "fp8", form)
    config = ModelConfig.from_checkpoint(directory)
    assert config.experts is not None
    width, hidden = config.experts.width, config.hidden_size
    prefix = "model.layers.0.mlp"
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: False)
    with CheckpointReader(directory, device=CPU, dtype=torch.bfloat16) as reader:
        held = load_expert_weights(reader, prefix, config.experts, hidden)
        assert isinstance(held.gate_up, QuantizedExperts) and isinstance(
            held.down, QuantizedExperts
        )
        assert held.down.scaling == form
        for expert in range(config.experts.num_experts):
            name = f"{prefix}.experts.{expert}"
            parts = [
                reader.load_expert(f"{name}.{part}_proj.weight", (width, hidden))
                for part in ("gate", "up")
            ]
            down = reader.load_expert(f"{name}.down_proj.weight", (hidden, width))
            gate_up = stack_rows(parts)
            for got, want in ((held.gate_up[expert], gate_up), (held.down[expert], down)):
                assert isinstance(want, QuantizedWeight) and got.has_fp8_rows == want.has_fp8_rows
                assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
                assert torch.equal(got.scales, want.scales)


def without_fp8(tensors: Tensors, *names: str) -> None:
    """Let weights in FP8 be in bfloat16."""
    for name in names:
        del tensors[f"{name}_scale_inv"]
        tensors[name] = tensors[name].float().to(torch.bfloat16)


@pytest.mark.parametrize("is_packed", [True, False])
def test_gate_and_up_of_experts_may_be_fp8_and_down_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_packed: bool
) -> None:
    def plain_downs(tensors: Tensors) -> None:
        without_fp8(tensors, *[name for name in tensors if re.search(r"experts.*down.*t$", name)])

    source = checkpoints.write_qwen3_moe(tmp_path / "source")
    directory = edit_checkpoint(write_fp8(source, tmp_path / "fp8", "block"), tensors=plain_downs)
    config = ModelConfig.from_checkpoint(directory)
    assert config.experts is not None
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: is_packed)
    with CheckpointReader(directory, device=CPU, dtype=torch.bfloat16) as reader:
        held = load_expert_weights(reader, "model.layers.1.mlp", config.experts, config.hidden_size)
    if not is_packed:
        assert isinstance(held.gate_up, QuantizedExperts) and isinstance(held.down, torch.Tensor)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("expert", [0, 3])
def test_experts_of_which_one_is_not_in_fp8_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expert: int, *, is_packed: bool
) -> None:
    name = DOWN.replace("experts.3", f"experts.{expert}")
    source = checkpoints.write_qwen3_moe(tmp_path / "source")
    directory = edit_checkpoint(
        write_fp8(source, tmp_path / "fp8", "block"), tensors=lambda t: without_fp8(t, name)
    )
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: is_packed)
    with pytest.raises(CheckpointError, match="must be FP8, with scales of one kind"):
        CausalLM.from_checkpoint(directory, CPU, torch.bfloat16)


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_whose_scales_are_unlike_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_packed: bool
) -> None:
    def per_output(tensors: Tensors) -> None:
        size = len(tensors[DOWN])
        tensors[f"{DOWN}_scale_inv"] = torch.ones(size, 1)

    source = checkpoints.write_qwen3_moe(tmp_path / "source", width=160)
    directory = edit_checkpoint(write_fp8(source, tmp_path / "fp8", "block"), tensors=per_output)
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: is_packed)
    with pytest.raises(CheckpointError, match="must be FP8, with scales of one kind"):
        CausalLM.from_checkpoint(directory, CPU, torch.bfloat16)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", [DOWN, DOWN.replace("down", "up"), f"{DOWN}_scale_inv"])
def test_an_expert_in_fp8_without_numbers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_packed: bool
) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8).view(-1)[-4:] = 0xFF

    source = checkpoints.write_qwen3_moe(tmp_path / "source")
    directory = edit_checkpoint(write_fp8(source, tmp_path / "fp8", "block"), tensors=damage)
    monkeypatch.setattr(CpuProducts, "packs", lambda *_: is_packed)
    weight = name.removesuffix("_scale_inv")
    with pytest.raises(CheckpointError, match=f"tensor '{weight}' or its scales hold NaN"):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


def test_layers_of_multi_token_prediction_are_left_to_the_draft(tmp_path: Path) -> None:
    directory = families.write(tmp_path, "glm4_moe", **families.GLM4_MOE)
    ids = tokens_of(9)
    before = Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32)).extend(ids).hidden
    name = "model.layers.3.eh_proj.weight"
    edit_checkpoint(directory, tensors=lambda t: t.update({name: torch.ones(64, 128)}))
    after = Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32)).extend(ids).hidden
    assert torch.equal(after, before)
    edit_checkpoint(directory, config=lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match=f"1 left-over tensors.*{name}"):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


@pytest.mark.parametrize("max_num_requests", [1, 8])
def test_step_costs_are_those_of_rows_that_pass_experts(
    models: Models, chosen: list[ChosenExperts], max_num_requests: int
) -> None:
    """Padding would cost nothing; and tokens that were all the same would pass the same two."""
    path = models.get("qwen3-moe", checkpoints.write_qwen3_moe)
    target = make_target(
        Pairing(target=path, draft=path, algorithm="none"), max_num_requests=max_num_requests
    )
    pool = pool_of(target)
    before = torch.stack(pool.caches)[:, pool.page_size :].clone()
    del chosen[:]
    measure_costs(target.runner, [1, 40])
    assert {len(one.ids) for one in chosen} == {1, 40}
    assert all((one.ids < 6).all() for one in chosen)
    assert all(len(one.ids.unique()) > 4 for one in chosen if len(one.ids) == 40)
    assert torch.equal(torch.stack(pool.caches)[:, pool.page_size :], before)
    pool.check_integrity()
