"""Build what follows the forward of a step, while the device computes that; host side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.kernels.mailbox_trees import TakenTrees
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES
from shared.step.buckets import bucket_of
from shared.step.staging import Arrays, Fields, Staging
from target_service.batch import StepBatch
from target_service.nodes import SampledNodes, SampledTrees
from target_service.phases import SamplingInput, VerifyInput
from target_service.sampler import Sampler, sampling_fields
from target_service.tree_source import TreeSource

_NO_NODE = -2
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Trees, nodes of each, and logit rows, padding included."""

    num_trees: int
    num_nodes: int
    num_rows: int

    @classmethod
    def of_bucket(cls, bucket: int, pool: KVPool) -> _Sizes:
        num_trees = min(bucket, pool.max_num_requests)
        return cls(num_trees=num_trees, num_nodes=MAX_TREE_NODES, num_rows=bucket)


def build_verify(
    batch: StepBatch,
    trees: SampledTrees,
    pool: KVPool,
    staging: Staging,
    sampler: Sampler,
    source: TreeSource,
    *,
    buckets: tuple[int, ...],
    taken: TakenTrees | None,
) -> VerifyInput:
    """Lay out how the trees of a step are sampled and walked, and start to bring it over.

    Args:
        source: Knows where the device posts accepted paths, besides.
        buckets: Row counts to pad to, if the forward is padded as well.
        taken: What the device took from the mailbox: the first trees; None: all of them are here.
    """
    nodes, requests = SampledNodes(trees), trees.requests
    num_trees, count = len(requests), len(trees.token_ids)
    bucket = None if batch.extend.bucket is None else bucket_of(count, buckets)
    sizes = _Sizes(num_trees=num_trees, num_nodes=int(nodes.num_nodes.max()), num_rows=count)
    if bucket is not None:
        sizes = _Sizes.of_bucket(bucket, pool)
    host, device = _place(sizes, pool, staging)
    _fill(host, nodes, batch.logit_rows)
    # What depends on the sizes alone comes first: it always lies in the same place.
    mailbox_paths = source.place_paths(requests, staging, sizes.num_trees)
    sampling = sampler.prepare(nodes, staging, sizes.num_rows)
    if sampling.masks is not None and sampling.masks.shut:
        shut = np.array(sampling.masks.shut)
        tree = nodes.tree[shut]
        host["token_ids"][tree, shut - nodes.first_node[tree]] = _NO_TOKEN
    inputs = VerifyInput(
        bucket=bucket,
        num_trees=num_trees,
        path_width=nodes.max_depth + 1,
        sampling=sampling,
        **device,
        max_depth=nodes.max_depth if bucket is None else MAX_TREE_NODES - 1,
        may_move_kv=bucket is not None or not all(layout.is_chain for layout in trees.layouts),
        **_logprob_fields(nodes, staging),
        wants_features=any([request.keeps_rows for request in requests]),
        wants_experts=any([request.open.wants_routed_experts for request in requests]),
        num_device_trees=trees.num_on_device,
        mailbox_paths=mailbox_paths,
    )
    staging.flush()
    if taken is not None:
        _put_first(taken, inputs)
    return inputs


def _logprob_fields(nodes: SampledNodes, staging: Staging) -> dict[str, Any]:
    """Return the fields of a VerifyInput that say whose log-probabilities are wanted."""
    wants_logprobs = [request.open.logprobs for request in nodes.requests]
    if not any(wants_logprobs):
        return {}
    rows = np.flatnonzero(np.array(wants_logprobs)[nodes.tree])
    most = max([request.open.top_logprobs for request in nodes.requests if request.open.logprobs])
    return {"logprob_rows": staging.add(rows), "num_top_logprobs": most}


def build_padding(
    bucket: int, pool: KVPool, staging: Staging, source: TreeSource, *, has_filters: bool
) -> VerifyInput:
    """Return a bucket of rows that belong to no request, and start to bring it over."""
    sizes = _Sizes.of_bucket(bucket, pool)
    _, device = _place(sizes, pool, staging)
    mailbox_paths = source.place_paths((), staging, sizes.num_trees)
    columns: dict[str, Any] = staging.place_zeros(sampling_fields, bucket)[1]
    staging.flush()
    return VerifyInput(
        bucket=bucket,
        num_trees=sizes.num_trees,
        path_width=1,
        **device,
        max_depth=MAX_TREE_NODES - 1,
        may_move_kv=True,
        mailbox_paths=mailbox_paths,
        sampling=SamplingInput(**columns, has_filters=has_filters),
    )


def _place(sizes: _Sizes, pool: KVPool, staging: Staging) -> tuple[Arrays, dict[str, Any]]:
    """Begin to stage trees that are nothing but padding."""
    staging.begin()
    host, device = staging.place_zeros(
        _verify_fields, sizes.num_trees, sizes.num_nodes, sizes.num_rows
    )
    host["req_idx"].fill(pool.max_num_requests)
    host["parent_index"].fill(_NO_NODE)
    return host, device


def _fill(host: Arrays, nodes: SampledNodes, logit_rows: Sequence[int] | None) -> None:
    """Replace the first trees, and the first rows, by those of the step.

    Args:
        logit_rows: As in StepBatch.
    """
    num_trees, count = len(nodes.req_idx), len(nodes.token_ids)
    rows = np.arange(count)
    host["req_idx"][:num_trees] = nodes.req_idx
    host["seq_len"][:num_trees] = nodes.seq_len
    at = (nodes.tree, rows - nodes.first_node[nodes.tree])
    host["node_rows"][at] = rows
    host["token_ids"][at] = nodes.token_ids
    host["parent_index"][at] = nodes.parent_index
    np.add(nodes.seq_len[nodes.tree] + 1, nodes.depth, out=host["position"][:count])
    host["logit_rows"][:count] = rows if logit_rows is None else logit_rows


def _put_first(taken: TakenTrees, inputs: VerifyInput) -> None:
    """Replace what held the places of trees from the mailbox by these trees, on the device.

    Mutates: the first trees of `inputs`.
    """
    num_trees, num_nodes = taken.token_ids.shape
    inputs.token_ids[:num_trees, :num_nodes] = taken.token_ids
    inputs.parent_index[:num_trees, :num_nodes] = taken.parent_index
    inputs.position[: len(taken.position)] = taken.position
    inputs.seq_len[:num_trees] = taken.seq_len


def _verify_fields(num_trees: int, num_nodes: int, num_rows: int) -> Fields:
    square = (num_trees, num_nodes)
    return {
        "req_idx": (torch.int64, (num_trees,)),
        "seq_len": (torch.int64, (num_trees,)),
        "node_rows": (torch.int64, square),
        "token_ids": (torch.int64, square),
        "parent_index": (torch.int64, square),
        "position": (torch.int64, (num_rows,)),
        "logit_rows": (torch.int64, (num_rows,)),
    }
