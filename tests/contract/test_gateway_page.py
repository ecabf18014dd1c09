"""The page of the gateway: in a real browser where there is one, and everywhere what it names."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coppice import AsyncClient
from coppice.gateway.fields import ChatFields, CompletionFields
from shared.messages import FeatureChunk
from shared.metrics.catalog import METRICS
from tests.browser import Browser, Page, browsing, find_browser
from tests.contract.serving import freed, write_model
from tests.contract.test_gateway import one
from tests.fakes import eventually

SOURCE = resources.files("coppice.gateway").joinpath("page.html").read_text()
BROWSER = find_browser()
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: see tests/README.md")
asyncio_test = pytest.mark.asyncio


class _Names(HTMLParser):
    """The ids of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]


def test_the_script_names_what_is_there() -> None:
    """Elements of the page, fields of requests, and metrics."""
    ids = _Names(SOURCE).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([^"]+)"\)', SOURCE)) <= set(ids)
    names = {metric.name for metric in METRICS.values()}
    assert set(re.findall(r'"(coppice_[a-z_]+)"', SOURCE)) <= names
    body = SOURCE[SOURCE.index("const body = {") : SOURCE.index("const path = isChat")]
    fields = set(re.findall(r"([a-z_]+)(?=: )", body)) - {"role", "content"}
    assert {"model", "messages", "max_tokens", "return_trees"} <= fields
    assert fields - {"messages"} <= CompletionFields.model_fields.keys()
    assert fields <= ChatFields.model_fields.keys()


def test_it_loads_nothing_from_elsewhere() -> None:
    assert not re.findall(r"""(?:https?:)?//\w[^\s"']*\.\w+""", SOURCE)
    assert not re.findall(r'(?:src|href)="(?!data:)|@import|url\(', SOURCE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    assert BROWSER is not None
    async with browsing(BROWSER) as found:
        yield found


async def opened(browser: Browser, front: Any, **shown: Any) -> Page:
    """Open the page once it knows what is served."""
    page = await browser.open()
    await page.show(**{"width": 1280, **shown})
    await page.go(front.url)
    await page.until("document.querySelector('#model').options.length")
    return page


async def fill(page: Page, **values: Any) -> None:
    """Type values into fields by their ids."""
    for name, value in values.items():
        await page.evaluate(f"document.getElementById('{name}').select()")
        await page.type(str(value))


TEXT = "[...document.querySelectorAll('pre')].map(pre => pre.textContent)"


@in_a_browser
@asyncio_test
async def test_a_prompt_is_typed_and_both_sides_stream(browser: Browser, model: Path) -> None:
    """By keys alone; text, colours, figures and rounds are those of the API."""
    async with one(model, step_s=0.5) as (front, server, target, draft):
        page = await opened(browser, front)
        await fill(page, prompt="ab", tokens=60, seed=3)
        await page.press("Enter", ctrl=True)
        received = draft.engine.received  # it has read the prompt before many rounds are over
        await eventually(lambda: any(isinstance(each, FeatureChunk) for each in received))
        target.handle.step_s = 0.02
        said = await page.until("document.querySelector('#same').textContent")
        assert said.startswith("The same text, character by character")
        async with AsyncClient(server.address) as client:
            plain = await client.generate("ab", max_new_tokens=60, seed=3, temperature=0)
        assert await page.evaluate(TEXT) == [plain.text] * 2
        drafted, added = await page.evaluate(
            "['.draft', '.bonus'].map(kind => [...document.querySelectorAll('pre')].map(pre => "
            "[...pre.querySelectorAll(kind)].map(span => span.textContent).join('').length))"
        )
        assert drafted[0] > 0 and drafted[1] == 0
        assert [sum(both) for both in zip(drafted, added, strict=True)] == 2 * [len(plain.text)]
        figures = await page.evaluate(
            "[...document.querySelectorAll('dd')].map(cell => cell.textContent)"
        )
        speed, length, counts, plain_speed, plain_length, plain_counts = figures
        num_tokens, num_rounds = map(int, counts.split(" / "))
        assert num_tokens == 60 and 0 < num_rounds < 59
        assert float(speed) > 0 and float(plain_speed) > 0
        assert float(length) > 1 and float(plain_length) == 1
        assert plain_counts.startswith("60 / ")
        await rounds_are_shown(page)
        server_says = await page.until("document.querySelector('#server').textContent")
        assert f"model {model.name}" in server_says and "with a draft" in server_says
        await page.until("document.querySelector('#server').textContent.includes('tokens120')")
        assert page.problems == []
        await freed(target, draft)


# Of the shown tree each node: kind, text, kind of the node above, place among its siblings.
NODES = """[...document.querySelectorAll('section')[0].querySelectorAll('.node')].map(node => {
  const item = node.parentElement, above = item.parentElement.parentElement;
  return [node.className.replace('node ', ''), node.lastChild.textContent,
    above.tagName === 'LI' ? above.firstChild.className.replace('node ', '') : '',
    [...item.parentElement.children].indexOf(item)];
})"""


async def rounds_are_shown(page: Page) -> None:
    """Look at the tree of each round, by the arrow keys, and by the buttons back to the first."""
    await page.evaluate("document.querySelector('input[type=range]').focus()")
    await page.press("Home")
    seen: list[list[list[Any]]] = []
    which = "document.querySelector('.which').textContent"
    last = int((await page.evaluate(which)).split()[3].rstrip(":"))
    for index in range(last + 1):
        if index:
            await page.press("ArrowRight")
        nodes = await page.evaluate(NODES)
        seen.append(nodes)
        kinds = [kind for kind, *_ in nodes]
        num_accepted = kinds.count("draft")
        num_drafted = num_accepted + kinds.count("miss")
        said = f"Round {index} of {last}: {num_drafted} drafted, {num_accepted} accepted"
        assert await page.evaluate(which) == said
        marked = "document.querySelectorAll('[aria-current]')"
        assert await page.evaluate(f"{marked}[0].dataset.index") == str(index)
    for before, nodes in zip([None, *seen], seen, strict=False):
        row = [node for node in nodes if node[3] == 0 and node[0] != "miss"]
        assert [kind for kind, *_ in row] == ["root", *["draft"] * (len(row) - 2), "bonus"]
        assert [node[2] for node in row] == ["", *(kind for kind, *_ in row[:-1])]
        assert all(kind == "miss" for kind, _, _, place in nodes if place)
        if before is not None:
            bonus = next(text for kind, text, *_ in before if kind == "bonus")
            assert row[0][1] == bonus, "a tree does not grow where the one before ended"
    kinds = [kind for nodes in seen for kind, *_ in nodes]
    assert kinds.count("draft") + kinds.count("bonus") == 60
    assert kinds.count("draft") > 0 and kinds.count("miss") > 0
    for index in reversed(range(last)):
        await page.evaluate("document.querySelector('.before').focus()")
        await page.press("Enter")
        assert await page.evaluate(NODES) == seen[index]
    assert await page.evaluate("document.querySelector('.before').disabled")


@in_a_browser
@asyncio_test
async def test_the_picture_follows_the_stream(browser: Browser, model: Path) -> None:
    """While rounds come the newest is shown, unless an older one was chosen."""
    async with one(model, step_s=0.01) as (front, _, target, draft):
        page = await opened(browser, front)
        await fill(page, tokens=3000)
        await page.press("Enter")
        shown = "document.querySelector('.which').textContent.split(' ')[1]"
        await page.until(f"Number({shown}) > 3")
        await page.evaluate("document.querySelector('.before').click()")
        chosen = await page.evaluate(shown)
        num_rounds = await page.evaluate("document.querySelector('input[type=range]').max")
        await page.until(f"document.querySelector('input[type=range]').max > {num_rounds} + 3")
        assert await page.evaluate(shown) == chosen
        await page.press("Escape")
        await page.until("!document.querySelector('#go').disabled")
        assert await page.evaluate(shown) == chosen
        await freed(target, draft)


@in_a_browser
@asyncio_test
async def test_what_goes_wrong_is_said_and_what_runs_is_stopped(
    browser: Browser, model: Path
) -> None:
    async with one(model, step_s=0.01) as (front, _, target, draft):
        page = await opened(browser, front)
        await page.evaluate("document.querySelector('#chat').click()")
        await page.evaluate("document.querySelector('#go').click()")
        said = await page.until("document.querySelector('#error').textContent")
        assert said.startswith("400: ") and "has no chat template" in said
        await page.evaluate("document.querySelector('#text').click()")
        await fill(page, tokens=3000)
        assert await page.evaluate("document.activeElement.id") == "tokens"
        await page.press("Enter")
        await eventually(lambda: bool(target.engine.requests), what="a request")
        assert await page.evaluate("document.querySelector('#error').textContent") == ""
        await page.press("Escape")
        await freed(target, draft)
        await page.until("!document.querySelector('#go').disabled")
        assert await page.evaluate("document.querySelector('#error').textContent") == ""
        refused = [problem for problem in page.problems if "400" not in problem]
        assert refused == []


# Nothing is wider than the window, and what is shown side by side does not overlap.
LAYOUT = """(() => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const boxes = [...document.querySelectorAll('h1, h2, p, label, button, dt, dd, pre, td, th, li')]
    .map(element => [element, element.getBoundingClientRect()])
    .filter(([, box]) => box.width && box.height);
  const clash = ([a, p], [b, q]) => !a.contains(b) && !b.contains(a)
    && Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
    && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1;
  const pairs = boxes.flatMap((one, i) => boxes.slice(i + 1).filter(other => clash(one, other))
    .map(other => [one[0].textContent.slice(0, 30), other[0].textContent.slice(0, 30)]));
  return [wide, pairs];
})()"""
# The least contrast of a text with what is behind it (WCAG asks for 4.5), and its text.
CONTRAST = """(() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => channels(color).slice(0, 3).map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('body *')]
    .filter(element => element.getClientRects().length && !element.disabled
      && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
    .map(element => {
      const pair = [light(getComputedStyle(element).color), light(behind(element))];
      return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05),
        element.outerHTML.slice(0, 80)];
    }).sort((a, b) => a[0] - b[0])[0];
})()"""


@in_a_browser
@asyncio_test
@pytest.mark.parametrize("width", [360, 1280])
async def test_it_fits_is_readable_and_has_names(browser: Browser, model: Path, width: int) -> None:
    async with one(model) as (front, _, _, _):
        page = await opened(browser, front, width=width)
        await fill(page, prompt="x" * 300, tokens=40)
        await page.press("Enter", ctrl=True)
        await page.until("document.querySelector('#same').textContent")
        assert await page.evaluate(LAYOUT) == [0, []]
        for is_dark in (False, True):
            await page.show(width=width, is_dark=is_dark)
            ratio, text = await page.evaluate(CONTRAST)
            assert ratio >= 4.5, (ratio, text)
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        controls = {"button", "textbox", "combobox", "spinbutton", "radio", "checkbox", "slider"}
        found = [node for node in tree if node.get("role", {}).get("value") in controls]
        roles = {node["role"]["value"] for node in found}
        assert roles >= controls - {"slider"}, roles
        nameless = [json.dumps(node) for node in found if not node.get("name", {}).get("value")]
        assert nameless == []
        assert page.problems == []
