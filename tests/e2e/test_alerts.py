"""Each alert fires on what it is for, and none on a healthy deployment; by promtool.

Skipped where there is no promtool, see test_metrics.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.e2e.test_metrics import ALERTS, binary

HOURS = 6
MINUTES = HOURS * 60
STEADY = f"0+60x{MINUTES}"  # one per second
NEVER = f"0x{MINUTES}"
# Series of a deployment in good health, one sample a minute.
HEALTHY = {
    'up{instance="o"}': f"1x{MINUTES}",
    'up{instance="d"}': f"1x{MINUTES}",
    'coppice_ready{role="orchestrator",instance="o"}': f"1x{MINUTES}",
    'coppice_ready{role="draft",instance="d"}': f"1x{MINUTES}",
    'coppice_engine_ends_total{role="target",instance="t",cause="hung"}': NEVER,
    'process_start_time_seconds{instance="t"}': f"1000x{MINUTES}",
    'coppice_requests_total{code="OK",finish_reason="stop"}': STEADY,
    'coppice_requests_total{code="INTERNAL",finish_reason=""}': NEVER,
    'coppice_workers_lost_total{worker_role="draft",cause="error"}': NEVER,
    'coppice_workers_lost_total{worker_role="draft",cause="ended"}': STEADY,
    'coppice_refusals_total{reason="OVERLOADED"}': NEVER,
    'coppice_calls_refused_total{role="target",reason="NO_IDENTITY"}': NEVER,
    'coppice_requests_waiting{role="orchestrator"}': f"2x{MINUTES}",
    'coppice_time_to_first_token_seconds_bucket{le="1.0"}': STEADY,
    'coppice_time_to_first_token_seconds_bucket{le="10.0"}': STEADY,
    'coppice_time_to_first_token_seconds_bucket{le="+Inf"}': STEADY,
    'coppice_kv_cache_usage_ratio{role="target"}': f"0.97x{MINUTES}",
    'coppice_retractions_total{role="target"}': NEVER,
    'coppice_workers{worker_role="draft",state="available"}': f"1x{MINUTES}",
    'coppice_workers{worker_role="draft",state="refused"}': f"0x{MINUTES}",
    'coppice_workers{worker_role="draft",state="unpaired"}': f"0x{MINUTES}",
    'coppice_root_only_rounds_total{reason="absent"}': NEVER,
    'coppice_root_only_rounds_total{reason="late"}': f"0+1x{MINUTES}",
    "coppice_rounds_total": STEADY,
    "coppice_accepted_tokens_total": f"0+120x{MINUTES}",
    "coppice_event_loop_idle_seconds_total": f"0+20x{MINUTES}",
    'coppice_compiles_total{role="target"}': NEVER,
    'coppice_captures_total{role="target"}': NEVER,
    "coppice_engine_process_resident_memory_bytes": f"1e9x{MINUTES}",
}
# What is otherwise when an alert is to fire.
FIRES = {
    "CoppiceProcessDown": {'up{instance="o"}': f"0x{MINUTES}"},
    # Its last sample is hours old.
    "CoppiceWorkerDown": {
        'up{instance="d"}': f"1x10 0x{MINUTES - 11}",
        'coppice_ready{role="draft",instance="d"}': "1x10",
    },
    "CoppiceNotReady": {'coppice_ready{role="orchestrator",instance="o"}': f"0x{MINUTES}"},
    # Once, in the last ten minutes.
    "CoppiceEngineEnded": {
        'coppice_engine_ends_total{role="target",instance="t",cause="hung"}': (
            f"0x{MINUTES - 10} 1x9"
        )
    },
    # The process itself; it has no spare engine.
    "CoppiceRestarts": {'process_start_time_seconds{instance="t"}': f"1000+300x{MINUTES}"},
    "CoppiceRequestsFail": {
        'coppice_requests_total{code="INTERNAL",finish_reason=""}': f"0+2x{MINUTES}"
    },
    "CoppiceWorkerLost": {
        'coppice_workers_lost_total{worker_role="draft",cause="error"}': f"0+1x{MINUTES}"
    },
    "CoppiceRefusing": {'coppice_refusals_total{reason="OVERLOADED"}': f"0+60x{MINUTES}"},
    "CoppiceCallsRefused": {
        'coppice_calls_refused_total{role="target",reason="NO_IDENTITY"}': STEADY
    },
    "CoppiceQueueing": {'coppice_requests_waiting{role="orchestrator"}': f"20x{MINUTES}"},
    "CoppiceSlowFirstToken": {'coppice_time_to_first_token_seconds_bucket{le="1.0"}': NEVER},
    "CoppiceKvPagesFull": {'coppice_retractions_total{role="target"}': STEADY},
    "CoppiceDraftMissing": {
        'coppice_workers{worker_role="draft",state="available"}': f"0x{MINUTES}",
        'coppice_root_only_rounds_total{reason="absent"}': STEADY,
    },
    "CoppiceDraftRefused": {'coppice_workers{worker_role="draft",state="refused"}': f"1x{MINUTES}"},
    "CoppiceDraftUnpaired": {
        'coppice_workers{worker_role="draft",state="unpaired"}': f"1x{MINUTES}"
    },
    # Two of three drafts are accepted no more in the last two hours.
    "CoppiceAcceptLengthFell": {
        "coppice_accepted_tokens_total": f"0+120x{MINUTES - 120} {(MINUTES - 120) * 120}+20x120"
    },
    "CoppiceDraftsLate": {'coppice_root_only_rounds_total{reason="late"}': f"0+6x{MINUTES}"},
    "CoppiceOrchestratorBusy": {"coppice_event_loop_idle_seconds_total": f"0+1x{MINUTES}"},
    "CoppiceCompiles": {'coppice_compiles_total{role="target"}': f"0+1x{MINUTES}"},
    "CoppiceMemoryGrows": {"coppice_engine_process_resident_memory_bytes": f"1e9+1e6x{MINUTES}"},
}


# Engines that spare ones replace: four in the last twenty minutes.
AGAIN = (
    ("CoppiceEngineEnded", "CoppiceRestarts"),
    {
        'coppice_engine_ends_total{role="target",instance="t",cause="hung"}': (
            f"0x{MINUTES - 20} 0+0.2x20"
        )
    },
)


def test_every_alert_is_tried() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == list(FIRES)


def in_namespace(namespace: str, series: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the series of one deployment as Prometheus has them on Kubernetes."""
    found = []
    for name, values in series.items():
        metric, _, labels = name.rstrip("}").partition("{")
        more = f'namespace="{namespace}",job="coppice"'
        found.append(
            {"series": f"{metric}{{{','.join(filter(None, (labels, more)))}}}", "values": values}
        )
    return found


def test_each_alert_fires_on_its_own_reason_and_on_no_other(tmp_path: Path) -> None:
    """`ALERTS` is a series of Prometheus: whatever fires is compared.

    Beside the deployment there is another one, in good health, whose figures must not be added.
    """
    program = binary("promtool")
    tests = []
    cases = [((), {}), *(((alert,), differs) for alert, differs in FIRES.items()), AGAIN]
    for alerts, differs in cases:
        assert differs.keys() <= HEALTHY.keys(), alerts
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    *in_namespace("one", {**HEALTHY, **differs}),
                    *in_namespace("other", HEALTHY),
                ],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname, namespace) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{MINUTES}m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{alert}",namespace="one"}}', "value": 1}
                            for alert in alerts
                        ],
                    }
                ],
            }
        )
    document = tmp_path / "test.yml"
    document.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "5m", "tests": tests})
    )
    result = subprocess.run(
        [program, "test", "rules", str(document)], check=False, capture_output=True, text=True
    )
    if result.returncode:
        pytest.fail(result.stdout + result.stderr)
