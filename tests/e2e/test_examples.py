"""The examples for users run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coppice import Client
from tests.compose_file import load_compose
from tests.e2e.serving import Server
from tests.processes import with_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=with_path(ROOT)
    )


def test_the_python_client_streams_and_compares(pair: Server) -> None:
    ran = run("client.py", pair.address)
    assert ran.returncode == 0, ran.stderr
    assert "the same without speculation" in ran.stdout and ran.stdout.endswith("True\n")


def test_the_client_of_the_proto_alone_gets_the_same_text(pair: Server) -> None:
    ran = run("raw_grpc.py", pair.address)
    assert ran.returncode == 0, ran.stderr
    with Client(pair.address) as client:
        text = client.generate("def read_lines(path):", max_new_tokens=48).text
    assert ran.stdout == f"{text}\nFINISH_REASON_LENGTH after 48 tokens\n"


def test_structured_output_is_an_object_of_python(pair: Server) -> None:
    ran = run("structured_output.py", pair.address)
    assert ran.returncode == 0, ran.stderr
    choice, text, function = ran.stdout.splitlines()
    assert choice in ("reads", "writes", "computes")
    assert re.fullmatch("[a-z]{4}-[0-9]{4}", text) and function.startswith("Function(name=")


@pytest.mark.parametrize("name", ["client.py", "raw_grpc.py", "structured_output.py"])
def test_without_a_server_an_example_says_so(name: str) -> None:
    ran = run(name, "127.0.0.1:1")
    assert ran.returncode == 1
    assert ran.stderr.startswith("UNAVAILABLE") and "Traceback" not in ran.stderr


def test_the_override_changes_services_and_options_that_exist() -> None:
    override = yaml.safe_load((ROOT / "examples" / "compose.override.yml").read_text())
    services = load_compose()["services"]
    for name, changes in override["services"].items():
        assert name in services
        assert set(changes) == {"environment"}
        role = services[name]["command"][2]
        options = subprocess.run(
            [sys.executable, "-m", "coppice", "serve", role, "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for variable in changes["environment"]:
            assert "--" + variable.removeprefix("COPPICE_").lower().replace("_", "-") in options


@pytest.mark.parametrize("arguments", [[], ["orchestrator"], ["nobody"]])
def test_the_script_of_two_hosts_says_how_to_use_it(arguments: list[str]) -> None:
    script = ROOT / "examples" / "two_hosts.sh"
    ran = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.startswith("usage: ")
