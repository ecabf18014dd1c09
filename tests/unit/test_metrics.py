"""Counts and their names; the documents, dashboards and alerts that name them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from shared.messages import WorkerLoad
from shared.metrics.catalog import ALL, METRICS, metric_of
from shared.metrics.engine import EngineTallies
from shared.metrics.exposition import SamplesCollector
from shared.metrics.samples import histogram, named, parse_key
from shared.metrics.tally import StageClock, Tally
from shared.metrics.worker import load_samples
from tests.scrape import Scrape

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
SCALING = sorted((ROOT / "deploy" / "kubernetes").glob("*/scaling.yaml"))
_SELECTOR = re.compile(r"\b((?:coppice|process)_\w+)\b(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|on|without|group_left|group_right)\s*\(([^)]*)\)")
_ROLES_OF_LETTERS = {"O": "orchestrator", "T": "target", "D": "draft", "G": "gateway"}


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]+", fullmatch=True).filter(lambda name: name != "name"),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        max_size=4,
    )
)
def test_labels_of_a_key_are_read_as_they_were_written(labels: dict[str, str]) -> None:
    assert parse_key(named("coppice_x_total", **labels)) == ("coppice_x_total", labels)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5)), max_size=40))
def test_a_tally_counts_as_a_histogram_does(values: list[tuple[float, int]]) -> None:
    bounds = (1.0, 2.5, 10.0)
    tally = Tally(bounds)
    for value, times in values:
        tally.add(value, times)
    samples = dict(histogram("x", tally))
    for bound in bounds:
        below = sum(times for value, times in values if value <= bound)
        assert samples[f'x_bucket{{le="{bound}"}}'] == below
    total = sum(times for _, times in values)
    assert samples["x_count"] == samples['x_bucket{le="+Inf"}'] == total
    assert samples["x_sum"] == pytest.approx(sum(value * times for value, times in values))


def test_stages_of_a_clock_add_up_to_the_time_between_its_begin_and_its_last_end() -> None:
    clock = StageClock(("a", "b"))
    began_ns = clock.begin()
    clock.end("a")
    clock.end("b")
    ended_ns = clock.end("a")
    assert sum(clock.ns.values()) == ended_ns - began_ns
    assert set(clock.ns) == {"a", "b"}


def test_what_is_not_in_the_catalog_is_refused() -> None:
    for name in ("coppice_nonsense", "coppice_requests_total_bucket", "coppice_ready_sum"):
        with pytest.raises(KeyError, match=name):
            metric_of(name)
    assert metric_of("coppice_batch_rows_bucket") is METRICS["coppice_batch_rows"]


def test_a_load_has_names_for_prometheus_as_it_is() -> None:
    """What `GetInfo` says is what /metrics says."""
    tallies = EngineTallies(("launch",))
    tallies.note_batch(12, 3)
    counts = tuple(sorted(tallies.samples.items()))
    load = WorkerLoad(
        num_pages=10, num_free_pages=4, kernel_launches=(("store_kv", 7),), counts=counts
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SamplesCollector("target", lambda: load_samples(load)))
    seen = Scrape(generate_latest(registry).decode())
    assert seen.value("coppice_kv_pages", state="used", role="target") == 6
    assert seen.value("coppice_kv_cache_usage_ratio") == 0.6
    assert seen.value("coppice_kernel_launches_total", kernel="store_kv") == 7
    assert seen.value("coppice_batch_rows_bucket", le="8") == 0
    assert seen.value("coppice_batch_rows_bucket", le="16") == 1
    assert seen.value("coppice_batch_requests_sum") == 3
    assert seen.families["coppice_batch_rows"].type == "histogram"
    assert seen.families["coppice_kv_pages"].documentation == METRICS["coppice_kv_pages"].meaning


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"coppice_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert metric.meaning and set(metric.roles) <= set(ALL)
        assert "role" not in metric.labels and "request_id" not in metric.labels


def test_the_document_has_every_metric_as_it_is() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(
        r"^\| `(coppice_\w+)` \| (\w+) \| (.*?) \| ([OTDG ]+) \| (.*) \|$", text, re.M
    )
    assert [row[0] for row in rows] == list(METRICS)
    for name, kind, labels, roles, meaning in rows:
        metric = METRICS[name]
        assert kind == metric.kind, name
        assert tuple(re.findall(r"`(\w+)`", labels)) == metric.labels, name
        assert tuple(_ROLES_OF_LETTERS[letter] for letter in roles.split()) == metric.roles, name
        assert meaning == metric.meaning, name


def expressions_of_dashboard(path: Path) -> Iterator[tuple[str, str]]:
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def expressions_of_scaling(path: Path) -> Iterator[tuple[str, str]]:
    for document in yaml.safe_load_all(path.read_text()):
        for trigger in document.get("spec", {}).get("triggers", ()):
            if "query" in trigger["metadata"]:
                yield f"{path.parent.name} {path.name}", trigger["metadata"]["query"]


def expressions() -> list[tuple[str, str]]:
    """Return all queries that are shipped, with where each is from."""
    rules: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    found = [(rule["alert"], rule["expr"]) for rule in rules]
    for path in DASHBOARDS:
        found += expressions_of_dashboard(path)
    for path in SCALING:
        found += expressions_of_scaling(path)
    return found


def labels_of(name: str) -> set[str]:
    """Return the labels that a sample may have once Prometheus has it."""
    labels = {"role", "instance", "job", "namespace"}
    if name.startswith("process_") or name.startswith("coppice_engine_process_"):
        return labels
    metric = metric_of(name)
    return labels | set(metric.labels) | ({"le"} if name.endswith("_bucket") else set())


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_what_is_shipped_asks_for_what_exists(where: str, expression: str) -> None:
    known: set[str] = set()
    for name, selector in _SELECTOR.findall(expression):
        known |= labels_of(name)
        for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector):
            assert label in labels_of(name), f"{where}: {name} has no label {label}"
        metric = METRICS.get(name)
        assert metric is None or metric.kind != "histogram", f"{where}: {name} is no sample"
    for group in _GROUPED.findall(expression):
        for label in filter(None, (part.strip() for part in group.split(","))):
            assert label in known, f"{where} groups by {label}"


def test_the_dashboard_shows_every_kind_of_metric_that_is_no_info() -> None:
    """Nothing is counted that nobody can see, but for what only a query would ask."""
    shown = {name for _, text in expressions() for name, _ in _SELECTOR.findall(text)}
    shown_metrics = {metric_of(name).name for name in shown if "process_" not in name}
    for_queries = {
        "coppice_build_info",
        "coppice_worker_info",
        "coppice_sessions",
        "coppice_kv_pages",
        "coppice_accept_length",
        "coppice_cached_prompt_tokens_total",
        "coppice_moved_rounds_total",
        "coppice_engine_rows_total",
        "coppice_engine_request_steps_total",
        "coppice_kernel_launches_total",
    }
    assert set(METRICS) - shown_metrics == for_queries


def test_every_alert_is_explained() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    for rule in rules:
        assert re.search(rf"^\|[^|]*\b{rule['alert']}\b", text, re.M), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
