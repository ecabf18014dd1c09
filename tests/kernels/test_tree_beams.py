"""The beams of growing trees against beams moved one by one: candidates, rows, slots, paths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.tree_beams import Beams, Candidates, GrowingTrees, next_beams

PAGE_TABLE_SHAPE = (9, 40)
INF = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; no steps: padding."""

    topk: int
    num_steps: int
    req_idx: int = 0
    kv_len: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A node to expand."""

    candidate: int
    score: np.float32
    token: int
    parent: int  # beam of the step before
    path: list[int]


def grow(
    requests: list[Request],
    children: list[torch.Tensor],
    tokens: list[torch.Tensor],
    page_size: int,
    device: torch.device,
) -> tuple[Candidates, list[Beams | None], torch.Tensor]:
    """Run all steps. children[s], tokens[s]: [B, P, K]."""
    width, most_steps = children[0].shape[2], len(children)

    def column(name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([getattr(r, name) for r in requests], dtype=dtype).to(device)

    page_table = torch.randint(1, 2**20, PAGE_TABLE_SHAPE, dtype=torch.int32)
    trees = GrowingTrees(
        req_idx=column("req_idx"),
        kv_len=column("kv_len"),
        node_position=column("position", torch.int64),
        topk=column("topk"),
        num_steps=column("num_steps"),
        page_table=page_table.to(device),
        page_size=page_size,
    )
    candidates = Candidates.allocate(len(requests), width, most_steps, device)
    for tensor in (candidates.score, candidates.token, candidates.parent):
        tensor.fill_(-7)
    beams, steps = None, []
    for step in range(most_steps):
        beams = next_beams(
            trees,
            candidates,
            beams,
            children[step].flatten(0, 1).to(device),
            tokens[step].flatten(0, 1).to(device),
            step=step,
            most_steps=most_steps,
        )
        steps.append(beams)
    return candidates, steps, page_table


def check(
    requests: list[Request],
    children: list[torch.Tensor],
    page_size: int,
    device: torch.device,
) -> None:
    """Compare every field of every step, padding included."""
    width, most_steps = children[0].shape[2], len(children)
    tokens = [torch.randint(0, 2**31 - 1, c.shape, dtype=torch.int32) for c in children]
    candidates, steps, page_table = grow(requests, children, tokens, page_size, device)
    assert steps[-1] is None
    launched = int(use_triton(candidates.score))
    assert launch_counts().get("next_beams", 0) == launched * most_steps
    for b, request in enumerate(requests):
        held = [Beam(candidate=-1, score=np.float32(0), token=0, parent=0, path=[])]
        for step in range(most_steps):
            first = 0 if step == 0 else width + (step - 1) * width**2
            num_parents = children[step].shape[1]
            found = []
            for parent in range(num_parents):
                for child in range(width):
                    candidate = first + parent * width + child
                    is_live = step < request.num_steps and parent < len(held)
                    score = np.float32(-INF)
                    if is_live and child < request.topk:
                        score = held[parent].score + np.float32(children[step][b, parent, child])
                        beam = Beam(
                            candidate=candidate,
                            score=score,
                            token=int(tokens[step][b, parent, child]),
                            parent=parent,
                            path=held[parent].path,
                        )
                        found.append(beam)
                    assert candidates.score[b, candidate].item() == score
                    if score > -INF:
                        assert candidates.token[b, candidate].item() == beam.token
                        assert candidates.parent[b, candidate].item() == held[parent].candidate
            found.sort(key=lambda beam: -beam.score)  # stable
            held = found[: request.topk] if step + 1 < request.num_steps else []
            for rank, beam in enumerate(held):
                held[rank] = Beam(
                    candidate=beam.candidate,
                    score=beam.score,
                    token=beam.token,
                    parent=beam.parent,
                    path=[*beam.path, step * request.topk + rank],
                )
            beams = steps[step]
            if beams is None:
                continue
            has_rows = step + 1 < request.num_steps
            assert beams.prefix_len[b].item() == (request.kv_len if has_rows else 0)
            for rank in range(width):
                row = b * width + rank
                path = beams.path_offset[row].tolist()
                if rank >= len(held):
                    assert beams.score[b, rank].item() == -INF
                    assert beams.token_ids[row] == beams.position_ids[row] == 0
                    assert beams.slot_mapping[row] == 0 and beams.path_len[row] == 1
                    assert beams.parent_row[row].item() == b * num_parents
                    assert path == [0] * (most_steps - 1)
                    continue
                beam = held[rank]
                logical = request.kv_len + beam.path[-1]
                page = int(page_table[request.req_idx, logical // page_size])
                assert beams.score[b, rank].item() == beam.score
                assert beams.slot_mapping[row].item() == page * page_size + logical % page_size
                assert beams.position_ids[row].item() == request.position + step
                assert beams.path_len[row].item() == step + 1
                assert path == beam.path + [0] * (most_steps - 2 - step)
                if beam.score > -INF:
                    assert beams.candidate[b, rank].item() == beam.candidate
                    assert beams.token_ids[row].item() == beam.token
                    assert beams.parent_row[row].item() == b * num_parents + beam.parent


def random_children(
    rng: random.Random, batch: int, width: int, most_steps: int, *, coarse: bool
) -> list[torch.Tensor]:
    """Return log-probabilities, best first; coarse: with ties, and fewer than K possible."""
    steps = []
    for step in range(most_steps):
        shape = (batch, 1 if step == 0 else width, width)
        values = [
            float(-rng.randrange(3)) if coarse else -rng.expovariate(1)
            for _ in range(math.prod(shape))
        ]
        if coarse:
            values = [-INF if rng.random() < 0.2 else value for value in values]
        steps.append(torch.tensor(values).view(shape).sort(dim=2, descending=True).values)
    return steps


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("width", "most_steps", "page_size"), [(1, 1, 1), (1, 6, 4), (4, 2, 16), (5, 4, 1), (16, 3, 64)]
)
def test_requests_of_different_shapes(
    device: torch.device, width: int, most_steps: int, page_size: int, *, coarse: bool
) -> None:
    rng = random.Random(width + most_steps)
    requests = [
        Request(topk=width, num_steps=most_steps, req_idx=8, kv_len=1, position=2**33),
        Request(topk=max(1, width - 1), num_steps=most_steps, req_idx=3, kv_len=11, position=10),
        Request(topk=width, num_steps=max(1, most_steps - 1), req_idx=1, kv_len=8, position=8),
        Request(topk=1, num_steps=1, req_idx=2, kv_len=3, position=3),
        Request(topk=0, num_steps=0),
    ]
    children = random_children(rng, len(requests), width, most_steps, coarse=coarse)
    check(requests, children, page_size, device)


def test_ties_go_to_the_lower_candidate(device: torch.device) -> None:
    children = [torch.zeros(1, 1 if step == 0 else 3, 3) for step in range(3)]
    check([Request(topk=3, num_steps=3, kv_len=2, position=2)], children, 2, device)


def test_impossible_children_score_nothing(device: torch.device) -> None:
    children = [torch.full((1, 1 if step == 0 else 4, 4), -INF) for step in range(3)]
    check([Request(topk=4, num_steps=3, kv_len=2, position=2)], children, 2, device)
