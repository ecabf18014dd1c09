"""Frozen-KV MTP against transformers: features, committed rows, chains and trees of guesses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.errors import CheckpointError
from shared.kv.layout import CacheShape
from shared.models.config import DraftKind, detect_kind, feature_spec
from shared.models.draft import DraftModel, load_draft
from shared.models.llama import CausalLM
from tests import checkpoints, families
from tests.checkpoints import edit_checkpoint
from tests.paged import Block, PagedKV
from tests.unit.test_models_llama import load_transformers, tokens_of

CPU = torch.device("cpu")
NUM_TOKENS = 45  # twice the window, and more
NUM_CLUSTERS = 8
# As layers are: with a window, without, with, without.
KV_LAYERS = (2, 3)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("frozen-kv")
    target = families.write(path / "target", "gemma4_text", **families.GEMMA4)
    return target, families.write_gemma4_assistant(path / "draft")


class Oracle:
    """A target and its assistant as transformers has them."""

    def __init__(self, target: Path, draft: Path) -> None:
        with families.kv_sharing():
            self.target = load_transformers(target)
            name = json.loads((draft / "config.json").read_text())["architectures"][0]
            self.draft = (
                getattr(transformers, name)
                .from_pretrained(draft, dtype=torch.float32, attn_implementation="eager")
                .eval()
            )
        self.embedding = self.target.get_input_embeddings()

    def read(self, token_ids: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return K and V, and final hidden states, of committed tokens."""
        output = self.target(
            torch.tensor([token_ids]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        return output.shared_kv_states, output.hidden_states[-1][0]

    def guess(
        self, kv: dict[str, Any], token_id: int, hidden: torch.Tensor, root: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits after a token, and the hidden state of its children.

        Args:
            hidden: [h], of the token before.
            root: Index of the newest token, which has no K and V yet.
        """
        embeds = self.embedding(torch.tensor([[token_id]]))
        output = self.draft(
            inputs_embeds=torch.cat([embeds, hidden[None, None]], dim=-1),
            position_ids=torch.tensor([[root]]),
            shared_kv_states=kv,
            use_cache=False,
        )
        return output.logits[0, 0], output.last_hidden_state[0, 0]


class Runner:
    """One request over a target and its draft, with paged caches."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target = CausalLM.from_checkpoint(target, CPU, torch.float32)
        self.draft: DraftModel = load_draft("auto", draft, target, device=CPU, dtype=torch.float32)
        self.target_kv = PagedKV(self.target.config.kv_layout)
        self.kv = PagedKV(self.draft.kv_layout, page_size=8, seed=1)
        self.num_rows = 0

    def features(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Return the feature rows of the target's next tokens."""
        spec = self.draft.feature_spec
        rows = self.target_kv.chain(token_ids, start)
        output = self.target.forward(rows, capture_kv=spec.kv_layer_ids)
        assert output.stored is not None
        return torch.cat([output.stored, output.hidden], dim=1)

    def extend(self, token_ids: list[int], count: int) -> torch.Tensor:
        """Return the newest row of the next `count` true ones. [1, hidden_size]"""
        start = self.num_rows
        features = self.features(token_ids[start : start + count], start)
        inputs = self.kv.chain(token_ids[start + 1 : start + count + 1], start)
        recurrent = self.draft.project_features(features)
        carried = torch.zeros(1, self.draft.hidden_size)
        hidden = self.draft.extend(inputs, recurrent, carried=carried)
        self.num_rows += count
        return hidden[-1:]

    def deepen(self, token_ids: list[int], hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Run nodes of one depth; `hidden` is that of each one's parent."""
        paths = [[*range(depth - 1), 10 * depth + i] for i in range(len(token_ids))]
        block = Block(req_idx=0, prefix_len=self.num_rows, num_rows=len(paths), paths=paths)
        inputs = self.kv.rows(token_ids, [block])
        return self.draft.deepen(inputs, hidden, depth=depth)


@pytest.fixture(scope="module")
def oracle(directories: tuple[Path, Path]) -> Oracle:
    return Oracle(*directories)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_a_row_has_the_targets_kv_and_its_final_hidden_state(
    directories: tuple[Path, Path], oracle: Oracle
) -> None:
    runner, ids = Runner(*directories), tokens_of(NUM_TOKENS)
    got = torch.cat([runner.features(ids[:30], 0), runner.features(ids[30:], 30)])
    kv, hidden = oracle.read(ids)
    kinds = ("sliding_attention", "full_attention")
    stored = [one[0].transpose(0, 1).flatten(1) for kind in kinds for one in kv[kind]]
    torch.testing.assert_close(got, torch.cat([*stored, hidden], dim=1), atol=1e-5, rtol=1e-5)
    assert runner.draft.feature_spec.kv_layer_ids == KV_LAYERS
    shapes = (CacheShape(num_heads=2, width=24), CacheShape(num_heads=1, width=40))
    assert runner.draft.kv_layout.layers == shapes


def test_a_unified_target_has_such_a_draft_as_well(tmp_path: Path) -> None:
    fields = families.GEMMA4_UNIFIED
    target = families.write(tmp_path / "target", "gemma4_unified_text", **fields)
    draft = families.write_gemma4_assistant(tmp_path / "draft", name="Gemma4Unified")
    oracle, runner, ids = Oracle(target, draft), Runner(target, draft), tokens_of(NUM_TOKENS)
    assert runner.draft.kind is DraftKind.FROZEN_KV_MTP
    hidden = runner.extend(ids, 33)
    kv, features = oracle.read(ids[:33])
    want, parent = oracle.guess(kv, ids[33], features[-1], 33)
    assert_close(runner.draft.logits(hidden), want[None])
    below = runner.draft.logits(runner.deepen([7], hidden, 1))
    assert_close(below, oracle.guess(kv, 7, parent, 33)[0][None])


def test_a_target_with_shared_kv_has_such_a_draft_as_well(tmp_path: Path) -> None:
    """It reads what the last layers read, which is K and V of layers before them."""
    target = families.write(tmp_path / "target", "gemma4_text", **families.GEMMA4_E)
    draft = families.write_gemma4_assistant(tmp_path / "draft")
    oracle, runner, ids = Oracle(target, draft), Runner(target, draft), tokens_of(NUM_TOKENS)
    assert runner.draft.feature_spec.kv_layer_ids == (2, 1)
    hidden = runner.extend(ids, 33)
    kv, features = oracle.read(ids[:33])
    want, parent = oracle.guess(kv, ids[33], features[-1], 33)
    assert_close(runner.draft.logits(hidden), want[None])
    below = runner.draft.logits(runner.deepen([7], hidden, 1))
    assert_close(below, oracle.guess(kv, 7, parent, 33)[0][None])


@pytest.mark.parametrize("chunks", [(40,), (1, 1, 2, 17, 3, 16), (19, 1, 1, 1, 18)])
def test_guesses_are_those_of_transformers(
    directories: tuple[Path, Path], oracle: Oracle, chunks: tuple[int, ...]
) -> None:
    """After every chunk: three nodes of each of six depths, the last two of them siblings."""
    runner, ids, rng = Runner(*directories), tokens_of(NUM_TOKENS), random.Random(3)
    for count in chunks:
        got = runner.extend(ids, count)
        root = runner.num_rows
        kv, features = oracle.read(ids[:root])
        logits, hidden = oracle.guess(kv, ids[root], features[-1], root)
        assert_close(runner.draft.logits(got), logits[None])
        parents = [(got[0], hidden)] * 3
        for depth in range(1, 7):
            tokens = [rng.randrange(checkpoints.EOS_ID) for _ in parents]
            rows = runner.deepen(tokens, torch.stack([own for own, _ in parents]), depth)
            wants = [
                oracle.guess(kv, token, hidden, root)
                for token, (_, hidden) in zip(tokens, parents, strict=True)
            ]
            assert_close(runner.draft.logits(rows), torch.stack([want for want, _ in wants]))
            parents = [(rows[i], wants[i][1]) for i in (0, 2, 2)]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float(want.std()) > 0.3, "logits that say nothing"
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_tokens_of_chosen_clusters_alone_are_proposed(tmp_path: Path) -> None:
    size = {"vocab_size": 33 * NUM_CLUSTERS}
    target = families.write(tmp_path / "target", "gemma4_text", **families.GEMMA4, **size)
    clusters = {"num_centroids": NUM_CLUSTERS, "centroid_intermediate_top_k": 3}
    draft = families.write_gemma4_assistant(
        tmp_path / "draft", use_ordered_embeddings=True, text=size, **clusters
    )
    oracle, runner = Oracle(target, draft), Runner(target, draft)
    ids = tokens_of(NUM_TOKENS)
    hidden = runner.extend(ids, 30)
    kv, features = oracle.read(ids[:30])
    want, parent = oracle.guess(kv, ids[30], features[-1], 30)
    assert_close(runner.draft.logits(hidden), want[None])
    assert int((want > want.min()).sum()) == 3 * 33
    both = runner.draft.logits(runner.deepen([7, 9], hidden.expand(2, -1), 1))
    wants = [oracle.guess(kv, token, parent, 30)[0] for token in (7, 9)]
    assert_close(both, torch.stack(wants))

    def repeat(tensors: checkpoints.Tensors) -> None:
        tensors["masked_embedding.token_ordering"][0] = 1

    edit_checkpoint(draft, tensors=repeat)
    with pytest.raises(CheckpointError, match="token_ordering' must name each of"):
        Runner(target, draft)


def test_nodes_leave_nothing_behind(directories: tuple[Path, Path]) -> None:
    runner, ids = Runner(*directories), tokens_of(NUM_TOKENS)
    hidden = runner.extend(ids, 9)
    before = [cache.clone() for layer in runner.kv.layers for cache in layer]
    runner.deepen([1, 2, 3], hidden.expand(3, -1), 1)
    after = [cache for layer in runner.kv.layers for cache in layer]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_what_it_reads_is_found_by_the_architecture(directories: tuple[Path, Path]) -> None:
    target, draft = directories
    assert detect_kind(draft, "auto") is DraftKind.FROZEN_KV_MTP
    for algorithm in ("auto", "frozen_kv_mtp"):
        kind, spec = feature_spec(draft, target, algorithm)
        assert (kind, spec.kv_layer_ids, spec.layer_ids) == (DraftKind.FROZEN_KV_MTP, KV_LAYERS, ())
        assert spec.width == 2 * (2 * 24 + 40) + 64
    loaded = load_draft("auto", draft, target, device=CPU, dtype=torch.float32)
    assert (loaded.kind, loaded.input_shift, loaded.kv_lag) == (DraftKind.FROZEN_KV_MTP, 1, 0)
    assert (loaded.recurrent_width, loaded.hidden_size) == (spec.width, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_ordered_embeddings": True}, "num_centroids = 2048 must divide vocab_size = "),
        ({"backbone_hidden_size": 48}, "backbone_hidden_size = 48, but the target's is 64"),
        ({"backbone_hidden_size": None}, "backbone_hidden_size must be a positive"),
        ({"text_config": {"model_type": "gemma3_text"}}, "must be .*gemma4_text or gemma4_un"),
        ({"text_config": {"use_double_wide_mlp": True}}, "use_double_wide_mlp = True"),
        ({"text_config": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input = 8"),
        ({"text_config": {"num_kv_shared_layers": 1}}, "num_kv_shared_layers = 1 must be"),
        ({"text_config": {"vocab_size": 100}}, "vocab_size = 100, but the target's"),
        ({"text_config": {"head_dim": 32}}, "layer 0 has .*head_dim = 32, but layer 2 of the tar"),
        ({"text_config": {"per_layer_config": {}}}, "layer 2 has .*but layer 3 of the target"),
    ],
)
def test_what_does_not_fit_is_named(
    directories: tuple[Path, Path], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    target, draft = directories
    config = json.loads((draft / "config.json").read_text())
    text = config["text_config"] | fields.pop("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text, **fields}))
    with pytest.raises(CheckpointError, match=message):
        feature_spec(tmp_path, target, "auto")


def test_the_target_needs_layers_of_both_kinds(
    directories: tuple[Path, Path], tmp_path: Path
) -> None:
    target = checkpoints.write_llama(tmp_path)
    edit_checkpoint(target, config=lambda c: c.update({"hidden_size": 64}))
    with pytest.raises(CheckpointError, match="with a window and of one without"):
        feature_spec(directories[1], target, "auto")
