"""The commands as a user types them; `coppice demo` is in test_wheel.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice import Client
from coppice.timeline import stage_colors
from tests.processes import command, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COPPICE = command("coppice")
SECRET = "0123456789abcdef-of-a-test"
# No engine dies here, and no grammar comes: what waits for that would take the cores from others.
NO_SPARES = {"COPPICE_SPARE_AFTER_S": "0", "COPPICE_GRAMMAR_AFTER_S": "0"}
NEVER_LATE = {"COPPICE_DRAFT_TIMEOUT_MS": "60000", "COPPICE_DRAFT_OPEN_TIMEOUT_MS": "60000"}
ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith("COPPICE_")}


def coppice(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COPPICE, *arguments],
        env={**ENVIRON, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `coppice up` writes."""
    return tmp_path_factory.mktemp("up") / "up.log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[str]:
    """Run `coppice up` with two drafts; yields its address."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*COPPICE, "up", "--port=0", "--device=cpu", "--num-drafts=2"],
            env={
                **ENVIRON,
                **NEVER_LATE,
                **NO_SPARES,
                "COPPICE_CPU_THREADS": "1",
                "COPPICE_SECRET": SECRET,
            },
            stdout=stream,
            stderr=stream,
        )
    deadline = time.monotonic() + 300.0
    try:
        while "Coppice listens on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield log.read_text().partition("Coppice listens on ")[2].partition(". ")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(180)
    said = log.read_text()
    assert code == 0, said
    check_log(said)
    for name in ("target-0", "draft-0", "draft-1", "orchestrator", "gateway"):
        assert f"{name:12} * ready" in said
        assert f"{name:12} * stopped" in said


def check_log(said: str) -> None:
    """Check that all processes log in one format, and that a CPU without mailboxes is no news."""
    stamped = [line for line in said.splitlines() if re.search(r"\d\d:\d\d:\d\d", line)]
    names = "target-0|draft-0|draft-1|orchestrator|gateway"
    for line in stamped:
        assert re.fullmatch(
            rf"({names}) +\| \d{{4}}-\d\d-\d\d [\d:,]+ (INFO|WARNING|ERROR) [\w.]+: .+", line
        ), line
    assert {line.partition(" ")[0] for line in stamped} == set(names.split("|"))
    assert SECRET not in said
    assert "mailbox" not in said and "\x1b" not in said


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

    def unmarked(text: str) -> str:
        return text.replace("[", "").replace("]", "")

    def is_marked() -> bool:
        """Return whether any text was drafted: a tree may come after so short an output."""
        marked = coppice("generate", "class Node:", *flags, "--show-tree")
        assert unmarked(marked.stdout) == unmarked(bare.stdout)
        assert "[accepted draft tokens]" in marked.stderr
        assert "\x1b" not in marked.stdout + marked.stderr
        return marked.stdout.count("[") > bare.stdout.count("[")

    wait_for(is_marked)


def test_a_timeout_is_said_on_a_line_of_its_own(server: str) -> None:
    flags = ("--server", server, "--ignore-eos", "--max-new-tokens", "0", "--timeout-s", "1")
    result = subprocess.run(
        [*COPPICE, "generate", "class Node:", *flags],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    *_, last = result.stdout.splitlines()
    assert last.startswith("coppice: DEADLINE_EXCEEDED: the deadline passed after "), result.stdout


def test_the_example_of_the_readme_runs(server: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert '"localhost:50051"' in code
    code = code.replace('"localhost:50051"', repr(server))
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "tokens per round" in result.stdout


def test_a_prefill_is_no_queueing(server: str) -> None:
    with Client(server) as client:

        def is_none() -> bool:
            """Return whether it took longer than its way to the target: any process may pause."""
            timings = client.generate("x = [1, 2]\n" * 100, max_new_tokens=1).timings
            return timings.queue_ms < timings.time_to_first_token_ms / 2

        wait_for(is_none)


def test_a_worker_whose_port_is_taken_says_so_in_one_line(server: str) -> None:
    result = coppice("serve", "target", "--device=cpu", "--port", server.rpartition(":")[2])
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert f"cannot listen on {server}" in line


def test_up_beside_a_running_server_says_so(server: str) -> None:
    result = coppice("up", "--device=cpu", "--port", server.rpartition(":")[2])
    assert (result.returncode, result.stdout) == (2, "")
    assert f"cannot listen on {server}: another Coppice server runs there" in result.stderr
    assert result.stderr.count("\n") == 1


def test_up_with_a_checkpoint_that_is_not_there() -> None:
    result = coppice(
        "up", "--device=cpu", "--port=0", "--target-model=/nowhere", "--draft-model=none"
    )
    assert result.returncode == 2
    assert "--target-model: there is no directory /nowhere" in result.stderr
    assert result.stderr.count("\n") == 1  # nothing was started


def test_errors_of_the_server_are_printed(server: str) -> None:
    result = coppice("generate", "x", "--server", server, "--temperature", "-1")
    assert result.returncode == 1
    assert "INVALID_ARGUMENT" in result.stderr and "sampling.temperature" in result.stderr


def test_bench_writes_table_json_and_plot(server: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "bench.json", tmp_path / "bench.svg"

    def has_tree() -> bool:
        """Return whether an output had a tree before its end, which is up to the machine."""
        result = coppice(
            *("bench", "--server", server, "--repeat=1", "--concurrency=1,2", "--new-tokens=96"),
            *("--speculation=off,3/2/6", f"--output={output}", f"--plot={plot}"),
        )
        assert result.returncode == 0, result.stderr
        runs = json.loads(output.read_text())["runs"]
        assert [(run["speculation"], run["batch"]) for run in runs] == [
            *(("off", 1), ("3/2/6", 1)),
            *(("off", 2), ("3/2/6", 2)),
        ]
        for index, run in enumerate(runs):
            assert run["tokens"] == run["batch"] * 96
            assert run["identical"] == (1.0 if index else None)
            assert run["accept_length"] == 1 or run["speculation"] != "off"
            assert f"{run['decode_tokens_per_second']:,.1f}" in result.stdout
        return any(run["accept_length"] > 1 for run in runs)

    wait_for(has_tree)
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_bench_plays_a_schedule_and_counts_what_workers_did(
    server: str, log: Path, tmp_path: Path
) -> None:
    schedule, output = tmp_path / "arrivals.json", tmp_path / "bench.json"
    rows = [
        {"at_s": 0.1 * index, "token_ids": [5 + index, 9], "max_new_tokens": 40 + index}
        for index in range(6)
    ]
    schedule.write_text(json.dumps(rows))
    admin = log.read_text().partition("operators are served on ")[2].split()[0]
    result = coppice(
        *("bench", "--server", server, "--schedule", str(schedule), "--speculation=off,3/1/4"),
        *("--processes=2", f"--admin={admin}", f"--output={output}"),
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(output.read_text())
    off, tree = document["runs"]
    assert off["tokens"] == tree["tokens"] == sum(row["max_new_tokens"] for row in rows)
    assert tree["identical"] == 1.0 and off["failed"] == tree["failed"] == 0
    counters = document["counters"].values()
    assert len(counters) == len(document["workers"]) == 3
    assert sum(each["num_steps"] > 0 for each in counters) >= 2
    assert {worker["kind"] for worker in document["workers"].values()} == {"target", "eagle3"}
    assert "num_steps +" in result.stdout


def test_bench_says_where_a_round_goes(server: str, tmp_path: Path) -> None:
    output, picture = tmp_path / "bench.json", tmp_path / "timeline.svg"

    def measure() -> tuple[subprocess.CompletedProcess[str], Any, Any]:
        result = coppice(
            *("bench", "--server", server, "--requests=2", "--concurrency=1", "--new-tokens=96"),
            *("--speculation=off,3/2/6", f"--output={output}", f"--timeline={picture}"),
        )
        assert result.returncode == 0, result.stderr
        plain, tree = json.loads(output.read_text())["cells"]
        return result, plain, tree

    result, plain, tree = measure()
    for _ in range(20):  # outputs may end before their first trees
        if plain["num_rounds"] > tree["num_rounds"]:
            break
        result, plain, tree = measure()
    assert plain["num_rounds"] > tree["num_rounds"] > 0
    names = [stage["name"] for stage in tree["stages"]]
    of_peer_rounds = [
        "draft: channel", "draft: features", "draft: queue", "draft: pack", "draft: extend",
        "draft: grow", "draft: read", "draft: tree",
        "target: channel", "target: queue", "target: pack", "target: forward", "target: sample",
        "target: read", "target: commit",
    ]  # fmt: skip
    assert [name for name in names if name in of_peer_rounds] == of_peer_rounds
    # Rounds without a tree, while the draft reads the prompt, end later than these.
    others = {name for name in names if "busy" not in name} - {*of_peer_rounds}
    assert others <= {"target: answer", "target: hop back", "orchestrator: commit"}
    assert 0 < tree["outside_us"] < tree["round_us"]
    assert plain["busy_shares"].keys() == {"target"}
    assert 0 < tree["busy_shares"]["target"] + tree["busy_shares"]["draft"] < 1
    assert "draft: grow" in result.stdout
    assert {*names, *(stage["name"] for stage in plain["stages"])} <= stage_colors().keys()
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_health_of_the_orchestrator(server: str) -> None:
    result = coppice(
        "health", server, "--service", "coppice.v1.GenerationService", "--timeout-s=60"
    )
    assert (result.returncode, result.stdout) == (0, "SERVING\n")
