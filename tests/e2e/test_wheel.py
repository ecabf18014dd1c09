"""A wheel that is built from this tree works outside of it, bundled models included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import coppice
from tests.processes import wait_for, with_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coppice", "orchestrator", "draft_service", "target_service", "shared")
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Installed:
    """A wheel in a folder of its own.

    Args:
        environ: In which Python finds it there.
        elsewhere: A folder to work in, empty.
    """

    wheel: Path
    site: Path
    environ: dict[str, str]
    elsewhere: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.elsewhere,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build and install it, without a network and without what earlier builds left behind."""
    tmp = tmp_path_factory.mktemp("wheel")
    source, built, site, elsewhere = (tmp / name for name in ("src", "built", "site", "elsewhere"))
    elsewhere.mkdir()
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COPPICE_")}
    for command in (
        ["wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(built), str(source)],
        ["install", *OFFLINE, "--target", str(site), "--find-links", str(built), "coppice"],
    ):
        result = subprocess.run([*pip, *command], env=environ, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    (wheel,) = built.iterdir()
    environ["PYTHONPATH"] = with_path(site)["PYTHONPATH"]
    return Installed(wheel, site, environ, elsewhere)


def test_it_says_what_it_is(installed: Installed) -> None:
    assert installed.wheel.name == f"coppice-{coppice.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(path).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"coppice/gateway/page.html", "coppice/bundled/target/chat_template.jinja"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, path.partition("/")[0]}
    said = installed.run("-m", "coppice", "--version")
    assert said.stdout == f"coppice {coppice.__version__}\n", said.stderr


def test_it_is_the_one_that_runs(installed: Installed) -> None:
    code = "import coppice, shared; print(coppice.__file__, shared.__path__[0])"
    said = installed.run("-c", code).stdout
    assert said.split() == [
        str(installed.site / name) for name in ("coppice/__init__.py", "shared")
    ]


def test_the_demo_runs_and_ends_with_one_json_object(installed: Installed) -> None:
    demo = ("-m", "coppice", "demo", "--device", "cpu", "--max-new-tokens", "112")

    def has_tree() -> bool:
        """Return whether the output had a tree before its end, which is up to the machine."""
        result = installed.run(*demo)
        assert result.returncode == 0, result.stdout + result.stderr
        *_, before, last = result.stdout.splitlines()
        report = json.loads(last)
        assert report["identical"] is True
        assert report["num_tokens"] == 112
        assert report["tokens_per_second"] > 0 and report["plain_tokens_per_second"] > 0
        assert "tokens per round" in before
        assert result.stdout.count("def load_json(filename):") >= 2
        assert "[accepted draft tokens]" in result.stdout and "\x1b" not in result.stdout
        assert list(installed.elsewhere.iterdir()) == []
        accept_length: float = report["accept_length"]
        return accept_length > 1

    wait_for(has_tree, 400.0)
