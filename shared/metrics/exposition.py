"""Samples as prometheus_client has them, and its text; loaded only where metrics are served."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family

from shared.metrics.catalog import metric_of
from shared.metrics.samples import Samples, named, parse_key


class SamplesCollector:
    """Makes Prometheus families of samples whenever it is asked.

    Args:
        role: Label of every sample.
        source: Returns the samples of this moment.
    """

    def __init__(self, role: str, source: Callable[[], Samples]) -> None:
        self._role = role
        self._source = source

    def collect(self) -> Iterator[Family]:
        """Yield the families, each with all of its samples."""
        families: dict[str, Family] = {}
        samples = {**_build_samples(), **self._source()}
        for key, value in samples.items():
            name, labels = parse_key(key)
            metric = metric_of(name)
            family = families.get(metric.name)
            if family is None:
                base = metric.name.removesuffix("_total")
                family = families[metric.name] = Family(base, metric.meaning, metric.kind)
            family.add_sample(name, {"role": self._role, **labels}, value)
        yield from families.values()


class Exposition:
    """What /metrics says.

    Args:
        role: orchestrator, target or draft.
        source: Returns the samples of this moment.
        engine_pid: Returns the process of the engine; None: there is none.
    """

    def __init__(
        self, role: str, source: Callable[[], Samples], engine_pid: Callable[[], int | None]
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SamplesCollector(role, source))
        ProcessCollector(registry=self._registry)
        # Of a process that has ended there is nothing to tell, and nothing is told.
        ProcessCollector(
            namespace="coppice_engine", pid=lambda: engine_pid() or 0, registry=self._registry
        )

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the text of this moment, and its content type.

        Args:
            accept: The header of this name.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def _build_samples() -> Samples:
    try:
        version = importlib.metadata.version("coppice")
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        version = "unknown"
    labels = {"version": version, "python": platform.python_version()}
    return {named("coppice_build_info", **labels): 1.0}
