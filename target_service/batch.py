"""Build a step's tensors from its plan; host side, over all requests at once.

What the forward needs comes first; the rest is built while the device computes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.mailbox_trees import TakenTrees
from shared.kernels.mailbox_words import MAX_PATH
from shared.kv.pool import KVPool
from shared.peer.mailbox import Mailbox
from shared.step.buckets import bucket_of
from shared.step.packing import RowBlocks, pack_rows
from shared.step.staging import Fields, Staging
from shared.tree import TreeLayout, depths_of, lay_out_tree, paths_of
from target_service.phases import AwaitedTrees, ExtendInput, MailedPaths, VerifyInput
from target_service.request import TargetRequest
from target_service.scheduler import PrefillWork, ReplayWork, StepPlan

if TYPE_CHECKING:
    from target_service.sampler import Sampler  # which reads the nodes of a step

_ROOT_ONLY: tuple[int, ...] = (-1,)


@functools.cache
def _unknown_tree(num_nodes: int) -> TreeLayout:
    """Return what holds the place of a tree that is not here; it may turn out to be of any kind."""
    return lay_out_tree((-1, *[0] * (num_nodes - 1)))._replace(is_chain=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrees:
    """The requests whose next tokens a step decides: B trees of L nodes in all, tree by tree.

    Args:
        requests: [B].
        req_idx: [B], rows of the page table.
        seq_len: [B], logical slot of each root.
        layouts: [B].
        token_ids: [L], roots included.
        parent_index: [L] within the own tree, root = -1.
        awaited: Where the device finds them; what is said of their nodes here but the roots is
            made up. None: they are here.
    """

    requests: Sequence[TargetRequest]
    req_idx: list[int]
    seq_len: list[int]
    layouts: list[TreeLayout]
    token_ids: list[int]
    parent_index: list[int]
    awaited: AwaitedTrees | None = None

    @property
    def num_nodes(self) -> list[int]:
        """Return the nodes of each tree, [B]; roots included."""
        return [len(layout.path_len) for layout in self.layouts]


class SampledNodes:
    """The trees of a step once more, as arrays.

    Args:
        first_node: [B] i64, node of the step that each root is.
        tree: [L] i64, which tree each node belongs to.
        depth: [L] i64.
    """

    def __init__(self, trees: SampledTrees) -> None:
        self.requests, self._layouts = trees.requests, trees.layouts
        per_tree = np.array([trees.req_idx, trees.seq_len, trees.num_nodes])
        per_node = np.array([trees.token_ids, trees.parent_index])
        self.req_idx, self.seq_len, self.num_nodes = per_tree
        self.token_ids, self.parent_index = per_node
        self.depth = depths_of(trees.layouts)
        self.first_node = np.cumsum(self.num_nodes) - self.num_nodes
        self.tree = np.repeat(np.arange(len(trees.layouts)), self.num_nodes)
        self.max_depth = max(layout.max_depth for layout in trees.layouts)
        if trees.awaited is not None:
            self.max_depth = trees.awaited.max_depth

    @property
    def path(self) -> NDArray[np.int64]:
        """Return [L, D], nodes of the step from the root to each; its root past it."""
        paths = paths_of(self._layouts)[:, : self.max_depth + 1]
        return paths + self.first_node[self.tree][:, None]


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
        logit_rows: [L] rows of the extend that are sampled; None: the first L.
    """

    extend: ExtendInput
    trees: SampledTrees | None
    chains: Sequence[ChainRows]
    num_rows: int
    logit_rows: Sequence[int] | None


def build_batch(
    plan: StepPlan,
    pool: KVPool,
    staging: Staging,
    *,
    window: int,
    pads_rows: bool,
    mailbox: Mailbox | None = None,
) -> StepBatch:
    """Pack trees, prefill chunks and replays into one forward, and start to bring it over.

    Args:
        pads_rows: Pad the rows of a step without prefills and replays up to a bucket.
        mailbox: Where the device finds trees that are awaited.
    """
    # The rows of trees come first, and the nodes of the step are these rows. After them come the
    # last tokens of prompts, each of them a tree of one node.
    works: list[PrefillWork | ReplayWork] = [*plan.prefills, *plan.replays]
    trees = _gather_trees(plan)
    num_verified = len(plan.verifies)
    req_idx: list[int] = []
    prefix_len: list[int] = []
    num_rows: list[int] = []
    layouts: list[TreeLayout] = []
    token_ids: list[int] = []
    if trees is not None:
        req_idx = trees.req_idx[:num_verified]
        prefix_len = trees.seq_len[:num_verified]
        num_rows = trees.num_nodes[:num_verified]
        layouts = trees.layouts[:num_verified]
        token_ids = trees.token_ids[: sum(num_rows)]
    logit_rows = list(range(len(token_ids))) if works else None
    writes_kv = None
    chains: list[ChainRows] = []
    for work in works:
        chains.append(ChainRows(work=work, first_row=len(token_ids)))
        token_ids += work.request.tokens[work.start : work.stop]
        req_idx.append(work.request.req_idx)
        prefix_len.append(work.start)
        num_rows.append(work.stop - work.start)
        if logit_rows is not None and isinstance(work, PrefillWork) and work.is_last:
            logit_rows.append(len(token_ids) - 1)
    if plan.replays:
        num_written = num_verified + len(plan.prefills)
        writes_kv = [True] * num_written + [False] * len(plan.replays)
    count = len(token_ids)
    bucket = bucket_of(count) if pads_rows and not works else None

    staging.begin()
    host, device = staging.place_zeros(_extend_fields, bucket or count)
    host["token_ids"][:count] = token_ids
    blocks = RowBlocks(
        req_idx=req_idx,
        prefix_len=prefix_len,
        num_rows=num_rows,
        trees=layouts,
        writes_kv=writes_kv,
    )
    rows = pack_rows(blocks, pool, window=window, staging=staging, num_rows=bucket)
    # The first row of a path, a root or the first token of a chunk, is at the prefix's end.
    before_path = np.array(prefix_len) - 1
    np.add(before_path.repeat(num_rows), rows.path_len, out=host["position_ids"][:count])
    extend = ExtendInput(**device, rows=rows, bucket=bucket)
    if trees is not None and plan.awaits_mail:
        assert mailbox is not None
        trees = replace(trees, awaited=_await_trees(plan.verifies, mailbox, staging))
    staging.flush()
    return StepBatch(
        extend=extend, trees=trees, chains=chains, num_rows=count, logit_rows=logit_rows
    )


def _await_trees(
    requests: Sequence[TargetRequest], mailbox: Mailbox, staging: Staging
) -> AwaitedTrees:
    host, device = staging.place_zeros(_mailbox_fields, len(requests))
    host["slot"][:] = [request.req_idx for request in requests]
    host["seq"][:] = [request.next_round_tag for request in requests]
    shapes = [request.queued.awaited_shape for request in requests if request.queued is not None]
    return AwaitedTrees(
        words=mailbox.trees,
        **device,
        num_nodes=max(shape.num_draft_tokens for shape in shapes if shape is not None),
        max_depth=max(shape.num_steps for shape in shapes if shape is not None),
    )


def _mailbox_fields(num_trees: int) -> Fields:
    return {"slot": (torch.int32, (num_trees,)), "seq": (torch.int32, (num_trees,))}


def _extend_fields(num_rows: int) -> Fields:
    return {"token_ids": (torch.int64, (num_rows,)), "position_ids": (torch.int64, (num_rows,))}


def _gather_trees(plan: StepPlan) -> SampledTrees | None:
    """Collect the trees of a step: those to verify, then the last tokens of prompts."""
    token_ids: list[int] = []
    parent_index: list[int] = []
    layouts = []
    for request in plan.verifies:
        sent = request.queued.tree if request.queued else None
        shape = request.queued.awaited_shape if request.queued else None
        parents, layout = _ROOT_ONLY, None
        if shape is not None:
            num_drafts = shape.num_draft_tokens - 1
            token_ids += [request.tokens[-1], *[0] * num_drafts]
            parents = (-1, *[0] * num_drafts)  # made up
            layout = _unknown_tree(shape.num_draft_tokens)
        elif sent is not None:
            token_ids += sent.token_ids
            parents = sent.parent_index
        elif request.num_in_flight:
            # A root that is still being computed is named by the row where the device keeps it.
            token_ids.append(-1 - request.req_idx)
        else:
            token_ids.append(request.tokens[-1])
        parent_index += parents
        layouts.append(layout or lay_out_tree(parents))
    seq_len = [request.next_seq_len for request in plan.verifies]
    endings = [work.request for work in plan.prefills if work.is_last]
    for request in endings:
        token_ids.append(request.tokens[-1])
        parent_index += _ROOT_ONLY
        layouts.append(lay_out_tree(_ROOT_ONLY))
        seq_len.append(len(request.tokens) - 1)
    requests = [*plan.verifies, *endings]
    if not requests:
        return None
    return SampledTrees(
        requests=requests,
        req_idx=[request.req_idx for request in requests],
        seq_len=seq_len,
        layouts=layouts,
        token_ids=token_ids,
        parent_index=parent_index,
    )


def build_verify(
    trees: SampledTrees,
    logit_rows: Sequence[int] | None,
    staging: Staging,
    sampler: Sampler,
    *,
    taken: TakenTrees | None = None,
    mailbox: Mailbox | None = None,
) -> VerifyInput:
    """Lay out how the trees of a step are sampled and walked, and start to bring it over.

    Args:
        logit_rows: [L] rows of the extend; None: the first L.
        taken: What the device took from the mailbox, if it awaits the trees.
        mailbox: Where the paths of requests go that have a draft there.
    """
    nodes = SampledNodes(trees)
    staging.begin()
    num_trees, count = len(trees.requests), len(trees.token_ids)
    host, device = staging.place_zeros(_verify_fields, num_trees, int(nodes.num_nodes.max()), count)
    host["req_idx"][:] = nodes.req_idx
    host["seq_len"][:] = nodes.seq_len
    at = (nodes.tree, np.arange(count) - nodes.first_node[nodes.tree])
    host["node_rows"][at] = np.arange(count)
    host["token_ids"][at] = nodes.token_ids
    host["parent_index"].fill(-2)
    host["parent_index"][at] = nodes.parent_index
    np.add(nodes.seq_len[nodes.tree] + 1, nodes.depth, out=host["position"])
    wants_logprobs = [request.open.logprobs for request in trees.requests]
    logprob_rows = None
    if any(wants_logprobs):
        logprob_rows = staging.add(np.flatnonzero(np.array(wants_logprobs)[nodes.tree]))
    inputs = VerifyInput(
        sampling=sampler.prepare(nodes, staging),
        req_idx=device["req_idx"],
        seq_len=device["seq_len"],
        num_logit_rows=count,
        logit_rows=None if logit_rows is None else staging.add(np.array(logit_rows)),
        node_rows=device["node_rows"],
        token_ids=device["token_ids"] if taken is None else taken.token_ids,
        parent_index=device["parent_index"] if taken is None else taken.parent_index,
        position=device["position"] if taken is None else taken.position,
        max_depth=nodes.max_depth,
        may_move_kv=not all(layout.is_chain for layout in trees.layouts),
        logprob_rows=logprob_rows,
        num_top_logprobs=max(
            (r.open.top_logprobs for r in trees.requests if r.open.logprobs), default=0
        ),
        wants_features=any(request.features is not None for request in trees.requests),
        is_awaited=taken is not None,
        mail=_mail_paths(trees.requests, nodes.max_depth, mailbox, staging),
    )
    staging.flush()
    return inputs


def _mail_paths(
    requests: Sequence[TargetRequest], max_depth: int, mailbox: Mailbox | None, staging: Staging
) -> MailedPaths | None:
    """Return where the paths go of requests whose rounds have numbers; None if none has any."""
    seqs = [request.next_round_tag for request in requests]
    if mailbox is None or not any(seqs) or max_depth >= MAX_PATH:
        return None
    host, device = staging.place_zeros(_mailbox_fields, len(requests))
    host["seq"][:] = seqs
    host["slot"][:] = [
        request.req_idx if seq else -1 for request, seq in zip(requests, seqs, strict=True)
    ]
    return MailedPaths(words=mailbox.paths, rows=mailbox.rows, **device)


def _verify_fields(num_trees: int, num_nodes: int, num_rows: int) -> Fields:
    square = (num_trees, num_nodes)
    return {
        "req_idx": (torch.int64, (num_trees,)),
        "seq_len": (torch.int64, (num_trees,)),
        "node_rows": (torch.int64, square),
        "token_ids": (torch.int64, square),
        "parent_index": (torch.int64, square),
        "position": (torch.int64, (num_rows,)),
    }
