"""Runs of `coppice bench` against a server without models, with client processes of its own."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coppice.bench.clients import ClientProcesses, Played, Send
from coppice.bench.measure import Bench, Mode
from coppice.bench.outputs import OutputLog
from coppice.bench.request import RequestResult
from coppice.bench.schedule import Arrival, at_once
from coppice.cli.main import main
from coppice.v1 import generation_pb2 as pb
from shared.errors import InternalError, ResourceExhaustedError
from shared.messages import FinishInfo, FinishReason
from tests.fakes.generation import FakeGeneration, serving

FIRST_S, GAP_S = 0.08, 0.02
REFUSED = 666


@pytest.fixture
def server() -> FakeGeneration:
    return FakeGeneration(first_s=FIRST_S, gap_s=GAP_S, fails_on=REFUSED)


@pytest.fixture
def address(server: FakeGeneration) -> Iterator[str]:
    with serving(server) as address:
        yield address


def bench_of(clients: ClientProcesses, repeat: int = 1) -> Bench:
    return Bench(
        clients, keywords={"omit_text": True}, repeat=repeat, goodput=None, outputs=OutputLog(0.0)
    )


def test_processes_send_everything_when_it_is_due(address: str, server: FakeGeneration) -> None:
    arrivals = [
        Arrival(at_s=0.1 * index, prompt=(index,), max_new_tokens=3, seed=0) for index in range(5)
    ]
    sends = [Send(at_s=each.at_s, request=each.request({})) for each in arrivals]
    with ClientProcesses(address, 2, num_connections=2) as clients:
        played = clients.play(sends)
    assert all(isinstance(outcome, RequestResult) for outcome in played.outcomes), played.outcomes
    outputs = [outcome.token_ids for outcome in played.outcomes]
    assert outputs == [(n, n + 1, n + 2) for n in range(5)]  # in the order of what was sent
    assert len(played.cpu_shares) == 2 and all(share > 0 for share in played.cpu_shares)
    assert 0.4 + FIRST_S + GAP_S <= played.elapsed_s
    assert min(played.lateness_s) >= 0
    sent = [outcome.sent_s for outcome in played.outcomes]
    came = {request.token_ids.ids[0]: at for at, request in server.requests}
    due_s = [at - late for at, late in zip(sent, played.lateness_s, strict=True)]
    begin_s = min(at - 0.1 * index for index, at in enumerate(due_s))
    for index in range(5):  # the clock is the same in all processes
        assert begin_s + 0.1 * index <= sent[index] <= came[index]
    first = played.outcomes[0]
    assert isinstance(first, RequestResult)
    assert [count for _, count in first.arrivals] == [1, 2]
    assert first.time_to_first_token_s >= FIRST_S and first.gaps_s[0] > 0
    assert first.time_to_first_token_s + sum(first.gaps_s) >= FIRST_S + GAP_S
    assert first.info is not None and first.info.model_fingerprint == "f00d"


def test_a_batch_is_warmed_up_and_repeated(address: str, server: FakeGeneration) -> None:
    with ClientProcesses(address, 2) as clients:
        bench = bench_of(clients, repeat=2)
        (run,) = bench.closed(
            [Mode(name="off", keywords={"speculation": False})],
            at_once([(1,), (2,)], 3, max_new_tokens=9, seed=0),
        )
    lengths = [request.stopping.max_new_tokens for _, request in server.requests]
    assert lengths == [32] * 3 + [1] * 3 + ([1] * 3 + [9] * 3) * 2
    assert (run["batch"], run["requests"], run["tokens"], run["failed"]) == (3, 3, 27, 0)
    assert run["first_s"] >= FIRST_S and run["first_token_ms"]["p50"] >= 1e3 * FIRST_S
    assert run["identical"] == 1.0  # the second repeat, and the third request, to the first ones
    assert run["accept_length"] == 2.0 and bench.info is not None


class Scripted:
    """Clients whose runs take these seconds; every request gets all of its tokens."""

    def __init__(self, *elapsed_s: float) -> None:
        self._elapsed_s = iter(elapsed_s)

    def play(self, sends: Sequence[Send]) -> Played:
        elapsed_s = next(self._elapsed_s)
        requests = [pb.GenerateRequest.FromString(send.request) for send in sends]
        outcomes = [
            RequestResult(
                token_ids=tuple(range(request.stopping.max_new_tokens)),
                arrivals=((0.1, 1), (elapsed_s, request.stopping.max_new_tokens)),
                elapsed_s=elapsed_s,
                finish=FinishInfo(reason=FinishReason.LENGTH),
            )
            for request in requests
        ]
        lateness_s = [0.0] * len(sends)
        return Played(
            outcomes=outcomes, lateness_s=lateness_s, elapsed_s=elapsed_s, cpu_shares=[0.0]
        )


def test_a_batch_is_counted_until_its_last_token_and_without_its_prompts() -> None:
    """Medians: 0.5 s for one token, 2.5 s for 21: 4 requests times 20 tokens in 2 s."""
    warm_up = (9.0, 8.0)
    clients: Any = Scripted(*warm_up, 0.5, 2.5, 0.4, 2.1, 0.7, 3.0)
    (run,) = bench_of(clients, repeat=3).closed(
        [Mode(name="off")], at_once(["a"], 4, max_new_tokens=21, seed=0)
    )
    assert (run["decode_tokens_per_second"], run["first_s"]) == (40.0, 0.5)
    assert run["spread"]["decode_tokens_per_second"] == [32.0, 50.0]
    assert run["tokens_per_second"] == pytest.approx(4 * 21 / 2.5)


def test_ways_to_speculate_take_turns() -> None:
    """The machine slows down by and by: each has as much of it."""
    clients: Any = Scripted(*([9.0] * 4), 0, 2, 0, 3, 0, 4, 0, 5)
    modes = [Mode(name="off"), Mode(name="auto")]
    runs = bench_of(clients, repeat=2).closed(modes, at_once(["a"], 4, max_new_tokens=21, seed=0))
    assert [run["speculation"] for run in runs] == ["off", "auto"]
    assert runs[0]["decode_tokens_per_second"] == runs[1]["decode_tokens_per_second"] == 22.9


def test_a_batch_that_takes_no_longer_for_more_tokens_has_no_speed() -> None:
    clients: Any = Scripted(1.0, 1.0, 1.0, 1.0)
    arrivals = at_once(["a"], 4, max_new_tokens=2, seed=0)
    (run,) = bench_of(clients).closed([Mode(name="off")], arrivals)
    assert run["decode_tokens_per_second"] is None


def test_a_batch_with_a_request_that_fails_has_no_figures(address: str) -> None:
    with ClientProcesses(address, 1) as clients, pytest.raises(ResourceExhaustedError):
        arrivals = at_once([(1,), (REFUSED,)], 2, max_new_tokens=2, seed=0)
        bench_of(clients).closed([Mode(name="auto")], arrivals)


def test_arrivals_that_fail_are_counted(address: str, server: FakeGeneration) -> None:
    arrivals = at_once([(1,)], 26, max_new_tokens=2, seed=0)
    arrivals.append(Arrival(at_s=0.2, prompt=(REFUSED,), max_new_tokens=2, seed=0))
    with ClientProcesses(address, 1) as clients:
        (run,) = bench_of(clients).open([Mode(name="auto")], {"schedule": "x.json"}, arrivals)
    lengths = [request.stopping.max_new_tokens for _, request in server.requests]
    assert lengths == [32] * 24 + [2] * 27  # a warm-up of the first 24
    assert (run["schedule"], run["requests"], run["failed"]) == ("x.json", 27, 1)
    assert run["failures"] == {ResourceExhaustedError.default_reason: 1}


def test_outputs_that_the_context_cuts_short_are_counted_and_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, output = tmp_path / "in.json", tmp_path / "out.json"
    rows = [{"at_s": 0, "token_ids": [1], "max_new_tokens": length} for length in (4, 5, 6)]
    schedule.write_text(json.dumps(rows))
    options = "--speculation=off", "--schedule", str(schedule), "--output", str(output)
    with serving(FakeGeneration(most_tokens=4)) as address:
        assert run_bench(address, *options) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert (run["requests"], run["ended_by_context"], run["tokens"]) == (3, 2, 12)
    assert "warning: 2 of 3 outputs ended before" in capsys.readouterr().err


def test_a_process_that_dies_ends_the_measurement(address: str) -> None:
    with ClientProcesses(address, 2) as clients, pytest.raises(InternalError, match="process"):
        for process in multiprocessing.active_children():
            process.kill()
        clients.play([Send(at_s=0.0, request=b"")])


def run_bench(address: str, *argv: str) -> int:
    return main(["bench", "--server", address, "--processes=1", *argv])


def test_the_command_plays_schedules_and_compares(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules = [tmp_path / "slow.json", tmp_path / "fast.json"]
    for path, gap_s in zip(schedules, (0.05, 0.01), strict=True):
        rows = [{"at_s": gap_s * i, "token_ids": [i + 1], "max_new_tokens": 5} for i in range(4)]
        path.write_text(json.dumps(rows))
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    files = [str(path) for path in schedules]
    argv = ["--schedule", *files, "--speculation=off,3/1/4", "--goodput=ttft=10s,tpot=1ms"]
    assert run_bench(address, *argv, f"--output={output}", f"--plot={plot}") == 0
    said = capsys.readouterr().out
    assert "slow.json" in said and "0.00 (0%)" in said and "clients: 1 process, busy" in said
    document: dict[str, Any] = json.loads(output.read_text())
    assert document["model_fingerprint"] == "f00d" and len(document["outputs"]) == 4
    assert [(run["schedule"], run["speculation"]) for run in document["runs"]] == [
        (files[0], "off"), (files[0], "3/1/4"), (files[1], "off"), (files[1], "3/1/4"),
    ]  # fmt: skip
    assert [run["identical"] for run in document["runs"]] == [None, 1.0, 1.0, 1.0]
    assert plot.read_text().startswith("<svg")

    again = tmp_path / "again.json"
    argv = ["--schedule", files[0], f"--compare-outputs={output}", f"--output={again}"]
    assert run_bench(address, *argv) == 0
    assert json.loads(again.read_text())["runs"][0]["identical_to_file"] == 1.0
    capsys.readouterr()
    assert main(["bench", "compare", str(output), str(again)]) == 0
    said = capsys.readouterr().out
    assert "slow.json, speculation off against auto" in said
    assert "first_token_ms p99" in said and "4 of 4 outputs are identical" in said


def test_the_command_fails_if_a_request_failed(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "arrivals.json"
    rows = [{"at_s": 0.0, "token_ids": [i + 1], "max_new_tokens": 1} for i in range(24)]
    rows.append({"at_s": 0.1, "token_ids": [REFUSED], "max_new_tokens": 1})
    path.write_text(json.dumps(rows))
    assert run_bench(address, "--schedule", str(path)) == 1
    captured = capsys.readouterr()
    assert "1 of 25" in captured.out and "1 requests failed: " in captured.err


@pytest.mark.parametrize("rate", ["--rate=60", "--rate=60,90"])
def test_the_command_sends_at_random(address: str, rate: str, server: FakeGeneration) -> None:
    assert run_bench(address, rate, "--seconds=0.3", "--new-tokens=2", "--speculation=off") == 0
    assert {request.speculation.mode for _, request in server.requests} == {2}
    assert {request.output.omit_text for _, request in server.requests} == {True}
