"""Every draft kind against its independent reference, step by step: features to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shared.errors import CheckpointError
from shared.models.draft import DraftModel, load_draft
from tests import checkpoints, deepseek
from tests.checkpoints import Shape
from tests.paged import Block, PagedKV
from tests.reference.causal_lm import DenseOutput, ReferenceLM
from tests.reference.deepseek import ReferenceDeepseek, ReferenceDeepseekMTP
from tests.reference.drafts import (
    ReferenceDraft,
    ReferenceEagle,
    ReferenceEagle3,
    ReferenceMTP,
    ReferenceStandalone,
    Row,
)

CPU = torch.device("cpu")
NUM_TOKENS = 23
DEEP = Shape(num_layers=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target, a draft, both as the code under test and as reference."""

    draft: DraftModel
    reference: ReferenceDraft
    token_ids: list[int]
    target: DenseOutput


def _eagle3(shape: Shape = checkpoints.TINY, **options: object) -> Callable[[Path], Case]:
    def build(path: Path) -> Case:
        target = checkpoints.write_llama(path / "target", shape=shape)
        draft = checkpoints.write_eagle3(path / "draft", target, **options)  # type: ignore[arg-type]
        return _case(draft, target, ReferenceEagle3(draft, ReferenceLM(target)))

    return build


def _eagle(**options: object) -> Callable[[Path], Case]:
    def build(path: Path) -> Case:
        target = checkpoints.write_llama(path / "target")
        draft = checkpoints.write_eagle(path / "draft", target, **options)  # type: ignore[arg-type]
        return _case(draft, target, ReferenceEagle(draft, ReferenceLM(target)))

    return build


def _mtp(path: Path) -> Case:
    target = checkpoints.write_mimo(path)
    return _case(target, target, ReferenceMTP(ReferenceLM(target)))


def _deepseek_mtp(path: Path) -> Case:
    target = deepseek.write_deepseek(path)
    model = ReferenceDeepseek(target)
    return _case(target, target, ReferenceDeepseekMTP(model), model)


def _standalone(path: Path) -> Case:
    target = checkpoints.write_qwen2(path / "target")
    draft = checkpoints.write_standalone(path / "draft", target, noise=0.3, num_shards=2)
    return _case(draft, target, ReferenceStandalone(draft))


def _tied_eagle(path: Path) -> Case:
    target = checkpoints.write_llama(path / "target", is_tied=True, num_shards=2)
    draft = checkpoints.write_eagle(path / "draft", target)
    return _case(draft, target, ReferenceEagle(draft, ReferenceLM(target)))


def _case(
    draft: Path,
    target: Path,
    reference: ReferenceDraft,
    reference_lm: ReferenceDeepseek | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, checkpoints.VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()
    return Case(
        draft=load_draft("auto", draft, target, device=CPU, dtype=torch.float32),
        reference=reference,
        token_ids=ids,
        target=(reference_lm or ReferenceLM(target)).forward(ids),
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "eagle3": _eagle3(),
    "eagle3-own-embedding": _eagle3(has_embedding=True),
    "eagle3-full-vocabulary": _eagle3(draft_vocab_size=None),
    "eagle3-targets-head": _eagle3(draft_vocab_size=None, has_head=False),
    "eagle3-default-layers": _eagle3(DEEP, layer_ids=None),
    "eagle3-three-layers-out-of-order": _eagle3(DEEP, layer_ids=(4, 0, 3)),
    "eagle3-fc-bias-norm-output": _eagle3(has_fc_bias=True, feeds_back_norm=True),
    "eagle3-other-width": _eagle3(hidden_size=32, has_embedding=True),
    "eagle3-other-names": _eagle3(prefix="model.", layer_name="layers.0"),
    "eagle3-speculators": _eagle3(is_speculators=True, has_embedding=True),
    "eagle3-speculators-plain-residual": _eagle3(
        DEEP, is_speculators=True, norm_before_residual=False, layer_ids=None
    ),
    "eagle3-speculators-qwen3": _eagle3(
        is_speculators=True, model_type="qwen3", norm_before_fc=True
    ),
    "eagle3-normed-residual": _eagle3(norm_before_residual=True),
    "eagle3.1": _eagle3(
        DEEP,
        layer_ids=(1, 2, 4),
        tap_norms=("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        feeds_back_norm=True,
    ),
    "eagle3.1-older-names": _eagle3(
        DEEP, layer_ids=None, tap_norms=("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    ),
    "eagle3.1-one-norm-before-fc": _eagle3(norm_before_fc=True, has_fc_bias=True),
    "eagle3-wide-heads": _eagle3(heads=(8, 16)),
    "eagle3-two-layers": _eagle3(num_layers=2, layer_name="layers.0", feeds_back_norm=True),
    "eagle3-three-layers-speculators": _eagle3(
        is_speculators=True, model_type="qwen3", num_layers=3, heads=(8, 16)
    ),
    "eagle": _eagle(),
    "eagle-no-fc-bias": _eagle(has_fc_bias=False, has_embedding=False),
    "eagle-two-layers": _eagle(num_layers=2, prefix="model."),
    "eagle-tied-sharded-target": _tied_eagle,
    "mtp": _mtp,
    "mtp-deepseek": _deepseek_mtp,
    "standalone": _standalone,
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def captured_features(case: Case) -> torch.Tensor:
    """Gather by the draft's own spec what the target would send. [T - 1, width]."""
    spec = case.draft.feature_spec
    layers = [case.target.layers[i] for i in spec.layer_ids] or [case.target.final]
    features = torch.cat(layers, dim=-1)[: NUM_TOKENS - 1]
    assert features.shape[1] == spec.width
    return features


class DraftRunner:
    """One request over a draft and paged caches."""

    def __init__(self, case: Case) -> None:
        self.draft = case.draft
        self.tokens = case.token_ids[self.draft.input_shift :]
        self.recurrent = (
            self.draft.project_features(captured_features(case))
            if self.draft.recurrent_width
            else None
        )
        self.kv = PagedKV(self.draft.kv_layout)
        self.num_rows = 0

    def extend(self, count: int) -> torch.Tensor:
        rows = slice(self.num_rows, self.num_rows + count)
        hidden = self.draft.extend(
            self.kv.chain(self.tokens[rows], self.num_rows),
            None if self.recurrent is None else self.recurrent[rows],
            carried=torch.zeros(1, self.draft.hidden_size),
        )
        self.num_rows += count
        return hidden

    def guess(
        self, token_ids: list[int], hidden: torch.Tensor, paths: list[list[int]]
    ) -> torch.Tensor:
        """Run guessed rows past the true ones; `hidden` is that of each row's parent."""
        block = Block(req_idx=0, prefix_len=self.num_rows, num_rows=len(paths), paths=paths)
        return self.draft.deepen(
            self.kv.rows(token_ids, [block]),
            hidden if self.draft.recurrent_width else None,
            depth=len(paths[0]),
        )

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, V] over target ids."""
        logits = self.draft.logits(hidden)
        assert logits.shape == (len(hidden), self.draft.vocab_size)
        ids = self.draft.to_target_ids(torch.arange(self.draft.vocab_size))
        full = torch.full((len(hidden), checkpoints.VOCAB_SIZE), float("-inf"))
        full[:, ids] = logits
        return full


def test_true_rows_match_the_reference(case: Case) -> None:
    rows = case.reference.true_rows(case.token_ids, case.target)
    runner = DraftRunner(case)
    hidden = torch.cat([runner.extend(9), runner.extend(1), runner.extend(len(rows) - 10)])
    assert len(hidden) == len(rows) == NUM_TOKENS - case.draft.input_shift
    for p in range(len(rows)):
        want = case.reference.hidden(rows[: p + 1])
        torch.testing.assert_close(hidden[p], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            runner.full_logits(hidden[p : p + 1])[0],
            case.reference.logits(want),
            atol=1e-4,
            rtol=1e-4,
        )


def test_projection_matches_the_reference(case: Case) -> None:
    if not case.draft.recurrent_width:
        assert case.draft.feature_spec.width == 0
        return
    rows = case.reference.true_rows(case.token_ids, case.target)
    want = torch.stack([row.recurrent for row in rows if row.recurrent is not None])
    got = case.draft.project_features(captured_features(case))
    assert got.shape == (len(rows), case.draft.recurrent_width)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_bushy_tree_of_guesses_matches_the_reference(case: Case) -> None:
    base = case.reference.true_rows(case.token_ids, case.target)
    runner = DraftRunner(case)
    root = runner.extend(len(base))[-1]
    # Two beams under the root, then three below them: a child of beam 0 and two of beam 1.
    tokens, parents = [11, 40, 7, 99, 200], [None, None, 0, 1, 1]
    first = runner.guess(tokens[:2], torch.stack([root, root]), [[0], [1]])
    second = runner.guess(
        tokens[2:], torch.stack([first[0], first[1], first[1]]), [[0, 2], [1, 3], [1, 4]]
    )
    got = torch.cat([first, second])
    reference_hidden: list[torch.Tensor] = []
    paths: list[list[Row]] = []
    root_want = case.reference.hidden(base)
    for token, parent in zip(tokens, parents, strict=True):
        above = [] if parent is None else paths[parent]
        fed_back = root_want if parent is None else reference_hidden[parent]
        row = Row(
            token_id=token,
            position=base[-1].position + 1 + len(above),
            recurrent=fed_back if case.draft.recurrent_width else None,
        )
        paths.append([*above, row])
        reference_hidden.append(case.reference.hidden([*base, *paths[-1]]))
    torch.testing.assert_close(got, torch.stack(reference_hidden), atol=2e-4, rtol=2e-4)


def test_features_of_another_dtype_are_converted(case: Case) -> None:
    if not case.draft.recurrent_width:
        return
    features = captured_features(case).bfloat16()
    got = case.draft.project_features(features)
    assert got.dtype is torch.float32
    assert torch.equal(got, case.draft.project_features(features.float()))


def test_targets_embedding_and_head_are_the_targets(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    draft = checkpoints.write_eagle3(tmp_path / "draft", target, draft_vocab_size=None)
    checkpoints.edit_checkpoint(
        draft,
        tensors=lambda t: t.pop("lm_head.weight"),
        config=lambda c: c.pop("draft_vocab_size"),
    )
    loaded = load_draft("auto", draft, target, device=CPU, dtype=torch.float32)
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    weights = checkpoints.read_tensors(draft) | checkpoints.read_tensors(target)
    rms = hidden.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    want = (hidden * rms * weights["norm.weight"]) @ weights["lm_head.weight"].T
    torch.testing.assert_close(loaded.logits(hidden), want, atol=1e-4, rtol=1e-4)


def test_later_layers_with_a_norm_of_the_first_are_refused(tmp_path: Path) -> None:
    """SGLang would norm their input by it; nobody trains such heads."""
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(tmp_path / "head", target, num_layers=2, layer_name="layers.0")
    name = "layers.1.hidden_norm.weight"
    checkpoints.edit_checkpoint(head, tensors=lambda t: t.update({name: torch.ones(48)}))
    with pytest.raises(CheckpointError, match=rf"left-over tensors.*{name}"):
        load_draft("auto", head, target, device=CPU, dtype=torch.float32)


def test_standalone_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    size = checkpoints.VOCAB_SIZE
    target = checkpoints.write_llama(tmp_path / "target", shape=Shape(vocab_size=size + 9))
    draft = checkpoints.write_llama(tmp_path / "draft", shape=Shape(vocab_size=size + 5))
    loaded = load_draft("auto", draft, target, device=CPU, dtype=torch.float32)
    assert loaded.vocab_size == size + 5
    # The second id is one that only the target's padding has.
    rows = PagedKV(loaded.kv_layout).chain([3, size + 8])
    hidden = loaded.extend(rows, None, carried=torch.zeros(1, loaded.hidden_size))
    assert loaded.logits(hidden).isfinite().all()
    swapped = load_draft("auto", target, draft, device=CPU, dtype=torch.float32)
    assert swapped.vocab_size == size + 5
    assert swapped.logits(hidden).shape == (2, size + 5)


def test_max_position_is_what_a_row_should_see(tmp_path: Path) -> None:
    target = checkpoints.write_mistral(tmp_path / "target", sliding_window=12)
    same = load_draft("standalone", target, target, device=CPU, dtype=torch.float32)
    assert same.max_position == 12
    head = checkpoints.write_eagle(tmp_path / "head", target, max_position_embeddings=64)
    eagle = load_draft("auto", head, target, device=CPU, dtype=torch.float32)
    assert eagle.max_position == 64
