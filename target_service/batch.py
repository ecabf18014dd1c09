"""Build the tensors of a step's forward from its plan; host side, over all requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shared.kv.pool import KVPool
from shared.step.buckets import bucket_of
from shared.step.packing import RowBlocks, pack_rows
from shared.step.staging import Fields, Staging
from shared.tree import TreeLayout
from target_service.nodes import SampledTrees, gather_trees
from target_service.phases import TOKEN_IS_KNOWN, ExtendInput, MailboxTrees
from target_service.scheduler import PrefillWork, ReplayWork, StepPlan
from target_service.tree_source import TreeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRows:
    """Rows of consecutive tokens of one request: a prefill chunk or a replay."""

    work: PrefillWork | ReplayWork
    first_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step, packed.

    Args:
        trees: None when nothing is sampled.
        mailbox_trees: Where the device finds the first trees; None: all of them are here.
        logit_rows: [L] rows of the extend that are sampled; None: the first L.
        wants_features: Whether some request keeps features of its rows.
    """

    extend: ExtendInput
    trees: SampledTrees | None
    mailbox_trees: MailboxTrees | None
    chains: Sequence[ChainRows]
    num_rows: int
    logit_rows: Sequence[int] | None
    wants_features: bool

    @property
    def num_chain_rows(self) -> int:
        """Return the rows of prompts and replays."""
        return sum([chain.work.stop - chain.work.start for chain in self.chains])


@dataclass(slots=True, kw_only=True)
class _Columns:
    """The blocks of a step, tree by tree and chain by chain; `token_ids` row by row, and
    `device_roots` as in SampledTrees.
    """

    req_idx: list[int] = field(default_factory=list)
    prefix_len: list[int] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    layouts: list[TreeLayout] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    device_roots: Mapping[int, int] = field(default_factory=dict)

    def add_trees(self, trees: SampledTrees, count: int) -> None:
        """Add the first `count` trees."""
        self.req_idx = trees.req_idx[:count]
        self.prefix_len = trees.seq_len[:count]
        self.num_rows = trees.num_nodes[:count]
        self.layouts = trees.layouts[:count]
        self.token_ids = trees.token_ids[: sum(self.num_rows)]
        self.device_roots = trees.device_roots

    def add_chain(self, work: PrefillWork | ReplayWork) -> ChainRows:
        chain = ChainRows(work=work, first_row=len(self.token_ids))
        self.token_ids += work.request.tokens[work.start : work.stop]
        self.req_idx.append(work.request.req_idx)
        self.prefix_len.append(work.start)
        self.num_rows.append(work.stop - work.start)
        return chain

    def blocks(self, *, num_replays: int) -> RowBlocks:
        """Return the blocks; the last ones are replays, whose KV is committed already."""
        writes_kv = None
        if num_replays:
            num_written = len(self.req_idx) - num_replays
            writes_kv = [True] * num_written + [False] * num_replays
        return RowBlocks(
            req_idx=self.req_idx,
            prefix_len=self.prefix_len,
            num_rows=self.num_rows,
            trees=self.layouts,
            writes_kv=writes_kv,
        )


def build_batch(
    plan: StepPlan,
    pool: KVPool,
    staging: Staging,
    source: TreeSource,
    *,
    window: int,
    buckets: Sequence[int],
    few_rows: int = 0,
) -> StepBatch:
    """Pack trees, prefill chunks and replays into one forward, and start to bring it over.

    Args:
        source: Knows where the device finds trees that are not here.
        buckets: Row counts to pad to; a step with more rows than the last, as any if there are
            none, is as it is.
        few_rows: See `pack_rows`.
    """
    # The rows of trees come first, and the nodes of the step are these rows. After them come the
    # last tokens of prompts, each of them a tree of one node.
    trees = gather_trees(plan)
    sampled = trees.requests if trees is not None else ()
    columns = _Columns()
    if trees is not None:
        columns.add_trees(trees, len(plan.verifies))
    num_tree_rows = len(columns.token_ids)
    works: list[PrefillWork | ReplayWork] = [*plan.prefills, *plan.replays]
    chains = [columns.add_chain(work) for work in works]
    count = len(columns.token_ids)
    bucket = bucket_of(count, buckets)

    staging.begin()
    host, device = staging.place_zeros(extend_fields, bucket or count)
    host["token_ids"][:count] = columns.token_ids
    host["root_idx"].fill(TOKEN_IS_KNOWN)
    if columns.device_roots:
        host["root_idx"][list(columns.device_roots)] = list(columns.device_roots.values())
    blocks = columns.blocks(num_replays=len(plan.replays))
    rows = pack_rows(
        blocks, pool, window=window, staging=staging, num_rows=bucket, few_rows=few_rows
    )
    # The first row of a path, a root or the first token of a chunk, is at the prefix's end.
    before_path = np.array(columns.prefix_len) - 1
    np.add(before_path.repeat(columns.num_rows), rows.path_len, out=host["position_ids"][:count])
    wants_experts = any([request.open.wants_routed_experts for request in sampled])
    extend = ExtendInput(**device, rows=rows, bucket=bucket, wants_experts=wants_experts)
    mailbox_trees = None
    if trees is not None and trees.num_on_device:
        mailbox_trees = source.place_trees(plan.verifies[: trees.num_on_device], staging)
    staging.flush()
    return StepBatch(
        extend=extend,
        trees=trees,
        mailbox_trees=mailbox_trees,
        chains=chains,
        num_rows=count,
        logit_rows=_logit_rows(num_tree_rows, chains) if chains else None,
        wants_features=any([r.keeps_rows for r in (*sampled, *[work.request for work in works])]),
    )


def _logit_rows(num_tree_rows: int, chains: Sequence[ChainRows]) -> list[int]:
    """Return the rows that are sampled: those of trees, and the last one of each whole prompt."""
    last_rows = [
        chain.first_row + chain.work.stop - chain.work.start - 1
        for chain in chains
        if isinstance(chain.work, PrefillWork) and chain.work.is_last
    ]
    return [*range(num_tree_rows), *last_rows]


def extend_fields(num_rows: int) -> Fields:
    """Return the fields of an ExtendInput that are placed first; fill `root_idx`."""
    shape = (num_rows,)
    return {
        "token_ids": (torch.int64, shape),
        "position_ids": (torch.int64, shape),
        "root_idx": (torch.int64, shape),
    }
