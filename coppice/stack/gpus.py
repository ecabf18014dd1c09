"""Which GPU each worker of a stack has, and what those that share one are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from shared.config import DraftConfig, TargetConfig, WorkerConfig
from shared.gpu_lease import list_machine_gpus

if TYPE_CHECKING:
    from coppice.stack.config import StackConfig

Worker = TypeVar("Worker", TargetConfig, DraftConfig)

# Of what is free when it allocates, whoever comes first: a draft needs far less for a token.
TARGET_KV_FRACTION = 0.7
DRAFT_KV_FRACTION = 0.25


def gpus_of_workers(config: StackConfig) -> list[str]:
    """Return the GPU option of every target, then of every draft.

    Where nothing is said, workers take the machine's GPUs in turn, so that a draft does not share
    its target's GPU when there is another one.
    """
    groups = (
        (config.target, config.num_targets, config.target_gpus),
        (config.draft, config.num_drafts, config.draft_gpus),
    )
    found: list[str] = []
    if any(count and not asked and _takes_any_gpu(worker) for worker, count, asked in groups):
        found = list_machine_gpus()
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


def shared_gpus(gpus: Sequence[str]) -> set[str]:
    """Return the GPUs that several workers are given.

    Args:
        gpus: Of each worker, index or uuid; "" = any, which says nothing.
    """
    return {gpu for gpu, count in Counter(gpus).items() if gpu and count > 1}


def on_gpu(worker: Worker, gpu: str, *, alike: Sequence[str], others: Sequence[str]) -> Worker:
    """Return a worker's configuration with its GPU, and with less memory where that is shared.

    Args:
        alike: GPUs of all workers of its role, its own included.
        others: Those of the other role's.
    """
    worker = replace(worker, gpus=gpu)
    if gpu not in shared_gpus([*alike, *others]):
        return worker
    worker = replace(worker, gpu_is_shared=True)
    if worker.num_pages or worker.kv_memory_fraction != WorkerConfig.kv_memory_fraction:
        return worker
    share = TARGET_KV_FRACTION if isinstance(worker, TargetConfig) else DRAFT_KV_FRACTION
    return replace(worker, kv_memory_fraction=share / alike.count(gpu))


def _takes_any_gpu(worker: TargetConfig | DraftConfig) -> bool:
    return worker.device in ("auto", "cuda") and not worker.gpu_lease_dir and not worker.gpus
