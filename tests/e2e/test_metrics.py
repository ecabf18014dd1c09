"""Every process of a real stack is scraped: by hand, and by Prometheus where there is one.

The tests with Prometheus run if `prometheus` and `promtool` are on PATH or in $PROMETHEUS_DIR, and
are skipped otherwise. Debian's package has both:

    apt-get download prometheus && dpkg -x prometheus_*.deb prometheus
    PROMETHEUS_DIR=prometheus/usr/bin python -m pytest tests/e2e/test_metrics.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from shared.metrics.catalog import METRICS, metric_of
from tests.e2e.serving import Server, generate_all, running, stack_config
from tests.processes import wait_for
from tests.scrape import Scrape, free_ports, scrape
from tests.unit.test_metrics import ALERTS, expressions

PROMPT = "def fibonacci(n):"
NUM_REQUESTS = 6
NUM_TOKENS = 48
# What no CPU does, or nothing has done here: absent until it happens.
ABSENT = {"coppice_kernel_launches_total", "coppice_refusals_total"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Server]:
    """Run a stack with two orchestrator processes, all of which have metrics; log in JSON."""
    ports = free_ports(4)
    log = {"log_format": "json"}
    config = stack_config(
        target=log, draft=log, orchestrator={"workers": 2, **log}, metrics_port=ports
    )
    with running(config) as server:
        yield server


@pytest.fixture(scope="module")
def served(stack: Server) -> list[Any]:
    """Return the completions of some requests, of several connections."""
    request = {"prompt": PROMPT, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    completions: list[Any] = []

    def are_drafts_accepted() -> bool:
        """Return whether trees came in time, which is up to the machine."""
        for choice in ({}, {"speculation": True}):  # by AUTO three have no trees on a CPU
            requests = [{**request, **choice}] * (NUM_REQUESTS // 2)
            completions.extend(generate_all(stack.address, requests))
        return any(each.speculation.num_accepted_drafts for each in completions)

    wait_for(are_drafts_accepted)
    return completions


def scrape_all(server: Server) -> dict[str, Scrape]:
    return {name: scrape(url) for name, url in server.metrics_urls.items()}


def test_all_processes_together_say_what_the_clients_were_told(
    stack: Server, served: list[Any]
) -> None:
    """Two orchestrator processes add up to what FinishInfo says; the target has done it all."""
    assert set(stack.metrics_urls) == {"orchestrator", "orchestrator.1", "target-0", "draft-0"}
    stats = [completion.speculation for completion in served]

    def total(field: str) -> int:
        return sum(getattr(each, field) for each in stats)

    num_trees = total("num_rounds") - total("num_root_only_rounds")
    of_requests = {"code": "OK", "finish_reason": "length"}

    def is_all_said(seen: dict[str, Scrape]) -> bool:
        ended = [
            front.value("coppice_requests_total", **of_requests)
            for name, front in seen.items()
            if name.startswith("orchestrator")
        ]
        return (
            sum(ended) >= len(served)
            and seen["target-0"].value("coppice_engine_rounds_total") >= total("num_rounds")
            and seen["draft-0"].value("coppice_draft_trees_total") >= num_trees
        )

    wait_for(lambda: is_all_said(scrape_all(stack)))  # reports are a moment old
    seen = scrape_all(stack)
    fronts = [seen["orchestrator"], seen["orchestrator.1"]]

    def summed(name: str, **labels: str) -> float:
        return sum(front.value(name, **labels) for front in fronts)

    assert summed("coppice_requests_total", code="OK", finish_reason="length") == len(served)
    assert summed("coppice_generation_tokens_total") == len(served) * NUM_TOKENS
    prompt_tokens = sum(completion.usage.num_prompt_tokens for completion in served)
    assert summed("coppice_prompt_tokens_total") == prompt_tokens
    assert summed("coppice_rounds_total") == total("num_rounds")
    assert summed("coppice_draft_tokens_total") == total("num_draft_tokens")
    assert summed("coppice_accepted_tokens_total") == total("num_accepted_drafts") > 0
    assert summed("coppice_root_only_rounds_total") == total("num_root_only_rounds")
    first_tokens_s = sum(c.timings.time_to_first_token_ms for c in served) / 1e3
    first_token = "coppice_time_to_first_token_seconds"
    assert summed(f"{first_token}_sum") == pytest.approx(first_tokens_s)
    target, draft = seen["target-0"], seen["draft-0"]
    with_tree = [
        target.value("coppice_engine_rounds_total", source=source)
        for source in ("device", "peer", "relayed")
    ]
    assert sum(with_tree) >= num_trees > 0, "a round past the end of its request is thrown away"
    assert draft.value("coppice_draft_trees_total") >= num_trees
    assert target.value("coppice_feature_bytes_total", carrier="ring") > 0
    for worker in (target, draft):
        stages_s = worker.value("coppice_step_stage_seconds_total")
        assert 0 < worker.value("coppice_engine_busy_seconds_total") == pytest.approx(stages_s)
        assert worker.value("coppice_compiles_total") == 0
        assert worker.value("coppice_engine_process_resident_memory_bytes") > 1e8
    assert target.value("coppice_device_busy_seconds_total") > 0


def test_every_metric_of_the_catalog_is_said_by_those_that_have_it(
    stack: Server, served: list[Any]
) -> None:
    for name, seen in scrape_all(stack).items():
        role = name.partition("-")[0].partition(".")[0]
        said = {
            metric_of(sample).name
            for sample in seen.names
            if sample.startswith("coppice_") and not sample.startswith("coppice_engine_process_")
        }
        expected = {metric.name for metric in METRICS.values() if role in metric.roles}
        if name.startswith("orchestrator"):  # of a process that no request came to
            expected -= {"coppice_accepted_tokens_per_depth_total"}
            said -= {"coppice_accepted_tokens_per_depth_total"}
        assert expected - ABSENT <= said <= expected, name


def test_every_line_of_the_stack_is_json_and_has_one_end_per_request(
    stack: Server, served: list[Any]
) -> None:
    def entries_of_log() -> list[dict[str, Any]]:
        return [json.loads(line.partition(": ")[2]) for line in list(stack.log)]

    def ids_of(entries: list[dict[str, Any]]) -> list[str]:
        return [e["request_id"] for e in entries if e.get("event") == "request_end"]

    # What is logged comes through a pipe.
    wait_for(lambda: {c.request_id for c in served} <= set(ids_of(entries_of_log())))
    entries = entries_of_log()
    ids = ids_of(entries)
    assert len(set(ids)) == len(ids) >= len(served)
    assert {"orchestrator", "target", "draft"} <= {entry["role"] for entry in entries}
    assert all(PROMPT not in json.dumps(entry) for entry in entries)


# --- a real Prometheus ---------------------------------------------------------------------------


def binary(name: str) -> str:
    """Return where a program of Prometheus is; skips the test if it is nowhere."""
    directory = os.environ.get("PROMETHEUS_DIR")
    found = shutil.which(name, path=directory) if directory else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH or in PROMETHEUS_DIR")
    return found


def test_promtool_understands_rules_and_configuration() -> None:
    config = ALERTS.with_name("prometheus.yml")
    result = subprocess.run(
        [binary("promtool"), "check", "config", str(config)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


class Prometheus:
    """A Prometheus that scrapes a stack every second."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with self._opener.open(url, timeout=20) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def is_up(self) -> bool:
        try:
            with self._opener.open(f"{self._url}/-/ready", timeout=20):
                return True
        except OSError:  # an HTTPError is one
            return False

    def value(self, expression: str) -> float:
        """Return the only value of an expression; nan if it has none."""
        result = self.get("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else float("nan")


@pytest.fixture(scope="module")
def prometheus(stack: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program, folder = binary("prometheus"), tmp_path_factory.mktemp("prometheus")
    port = free_ports(1)
    config = yaml.safe_load(ALERTS.with_name("prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    hosts = [urllib.parse.urlparse(url).netloc for url in stack.metrics_urls.values()]
    config["scrape_configs"][0]["static_configs"] = [{"targets": hosts}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        wait_for(server.is_up, 60.0, (folder / "log").read_text)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def test_prometheus_reads_every_process_and_understands_every_query(
    stack: Server, served: list[Any], prometheus: Prometheus
) -> None:
    wait_for(lambda: prometheus.value('count(up{job="coppice"} == 1)') == 4)
    ok = 'sum(coppice_requests_total{code="OK"})'
    wait_for(lambda: prometheus.value(ok) >= len(served))
    wait_for(  # every rule has been evaluated
        lambda: (
            {
                rule["health"]
                for group in prometheus.get("rules")["groups"]
                for rule in group["rules"]
            }
            == {"ok"}
        ),
        60.0,
        lambda: prometheus.get("rules"),
    )
    for _, expression in expressions():
        prometheus.get("query", query=expression.replace("$__rate_interval", "1m"))
    targets = prometheus.get("targets")["activeTargets"]
    assert all(not target["lastError"] for target in targets)


def test_an_alert_fires_when_its_reason_is_there_and_not_before(
    stack: Server, served: list[Any], prometheus: Prometheus
) -> None:
    """A killed draft is a worker that was lost; there was none before."""

    def alerts() -> dict[str, str]:
        found = prometheus.get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in found}

    up = 'count(up{job="coppice"} == 1)'
    wait_for(lambda: prometheus.value(up) == 4 and not alerts(), 120.0, alerts)
    stack.kill("draft-0")
    wait_for(lambda: alerts().get("CoppiceWorkerLost") == "firing", 60.0, alerts)
    stack.wait_paired()
