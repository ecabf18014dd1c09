"""Figures and plot of `coppice bench`."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from coppice.bench_plot import draw_plot

from coppice.bench import CellResult, RequestResult, percentile, run_cell, summarize
from shared.errors import UnavailableError
from shared.messages import FinishInfo, FinishReason, SpeculationStats


def request(tokens: tuple[int, ...], *, rounds: int, accepted: int) -> RequestResult:
    """A request whose first token came after 0.1 s and the rest 0.1 s each."""
    return RequestResult(
        token_ids=tokens,
        arrivals=tuple((0.1 * (i + 1), 1) for i in range(len(tokens))),
        elapsed_s=0.1 * len(tokens),
        finish=FinishInfo(
            reason=FinishReason.LENGTH,
            speculation=SpeculationStats(
                num_rounds=rounds, num_accepted_drafts=accepted, num_root_only_rounds=1
            ),
        ),
    )


def cell() -> CellResult:
    requests = [
        request((1, 2, 3), rounds=2, accepted=0),
        request((4, 5, 6, 7), rounds=2, accepted=4),
    ]
    return summarize("5/8/32", 2, requests, 0.5, {0: (1, 2, 3), 1: (4, 5, 6, 8)})


def test_a_cell_sums_up_its_requests() -> None:
    result = cell()
    assert (result.num_requests, result.num_tokens) == (2, 7)
    assert result.tokens_per_second == pytest.approx(14)
    assert result.time_to_first_token_ms_p50 == pytest.approx(100)
    assert result.time_per_output_token_ms_p99 == pytest.approx(100)
    assert result.request_ms_p50 == pytest.approx(300)
    assert result.accept_length == 2.0  # (4 accepted + 4 bonus) / 4 rounds
    assert result.root_only_share == 0.5
    assert result.identical_share == 0.5


def test_without_a_plain_run_nothing_is_compared() -> None:
    result = summarize("x", 1, [request((1,), rounds=0, accepted=0)], 1.0, {})
    assert result.identical_share is None
    assert (result.accept_length, result.time_per_output_token_ms_p50) == (0.0, 0.0)


def test_the_error_of_a_request_is_the_error_of_its_cell() -> None:
    class Broken:
        async def stream(self, prompt: str, **keywords: Any) -> AsyncIterator[Any]:
            raise UnavailableError("no target worker is ready")
            yield

    with pytest.raises(UnavailableError):
        asyncio.run(run_cell(Broken(), ["a"], {}, concurrency=3, count=5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 10), (25, 10), (50, 20), (51, 30), (99, 40), (100, 40)]
)
def test_percentiles_are_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([40.0, 10.0, 30.0, 20.0], percent) == expected


def test_the_plot_is_svg_with_a_line_per_mode() -> None:
    plain = replace(cell(), mode="plain & simple")
    results = [cell(), replace(cell(), concurrency=8, tokens_per_second=90.0), plain]
    root = ElementTree.fromstring(draw_plot(results, title="a < b"))
    name = "{http://www.w3.org/2000/svg}"
    lines = [line.get("points", "").split() for line in root.findall(f"{name}polyline")]
    assert [len(points) for points in lines] == [2, 1]
    height = float(root.get("height", "0"))
    first, second = (float(point.split(",")[1]) for point in lines[0])
    assert 0 < second < first < height  # more tokens per second are further up
    texts = [text.text for text in root.findall(f"{name}text")]
    assert {"a < b", "plain & simple", "5/8/32", "100"} <= set(texts)


@pytest.mark.parametrize("value", [0.003, 1.0, 7.5, 90.0, 1234.0])
def test_the_plot_fits_any_scale(value: float) -> None:
    root = ElementTree.fromstring(draw_plot([replace(cell(), tokens_per_second=value)], title="t"))
    circle = root.find("{http://www.w3.org/2000/svg}circle")
    assert circle is not None
    assert 36 <= float(circle.get("cy", "-1")) <= 360 - 48
