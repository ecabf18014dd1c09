"""Each alert fires on what it is for, and none on a healthy deployment; by promtool.

Skipped where there is no promtool, see test_metrics.py.
"""

from __future__ import annotations

import subprocess
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
    'up{job="coppice",instance="o"}': f"1x{MINUTES}",
    'coppice_ready{role="orchestrator"}': f"1x{MINUTES}",
    'coppice_engine_silence_seconds{role="target"}': f"0.2x{MINUTES}",
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
    'coppice_compiles_total{role="target"}': NEVER,
    'coppice_captures_total{role="target"}': NEVER,
    "coppice_engine_process_resident_memory_bytes": f"1e9x{MINUTES}",
}
# What is otherwise when an alert is to fire.
FIRES = {
    "CoppiceProcessDown": {'up{job="coppice",instance="o"}': f"0x{MINUTES}"},
    "CoppiceNotReady": {'coppice_ready{role="orchestrator"}': f"0x{MINUTES}"},
    "CoppiceEngineSilent": {'coppice_engine_silence_seconds{role="target"}': f"9x{MINUTES}"},
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
    "CoppiceCompiles": {'coppice_compiles_total{role="target"}': f"0+1x{MINUTES}"},
    "CoppiceMemoryGrows": {"coppice_engine_process_resident_memory_bytes": f"1e9+1e6x{MINUTES}"},
}


def test_every_alert_is_tried() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == list(FIRES)


def test_each_alert_fires_on_its_own_reason_and_on_no_other(tmp_path: Path) -> None:
    """`ALERTS` is a series of Prometheus: whatever fires is compared."""
    program = binary("promtool")
    tests = []
    for alert, differs in {"": {}, **FIRES}.items():
        assert differs.keys() <= HEALTHY.keys(), alert
        names = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values}
                    for series, values in {**HEALTHY, **differs}.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{MINUTES}m",
                        "exp_samples": names,
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
