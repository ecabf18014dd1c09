"""Several layers of multi-token prediction: rows, trees and KV against a dense reference and
transformers' MtpModel, and speculation by them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.messages import SamplingParams, TokenTree, TreeShape
from shared.models.draft import DraftModel, load_draft
from tests import checkpoints, deepseek, mimo_v2
from tests.checkpoints import Tensors, edit_checkpoint
from tests.engines import (
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    graft,
    make_draft,
    make_target,
    plain_of,
    pool_of,
    random_tokens,
)
from tests.local_pair import LocalRequest
from tests.paged import Block, PagedKV
from tests.reference.causal_lm import DenseOutput, ReferenceLM
from tests.reference.deepseek import ReferenceDeepseek, ReferenceDeepseekMTP
from tests.reference.drafts import ReferenceMTP, Row
from tests.reference.mimo_v2 import ReferenceMiMoV2, ReferenceMiMoV2MTP
from tests.reference.mtp_layers import ReferenceMTPLayers
from tests.reference.trees import draft_tree
from tests.unit.test_engine_exactness import requests_of
from tests.unit.test_models_llama import load_transformers

CPU = torch.device("cpu")
NUM_TOKENS = 19
SAFE_MARGIN = 2e-5


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How checkpoints of a family are written, and what they are compared with."""

    write: Callable[..., Path]
    target: Callable[[Path], Any]
    draft: Callable[..., Any]


FAMILIES = {
    "mimo": Family(write=checkpoints.write_mimo, target=ReferenceLM, draft=ReferenceMTP),
    "deepseek": Family(
        write=deepseek.write_deepseek, target=ReferenceDeepseek, draft=ReferenceDeepseekMTP
    ),
    # Its layers have a window of 13 and other heads than those of the target without one.
    "mimo-v2": Family(
        write=partial(mimo_v2.write_mimo_v2, **mimo_v2.OTHER_HEADS),
        target=ReferenceMiMoV2,
        draft=ReferenceMiMoV2MTP,
    ),
}


class Runner:
    """One request over a draft and paged caches, as a draft's engine runs it."""

    def __init__(self, draft: DraftModel, token_ids: list[int], target: DenseOutput) -> None:
        self.draft = draft
        self.token_ids = token_ids
        self.features = draft.project_features(target.final)
        self.kv = PagedKV(draft.kv_layout)
        self.num_rows = 0
        self.hidden = torch.zeros(1, draft.hidden_size)  # by req_idx

    def extend(self, count: int) -> torch.Tensor:
        """Return the newest row of the next `count` true ones. [hidden_size]"""
        rows = slice(self.num_rows, self.num_rows + count)
        token_ids = self.token_ids[rows.start + 1 : rows.stop + 1]
        inputs = self.kv.chain(token_ids, rows.start, window=self.draft.max_position)
        hidden = self.draft.extend(inputs, self.features[rows], carried=self.hidden)
        self.num_rows += count
        self.hidden = hidden[-1:]
        return hidden[-1]

    def guess(
        self, token_ids: list[int], hidden: torch.Tensor, paths: list[list[int]]
    ) -> torch.Tensor:
        """Run nodes of one depth; `hidden` is that of each one's parent."""
        block = Block(req_idx=0, prefix_len=self.num_rows, num_rows=len(paths), paths=paths)
        inputs = self.kv.rows(token_ids, [block], window=self.draft.max_position)
        return self.draft.deepen(inputs, hidden, depth=len(paths[0]))


def tokens_of(count: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, checkpoints.VOCAB_SIZE, (count,), generator=generator).tolist()


CASES = [("mimo", 2), ("mimo", 3), ("deepseek", 3), ("mimo-v2", 1), ("mimo-v2", 3)]


@pytest.fixture(params=CASES, ids=lambda p: f"{p[0]}-{p[1]}")
def case(
    request: pytest.FixtureRequest, models: Models
) -> tuple[Runner, ReferenceMTPLayers, DenseOutput]:
    name, num_layers = request.param
    family = FAMILIES[name]
    directory = models.get(
        f"{name}-{num_layers}-mtp", lambda d: family.write(d, num_mtp_layers=num_layers)
    )
    target = family.target(directory)
    output = target.forward(tokens_of())
    draft = load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)
    assert draft.kv_layout.num_layers == num_layers and draft.kv_lag == num_layers - 1
    runner = Runner(draft, tokens_of(), output)
    return runner, ReferenceMTPLayers(family.draft(target), num_layers), output


Case = tuple[Runner, ReferenceMTPLayers, DenseOutput]


@pytest.mark.parametrize("chunks", [(18,), (1, 1, 1, 9, 6), (2, 16), (5, 1, 12)])
def test_trees_from_rows_in_chunks_match_the_reference(case: Case, chunks: tuple[int, ...]) -> None:
    """After every chunk, however short: three nodes of every depth, past the last layer, too."""
    runner, reference, output = case
    rng = random.Random(2)
    for count in chunks:
        hidden = runner.extend(count)
        base = reference.true_rows(runner.token_ids[: runner.num_rows + 1], output)
        beams: list[tuple[list[int], list[Row], torch.Tensor, torch.Tensor]]
        want = reference.hidden(base)
        assert_logits(runner.draft, reference, hidden[None], [want])
        beams = [([], [], hidden, want)]
        for depth in range(1, 6):
            # Children of the first beam twice, of the last one once: a parent that is a sibling's.
            parents = [beams[0], beams[0], beams[-1]]
            tokens = random_tokens(rng, 3)
            paths = [[*p[0], 3 * (depth - 1) + i] for i, p in enumerate(parents)]
            got = runner.guess(tokens, torch.stack([p[2] for p in parents]), paths)
            rows = [
                [*p[1], Row(token_id=t, position=len(base) + depth - 1, recurrent=p[3])]
                for p, t in zip(parents, tokens, strict=True)
            ]
            wants = [reference.hidden([*base, *path]) for path in rows]
            assert_logits(runner.draft, reference, got, wants)
            beams = list(zip(paths, rows, got, wants, strict=True))


def assert_logits(
    draft: DraftModel,
    reference: ReferenceMTPLayers,
    hidden: torch.Tensor,
    wants: list[torch.Tensor],
) -> None:
    want = torch.stack([reference.logits(one) for one in wants])
    torch.testing.assert_close(draft.logits(hidden), want, atol=3e-4, rtol=1e-4)


def test_two_requests_share_a_forward(models: Models) -> None:
    """One at its first row, one far behind it; each has the hidden row that it has alone."""
    path = models.get("mimo-3-mtp", lambda d: checkpoints.write_mimo(d, num_mtp_layers=3))
    target = ReferenceLM(path)
    draft = load_draft("mtp", path, path, device=CPU, dtype=torch.float32)
    ids = [tokens_of()[:12], tokens_of()[7:]]
    outputs = [target.forward(one) for one in ids]
    alone = [Runner(draft, one, output) for one, output in zip(ids, outputs, strict=True)]
    want = [[runner.extend(4) for _ in range(2)] for runner in alone]
    kv = PagedKV(draft.kv_layout, num_requests=2)
    carried = torch.full((3, draft.hidden_size), float("nan"))
    carried[:2] = 0
    # (request, rows before, rows): the second request begins when the first goes on.
    for blocks in (((0, 0, 4),), ((1, 0, 4), (0, 4, 4)), ((1, 4, 4),)):
        rows = [(r, p) for r, first, count in blocks for p in range(first, first + count)]
        inputs = kv.rows(
            [ids[r][p + 1] for r, p in rows],
            [Block(req_idx=r, prefix_len=first, num_rows=count) for r, first, count in blocks],
        )
        features = torch.stack([outputs[r].final[p] for r, p in rows])
        hidden = draft.extend(inputs, features, carried=carried)
        for i, (request, first, _) in enumerate(blocks):
            carried[request] = hidden[4 * i + 3]
            torch.testing.assert_close(carried[request], want[request][first // 4])


@pytest.mark.parametrize("num_layers", [2, 3])
def test_drafts_are_those_of_transformers(tmp_path: Path, num_layers: int) -> None:
    """MtpModel, greedily, one chain: each layer's logits at its first draft."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    directory = deepseek.write_deepseek(tmp_path, num_mtp_layers=num_layers)
    main = load_transformers(directory)
    # It looks for the layers of the published sizes.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.[{deepseek.NUM_LAYERS}-9].*"]
    mtp = MtpModel.from_pretrained(main).eval()
    ids = tokens_of()
    features = main.model(torch.tensor([ids[:-1]])).last_hidden_state
    drafted, logits, _ = mtp(
        input_ids=torch.tensor([ids[1:]]),
        last_hidden_states=features,
        attention_mask=None,
        position_ids=torch.arange(1, len(ids))[None],
        mtp_cache=MtpCache(config=main.config.get_mtp_config()),
    )
    draft = load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)
    target = ReferenceDeepseek(directory).forward(ids)
    runner = Runner(draft, ids, target)
    hidden = runner.extend(len(ids) - 1)[None]
    path: list[int] = []
    for depth in range(num_layers):
        got = draft.logits(hidden)[0]
        torch.testing.assert_close(got, logits[0, depth], atol=5e-4, rtol=1e-4)
        token = int(got.argmax())
        assert token == int(drafted[0, depth])
        path.append(depth)
        hidden = runner.guess([token], hidden, [path])


@pytest.fixture(params=FAMILIES)
def pairing(request: pytest.FixtureRequest, models: Models) -> Pairing:
    write = FAMILIES[request.param].write
    path = models.get(
        f"{request.param}-agreeable-mtp", lambda d: write(d, num_mtp_layers=3, branch_scale=0.3)
    )
    return Pairing(target=path, draft=path, algorithm="mtp")


def test_speculation_changes_no_token(pairing: Pairing) -> None:
    """Trees shallower and deeper than there are layers, prompts shorter than their number.

    DeepSeek's random layers agree too seldom with it: the truth is written into half their trees.
    """
    assert_exact(pairing, page_sizes=(4, 16))


@pytest.mark.parametrize("page_sizes", [(1, 64), (16, 2), (64, 1)], ids=str)
def test_pages_of_caches_of_two_widths_change_no_token(
    models: Models, page_sizes: tuple[int, int]
) -> None:
    path = models.get(
        "mimo-v2-agreeable-mtp", lambda d: FAMILIES["mimo-v2"].write(d, branch_scale=0.3)
    )
    assert_exact(Pairing(target=path, draft=path, algorithm="mtp"), page_sizes=page_sizes)


def assert_exact(pairing: Pairing, *, page_sizes: tuple[int, int]) -> None:
    """Assert that trees change no token, and that some are accepted past the last layer.

    Args:
        page_sizes: The target's, the draft's.
    """
    requests = requests_of(4, (1, 2, 3, 9, 40, 129))
    target = make_target(pairing, page_size=page_sizes[0])
    plain = plain_of(target, requests, alone=True)
    speculative = [fresh(request) for request in requests]
    pair = PoisonedPair(target, make_draft(pairing, page_size=page_sizes[1]))
    rng = random.Random(1)

    def edit(tree: TokenTree) -> TokenTree:
        if "mimo" in pairing.target.name or rng.random() < 0.5:
            return tree
        truth = plain[int(tree.request_id[1:]) - 1].output
        return graft(tree, truth[len(pair.requests[tree.request_id].output) :], rng)

    pair.edit_tree = edit
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
        assert got.logprob_rows == want.logprob_rows
        assert len(got.trees) == len(got.paths) - 1, "a round had no tree"
    accepted = [path.num_accepted_drafts for r in speculative for path in r.paths]
    assert max(accepted) > 3, "no path goes past the last layer"
    assert sum(accepted) / len(accepted) > 0.5


@pytest.mark.parametrize(
    ("name", "num_layers", "window"), [("mimo", 3, 0), ("mimo", 4, 8), ("mimo-v2", 3, 13)]
)
def test_served_trees_equal_the_reference(
    models: Models, name: str, num_layers: int, window: int
) -> None:
    """Round by round: after drafts of any number were accepted, no KV of a wrong guess is left.

    With a window, pages before it are freed, and are NaN for whoever reads them.
    """
    family = FAMILIES[name]
    path = models.get(
        f"{name}-agreeable-{num_layers}-mtp",
        lambda d: family.write(d, branch_scale=0.3, num_mtp_layers=num_layers),
    )
    pairing = Pairing(target=path, draft=path, algorithm="mtp")
    rng = random.Random(5)
    shapes = [
        TreeShape(num_steps=steps, topk=topk, num_draft_tokens=nodes)
        for steps, topk, nodes in ((2, 2, 5), (3, 2, 6), (5, 3, 12))
    ]
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=30 if window else 11,
            shape=shape,
            sampling=SamplingParams(temperature=temperature, seed=3),
        )
        for shape in shapes
        for length, temperature in ((1, 0.0), (2, 0.7), (7 if window else 13, 0.0))
    ]
    target = make_target(pairing, page_size=4, prefill_chunk_len=11)
    options = {"window": window} if window and name == "mimo" else {}
    draft = make_draft(pairing, page_size=1 if window else 2, **options)
    pair = PoisonedPair(target, draft)
    for request in requests:
        pair.open(request)
    pool, freed = pool_of(draft), 0
    while pair.step():
        held = [(r.kv_len, pool.num_held_pages(r.req_idx)) for r in draft.requests.values()]
        freed += sum(pool.page_size * num_pages < kv_len for kv_len, num_pages in held)
    pair.finish()
    assert bool(freed) == bool(window)
    model = family.target(pairing.target)
    reference = ReferenceMTPLayers(family.draft(model, window), num_layers)
    num_compared, accepted = 0, set()
    for request in requests:
        assert request.shape is not None
        accepted |= {path.num_accepted_drafts for path in request.paths}
        for tree in request.trees:
            tokens = request.tokens[: tree.seq_len + 1]
            want = draft_tree(
                reference,
                tokens,
                model.forward(tokens),
                num_steps=request.shape.num_steps,
                topk=request.shape.topk,
                num_draft_tokens=request.shape.num_draft_tokens,
                temperature=request.sampling.temperature,
                seed=request.sampling.seed,
            )
            if want.margin >= SAFE_MARGIN:
                assert tree.token_ids == want.token_ids
                assert tree.parent_index == want.parent_index
                assert tree.cumulative_logprobs == pytest.approx(want.scores, abs=3e-4)
                num_compared += 1
    assert num_compared > 20 and {0, 1, 2} <= accepted


def test_tensors_of_all_layers_are_accounted_for(tmp_path: Path) -> None:
    directory = deepseek.write_deepseek(tmp_path, num_mtp_layers=2)

    def lose(tensors: Tensors) -> None:
        tensors["model.layers.3.surplus.weight"] = tensors.pop("model.layers.3.enorm.weight")

    edit_checkpoint(directory, tensors=lose)
    with pytest.raises(CheckpointError, match=r"missing tensor 'model\.layers\.3\.enorm\.weight'"):
        load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("count", [0, 17])
def test_a_number_of_layers_that_no_draft_has_is_refused(tmp_path: Path, count: int) -> None:
    directory = checkpoints.write_mimo(tmp_path)
    edit_checkpoint(directory, config=lambda c: c.update(num_nextn_predict_layers=count))
    with pytest.raises(CheckpointError, match=f"num_nextn_predict_layers = {count}; mtp needs"):
        load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)
