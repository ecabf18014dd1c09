"""Figures and picture of `coppice bench --timeline`."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from coppice.svg import draw_charts
from coppice.timeline import IN_ENGINES, TimelineResult, chart, stage_colors, summarize
from shared.messages import RoundTimes, StageTime


def round_times(begin_us: int, **took_us: int) -> RoundTimes:
    """A round; `target_forward=5` is the stage "target: forward" of 5 us."""
    stages = []
    end_ns = begin_ns = begin_us * 1000
    for name, us in took_us.items():
        end_ns += us * 1000
        stages.append(StageTime(name=name.replace("_", ": "), end_ns=end_ns))
    return RoundTimes(round_idx=1, begin_ns=begin_ns, stages=tuple(stages))


ROUNDS = [
    round_times(1000, target_hop=20, target_forward=100, draft_grow=60, orchestrator_order=20),
    round_times(1200, target_hop=30, target_forward=100, draft_grow=70, orchestrator_order=20),
    round_times(1420, target_hop=40, target_forward=100, draft_grow=80, orchestrator_order=20),
]


def test_stages_are_summed_up_in_the_order_of_a_round() -> None:
    result = summarize("5/4/16", 1, ROUNDS)
    assert [(s.name, s.num_rounds, s.median_us, s.p95_us) for s in result.stages] == [
        ("target: hop", 3, 30, 40),
        ("target: forward", 3, 100, 100),
        ("draft: grow", 3, 70, 80),
        ("orchestrator: order", 3, 20, 20),
    ]
    assert sum(stage.share for stage in result.stages) == pytest.approx(1)
    assert (result.num_rounds, result.round_us, result.outside_us) == (3, 220, 50)


def test_engines_are_busy_for_the_share_of_time_in_which_they_compute_anything() -> None:
    """A second request's steps, half of them at the same time, are not counted twice."""
    assert summarize("x", 1, ROUNDS).busy_shares == pytest.approx(
        {"target": 300 / 660, "draft": 210 / 660}
    )
    other = round_times(1070, target_forward=100)  # the first one forwards in [1020, 1120)
    busy = summarize("x", 2, [*ROUNDS, other]).busy_shares
    assert busy["target"] == pytest.approx(350 / 660)


def test_a_stage_that_some_rounds_lack_does_not_count_there() -> None:
    result = summarize("x", 1, [ROUNDS[0], round_times(1200, target_forward=50)])
    assert {stage.name: stage.num_rounds for stage in result.stages}["draft: grow"] == 1
    assert result.outside_us == 20  # the median of 40 and 0


def test_a_stage_that_few_rounds_have_stands_in_its_place() -> None:
    late = round_times(
        1700, target_hop=20, target_busy=7, target_forward=100, draft_grow=60, orchestrator_order=1
    )
    names = [stage.name for stage in summarize("x", 1, [*ROUNDS, late]).stages]
    assert names[:3] == ["target: hop", "target: busy", "target: forward"]


def test_the_picture_holds_every_stage_of_every_mode() -> None:
    results = [summarize("a < b", 1, ROUNDS), summarize("plain", 2, ROUNDS)]
    root = drawn(results)
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in root.findall(f"{name}text")]
    assert sum(text == "target: forward" for text in texts) == 2
    assert any(text.startswith("a < b, 1 at once: 220 us a round") for text in texts)
    height = float(root.get("height", "0"))
    assert all(float(rect.get("y", "0")) < height for rect in root.findall(f"{name}rect"))


def drawn(results: list[TimelineResult]) -> ElementTree.Element:
    charts = [chart(result) for result in results]
    return ElementTree.fromstring(draw_charts(charts, colors=stage_colors()))


def test_a_stage_has_one_color_in_all_pictures_that_every_renderer_knows() -> None:
    """hsl() and styles are for browsers: others draw black."""
    first, other = summarize("x", 1, ROUNDS), summarize("y", 1, [round_times(0, draft_grow=5)])
    known = stage_colors()
    for root in (drawn([first, other]), drawn([other]), drawn([other, first])):
        assert not root.findall(".//{*}style")
        colors: dict[str, set[str]] = {}
        for rect in root.findall("{*}rect"):
            fill, title = rect.get("fill", ""), rect.findtext("{*}title")
            assert re.fullmatch("#[0-9a-f]{6}", fill) and not rect.get("style")
            if title:
                colors.setdefault(re.sub(r": [\d.]+ us at .*", "", title), set()).add(fill)
        assert {len(found) for found in colors.values()} == {1}
        assert colors["draft: grow"] == {known["draft: grow"]}
    assert len(set(known.values())) == len(known)


def test_every_stage_that_engines_name_has_a_color() -> None:
    assert {name for name in IN_ENGINES if "busy" not in name} <= stage_colors().keys()
