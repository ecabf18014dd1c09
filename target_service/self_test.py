"""Start-up proof that a token's logits and KV are bitwise a function of the tokens before it.

On a CPU the products of the loaded weights are probed first, and ways to multiply that fail are
given up. Then the same tokens are computed by one prefill, by prefill chunks and plain decoding,
and as the winding path of a bushy tree whose accepted KV is then moved. All three must agree bit
for bit. A CPU where they do not gives up every library; a worker that then fails still, or has none
to give up, says that exactness is off.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.fp8_cache import as_bytes
from shared.kernels.move_kv import move_paths
from shared.kernels.probe_cpu import settle_products
from shared.step.buckets import bucket_of
from shared.step.packing import RowBlocks, captures_few_rows, pack_rows, to_device
from shared.tree import TreeLayout, depths_of, lay_out_tree
from target_service.batch import extend_fields
from target_service.phases import TOKEN_IS_KNOWN, ExtendInput
from target_service.runner import TargetRunner

logger = logging.getLogger(__name__)

PREFIX_LEN = 61  # the path crosses the edge of a 64-token tile
PATH_LEN = 5
# A bushy tree whose true path is nodes 0, 2, 5, 7, 8: node index != depth from depth 1 on.
TREE_PARENTS = (-1, 0, 0, 1, 2, 2, 4, 5, 7, 7, 3)
TREE_PATH = np.array([0, 2, 5, 7, 8])
NUM_SLOTS = PREFIX_LEN + len(TREE_PARENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """What the proof found.

    Args:
        is_exact: All three ways agreed bit for bit.
        max_logit_difference: Largest difference of any logit.
        max_kv_difference: Largest difference of any committed K or V.
    """

    is_exact: bool
    max_logit_difference: float
    max_kv_difference: float


@torch.inference_mode()
def run_self_test(runner: TargetRunner) -> SelfTestResult:
    """Probe a CPU's products, and compute the same tokens in three ways.

    Mutates: how the model multiplies on a CPU; nothing else that outlives it.
    """
    products, config = runner.model.products, runner.model.config
    if products.weights:  # none are a CPU's on a GPU
        heads = [(heads // shape.num_heads, *shape.widths) for heads, shape in config.head_shapes]
        settle_products(products, *heads)
    result = _compare_ways(runner)
    if products.weights and not result.is_exact and not products.is_invariant:
        logger.warning(
            "exactness: prefill, decoding and trees differ by %s and %s, though both passed their "
            "probes; everything is multiplied by elementwise arithmetic from now on, which is slow",
            products.linear.name,
            products.attention.name,
        )
        products.give_up_libraries()
        result = _compare_ways(runner)
    if result.is_exact:
        logger.info("self-test passed: prefill, decoding and trees agree bit for bit")
    else:
        logger.error(
            "EXACTNESS IS OFF: prefill, decoding and trees differ on this machine (logits by up to "
            "%g, KV by up to %g); speculation may change the output",
            result.max_logit_difference,
            result.max_kv_difference,
        )
    return result


def _compare_ways(runner: TargetRunner) -> SelfTestResult:
    """Compute PATH_LEN tokens after PREFIX_LEN others in three ways and compare the bits.

    Mutates: nothing that outlives it; the pages it takes are given back.
    """
    rng, vocab_size = np.random.default_rng(0), runner.model.config.vocab_size
    tokens = rng.integers(0, vocab_size, PREFIX_LEN + PATH_LEN)
    filler = rng.integers(0, vocab_size, len(TREE_PARENTS))

    def at_once(test: _SelfTest) -> torch.Tensor:
        return test.chain(tokens, 0, len(tokens))[-PATH_LEN:]

    def decoded(test: _SelfTest) -> torch.Tensor:
        for start in range(0, PREFIX_LEN, 13):
            test.chain(tokens, start, min(start + 13, PREFIX_LEN))
        steps = [
            test.chain(tokens, p, p + 1, is_among_many=p % 2 == 0)
            for p in range(PREFIX_LEN, len(tokens))
        ]
        return torch.cat(steps)

    def in_tree(test: _SelfTest) -> torch.Tensor:
        test.chain(tokens, 0, PREFIX_LEN)
        return test.tree(tokens, filler)

    outcomes, kv = [], []
    for way in (at_once, decoded, in_tree):
        row = runner.pool.acquire()
        try:
            runner.pool.reserve(row, NUM_SLOTS)
            test = _SelfTest(runner, row)
            test.clear()  # the pages are those of the way before, and its KV must not help
            outcomes.append(way(test))
            kv.append(test.committed_kv(len(tokens)))
        finally:
            runner.pool.release(row)
    logits = _spread(outcomes)
    committed = _spread(kv)
    return SelfTestResult(
        is_exact=logits == 0.0 and committed == 0.0,
        max_logit_difference=logits,
        max_kv_difference=committed,
    )


@torch.inference_mode()
def fixed_prompt_logits(runner: TargetRunner, *, max_num_tokens: int) -> torch.Tensor:
    """Return the logits of the self-test's tokens, [n, vocab_size], computed by one prefill.

    Args:
        max_num_tokens: The prompt is cut to so many tokens.
    Mutates: nothing that outlives it; the pages it takes are given back.
    """
    num_tokens = min(PREFIX_LEN + PATH_LEN, max_num_tokens)
    rng, vocab_size = np.random.default_rng(0), runner.model.config.vocab_size
    tokens = rng.integers(0, vocab_size, PREFIX_LEN + PATH_LEN)[:num_tokens]
    row = runner.pool.acquire()
    try:
        runner.pool.reserve(row, num_tokens)
        return _SelfTest(runner, row).chain(tokens, 0, num_tokens)
    finally:
        runner.pool.release(row)


class _SelfTest:
    """Forwards of one row of the page table."""

    def __init__(self, runner: TargetRunner, row: int) -> None:
        self._runner = runner
        self._row = row

    def chain(
        self, tokens: NDArray, start: int, stop: int, *, is_among_many: bool = False
    ) -> torch.Tensor:
        """Extend tokens [start, stop) as a chain; return their logits.

        Args:
            is_among_many: As in a step of many requests, each of few rows.
        """
        runner, block = self._runner, self._block(start, stop - start)
        bucket = bucket_of(stop - start, runner.buckets)
        if is_among_many:
            has_graph = partial(captures_few_rows, pool=runner.pool, few_rows=runner.few_rows)
            bucket = next(filter(has_graph, runner.buckets), bucket)
        return self._extend(block, tokens[start:stop], np.arange(start, stop), bucket)

    def tree(self, tokens: NDArray, filler: NDArray) -> torch.Tensor:
        """Extend the bushy tree, move the path's KV to the front; return the path's logits."""
        layout = lay_out_tree(TREE_PARENTS)
        node_tokens = filler.copy()
        node_tokens[TREE_PATH] = tokens[PREFIX_LEN:]
        block = self._block(PREFIX_LEN, len(TREE_PARENTS), layout)
        bucket = bucket_of(len(TREE_PARENTS), self._runner.buckets)
        logits = self._extend(block, node_tokens, PREFIX_LEN + depths_of([layout]), bucket)
        pool = self._runner.pool
        src = pool.slots(self._row, PREFIX_LEN + TREE_PATH)
        dst = pool.slots(self._row, PREFIX_LEN + np.arange(PATH_LEN))
        move_paths(
            pool.cache_groups,
            to_device(src, pool.device)[None],
            to_device(dst, pool.device)[None],
        )
        return logits[to_device(TREE_PATH, pool.device)]

    def clear(self) -> None:
        """Zero the row's slots."""
        pool = self._runner.pool
        slots = to_device(pool.slots(self._row, np.arange(NUM_SLOTS)).astype(np.int64), pool.device)
        for cache in pool.caches:
            as_bytes(cache)[slots] = 0

    def committed_kv(self, count: int) -> torch.Tensor:
        """Return what all caches hold of the first `count` slots, one after the other."""
        pool = self._runner.pool
        slots = to_device(pool.slots(self._row, np.arange(count)).astype(np.int64), pool.device)
        stored = torch.cat([as_bytes(cache)[slots].flatten() for cache in pool.caches])
        return stored.view(pool.caches[0].dtype)

    def _block(self, prefix_len: int, num_rows: int, *trees: TreeLayout) -> RowBlocks:
        return RowBlocks(
            req_idx=[self._row], prefix_len=[prefix_len], num_rows=[num_rows], trees=trees
        )

    def _extend(
        self, block: RowBlocks, tokens: NDArray, positions: NDArray, bucket: int | None
    ) -> torch.Tensor:
        """Run a block as a step of the engine would.

        Args:
            bucket: What its rows are padded to; None: they are not padded.
        """
        runner, count = self._runner, len(tokens)
        staging = runner.extend_staging
        staging.begin()
        host, device = staging.place_zeros(extend_fields, bucket or count)
        host["token_ids"][:count] = tokens
        host["position_ids"][:count] = positions
        host["root_idx"].fill(TOKEN_IS_KNOWN)
        rows = pack_rows(
            block,
            runner.pool,
            window=runner.window,
            staging=staging,
            num_rows=bucket,
            few_rows=runner.few_rows,
        )
        inputs = ExtendInput(**device, rows=rows, bucket=bucket, wants_experts=False)
        staging.flush()
        return runner.model.logits(runner.extend(inputs).hidden[:count])


def _spread(values: list[torch.Tensor]) -> float:
    """Return the largest difference between the first value and the others; NaN counts as inf."""
    first = values[0].double()
    spread = torch.stack([(first - value.double()).abs().max() for value in values[1:]])
    return float(spread.nan_to_num(nan=torch.inf).max())
