"""Engines over tiny checkpoints in this process, and ways to look into and to poison their KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.engine import DraftEngine
from draft_service.engine_factory import MakeSource, choose_source
from draft_service.engine_factory import create_engine as create_draft_engine
from shared.config import DraftConfig, TargetConfig
from shared.kv.pool import KVPool
from shared.messages import TokenTree, TreeShape
from shared.step.packing import RowBlocks
from shared.tree import TreeLayout, depths_of, lay_out_tree
from target_service.engine import TargetEngine
from target_service.engine_factory import create_engine as create_target_engine
from target_service.step_costs import StepCosts
from tests import checkpoints, families
from tests.local_pair import LocalPair, LocalRequest

KINDS = ("eagle3", "eagle", "mtp", "standalone", "frozen_kv_mtp")
SHAPES = tuple(
    TreeShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    for num_steps, topk, num_draft_tokens in (
        (3, 1, 4), (3, 2, 2), (3, 2, 6), (5, 4, 16), (5, 8, 32), (6, 8, 64), (5, 16, 64),
    )
)  # fmt: skip

FLAT = replace(checkpoints.TINY, num_layers=2)

FORWARDS = StepCosts((1, 8, 64, 128), (0.004, 0.005, 0.01, 0.02))
"""About what forwards of these models take: timing them would be most of an engine's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A target and a draft that fit each other.

    Args:
        algorithm: As on the command line.
    """

    target: Path
    draft: Path
    algorithm: str


class Models:
    """Tiny checkpoints, written once and only when asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, name: str, write: Callable[[Path], Path]) -> Path:
        """Return the checkpoint `name`, written by `write` if nobody asked before."""
        path = self._directory / name
        return path if path.exists() else write(path)

    @property
    def llama(self) -> Path:
        """Return a target whose text wanders."""
        return self.get("llama", checkpoints.write_llama)

    def pairing(self, kind: str) -> Pairing:
        """Return a target and a draft of this kind that often agree; EAGLE-3 seldom does.

        It reads the first and the last of three layers; targets of EAGLE and standalone drafts have
        two.

        Args:
            kind: One of KINDS; or "mtp-layers": three layers of MTP; or "experts": a target with
                experts that drafts for itself; or "window": a target whose rows see 40 tokens, and
                a standalone draft; or "shared-kv": as frozen_kv_mtp, of a target whose last layers
                have no K and V.
        """
        if kind == "mtp":
            mimo = self.get("mimo", lambda d: checkpoints.write_mimo(d, branch_scale=0.3))
            return Pairing(target=mimo, draft=mimo, algorithm=kind)
        if kind == "mtp-layers":
            mimo = self.get(
                kind, lambda d: checkpoints.write_mimo(d, branch_scale=0.3, num_mtp_layers=3)
            )
            return Pairing(target=mimo, draft=mimo, algorithm="mtp")
        if kind == "eagle":
            target = self.get(
                "agreeable", lambda d: checkpoints.write_agreeable_target(d, shape=FLAT)
            )
            draft = self.get(
                "eagle", lambda d: checkpoints.write_eagle(d, target, branch_scale=0.3)
            )
            return Pairing(target=target, draft=draft, algorithm=kind)
        if kind == "frozen_kv_mtp":
            target = self.get("gemma4-agreeable", families.write_gemma4_agreeable)
            draft = self.get(
                "assistant", lambda d: families.write_gemma4_agreeing_assistant(d, target)
            )
            return Pairing(target=target, draft=draft, algorithm=kind)
        if kind == "shared-kv":
            target = self.get(
                "gemma4-e-agreeable",
                lambda d: families.write_gemma4_agreeable(d, families.GEMMA4_E),
            )
            draft = self.get(
                "e-assistant", lambda d: families.write_gemma4_agreeing_assistant(d, target)
            )
            return Pairing(target=target, draft=draft, algorithm="frozen_kv_mtp")
        if kind == "experts":
            path = self.get(kind, checkpoints.write_qwen3_moe)
            return Pairing(target=path, draft=path, algorithm="standalone")
        if kind == "window":
            target = self.get("window", lambda d: checkpoints.write_mistral(d, sliding_window=40))
            draft = self.get(
                "window-draft", lambda d: checkpoints.write_standalone(d, target, noise=0.1)
            )
            return Pairing(target=target, draft=draft, algorithm="standalone")
        if kind == "eagle3":
            target = self.llama
            draft = self.get("eagle3", lambda d: checkpoints.write_eagle3(d, target))
        else:
            target = self.get("llama-flat", lambda d: checkpoints.write_llama(d, shape=FLAT))
            draft = self.get(
                "standalone", lambda d: checkpoints.write_standalone(d, target, noise=0.1)
            )
        return Pairing(target=target, draft=draft, algorithm=kind)


def make_target(pairing: Pairing, *, has_mailbox: bool = False, **options: Any) -> TargetEngine:
    """Build a target engine; the start-up self-test has tests of its own.

    Args:
        has_mailbox: Device rounds, on a CPU.
    """
    options = {
        "device": "cpu",
        "self_test": False,
        "feature_ring_mb": 0,
        "num_pages": -(-8192 // options.get("page_size", 16)),
        "prefill_chunk_len": 256,  # by the clock otherwise
    } | options
    config = TargetConfig(
        model=str(pairing.target),
        draft_model=str(pairing.draft),
        algorithm=pairing.algorithm,
        **options,
    )
    return create_target_engine(
        config, lambda *_: None, has_cpu_mailbox=has_mailbox, cpu_forwards=FORWARDS
    )


def make_draft(
    pairing: Pairing,
    *,
    make_source: MakeSource = choose_source,
    **options: Any,
) -> DraftEngine:
    """Build a draft engine."""
    num_pages = -(-16384 // options.get("page_size", 16))
    options = {"device": "cpu", "num_pages": num_pages} | options
    config = DraftConfig(
        model=str(pairing.draft),
        target_model=str(pairing.target),
        algorithm=pairing.algorithm,
        **options,
    )
    return create_draft_engine(config, lambda *_: None, make_source=make_source)


def run_plain(
    target: TargetEngine, requests: Iterable[LocalRequest], *, alone: bool = False
) -> list[LocalRequest]:
    """Serve copies of the requests without speculation, all at once; return them.

    Args:
        alone: One after the other, nobody else in any batch.
    """
    copies = [fresh(request, shape=None) for request in requests]
    for batch in [[copy] for copy in copies] if alone else [copies]:
        LocalPair(target).run(batch)
    return copies


_PLAIN: dict[tuple[Any, ...], LocalRequest] = {}


def plain_of(
    target: TargetEngine, requests: Iterable[LocalRequest], *, alone: bool = False
) -> list[LocalRequest]:
    """Return the requests as served without speculation; do not change them.

    What was served once in this process is not served again: pages, batches and whatever else the
    target was made with must not change a token, so its output is compared to that of any target.

    Args:
        alone: Each in a batch of its own, which proves that batches change nothing.
    """
    keys, missing = [], {}
    for request in requests:
        keys.append(_plain_key(target, request, alone=alone))
        if keys[-1] not in _PLAIN:
            missing[keys[-1]] = request
    _PLAIN.update(zip(missing, run_plain(target, missing.values(), alone=alone), strict=True))
    return [_PLAIN[key] for key in keys]


def _plain_key(target: TargetEngine, request: LocalRequest, *, alone: bool) -> tuple[Any, ...]:
    info = target.info
    return (
        alone, info.model_hash, info.device, info.dtype, info.quantization, info.kv_cache_dtype,
        info.max_context_len,
        tuple(request.prompt), request.max_new_tokens, request.sampling, request.min_new_tokens,
        request.stop_token_ids, request.logprobs, request.top_logprobs, request.compiled_grammar,
        request.wants_routed_experts,
    )  # fmt: skip


def fresh(request: LocalRequest, **changes: Any) -> LocalRequest:
    """Return the request as it was before it ran, with some fields changed."""
    unserved = {
        "output": [], "paths": [], "trees": [], "logprob_rows": [], "request_id": "",
        "finish_reason": type(request.finish_reason).NONE, "has_draft": False,
        "target_epoch": 1, "draft_epoch": 0, "ordered_round": -1,
    }  # fmt: skip
    return replace(request, **(unserved | changes))


def random_tokens(
    rng: random.Random, count: int, vocab_size: int = checkpoints.EOS_ID
) -> list[int]:
    """Return `count` token ids."""
    return [rng.randrange(vocab_size) for _ in range(count)]


def graft(
    tree: TokenTree, continuation: Sequence[int], rng: random.Random, *, doubt: float = 0.1
) -> TokenTree:
    """Return the tree with what the target will really say written along one of its branches.

    A stand-in for a well-trained draft: paths of any length through any node indices are accepted.

    Args:
        doubt: Chance at each node that the truth ends there.
    """
    tokens, node = list(tree.token_ids), 0
    for token_id in continuation:
        children = [i for i, parent in enumerate(tree.parent_index) if parent == node]
        if not children or rng.random() < doubt:
            break
        known = [child for child in children if tokens[child] == token_id]
        node = known[0] if known else rng.choice(children)
        tokens[node] = token_id
    return replace(tree, token_ids=tuple(tokens))


def row_blocks(
    blocks: Sequence[tuple[int, int, int, Sequence[int] | None]],
) -> tuple[RowBlocks, NDArray[np.int64]]:
    """Return blocks for `pack_rows`, and the position of every row.

    Args:
        blocks: (req_idx, prefix_len, num_rows, parents of a tree or None for a chain) each; trees
            come first.
    """
    trees: list[TreeLayout] = []
    position: list[int] = []
    for block, (_, prefix_len, count, parents) in enumerate(blocks):
        depth: Sequence[int] = range(count)
        if parents is not None:
            assert len(trees) == block, "a tree comes after a chain"
            trees.append(lay_out_tree(tuple(parents)))
            depth = depths_of(trees[-1:]).tolist()
        position += [prefix_len + above for above in depth]
    packed = RowBlocks(
        req_idx=[block[0] for block in blocks],
        prefix_len=[block[1] for block in blocks],
        num_rows=[block[2] for block in blocks],
        trees=trees,
    )
    return packed, np.array(position)


# --- KV ------------------------------------------------------------------------------------------


def pool_of(engine: TargetEngine | DraftEngine) -> KVPool:
    """Return the engine's KV pool."""
    return engine.runner.pool


def keep_table_apart(pool: KVPool) -> None:
    """Give the pool's device a copy of the page table, as on a GPU."""
    pool._device_table = pool._device_table.clone()
    pool._is_table_shared = False


def poison(pool: KVPool, value: float = float("nan")) -> None:
    """Fill the whole pool with a value, and every page again when it is freed."""
    caches = pool.caches
    for cache in caches:
        cache.fill_(value)
    free = pool._allocator.free

    def free_and_poison(pages: Iterable[Any]) -> None:
        pages = list(pages)
        free(pages)
        for page in pages:
            for cache in caches:
                cache[page * pool.page_size : (page + 1) * pool.page_size] = value

    pool._allocator.free = free_and_poison  # type: ignore[method-assign]


def poison_scratch(engine: TargetEngine | DraftEngine, value: float = float("nan")) -> None:
    """Fill every slot past the committed ones of every request with a value."""
    pool = pool_of(engine)
    for request in engine.requests.values():
        if request.req_idx < 0:
            continue
        committed = request.kv_len if isinstance(engine, DraftEngine) else request.launched_len
        logical = np.arange(committed, pool.reserved_len(request.req_idx), dtype=np.int64)
        slots = torch.from_numpy(pool.slots(request.req_idx, logical).astype(np.int64))
        for cache in pool.caches:
            cache[slots] = value


class PoisonedPair(LocalPair):
    """A pair whose KV is NaN wherever nothing is committed, between any two steps.

    What a step in flight writes is left alone: of that, it is not known yet what is committed.
    """

    def __init__(
        self, target: TargetEngine, draft: DraftEngine | None = None, **options: Any
    ) -> None:
        super().__init__(target, draft, **options)
        for engine in (target, draft):
            if engine is not None:
                poison(pool_of(engine))

    def step(self) -> bool:
        """Step both engines once, then poison their scratch."""
        is_busy = super().step()
        if self.target.pipeline.in_flight is None:
            poison_scratch(self.target)
        if self.draft is not None:
            poison_scratch(self.draft)
        return is_busy


def committed_kv(engine: TargetEngine | DraftEngine, request_id: str, count: int) -> torch.Tensor:
    """Return K and V of a request's first `count` slots, those of all layers beside each other.
    [count, any]
    """
    pool = pool_of(engine)
    req_idx = engine.requests[request_id].req_idx
    slots = torch.from_numpy(pool.slots(req_idx, np.arange(count)).astype(np.int64))
    return torch.cat([cache[slots].flatten(1) for cache in pool.caches], dim=1)


def prefilled_kv(target: TargetEngine, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the committed KV of a fresh prefill of these tokens."""
    pair = LocalPair(target)
    request = LocalRequest(prompt=token_ids, max_new_tokens=2, request_id="fresh")
    pair.open(request)
    while not request.paths:
        assert pair.step()
    kv = committed_kv(target, "fresh", len(token_ids))
    pair.finish()
    return kv
