"""Stage what the growth of trees reads.

Where graphs are captured, the requests are padded to one of a few numbers (shared/step/buckets.py);
growth.py says with what.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_service.phases import DraftInput
from draft_service.request import DraftRequest
from shared.kernels.tree_beams import GrowingTrees
from shared.kv.pool import KVPool
from shared.messages import TreeShape
from shared.step.staging import Fields, Staging

# Of each request, in the order of `_numbers_of`.
_NUMBERS = {
    "req_idx": torch.int32,
    "kv_len": torch.int32,
    "node_position": torch.int64,
    "topk": torch.int32,
    "num_steps": torch.int32,
    "num_nodes": torch.int32,
    "child_position": torch.int64,
}


def pack_growth(
    requests: Sequence[DraftRequest],
    shapes: Sequence[TreeShape],
    pool: KVPool,
    staging: Staging,
    *,
    num_places: int,
) -> DraftInput:
    """Stage what the requests' trees depend on.

    Args:
        shapes: Of their trees.
        staging: Of nothing else.
        num_places: Of the requests and of padding.
    """
    count = len(requests)
    staging.begin()
    host, device = staging.place_zeros(_growth_fields, num_places)
    for request, shape in zip(requests, shapes, strict=True):
        stop = request.kv_len + num_scratch_slots(shape)
        assert pool.holds(request.req_idx, request.kv_len, stop), "a node's slot is in the sink"
    columns = zip(*map(_numbers_of, requests, shapes), strict=True)
    numbers = dict(zip(_NUMBERS, columns, strict=True))
    for name, values in numbers.items():
        host[name][:count] = values
    samplings = [request.open.sampling for request in requests]
    is_random = any([sampling.temperature > 0 for sampling in samplings])
    if is_random:
        host["temperature"][:count] = [sampling.temperature for sampling in samplings]
        host["seed"][:count] = [_signed(sampling.seed) for sampling in samplings]
    page_table = pool.stage_page_table(staging)
    staging.flush()
    return DraftInput(
        trees=GrowingTrees(
            req_idx=device["req_idx"],
            kv_len=device["kv_len"],
            node_position=device["node_position"],
            topk=device["topk"],
            num_steps=device["num_steps"],
            page_table=page_table,
            page_size=pool.page_size,
        ),
        num_nodes=device["num_nodes"],
        temperature=device["temperature"],
        seed=device["seed"],
        child_position=device["child_position"],
        bounds=TreeShape(
            num_steps=max(numbers["num_steps"]),
            topk=max(numbers["topk"]),
            num_draft_tokens=1 + max(numbers["num_nodes"]),
        ),
        is_random=is_random,
    )


def num_scratch_slots(shape: TreeShape) -> int:
    """Return how many slots past kv_len a tree needs while it grows."""
    return (shape.num_steps - 1) * shape.topk


def _numbers_of(request: DraftRequest, shape: TreeShape) -> tuple[int, ...]:
    return (
        request.req_idx,
        request.kv_len,
        request.next_position,
        shape.topk,
        shape.num_steps,
        shape.num_draft_tokens - 1,
        len(request.tokens),
    )


def _growth_fields(num_reqs: int) -> Fields:
    dtypes = {**_NUMBERS, "temperature": torch.float32, "seed": torch.int64}
    return {name: (dtype, (num_reqs,)) for name, dtype in dtypes.items()}


def _signed(seed: int) -> int:
    """Return the number that has the bits of an unsigned seed."""
    return seed - (1 << 64) if seed >> 63 else seed
