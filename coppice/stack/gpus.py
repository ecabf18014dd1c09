"""Which GPU each worker of a stack has, and what those that share one are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from shared.config import DraftConfig, TargetConfig, WorkerConfig
from shared.gpu_lease import visible_gpus

if TYPE_CHECKING:
    from coppice.stack.config import StackConfig

Worker = TypeVar("Worker", TargetConfig, DraftConfig)

# Of what is free when it allocates, whoever comes first: a draft needs far less for a token.
TARGET_KV_FRACTION = 0.7
DRAFT_KV_FRACTION = 0.25


def gpus_of_workers(config: StackConfig) -> list[str]:
    """Return the GPU option of every target, then of every draft.

    Where nothing is said, workers take the visible GPUs in turn, so that a draft does not share
    its target's GPU when there is another one.
    """
    groups = (
        (config.target, config.num_targets, config.target_gpus),
        (config.draft, config.num_drafts, config.draft_gpus),
    )
    found: list[str] = []
    if any(count and not asked and _takes_any_gpu(worker) for worker, count, asked in groups):
        found = visible_gpus()
    gpus: list[str] = []
    for worker, count, asked in groups:
        for turn in range(count):
            if asked:
                gpus.append(asked[turn % len(asked)])
            elif found and _takes_any_gpu(worker):
                gpus.append(found[len(gpus) % len(found)])
            else:
                gpus.append(worker.gpus)
    return gpus


def places_of(config: StackConfig, gpus: Sequence[str]) -> list[str]:
    """Return which GPU that is, likewise: its uuid, if the machine shows one; "": nobody knows, as
    of a worker that leases one, which nobody else gets.

    Args:
        gpus: What `gpus_of_workers` returned.
    """
    found = visible_gpus() if any(map(str.isdecimal, gpus)) else []
    places: list[str] = []
    workers = [config.target] * config.num_targets + [config.draft] * config.num_drafts
    for worker, gpu in zip(workers, gpus, strict=True):
        is_index = gpu.isdecimal() and int(gpu) < len(found)
        place = found[int(gpu)] if is_index else gpu
        places.append("" if worker.gpu_lease_dir else place)
    return places


def shared_gpus(places: Sequence[str]) -> set[str]:
    """Return the GPUs that several workers have.

    Args:
        places: Of each worker; "" says nothing.
    """
    return {place for place, count in Counter(places).items() if place and count > 1}


def on_gpu(worker: Worker, place: str, *, alike: Sequence[str], others: Sequence[str]) -> Worker:
    """Return a worker's configuration on a GPU, with less memory where that is shared.

    Args:
        place: Where it is, of `places_of`.
        alike: Where all workers of its role are, its own place included.
        others: Where those of the other role are.
    """
    if place not in shared_gpus([*alike, *others]):
        return worker
    worker = replace(worker, gpu_is_shared=True)
    if worker.num_pages or worker.kv_memory_fraction != WorkerConfig.kv_memory_fraction:
        return worker
    share = TARGET_KV_FRACTION if isinstance(worker, TargetConfig) else DRAFT_KV_FRACTION
    return replace(worker, kv_memory_fraction=share / alike.count(place))


def _takes_any_gpu(worker: TargetConfig | DraftConfig) -> bool:
    return worker.device in ("auto", "cuda") and not worker.gpu_lease_dir and not worker.gpus
