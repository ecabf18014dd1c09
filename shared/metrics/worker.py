"""The named values of a worker: of its load, its identity and its front."""

from __future__ import annotations

from shared.messages import WorkerInfo, WorkerLoad
from shared.metrics.catalog import INFO_LABELS
from shared.metrics.samples import Samples, counted, named


def load_samples(load: WorkerLoad) -> Samples:
    """Return the named values of a load, with all that the engine counts.

    `coppice top`, `GetInfo` and Prometheus read a worker by these names.
    """
    num_used = load.num_pages - load.num_free_pages
    return {
        "coppice_requests_running": load.num_running,
        "coppice_requests_waiting": load.num_waiting,
        named("coppice_kv_pages", state="free"): load.num_free_pages,
        named("coppice_kv_pages", state="used"): num_used,
        "coppice_kv_cache_usage_ratio": num_used / load.num_pages if load.num_pages else 0.0,
        "coppice_engine_steps_total": load.num_steps,
        "coppice_engine_rows_total": load.num_rows,
        "coppice_engine_request_steps_total": load.num_request_steps,
        "coppice_compiles_total": load.num_compiles,
        "coppice_captures_total": load.num_captures,
        "coppice_eager_launches_total": load.num_eager_launches,
        **dict(counted("coppice_kernel_launches_total", "kernel", dict(load.kernel_launches))),
        **dict(load.counts),
    }


def info_samples(info: WorkerInfo) -> Samples:
    """Return what a worker is, as labels."""
    labels = {name: getattr(info, name) for name in INFO_LABELS}
    return {named("coppice_worker_info", **labels): 1.0}
