"""pyproject.toml, constraints.txt, Makefile and .ci/run agree with each other and with the tree."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MAX_BUNDLED_BYTES = 40_000_000


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, Any] = document["project"]
    return found


def requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = project["optional-dependencies"]
    found = [Requirement(text) for text in project["dependencies"] + extras["dev"]]
    own = [requirement for requirement in found if requirement.name == project["name"]]
    texts = [text for requirement in own for extra in requirement.extras for text in extras[extra]]
    return [one for one in found if one not in own] + [Requirement(text) for text in texts]


def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            found[canonicalize_name(name)] = version
    return found


def test_every_dependency_is_pinned_within_its_range(project: dict[str, Any]) -> None:
    for requirement in requirements(project):
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def locked(name: str) -> dict[str, str]:
    """Return the versions of a file of the image; each must have hashes and come from an index."""
    found = {}
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("--extra-index-url"):
            assert line.split() == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
            continue
        pin, *hashes = line.split()
        package, version = pin.split("==")
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes), pin
        assert canonicalize_name(package) not in found, pin
        found[canonicalize_name(package)] = version
    return found


@pytest.mark.parametrize("flavour", ["cuda", "cpu"])
def test_the_image_installs_the_pinned_versions(flavour: str) -> None:
    torch = locked(f"torch-{flavour}.txt")
    assert torch["torch"] == pins()["torch"] + ("+cpu" if flavour == "cpu" else "")
    if flavour == "cpu":
        assert list(torch) == ["torch"]
    own = [name for name in torch if name != "torch"]
    assert all(name.startswith(("nvidia-", "cuda-")) for name in own)
    image = locked("image.txt")
    assert not image.keys() & torch.keys()
    assert image == {name: pins().get(name) for name in image}


def test_the_image_installs_all_that_is_asked_for(project: dict[str, Any]) -> None:
    """And what that asks for, as far as it is installed here; torch asks for CUDA elsewhere."""
    image = {**locked("image.txt"), **locked("torch-cpu.txt")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    extras = project["optional-dependencies"]
    asked = (*project["dependencies"], *extras["smg"], *extras["tracing"], *build)
    open_ones = [Requirement(text) for text in asked]
    seen = set()
    while open_ones:
        wanted = open_ones.pop()
        name = canonicalize_name(wanted.name)
        assert wanted.specifier.contains(image[name].partition("+")[0], prereleases=True), wanted
        if name in seen:
            continue
        seen.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            extras = [*wanted.extras, ""]
            where = {
                "platform_machine": "x86_64",
                "sys_platform": "linux",
                "python_version": "3.11",
            }
            if needed.marker is None or any(
                needed.marker.evaluate({**where, "extra": extra}) for extra in extras
            ):
                open_ones.append(needed)
    assert seen == image.keys(), "what nobody asks for any more"


def test_the_image_takes_no_package_without_a_hash() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ([^&\n]*)", text)
    assert len(installs) == 3
    for options in installs:
        assert "--no-deps" in options
        assert "--require-hashes" in options or "--no-index --no-build-isolation ." in options
    assert re.findall(r"^FROM (.*)$", text, re.MULTILINE) == ["${BASE_IMAGE}"]


def test_what_is_installed_fits_the_ranges(project: dict[str, Any]) -> None:
    for requirement in requirements(project):
        if requirement.marker is None or requirement.marker.evaluate():
            version = metadata.version(requirement.name)
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_torch_is_pinned_without_a_build_tag() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins()["torch"])


def test_the_stubs_need_no_newer_runtime_than_the_ranges_allow(project: dict[str, Any]) -> None:
    stub = (ROOT / "coppice" / "v1" / "generation_pb2.py").read_text()
    grpc_stub = (ROOT / "coppice" / "v1" / "generation_pb2_grpc.py").read_text()
    versions = {
        "protobuf": re.search(r"^# Protobuf Python Version: (\S+)$", stub, re.MULTILINE),
        "grpcio": re.search(r"^GRPC_GENERATED_VERSION = '(\S+)'$", grpc_stub, re.MULTILINE),
    }
    for requirement in requirements(project):
        if requirement.name in versions:
            found = versions[requirement.name]
            assert found is not None
            floors = [s.version for s in requirement.specifier if s.operator == ">="]
            assert floors == [found[1]], requirement.name


def test_the_console_script_exists(project: dict[str, Any]) -> None:
    module, _, function = project["scripts"]["coppice"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_bundled_models_are_package_data_and_small() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "bundled/**/*" in document["tool"]["setuptools"]["package-data"]["coppice"]
    bundled = ROOT / "coppice" / "bundled"
    for name in ("target", "eagle3", "standalone"):
        assert (bundled / name / "config.json").is_file()
    size = sum(path.stat().st_size for path in bundled.rglob("*") if path.is_file())
    assert size < MAX_BUNDLED_BYTES


def test_the_map_of_the_tests_names_what_there_is() -> None:
    tests = ROOT / "tests"
    names = re.findall(r"`([\w/*]+\.py|\w+/)`", (tests / "README.md").read_text())
    assert len(names) > 40
    assert [name for name in names if not list(tests.glob(name))] == []


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "check", "format", "protos"])
def test_every_make_target_sets_up_the_environment(target: str, tmp_path: Path) -> None:
    """In a folder without .venv, make would install before anything else."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--dry-run", target]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    installs = [i for i, line in enumerate(lines) if "--editable '.[dev]'" in line]
    uses = [i for i, line in enumerate(lines) if line.startswith(".venv/bin/")]
    assert installs and set(uses) - set(installs)
    assert installs[0] == min(uses)
