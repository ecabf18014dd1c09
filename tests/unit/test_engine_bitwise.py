"""A token's logits, captured layers and KV are bitwise a function of the tokens before it.

One prefill in one chunk is the truth. Chunks, plain decoding, and paths that wind through chains
and bushy trees, alone and in a batch, must give its bits at every length around a tile edge.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.messages import FeatureSpec
from shared.step.packing import pack_rows
from target_service.engine import TargetEngine
from target_service.phases import TOKEN_IS_KNOWN, ExtendInput
from tests import checkpoints, deepseek, families, gpt_oss
from tests.checkpoints import Shape
from tests.engines import Models, Pairing, make_target, pool_of, random_tokens, row_blocks

NUM_TOKENS = 140
# Paths of 7 tokens that end before, at and after the edges of 64-token tiles.
PREFIX_LENS = (1, 2, 15, 16, *range(56, 67), *range(120, 131))
CHAIN = [-1, 0, 1, 2, 3, 4, 5]
# (parents, nodes of the true path): the path's indices drift further from its depths each time.
TREES: dict[str, tuple[list[int], list[int]]] = {
    "chain": (CHAIN, [0, 1, 2, 3, 4, 5, 6]),
    "root": ([-1], [0]),
    "side-branch": ([-1, 0, 0, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6, 7]),
    "bushy": ([-1, 0, 0, 1, 2, 2, 4, 5, 7, 7, 3, 9, 11, 11, 13], [0, 2, 5, 7, 9, 11, 13]),
    "late": ([-1, *[0] * 50, 50, 51, *[52] * 6, 56, 59, 60, 60, 0], [0, 50, 51, 52, 56, 59, 60]),
}


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> Shape:
    return replace(
        checkpoints.TINY, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, max_position_embeddings=256,
    )  # fmt: skip


TARGETS: dict[str, Callable[[Path], Path]] = {
    "llama-4x16": lambda d: checkpoints.write_llama(d, shape=shape(4, 4, 16)),
    "llama-8:1x64": lambda d: checkpoints.write_llama(d, shape=shape(8, 1, 64)),
    "llama-6:2x80-biases": lambda d: checkpoints.write_llama(
        d, shape=shape(6, 2, 80), has_attention_bias=True, has_mlp_bias=True
    ),
    "llama-3:1x96-tied": lambda d: checkpoints.write_llama(d, shape=shape(3, 1, 96), is_tied=True),
    "qwen2-4:2x128": lambda d: checkpoints.write_qwen2(d, shape=shape(4, 2, 128)),
    "qwen3-16:1x20": lambda d: checkpoints.write_qwen3(d, shape=shape(16, 1, 20)),
    "qwen3-moe-6-experts": lambda d: checkpoints.write_qwen3_moe(d, shape=shape(4, 2, 16)),
    "deepseek-4:1x24-latents": deepseek.write_deepseek,
    "gpt-oss-6:2x16-sinks-in-windows-over-tiles": lambda d: gpt_oss.write_gpt_oss(
        d, hidden_size=48, window=70
    ),
    "mistral-2x256-window": lambda d: checkpoints.write_mistral(
        d, shape=shape(2, 2, 256), sliding_window=9
    ),
    "gemma4-4:2x24-and-4:1x40": lambda d: families.write(d, "gemma4_text", **families.GEMMA4),
    "gemma4-6-experts-beside-mlp": lambda d: families.write(
        d, "gemma4_text", **families.GEMMA4_EXPERTS
    ),
    "gemma4-e-layers-without-kv": lambda d: families.write(d, "gemma4_text", **families.GEMMA4_E),
    "mistral-4:2x16-window-over-tiles": lambda d: checkpoints.write_mistral(
        d, shape=shape(4, 2, 16), sliding_window=70
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What rows gave, [T, ...] each; `kv` has the K and V of all layers one after the other."""

    logits: torch.Tensor
    captured: torch.Tensor
    kv: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Work:
    """Rows of one request: a chain of tokens [prefix_len, ...), or a tree after prefix_len."""

    req_idx: int
    prefix_len: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None


class Rig:
    """Forwards over a target's pool, without requests."""

    def __init__(self, target: TargetEngine) -> None:
        self.pool = pool_of(target)
        self.runner = target.runner
        self.runner.features = FeatureSpec(layer_ids=(1, 0), width=96, dtype="float32")
        self.window = target.runner.window

    def open(self) -> int:
        """Return the row of a new request, its slots poisoned."""
        req_idx = self.pool.acquire()
        self.pool.reserve(req_idx, NUM_TOKENS + 64)
        slots = self._slots(req_idx, np.arange(NUM_TOKENS + 64))
        for cache in self.pool.caches:
            cache[slots] = float("nan")
        return req_idx

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Bits]:
        """Run all works in one forward."""
        blocks, position = row_blocks(
            [(work.req_idx, work.prefix_len, len(work.token_ids), work.parents) for work in works]
        )
        staging = self.runner.extend_staging
        staging.begin()
        inputs = ExtendInput(
            token_ids=torch.tensor([token for work in works for token in work.token_ids]),
            position_ids=torch.from_numpy(position),
            root_idx=torch.full((len(position),), TOKEN_IS_KNOWN),
            rows=pack_rows(blocks, self.pool, staging=staging, window=self.window),
        )
        staging.flush()
        output = self.runner.extend(inputs)
        assert output.features is not None
        logits, results, start = self.runner.model.logits(output.hidden), [], 0
        for work in works:
            rows = slice(start, start + len(work.token_ids))
            start = rows.stop
            nodes = work.prefix_len + np.arange(len(work.token_ids))
            results.append(
                Bits(
                    logits=logits[rows], captured=output.features[rows],
                    kv=self.kv(work.req_idx, nodes),
                )
            )  # fmt: skip
        return results

    def kv(self, req_idx: int, logical: np.ndarray) -> torch.Tensor:
        slots = self._slots(req_idx, logical)
        return torch.cat([cache[slots].flatten(1) for cache in self.pool.caches], dim=1)

    def copy_kv(self, src: int, dst: int, count: int) -> None:
        """Give a request the committed KV of another one."""
        from_, to = (self._slots(row, np.arange(count)) for row in (src, dst))
        for cache in self.pool.caches:
            cache[to] = cache[from_]

    def _slots(self, req_idx: int, logical: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.pool.slots(req_idx, logical).astype(np.int64))


FAST = {"llama-8:1x64", "mistral-4:2x16-window-over-tiles"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in TARGETS],
)
def rig(request: pytest.FixtureRequest, models: Models) -> Rig:
    path = models.get(f"bitwise-{request.param}", TARGETS[request.param])
    pairing = Pairing(target=path, draft=path, algorithm="none")
    page_size = 1 + 6 * list(TARGETS).index(request.param) % 17
    return Rig(make_target(pairing, page_size=page_size, num_pages=9000 // page_size))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return random_tokens(random.Random(3), NUM_TOKENS)


@pytest.fixture(scope="module")
def truth(rig: Rig, tokens: list[int]) -> tuple[int, Bits]:
    req_idx = rig.open()
    [bits] = rig.forward([Work(req_idx=req_idx, prefix_len=0, token_ids=tokens)])
    assert bits.logits.isfinite().all() and bits.kv.isfinite().all()
    return req_idx, bits


def assert_same_bits(got: Bits, nodes: Sequence[int], truth: Bits, start: int) -> None:
    stop = start + len(nodes)
    for name in ("logits", "captured", "kv"):
        ours, true = getattr(got, name)[list(nodes)], getattr(truth, name)[start:stop]
        assert torch.equal(ours, true), f"{name} differ at positions [{start}, {stop})"


@pytest.mark.parametrize("chunks", [[1], [7], [64], [63, 1, 65], [8, 3, 1, 21]])
def test_prefill_chunks_do_not_matter(
    rig: Rig, tokens: list[int], truth: tuple[int, Bits], chunks: list[int]
) -> None:
    req_idx, start, turn = rig.open(), 0, 0
    while start < NUM_TOKENS:
        part = tokens[start : start + chunks[turn % len(chunks)]]
        [bits] = rig.forward([Work(req_idx=req_idx, prefix_len=start, token_ids=part)])
        assert_same_bits(bits, range(len(part)), truth[1], start)
        start, turn = start + len(part), turn + 1
    rig.pool.release(req_idx)


def tree_work(
    name: str, req_idx: int, prefix_len: int, tokens: list[int], rng: random.Random
) -> tuple[Work, list[int]]:
    parents, path = TREES[name]
    ids = random_tokens(rng, len(parents))
    for node, token in zip(path, tokens[prefix_len:], strict=False):
        ids[node] = token
    return Work(req_idx=req_idx, prefix_len=prefix_len, token_ids=ids, parents=parents), path


@pytest.mark.parametrize("name", TREES)
def test_a_path_through_a_tree_alone(
    rig: Rig, tokens: list[int], truth: tuple[int, Bits], name: str
) -> None:
    rng = random.Random(0)
    for prefix_len in PREFIX_LENS:
        req_idx = rig.open()
        rig.copy_kv(truth[0], req_idx, prefix_len)
        work, path = tree_work(name, req_idx, prefix_len, tokens, rng)
        [bits] = rig.forward([work])
        assert_same_bits(bits, path, truth[1], prefix_len)
        rig.pool.release(req_idx)


def test_paths_chunks_and_decoding_in_one_batch(
    rig: Rig, tokens: list[int], truth: tuple[int, Bits]
) -> None:
    rng = random.Random(1)
    jobs: list[tuple[Work, list[int]]] = []
    for i, prefix_len in enumerate(PREFIX_LENS):
        req_idx = rig.open()
        rig.copy_kv(truth[0], req_idx, prefix_len)
        if i % 6 == 5:
            stop = rng.randrange(prefix_len + 1, NUM_TOKENS + 1)
            chunk = tokens[prefix_len:stop]
            work = Work(req_idx=req_idx, prefix_len=prefix_len, token_ids=chunk)
            jobs.append((work, list(range(len(chunk)))))
        else:
            name = list(TREES)[i % 6]
            jobs.append(tree_work(name, req_idx, prefix_len, tokens, rng))
    rng.shuffle(jobs)
    jobs.sort(key=lambda job: job[0].parents is None)
    for (work, path), bits in zip(jobs, rig.forward([w for w, _ in jobs]), strict=True):
        assert_same_bits(bits, path, truth[1], work.prefix_len)
        rig.pool.release(work.req_idx)


def test_the_truth_is_sensitive(rig: Rig, tokens: list[int], truth: tuple[int, Bits]) -> None:
    """Another token within sight changes the bits, so equal bits are no accident."""
    start = NUM_TOKENS - 3
    other = [*tokens]
    other[start] = (other[start] + 1) % 256
    req_idx = rig.open()
    [bits] = rig.forward([Work(req_idx=req_idx, prefix_len=0, token_ids=other)])
    assert_same_bits(bits, range(start), truth[1], 0)
    with pytest.raises(AssertionError, match="logits differ"):
        last = replace_rows(bits, NUM_TOKENS - 1)
        assert_same_bits(last, [0], truth[1], NUM_TOKENS - 1)
    rig.pool.release(req_idx)


def replace_rows(bits: Bits, row: int) -> Bits:
    rows = slice(row, row + 1)
    return Bits(logits=bits.logits[rows], captured=bits.captured[rows], kv=bits.kv[rows])
