"""Start-up proof that a token's logits and KV are bitwise a function of the tokens before it.

The same tokens are computed by one prefill, by prefill chunks and plain decoding, and as the
winding path of a bushy tree whose accepted KV is then moved. All three must agree bit for bit; on a
machine or a model where they do not, the worker says that exactness is off.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.move_kv import move_kv
from shared.packing import RowBlock, pack_rows, to_device
from shared.tree import tree_paths
from target_service.phases import ExtendInput
from target_service.runner import TargetRunner

logger = logging.getLogger(__name__)

PREFIX_LEN = 61  # the path crosses the edge of a 64-token tile
PATH_LEN = 5
# A bushy tree whose true path is nodes 0, 2, 5, 7, 8: node index != depth from depth 1 on.
TREE_PARENTS = np.array([-1, 0, 0, 1, 2, 2, 4, 5, 7, 7, 3], dtype=np.int32)
TREE_PATH = np.array([0, 2, 5, 7, 8])


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
def run_self_test(runner: TargetRunner, vocab_size: int, window: int) -> SelfTestResult:
    """Compute PATH_LEN tokens after PREFIX_LEN others in three ways and compare the bits.

    Mutates: nothing that outlives it; the pages it takes are given back.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, PREFIX_LEN + PATH_LEN)
    rows = [runner.pool.acquire() for _ in range(3)]
    try:
        for row in rows:
            runner.pool.reserve(row, PREFIX_LEN + len(TREE_PARENTS))
        test = _SelfTest(runner, window)
        at_once = test.chain(rows[0], tokens, 0, len(tokens))[-PATH_LEN:]
        for start in range(0, PREFIX_LEN, 13):
            test.chain(rows[1], tokens, start, min(start + 13, PREFIX_LEN))
        decoded = torch.cat(
            [test.chain(rows[1], tokens, p, p + 1) for p in range(PREFIX_LEN, len(tokens))]
        )
        test.chain(rows[2], tokens, 0, PREFIX_LEN)
        in_tree = test.tree(rows[2], tokens, rng.integers(0, vocab_size, len(TREE_PARENTS)))
        kv = [test.committed_kv(row, len(tokens)) for row in rows]
    finally:
        for row in rows:
            runner.pool.release(row)
    logits = _spread([at_once, decoded, in_tree])
    committed = _spread(kv)
    result = SelfTestResult(
        is_exact=logits == 0.0 and committed == 0.0,
        max_logit_difference=logits,
        max_kv_difference=committed,
    )
    if result.is_exact:
        logger.info("self-test passed: prefill, decoding and trees agree bit for bit")
    else:
        logger.error(
            "EXACTNESS IS OFF: prefill, decoding and trees differ on this machine (logits by up to "
            "%g, KV by up to %g); speculation may change the output",
            logits,
            committed,
        )
    return result


class _SelfTest:
    def __init__(self, runner: TargetRunner, window: int) -> None:
        self._runner = runner
        self._window = window

    def chain(self, row: int, tokens: NDArray, start: int, stop: int) -> torch.Tensor:
        """Extend tokens [start, stop) as a chain; return their logits."""
        block = RowBlock(req_idx=row, prefix_len=start, num_rows=stop - start, first_slot=start)
        return self._extend(block, tokens[start:stop], np.arange(start, stop))

    def tree(self, row: int, tokens: NDArray, filler: NDArray) -> torch.Tensor:
        """Extend the bushy tree, move the path's KV to the front; return the path's logits."""
        depth, path = tree_paths(TREE_PARENTS)
        node_tokens = filler.copy()
        node_tokens[TREE_PATH] = tokens[PREFIX_LEN:]
        block = RowBlock(
            req_idx=row,
            prefix_len=PREFIX_LEN,
            num_rows=len(TREE_PARENTS),
            first_slot=PREFIX_LEN,
            depth=depth,
            path=path,
        )
        logits = self._extend(block, node_tokens, PREFIX_LEN + depth.astype(np.int64))
        pool = self._runner.pool
        src = pool.slots(row, PREFIX_LEN + TREE_PATH)
        dst = pool.slots(row, PREFIX_LEN + np.arange(PATH_LEN))
        move_kv([*pool.k, *pool.v], to_device(src, pool.device), to_device(dst, pool.device))
        return logits[to_device(TREE_PATH, pool.device)]

    def committed_kv(self, row: int, count: int) -> torch.Tensor:
        """Return K and V of the first `count` slots, all layers, flat."""
        pool = self._runner.pool
        slots = to_device(pool.slots(row, np.arange(count)).astype(np.int64), pool.device)
        return torch.stack([cache[slots] for cache in (*pool.k, *pool.v)])

    def _extend(self, block: RowBlock, tokens: NDArray, positions: NDArray) -> torch.Tensor:
        pool = self._runner.pool
        inputs = ExtendInput(
            token_ids=to_device(tokens.astype(np.int64), pool.device),
            position_ids=to_device(positions.astype(np.int64), pool.device),
            rows=pack_rows([block], pool, window=self._window),
        )
        return self._runner.model.logits(self._runner.extend(inputs).hidden)


def _spread(values: list[torch.Tensor]) -> float:
    """Return the largest difference between the first value and the others; NaN counts as inf."""
    first = values[0].double()
    spread = torch.stack([(first - value.double()).abs().max() for value in values[1:]])
    return float(spread.nan_to_num(nan=torch.inf).max())
