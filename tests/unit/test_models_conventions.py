"""Conventions of every draft kind, computed by hand on checkpoints with two-wide weights.

| kind       | row p reads        | order in the input  | norms on the input | fed back        |
|------------|--------------------|---------------------|--------------------|-----------------|
| eagle3     | token p+1, fc(f_p) | [embedding; hidden] | both               | before the norm |
| eagle      | token p+1, f_p     | [embedding; hidden] | none               | no norm at all  |
| mtp        | token p+1, f_p     | [hidden; embedding] | both; 0 at row 0   | after the norm  |
| standalone | token p            | embedding           | the layer's own    | nothing         |

f_p of eagle3: outputs of the captured layers; of eagle and mtp: the target's final norm. Those of
frozen_kv_mtp are compared with transformers in test_models_frozen_kv.py.
Hidden size 2, one head of width 2, so that every number below can be checked with a pencil.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.models.config import DraftKind, feature_spec
from shared.models.draft import DraftModel, load_draft
from tests.paged import PagedKV

CPU = torch.device("cpu")
EYE = [[1.0, 0.0], [0.0, 1.0]]
ZERO = [[0.0, 0.0], [0.0, 0.0]]
EMBEDDING = [[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]  # of tokens 0, 1, 2
HEAD = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
# rms(3, 4) = sqrt(12.5), rms(0, 2) = rms(1, 1) * sqrt(2) = sqrt(2), rms(6, 8) = sqrt(50)
NORM_3_4 = (3 / math.sqrt(12.5), 4 / math.sqrt(12.5))


def write(path: Path, fields: dict[str, object], tensors: dict[str, object]) -> Path:
    path.mkdir()
    base = {
        "vocab_size": 3,
        "hidden_size": 2,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-12,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(base | fields))
    save_file(
        {name: torch.tensor(value) for name, value in tensors.items()},
        path / "model.safetensors",
    )
    return path


def layer(prefix: str, *, value: object = ZERO, query: object = ZERO) -> dict[str, object]:
    """Return a layer without an MLP whose attention output is the mean of W_v x, or zero."""
    return {
        f"{prefix}.self_attn.q_proj.weight": query,
        f"{prefix}.self_attn.k_proj.weight": query,
        f"{prefix}.self_attn.v_proj.weight": value,
        f"{prefix}.self_attn.o_proj.weight": EYE,
        f"{prefix}.post_attention_layernorm.weight": [1.0, 1.0],
        f"{prefix}.mlp.gate_proj.weight": ZERO,
        f"{prefix}.mlp.up_proj.weight": ZERO,
        f"{prefix}.mlp.down_proj.weight": ZERO,
    }


def write_target(path: Path, *, num_layers: int = 1, has_mtp: bool = False) -> Path:
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
    }
    tensors: dict[str, object] = {
        "model.embed_tokens.weight": EMBEDDING,
        "model.norm.weight": [10.0, 10.0],
        "lm_head.weight": HEAD,
    }
    for i in range(num_layers):
        tensors |= layer(f"model.layers.{i}")
        tensors[f"model.layers.{i}.input_layernorm.weight"] = [1.0, 1.0]
    if has_mtp:
        fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        prefix = "model.mtp_layers.0"
        for name in ("model.layers.0", prefix):
            tensors |= {f"{name}.self_attn.{x}_proj.bias": [0.0, 0.0] for x in "qkv"}
        tensors |= layer(prefix)
        tensors |= {
            f"{prefix}.input_layernorm.weight": [1.0, 1.0],
            f"{prefix}.token_layernorm.weight": [1.0, 1.0],
            f"{prefix}.hidden_layernorm.weight": [2.0, 2.0],
            f"{prefix}.final_layernorm.weight": [5.0, 5.0],
            # 1 x the first half + 100 x the second
            f"{prefix}.input_proj.weight": [[1.0, 0.0, 100.0, 0.0], [0.0, 1.0, 0.0, 100.0]],
        }
    return write(path, fields, tensors)


def write_eagle3(
    path: Path, *, value: object, norms: dict[str, object] | None = None, **fields: object
) -> Path:
    tensors = layer("midlayer", value=value, query=[[0.0] * 4] * 2) | (norms or {})
    tensors |= {
        "fc.weight": [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.5]],  # layer A + half of layer B
        "midlayer.input_layernorm.weight": [1.0, 1.0],
        "midlayer.hidden_norm.weight": [2.0, 2.0],
        "norm.weight": [5.0, 5.0],
        "lm_head.weight": [[1.0, 0.0], [0.0, 1.0]],
        "d2t": [1, 1],  # draft ids 0, 1 are target ids 1, 2
        "t2d": [False, True, True],
    }
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0]},
    } | fields
    return write(path, fields, tensors)


def run(
    draft: DraftModel,
    token_ids: list[int],
    recurrent: list[list[float]] | None,
    positions: list[int] | None = None,
) -> torch.Tensor:
    """Run a chain of rows from an empty cache."""
    positions = positions or list(range(1, len(token_ids) + 1))
    return draft.extend(
        replace(PagedKV(draft.kv_layout).chain(token_ids), position_ids=torch.tensor(positions)),
        None if recurrent is None else torch.tensor(recurrent),
        carried=torch.zeros(1, draft.hidden_size),
    )


def assert_rows(got: torch.Tensor, want: list[list[float] | tuple[float, float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """What the engines need to know of a kind."""

    kind: DraftKind
    input_shift: int
    layer_ids: tuple[int, ...]
    feature_width: int
    recurrent_width: int


CONVENTIONS = [
    Convention(
        kind=DraftKind.EAGLE3, input_shift=1, layer_ids=(1, 0), feature_width=4, recurrent_width=2
    ),
    Convention(
        kind=DraftKind.EAGLE, input_shift=1, layer_ids=(), feature_width=2, recurrent_width=2
    ),
    Convention(kind=DraftKind.MTP, input_shift=1, layer_ids=(), feature_width=2, recurrent_width=2),
    Convention(
        kind=DraftKind.STANDALONE, input_shift=0, layer_ids=(), feature_width=0, recurrent_width=0
    ),
]


def load(kind: DraftKind, tmp_path: Path) -> DraftModel:
    is_mtp = kind is DraftKind.MTP
    target = write_target(tmp_path / "target", num_layers=1 if is_mtp else 2, has_mtp=is_mtp)
    directory = target
    if kind is DraftKind.EAGLE3:
        directory = write_eagle3(tmp_path / "draft", value=[[0.0] * 4] * 2)
    if kind is DraftKind.EAGLE:
        directory = write_eagle(tmp_path / "draft")
    return load_draft(kind, directory, target, device=CPU, dtype=torch.float32)


def write_eagle(path: Path, **weights: object) -> Path:
    tensors: dict[str, object] = layer("layers.0") | {
        # 1 x the first half + 100 x the second, + (0.25, 0.5)
        "fc.weight": [[1.0, 0.0, 100.0, 0.0], [0.0, 1.0, 0.0, 100.0]],
        "fc.bias": [0.25, 0.5],
    }
    return write(path, {"architectures": ["LlamaForCausalLMEagle"]}, tensors | weights)


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: str(c.kind))
def test_table(convention: Convention, tmp_path: Path) -> None:
    draft = load(convention.kind, tmp_path)
    assert draft.kind is convention.kind
    assert draft.input_shift == convention.input_shift
    assert draft.feature_spec.layer_ids == convention.layer_ids
    assert draft.feature_spec.width == convention.feature_width
    assert draft.recurrent_width == convention.recurrent_width


def test_eagle3_projects_with_fc_in_the_order_of_the_layer_ids(tmp_path: Path) -> None:
    draft = load(DraftKind.EAGLE3, tmp_path)
    # [layer 1; layer 0] = [(6, 8); (2, 4)] -> (6, 8) + (2, 4) / 2
    assert_rows(draft.project_features(torch.tensor([[6.0, 8.0, 2.0, 4.0]])), [[7.0, 10.0]])


def test_eagle3_feeds_back_the_sum_before_the_norm(tmp_path: Path) -> None:
    draft = load(DraftKind.EAGLE3, tmp_path)
    # Attention and MLP give 0: h goes through as it is; the embedding is in no residual.
    hidden = run(draft, [0], [[6.0, 8.0]])
    assert_rows(hidden, [[6.0, 8.0]])
    # The head norms first: (6, 8) / sqrt(50) * 5.
    assert_rows(draft.logits(hidden), [[30 / math.sqrt(50), 40 / math.sqrt(50)]])
    assert draft.to_target_ids(torch.tensor([0, 1])).tolist() == [1, 2]


def test_eagle3_with_norm_output_feeds_back_the_normed_sum(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_layers=2)
    head = write_eagle3(tmp_path / "draft", value=[[0.0] * 4] * 2, norm_output=True)
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    want = [[30 / math.sqrt(50), 40 / math.sqrt(50)]]
    hidden = run(draft, [0], [[6.0, 8.0]])
    assert_rows(hidden, want)
    assert_rows(draft.logits(hidden), want)


def test_eagle3_residual_may_begin_normed(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_layers=2)
    none = [[0.0] * 4] * 2
    head = write_eagle3(tmp_path / "draft", value=none, norm_before_residual=True)
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    # hidden_norm has weight 2: 2 x (6, 8) / sqrt(50), and the layer adds nothing.
    hidden = run(draft, [0], [[6.0, 8.0]])
    assert_rows(hidden, [[12 / math.sqrt(50), 16 / math.sqrt(50)]])


def test_eagle3_norms_before_fc(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_layers=2)
    features = torch.tensor([[6.0, 8.0, 0.0, 2.0]])
    taps: dict[str, object] = {"fc_norm.0.weight": [1.0, 2.0], "fc_norm.1.weight": [1.0, 3.0]}
    none = [[0.0] * 4] * 2
    head = write_eagle3(tmp_path / "a", value=none, norms=taps, fc_norm=True)
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    # Each tap by itself: (6, 16) / sqrt(50) + (0, 6) / sqrt(2) / 2.
    want = [[6 / math.sqrt(50), 16 / math.sqrt(50) + 3 / math.sqrt(2)]]
    assert_rows(draft.project_features(features), want)
    one: dict[str, object] = {"input_norm.weight": [1.0, 2.0, 1.0, 3.0]}
    head = write_eagle3(tmp_path / "b", value=none, norms=one, norm_before_fc=True)
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    # All four together, whose mean square is 26: ((6, 16) + (0, 6) / 2) / sqrt(26).
    assert_rows(draft.project_features(features), [[6 / math.sqrt(26), 19 / math.sqrt(26)]])


def test_eagle3_attention_reads_normed_embedding_then_normed_hidden(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_layers=2)
    first_half = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    second_half = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    for name, value, added in (
        ("a", first_half, NORM_3_4),  # token 0 is (3, 4)
        ("b", second_half, (12 / math.sqrt(50), 16 / math.sqrt(50))),  # 2 x norm(6, 8)
    ):
        head = write_eagle3(tmp_path / name, value=value)
        draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
        hidden = run(draft, [0], [[6.0, 8.0]])
        assert_rows(hidden, [[6.0 + added[0], 8.0 + added[1]]])


def test_eagle3_default_layers_are_inputs_of_2_half_and_third_last(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_layers=8)
    head = write_eagle3(tmp_path / "draft", value=ZERO, eagle_config=None)
    kind, spec = feature_spec(head, target, "auto")
    assert kind is DraftKind.EAGLE3
    # Inputs of layers 2, 8 / 2 and 8 - 3 are outputs of layers 1, 3 and 4.
    assert spec.layer_ids == (1, 3, 4)
    assert spec.width == 6


def test_eagle_reads_embedding_then_feature_and_has_no_norm(tmp_path: Path) -> None:
    draft = load(DraftKind.EAGLE, tmp_path)
    assert_rows(draft.project_features(torch.tensor([[6.0, 8.0]])), [[6.0, 8.0]])
    # fc: (3, 4) + 100 x (6, 8) + (0.25, 0.5); the layer adds nothing.
    hidden = run(draft, [0], [[6.0, 8.0]])
    assert_rows(hidden, [[603.25, 804.5]])
    # The target's head on the raw hidden state, without a norm.
    assert_rows(draft.logits(hidden), [[603.25, 804.5, 1407.75]])


def test_eagle_divides_logits_as_its_target_does(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    fields = json.loads((target / "config.json").read_text())
    fields |= {"architectures": ["GraniteForCausalLM"], "logits_scaling": 4.0}
    (target / "config.json").write_text(json.dumps(fields))
    head = write_eagle(tmp_path / "draft")
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    assert_rows(draft.logits(torch.tensor([[1.0, 2.0]])), [[0.25, 0.5, 0.75]])


def test_eagle_attention_has_no_input_norm(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    fc = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    head = write_eagle(
        tmp_path / "draft",
        **{"layers.0.self_attn.v_proj.weight": EYE, "fc.weight": fc, "fc.bias": [0.0, 0.0]},
    )
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    # x = (3, 4); attention to itself adds x, not norm(x).
    assert_rows(run(draft, [0], [[6.0, 8.0]]), [[6.0, 8.0]])


def test_mtp_reads_normed_feature_then_normed_embedding(tmp_path: Path) -> None:
    draft = load(DraftKind.MTP, tmp_path)
    # input_proj: 2 x norm(6, 8) + 100 x norm(3, 4), both along (3, 4) / sqrt(12.5): 102 of it;
    # the final norm makes it 5 x norm(3, 4) again.
    hidden = run(draft, [0], [[6.0, 8.0]])
    want = [[5 * NORM_3_4[0], 5 * NORM_3_4[1]]]
    assert_rows(hidden, want)
    # What is fed back and what the head reads is the same, after the final norm.
    assert_rows(draft.logits(hidden), [[*want[0], want[0][0] + want[0][1]]])
    # Token 1 is (0, 2), its norm (0, sqrt(2)); the feature (1, 0), twice its norm (2 sqrt(2), 0):
    # x = sqrt(2) x (2, 100), and rms(2, 100) = sqrt(5002).
    hidden = run(draft, [1], [[1.0, 0.0]])
    assert_rows(hidden, [[10 / math.sqrt(5002), 500 / math.sqrt(5002)]])


def test_mtp_row_at_position_zero_has_no_embedding(tmp_path: Path) -> None:
    draft = load(DraftKind.MTP, tmp_path)
    # Only the feature (1, 0) is left: 5 x norm(1, 0) = (5 sqrt(2), 0).
    hidden = run(draft, [1, 1], [[1.0, 0.0], [1.0, 0.0]], positions=[0, 1])
    assert_rows(hidden, [[5 * math.sqrt(2), 0.0], [10 / math.sqrt(5002), 500 / math.sqrt(5002)]])


def test_standalone_row_is_its_own_token(tmp_path: Path) -> None:
    draft = load(DraftKind.STANDALONE, tmp_path)
    # Token 0 is (3, 4); the final norm scales by 10.
    hidden = run(draft, [0], None)
    x, y = 10 * NORM_3_4[0], 10 * NORM_3_4[1]
    assert_rows(hidden, [[x, y]])
    assert_rows(draft.logits(hidden), [[x, y, x + y]])


def test_row_attends_by_distance_of_positions(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    take_embedding = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    head = write_eagle(
        tmp_path / "draft",
        **{
            "fc.weight": take_embedding,
            "fc.bias": [0.0, 0.0],
            "layers.0.self_attn.q_proj.weight": EYE,
            "layers.0.self_attn.k_proj.weight": EYE,
            "layers.0.self_attn.v_proj.weight": EYE,
        },
    )
    draft = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    # Rows (1, 0) at position p and (0, 2) at position p + 3. The angle between them is 3 radians:
    # q . k = 2 (0, 1) . R(-3)(1, 0) = 2 sin(-3) over sqrt(2); with itself 4 over sqrt(2).
    other, own = 2 * math.sin(-3), 4.0
    share = 1 / (1 + math.exp((own - other) / math.sqrt(2)))
    for first in (0, 5):
        hidden = run(draft, [2, 1], [[9.0, 9.0], [9.0, 9.0]], positions=[first, first + 3])
        assert_rows(hidden, [[2.0, 0.0], [share, 2 + 2 * (1 - share)]])
