"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COPPICE = str(Path(sys.executable).parent / "coppice")
ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith("COPPICE_")}


def coppice(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COPPICE, *arguments],
        env={**ENVIRON, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run `coppice up` with two drafts; yields its address."""
    log = tmp_path_factory.mktemp("up") / "up.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [COPPICE, "up", "--port=0", "--device=cpu", "--num-drafts=2"],
            env={**ENVIRON, "COPPICE_CPU_THREADS": "1"},
            stdout=stream,
            stderr=stream,
        )
    deadline = time.monotonic() + 120.0
    try:
        while "Coppice listens on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield log.read_text().partition("Coppice listens on ")[2].partition(". ")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    said = log.read_text()
    assert code == 0, said
    for name in ("target-0", "draft-0", "draft-1", "orchestrator"):
        assert f"{name:12} * ready" in said
        assert f"{name:12} * stopped" in said


def test_demo_ends_with_one_json_object() -> None:
    result = coppice("demo", "--max-new-tokens", "48", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    *_, before, last = result.stdout.splitlines()
    report = json.loads(last)
    assert report["identical"] is True
    assert report["num_tokens"] == 48
    assert report["accept_length"] > 1.5
    assert report["tokens_per_second"] > 0 and report["plain_tokens_per_second"] > 0
    assert "tokens per round" in before
    assert result.stdout.count("def load_json(filename):") >= 2
    assert "\x1b[32m" in result.stdout  # accepted draft tokens are coloured


def test_generate_is_the_same_with_and_without_speculation(server: str) -> None:
    flags = ("--max-new-tokens", "40", "--temperature", "0.8", "--seed", "7", "--ignore-eos")
    fast = coppice("generate", "def main():", "--server", server, "--stats", *flags)
    plain = coppice("generate", "def main():", *flags, "--no-speculation", COPPICE_SERVER=server)
    assert (fast.returncode, plain.returncode) == (0, 0), fast.stderr + plain.stderr
    assert fast.stdout == plain.stdout != "\n"
    assert "accept_length" in fast.stderr and "seed" in fast.stderr
    assert plain.stderr == ""


def test_show_tree_marks_drafted_text(server: str) -> None:
    flags = ("--server", server, "--max-new-tokens", "40", "--ignore-eos")
    bare = coppice("generate", "class Node:", *flags)
    colored = coppice("generate", "class Node:", *flags, "--show-tree")
    marks = ("\x1b[32m", "\x1b[1;33m", "\x1b[0m")
    assert all(mark in colored.stdout for mark in marks)
    text = colored.stdout
    for mark in marks:
        text = text.replace(mark, "")
    assert text == bare.stdout
    assert "accepted draft tokens" in colored.stderr


def test_errors_of_the_server_are_printed(server: str) -> None:
    result = coppice("generate", "x", "--server", server, "--temperature", "-1")
    assert result.returncode == 1
    assert "INVALID_ARGUMENT" in result.stderr and "sampling.temperature" in result.stderr


def test_bench_writes_table_json_and_plot(server: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    result = coppice(
        *("bench", "--server", server, "--requests=4", "--concurrency=1,2", "--trees=3/2/6"),
        *("--max-new-tokens=24", f"--output={output}", f"--plot={plot}"),
    )
    assert result.returncode == 0, result.stderr
    cells = json.loads(output.read_text())["cells"]
    assert [(c["mode"], c["concurrency"]) for c in cells] == [
        *(("plain", 1), ("3/2/6", 1)),
        *(("plain", 2), ("3/2/6", 2)),
    ]
    for cell in cells:
        assert cell["num_tokens"] == 4 * 24
        assert cell["identical_share"] == 1.0
        assert cell["mode"] == "plain" or cell["accept_length"] > 1.2
        assert f"{cell['tokens_per_second']:.1f}" in result.stdout
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_bench_says_where_a_round_goes(server: str, tmp_path: Path) -> None:
    output, picture = tmp_path / "bench.json", tmp_path / "timeline.svg"
    result = coppice(
        *("bench", "--server", server, "--requests=2", "--concurrency=1", "--trees=3/2/6"),
        *("--max-new-tokens=48", f"--output={output}", f"--timeline={picture}"),
    )
    assert result.returncode == 0, result.stderr
    plain, tree = json.loads(output.read_text())["cells"]
    assert plain["num_rounds"] > tree["num_rounds"] > 0
    names = [stage["name"] for stage in tree["stages"]]
    assert [name for name in names if "busy" not in name] == [
        "draft: link", "draft: features", "draft: queue", "draft: pack", "draft: extend",
        "draft: grow", "draft: read", "draft: tree",
        "target: link", "target: queue", "target: pack", "target: forward", "target: sample",
        "target: read", "target: commit",
    ]  # fmt: skip
    assert 0 < tree["outside_us"] < tree["round_us"]
    assert plain["busy_shares"].keys() == {"target"}
    assert 0.1 < tree["busy_shares"]["target"] + tree["busy_shares"]["draft"] < 1
    assert "draft: grow" in result.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_health_of_the_orchestrator(server: str) -> None:
    result = coppice("health", server, "--service", "coppice.v1.GenerationService")
    assert (result.returncode, result.stdout) == (0, "SERVING\n")
