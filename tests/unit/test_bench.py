"""Figures of `coppice bench`: what the definitions say, by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from coppice.bench.clients import Played
from coppice.bench.compare import compare, identical_outputs, read_result
from coppice.bench.envelope import envelope_of
from coppice.bench.figures import (
    Goodput,
    failures_of,
    figures_of,
    median_of,
    overhead_of,
    quantile,
    spread_of,
    warning_of,
)
from coppice.bench.outputs import OutputLog, key_of
from coppice.bench.plot import draw_plot, plot_runs
from coppice.bench.request import RequestResult, run_in_turn
from coppice.bench.schedule import Arrival, at_once, poisson, read_prompts, read_schedule
from coppice.v1.generation_pb2 import GenerateRequest
from shared.errors import ConfigError, UnavailableError
from shared.messages import FinishInfo, FinishReason, RequestFailure, SpeculationStats

NAME = "{http://www.w3.org/2000/svg}"


def request(*arrivals: tuple[float, int], rounds: int = 0, accepted: int = 0) -> RequestResult:
    """A request with deltas of so many tokens at these times; it ends 0.05 s after the last."""
    return RequestResult(
        token_ids=tuple(range(sum(count for _, count in arrivals))),
        arrivals=arrivals,
        elapsed_s=arrivals[-1][0] + 0.05,
        finish=FinishInfo(
            reason=FinishReason.LENGTH,
            speculation=SpeculationStats(
                num_rounds=rounds, num_accepted_drafts=accepted, num_root_only_rounds=1
            ),
        ),
    )


EVEN = request((0.1, 1), (0.2, 1), (0.3, 1), rounds=2, accepted=0)
BURST = request((0.2, 1), (0.5, 4), rounds=2, accepted=4)
FAILURE = RequestFailure(request_id="", code=8, reason="NO_ROOM", message="no room")


# --- figures ---


def test_figures_of_a_run() -> None:
    figures = figures_of([EVEN, BURST, FAILURE], 2.0, None)
    assert (figures["requests"], figures["failed"], figures["tokens"]) == (3, 1, 8)
    assert (figures["tokens_per_second"], figures["requests_per_second"]) == (4.0, 1.0)
    assert figures["first_token_ms"] == {"p50": 100, "p90": 200, "p99": 200}
    assert figures["per_token_ms"]["p50"] == 75  # BURST: 0.3 s for the 4 tokens after its first
    assert figures["gap_ms"] == {"p50": 100, "p90": 300, "p99": 300, "p99.9": 300}
    assert figures["request_ms"]["p90"] == 500  # until the last token, not until the stream's end
    assert figures["accept_length"] == 2.0  # (4 accepted + 4 bonus) / 4 rounds
    assert figures["root_only_share"] == 0.5
    assert "goodput" not in figures


def test_one_token_takes_no_time_per_token_and_has_no_gaps() -> None:
    figures = figures_of([request((0.1, 1))], 1.0, None)
    assert figures["per_token_ms"]["p99"] == 0 and figures["gap_ms"] is None
    assert figures["accept_length"] is None


def test_a_run_in_which_everything_failed_has_no_times() -> None:
    figures = figures_of([FAILURE], 1.0, Goodput.parse("ttft=1s"))
    assert figures["first_token_ms"] is None and figures["goodput"]["share"] == 0


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 10), (0.25, 10), (0.5, 20), (0.74, 30), (0.99, 40), (1.0, 40)]
)
def test_quantiles_are_the_value_at_the_nearest_rank(fraction: float, expected: float) -> None:
    assert quantile([40.0, 10.0, 30.0, 20.0], fraction) == expected
    assert quantile([], fraction) == 0


def test_quantiles_of_few_values_are_not_the_largest() -> None:
    assert quantile([2.0, 1.0], 0.5) == 1
    assert quantile(range(1, 11), 0.9) == 9
    assert quantile(range(1, 1001), 0.999) == 999


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ("ttft=150ms", 1),
        ("ttft=0.2s", 2),
        ("tpot=80ms", 1),
        ("gap=299ms", 1),
        ("request=1s, ttft=1s", 2),
        ("ttft=150ms,tpot=80ms", 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: str, num_good: int) -> None:
    goodput = figures_of([EVEN, BURST, FAILURE], 2.0, Goodput.parse(limits))["goodput"]
    assert goodput["requests_per_second"] == num_good / 2
    assert goodput["share"] == pytest.approx(num_good / 3, abs=1e-3)  # one that failed is not good


@pytest.mark.parametrize("limits", ["ttft", "ttft=5", "speed=5ms", "ttft=5ms;tpot=5ms", ""])
def test_limits_that_cannot_be_read_are_refused(limits: str) -> None:
    with pytest.raises(ConfigError, match=r"--goodput is .* as in ttft=200ms,tpot=10ms"):
        Goodput.parse(limits)


def test_repeats_have_a_median_and_a_spread() -> None:
    repeats = [
        {"count": 2, "ms": {"p50": 1.0}, "none": None},
        {"count": 2, "ms": {"p50": 5.0}, "none": 3.0},
        {"count": 2, "ms": {"p50": 2.0}, "none": None},
    ]
    assert median_of(repeats) == {"count": 2, "ms": {"p50": 2.0}, "none": 3.0}
    assert spread_of(repeats) == {"count": [2, 2], "ms": {"p50": [1.0, 5.0]}, "none": [3.0, 3.0]}


def test_what_the_clients_cost_is_said() -> None:
    calm = Played(
        outcomes=[EVEN], lateness_s=[0.001] * 98 + [0.02] * 2, elapsed_s=1.0, cpu_shares=[0.1]
    )
    busy = Played(
        outcomes=[FAILURE, FAILURE], lateness_s=[0.0], elapsed_s=1.0, cpu_shares=[0.1, 0.9]
    )
    overhead = overhead_of([calm])
    assert overhead == {"late_ms_p99": 20.0, "cpu_share_max": 0.1}
    assert "20 ms late" in warning_of(overhead, is_batch=False)
    assert warning_of(overhead, is_batch=True) == ""  # all of a batch are due at once
    assert "computed 90% of the time: raise --processes" in warning_of(
        overhead_of([busy]), is_batch=True
    )
    assert failures_of([calm, busy]) == {"NO_ROOM": 2}


def test_the_error_of_a_request_is_the_error_of_what_runs_it() -> None:
    class Broken:
        async def run(self, request: bytes) -> RequestResult:
            raise UnavailableError("no target worker is ready")

    with pytest.raises(UnavailableError):
        asyncio.run(run_in_turn(Broken(), [b""] * 5, 3))  # type: ignore[arg-type]


# --- arrivals ---


def test_poisson_arrivals_have_their_rate_and_their_seed() -> None:
    def times(seed: int) -> list[float]:
        arrivals = poisson(["a", "b"], rate=50.0, seconds=20.0, max_new_tokens=3, seed=seed)
        assert [arrival.prompt for arrival in arrivals[:3]] == ["a", "b", "a"]
        assert len({arrival.seed for arrival in arrivals}) == len(arrivals)
        return [arrival.at_s for arrival in arrivals]

    first = times(1)
    assert first == times(1) != times(2)
    assert first == sorted(first) and 0 < first[0] and first[-1] <= 20.0
    assert 900 < len(first) < 1100
    gaps = [after - before for before, after in zip(first, first[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.3)  # of exponential times


def test_a_schedule_is_read_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.json"
    rows = [
        {"at_s": 0.5, "token_ids": [1, 2], "max_new_tokens": 7},
        {"at_s": 0, "token_ids": [3], "max_new_tokens": 8, "temperature": 1},
    ]
    path.write_text(json.dumps(rows))
    assert read_schedule(str(path), seed=5) == [
        Arrival(at_s=0.0, prompt=(3,), max_new_tokens=8, seed=6, temperature=1.0),
        Arrival(at_s=0.5, prompt=(1, 2), max_new_tokens=7, seed=5),
    ]


def write(folder: Path, temperature: float) -> str:
    row = {"at_s": 0, "token_ids": [3], "max_new_tokens": 8, "temperature": temperature}
    path = folder / "one.json"
    path.write_text(json.dumps([row]))
    return str(path)


def test_an_arrival_may_have_a_temperature_of_its_own(tmp_path: Path) -> None:
    own = Arrival(at_s=0.0, prompt=(3,), max_new_tokens=8, seed=6, temperature=1.5)
    for given, expected in ((own, 1.5), (dataclasses.replace(own, temperature=None), 0.5)):
        message = GenerateRequest.FromString(given.request({"temperature": 0.5}))
        assert message.sampling.temperature == expected
        assert key_of(given, 0.5) == key_of(dataclasses.replace(own, temperature=expected), 0.0)
    (read, *_) = read_schedule(write(tmp_path, 0), seed=6)
    greedy = dataclasses.replace(own, temperature=0.0)
    assert key_of(read, 1.0) == key_of(greedy, 1.0), "a whole number is a temperature as well"
    assert key_of(greedy, 1.0) == key_of(dataclasses.replace(greedy, seed=7), 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no JSON"),
        ("{}", "is no JSON list of arrivals"),
        ("[]", "is no JSON list of arrivals"),
        ("[3]", "entry 0 is no object"),
        ('[{"at_s": -1, "token_ids": [1], "max_new_tokens": 1}]', 'entry 0 has "at_s" -1'),
        ('[{"at_s": 1, "token_ids": [], "max_new_tokens": 1}]', 'entry 0 has no "token_ids"'),
        ('[{"at_s": 1, "token_ids": [1], "max_new_tokens": 0}]', 'has "max_new_tokens" 0'),
        (
            '[{"at_s": 1, "token_ids": [1], "max_new_tokens": 1, "temperature": -1}]',
            'has "temperature" -1',
        ),
        (
            '[{"at_s": 1, "token_ids": [1], "max_new_tokens": 1, "temprature": 1}]',
            'entry 0 has "temprature", which means nothing; did you mean temperature?',
        ),
    ],
)
def test_a_schedule_that_cannot_be_played_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "arrivals.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--schedule") as caught:
        read_schedule(str(path), seed=0)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        (
            'plain\n\n"two\\nlines"\n"quoted" but no JSON\n',
            ["plain", "two\nlines", '"quoted" but no JSON'],
        ),
        ('["a", [1, 2]]', ["a", (1, 2)]),
    ],
)
def test_prompts_are_lines_or_json(text: str, prompts: list[object], tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    assert read_prompts(str(path)) == prompts


@pytest.mark.parametrize("text", ["[]", "\n", "[[]]", '[["a"]]', "[3]"])
def test_a_file_without_prompts_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(str(path))


# --- outputs ---


def test_outputs_are_compared_with_earlier_ones_and_with_a_file() -> None:
    arrivals = at_once(["a", "b"], 2, max_new_tokens=5, seed=0)
    log = OutputLog(0.0)
    assert log.compare([(arrivals, [EVEN, BURST])]) == {"identical": None}
    assert log.compare([(arrivals, [EVEN, EVEN])]) == {"identical": 0.5}
    assert log.compare([(arrivals, [FAILURE, BURST])]) == {"identical": 1.0}
    later = OutputLog(0.0, reference=log.digests)
    assert later.compare([(arrivals, [BURST, BURST])])["identical_to_file"] == 0.5
    assert log.digest() != later.digest()
    longer = at_once(["a"], 1, max_new_tokens=6, seed=0)
    assert later.compare([(longer, [EVEN])])["identical_to_file"] is None  # another request


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 1.0), (0.7, None)])
def test_the_seed_belongs_to_a_sampled_request(temperature: float, share: float | None) -> None:
    log = OutputLog(temperature)
    for seed in (1, 2):
        shares = log.compare([(at_once(["a"], 1, max_new_tokens=5, seed=seed), [EVEN])])
    assert shares == {"identical": share}


# --- comparison ---


def test_runs_of_the_same_arrivals_are_compared(tmp_path: Path) -> None:
    """First those that speculate alike, then the others; quantiles may be a list."""
    before = [
        {"batch": 8, "speculation": "off", "decode_tokens_per_second": 100.0},
        {"batch": 8, "speculation": "3/1/4", "decode_tokens_per_second": 200.0},
        {"batch": 9, "speculation": "off", "decode_tokens_per_second": 1.0},
        {"schedule": "a/x.json", "chain": 3, "gap_ms": [1.0, 2.0, 3.0, 4.0], "failed": 0},
    ]
    after = [
        {"schedule": "b/x.json", "speculation": "auto", "gap_ms": {"p50": 2.0}, "failed": 1},
        {"batch": 8, "speculation": "5/4/16", "decode_tokens_per_second": 300.0},
        {"batch": 8, "speculation": "off", "decode_tokens_per_second": 110.0},
    ]
    pairs = compare(before, after)
    assert [pair.title for pair in pairs] == [
        "batch of 8, speculation off",
        "batch of 8, speculation 3/1/4 against 5/4/16",
        "x.json, speculation 3/1/4 against auto",
    ]
    (speed,), (other,), (gap, failed) = (pair.differences for pair in pairs)
    assert speed.change == pytest.approx(0.1) and other.change == pytest.approx(0.5)
    assert (gap.name, gap.before, gap.after) == ("gap_ms p50", 1.0, 2.0)
    assert failed.change is None  # of nothing
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(before))
    assert read_result(str(path))["runs"] == before
    path.write_text(json.dumps({"rows": before, "outputs": {"8": [[1, 2]]}}))
    assert read_result(str(path))["runs"] == before


def test_outputs_of_two_results_are_counted() -> None:
    one = {"outputs": {"a": "1", "b": "2", "c": "3"}}
    assert identical_outputs(one, {"outputs": {"a": "1", "b": "9", "d": "3"}}) == (2, 1)
    assert identical_outputs(one, {"outputs": {"8": [[1]]}}) == identical_outputs(one, {}) == (0, 0)


@pytest.mark.parametrize(
    "text", ["[", "3", "{}", "[]", '{"runs": [1]}', '{"runs": [{"a": 1}]}', '{"rows": 2}']
)
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"result\.json"):
        read_result(str(path))


# --- plot ---


def test_the_plot_is_svg_with_a_line_per_way_to_speculate() -> None:
    runs = [
        {"batch": 2, "speculation": "5/8/32", "decode_tokens_per_second": 14.0},
        {"batch": 8, "speculation": "5/8/32", "decode_tokens_per_second": 90.0},
        {"batch": 2, "speculation": "a < b", "decode_tokens_per_second": None},
    ]
    root = ElementTree.fromstring(plot_runs(runs))
    lines = [line.get("points", "").split() for line in root.findall(f"{NAME}polyline")]
    assert [len(points) for points in lines] == [2, 1]
    height = float(root.get("height", "0"))
    first, second = (float(point.split(",")[1]) for point in lines[0])
    assert 0 < second < first < height  # more tokens per second are further up
    texts = [text.text for text in root.findall(f"{NAME}text")]
    assert {"requests at once", "a < b", "5/8/32", "2", "8", "100"} <= set(texts)


def test_the_plot_shows_auto_over_the_best_of_all_others() -> None:
    speeds = {"off": [10.0, 80.0], "3/1/4": [25.0, 60.0], "auto": [24.0, 80.0]}
    runs = [
        {"batch": batch, "speculation": name, "decode_tokens_per_second": speed}
        for name, line in speeds.items()
        for batch, speed in zip([1, 16], line, strict=True)
    ]
    assert [(p.batch, p.name, p.share) for p in envelope_of(runs)] == [
        (1, "3/1/4", 0.96),
        (16, "off", 1.0),
    ]
    assert not list(envelope_of(runs[:4])), "nothing was measured with auto"
    root = ElementTree.fromstring(plot_runs(runs))
    texts = [text.text for text in root.findall(f"{NAME}text")]
    assert {"auto / best", "0.96", "1.00"} <= set(texts)
    area = root.find(f"{NAME}polygon")
    assert area is not None
    corners = [tuple(map(float, point.split(","))) for point in area.get("points", "").split()]
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
        for line in root.findall(f"{NAME}polyline")
    ]
    assert corners[1:-1] == [lines[1][0], lines[0][1]]
    height = float(root.get("height", "0"))
    assert all(0 < y < height for line in lines for _, y in line)


def test_the_plot_of_arrivals_shows_the_time_per_token() -> None:
    quantiles = {"p50": 3.0, "p90": 4.0, "p99": 5.0}
    runs = [
        {"rate": 8.0, "speculation": "auto", "per_token_ms": quantiles},
        {"rate": 20.0, "speculation": "auto", "per_token_ms": None},
    ]
    root = ElementTree.fromstring(plot_runs(runs))
    assert len(root.findall(f"{NAME}polyline")) == 2
    texts = {text.text for text in root.findall(f"{NAME}text")}
    assert {"auto p50", "auto p99", "8 a second", "20 a second"} <= texts


@pytest.mark.parametrize("value", [0.0, 0.003, 1.0, 7.5, 90.0, 1234.0])
def test_the_plot_fits_any_scale(value: float) -> None:
    root = ElementTree.fromstring(draw_plot({"line": {"1": value}}, title="t", below="b"))
    circle = root.find(f"{NAME}circle")
    assert circle is not None
    assert 36 <= float(circle.get("cy", "-1")) <= 360 - 48
