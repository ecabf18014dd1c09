"""The benchmark commands run, check themselves and write what they measured, on any machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import (
    decode,
    draft,
    experts,
    fidelity,
    forward,
    fp8,
    gateway,
    int4,
    kernels,
    latents,
    loading,
    metrics,
    orchestrator,
    pauses,
    peer_channel,
    speculation,
    steps,
    timing,
)
from benchmarks.rows import tree_of
from benchmarks.speculation import decode_rate
from benchmarks.steps import chart, gaps_us, summarize
from coppice.bench.request import RequestResult
from coppice.svg import Span, draw_charts
from shared.messages import FinishInfo, FinishReason
from shared.tree import check_tree

CHECKS = ("is_right", "is_exact", "identical", "identical_outputs", "identical_trees")
KERNELS = [
    Span(name="void gemm<float, 4>(float*)", start_us=0.0, end_us=6.0),
    Span(name="norm & <scale>", start_us=5.0, end_us=7.0),
    Span(name="void gemm<half, 8>(half*)", start_us=8.0, end_us=10.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "flags", "num_rows"),
    [
        (kernels, "--rows 1,3 --trees 2x5 --context 70", 5 * 2 + 3 + 2 * 2 + 2 * 2),
        pytest.param(
            *(forward, "--rows 2 --trees 1x4 --contexts 20,70 --prefill-len 40", 4),
            marks=pytest.mark.exhaustive,  # `draft` and `steps` run the same models and writers
        ),
        (experts, "--rows 1,3 --context 20", 3 * 2),
        (experts, "--rows 2 --context 20 --shapes= --models small-latent", 1),
        (experts, "--rows 2 --trees 1x5 --context 20 --weights fp8 --layers 1", 2 + 2),
        (latents, "--trees 1x1,2x3 --contexts 70", 2),
        (draft, "--requests 1,2 --shapes 3/2/5,1/2/3 --context 20", 4),
        pytest.param(
            *(decode, "--requests 2 --shapes 3/2/5 --prompt-len 24 --max-new-tokens 40", 2),
            marks=pytest.mark.exhaustive,  # tests/unit/test_engine_device_rounds.py has its rounds
        ),
        pytest.param(
            *(fidelity, "--num-prompts 1 --max-new-tokens 4 --shape 3/2/5", 2),
            marks=pytest.mark.exhaustive,  # tests/unit/test_inflate.py proves the same, to the bit
        ),
        pytest.param(
            *(fp8, "--shape small --products o --rows 1 --step-rows 1", 5 + 3),
            marks=pytest.mark.exhaustive,  # tests/kernels/test_linear_quantized.py has the products
        ),
        pytest.param(
            *(int4, "--shape small --products o,gate_up --rows 1,3 --step-rows 1", 2 * 2 * 3 + 3),
            marks=pytest.mark.exhaustive,  # tests/kernels/test_linear_int4.py has the products
        ),
        (steps, "--requests 2 --shape 3/2/5 --context 20", None),
        pytest.param(
            speculation,
            "--drafts eagle3 --cells plain@1,3/2/5@2 --num-prompts 2 --max-new-tokens 8 "
            "--prompt-len 24",
            2,
            marks=pytest.mark.exhaustive,  # tests/e2e/test_command_line.py has `coppice bench`
        ),
        pytest.param(
            *(pauses, "--targets 1 --events nothing,target+killed --repeat 1", 2),
            marks=pytest.mark.exhaustive,  # tests/e2e/test_faults.py proves the same
        ),
    ],
)
def test_a_command_writes_its_result(
    module: ModuleType,
    flags: str,
    num_rows: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "result.json"
    flags_given = [flag.replace("+", " ") for flag in flags.split()]
    argv = [module.__file__ or "", *flags_given, "--device", "cpu", "--output", str(output)]
    if module is steps:
        argv += ["--svg", str(tmp_path / "picture")]
    monkeypatch.setattr(sys, "argv", argv)
    module.main()
    result = json.loads(output.read_text())
    assert {"date", "command", "processor", "gpus", "rows"} <= result.keys()
    assert num_rows is None or len(result["rows"]) == num_rows
    for row in result["rows"]:
        checks = [row[name] for name in CHECKS if name in row]
        assert all(check == 1 for check in checks) and (checks or module is steps)
    assert "| " in capsys.readouterr().out.splitlines()[-1]
    if module is steps:
        for step in ("target", "draft"):
            ElementTree.parse(tmp_path / f"picture-{step}.svg")


@pytest.mark.slow
def test_the_orchestrator_alone_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain and peer rounds; tokens that are missing would raise."""
    output = tmp_path / "result.json"
    flags = "--streams 3 --clients 2 --warm-up-s 0 --duration-s 1 --step-ms 10"
    argv = [orchestrator.__file__ or "", *flags.split(), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    orchestrator.main()
    plain, peer = json.loads(output.read_text())["rows"]
    assert (plain["mode"], peer["mode"]) == ("plain", "peer")
    assert plain["tokens_per_s"] > 0 and peer["tokens_per_s"] > 0
    assert "| " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.exhaustive  # tests/unit/test_peer_channel.py has every way but the clock
def test_the_messages_of_a_round_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every way; rows that are not those that were sent would raise."""
    output = tmp_path / "result.json"
    flags = "--requests 2 --rounds 30 --repeat 1 --width 64 --delay-ms 5"
    argv = [peer_channel.__file__ or "", *flags.split(), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    peer_channel.main()
    rows = {row["way"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["socket", "tcp", "proxy", "delay"]
    assert rows["delay"]["p50_ms"] >= 10.0, "in each direction"


@pytest.mark.parametrize(
    ("shape", "num_ways"),
    [("", 8), ("--experts 4 --expert-width 256", 10), ("--experts 4 --expert-width 256 --fp8", 10)],
)
def test_ways_to_load_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, num_ways: int
) -> None:
    output = tmp_path / "result.json"
    flags = f"--gigabytes 0.004 --hidden-size 128 --repeat 1 --directory {tmp_path} {shape}"
    argv = [loading.__file__ or "", *flags.split(), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    loading.main()
    rows = json.loads(output.read_text())["rows"]
    assert len({row["what"] for row in rows}) == len(rows) == num_ways
    assert all(row["wall_s"] > 0 and row["cpu_s"] >= 0 for row in rows)
    assert rows[0]["gigabytes"] > 0.003
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_counting_adds_to_a_step_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "result.json"
    argv = [metrics.__file__ or "", "--steps-only", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    metrics.main()
    step_us = json.loads(output.read_text())["step_us"]
    assert list(step_us) == ["1", "8", "64"] and min(step_us.values()) > 0


@pytest.mark.parametrize(("num_pairs", "bounds"), [(6, (1, 6)), (9, (2, 8)), (12, (3, 10))])
def test_the_interval_of_pairs_is_that_of_the_sign_test(
    num_pairs: int, bounds: tuple[int, int]
) -> None:
    """Of changes by 1, 2, 3, ... percent, as tables of the median's order statistics say."""
    changed = [100.0 + percent for percent in range(num_pairs, 0, -1)]
    found = metrics.compared([100.0] * num_pairs, changed)
    assert (found["low_percent"], found["high_percent"]) == bounds
    assert found["change_percent"] == (num_pairs + 1) / 2


def test_speed_counts_only_while_all_requests_decode() -> None:
    def wave(*requests: list[tuple[float, int]]) -> list[RequestResult]:
        return [
            RequestResult(
                token_ids=(),
                arrivals=tuple(arrivals),
                elapsed_s=arrivals[-1][0],
                finish=FinishInfo(reason=FinishReason.LENGTH),
            )
            for arrivals in requests
        ]

    early, late = [(0.5, 1), (1.0, 4), (2.0, 5)], [(1.0, 1), (2.0, 3), (9.0, 2)]
    assert decode_rate([wave(early, late)]) == 8.0  # (1, 2]: 5 and 3
    assert decode_rate([wave(early, late), wave([(0.0, 1), (3.0, 4)])]) == 3.0  # 12 in 4 s
    assert decode_rate([wave([(0.0, 1), (1.0, 1)], [(2.0, 1), (3.0, 1)])]) == 0.0


def test_the_time_between_kernels_is_counted() -> None:
    assert gaps_us(KERNELS) == [1.0]
    lines = summarize("step", KERNELS)
    assert [(line.kernel, line.count, line.us) for line in lines] == [
        ("gemm", 2, 8.0),
        ("norm & ", 1, 1.0),  # it began early, and waited
        ("(no kernel)", 1, 1.0),
    ]
    assert sum(line.share for line in lines) == pytest.approx(1.0)


def test_a_picture_holds_every_kernel() -> None:
    root = ElementTree.fromstring(draw_charts([chart("a < b", KERNELS)]))
    hints = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(hint is not None and " at " in hint for hint in hints) == len(KERNELS)


@pytest.mark.parametrize("num_nodes", [1, 4, 16, 64])
def test_made_up_trees_are_trees(num_nodes: int) -> None:
    parents = tree_of(num_nodes).tolist()
    assert len(parents) == num_nodes
    check_tree(range(num_nodes), parents, root_token_id=0, vocab_size=100)


def test_time_is_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def call() -> None:
        nonlocal now_s
        now_s += 0.002

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert timing.time_ms([call] * 3, torch.device("cpu")) == pytest.approx(2.0)


@pytest.mark.slow
def test_the_gateway_is_measured_beside_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gateway.json"
    flags = f"--streams 1,2 --requests 4 --new-tokens 7 --output {path}"
    monkeypatch.setattr(sys, "argv", ["gateway", *flags.split()])
    gateway.main()
    result = json.loads(path.read_text())
    assert [cell["num_streams"] for cell in result["cells"]] == [1, 2]
    assert all(cell["first_ms"] > 0 and cell["grpc_first_ms"] > 0 for cell in result["cells"])
    assert result["cpu_us_per_request"] >= 0  # by the clock ticks of so short a run
