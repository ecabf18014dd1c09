"""Write requirements/: what the image installs, with versions and the hashes of wheels.

    python scripts/lock_image.py              after a change of pyproject.toml or constraints.txt
    python scripts/lock_image.py --keep-cpu   where PyTorch's index cannot be reached

Needs uv on PATH (`pip install uv`) and `packaging`. Versions are those of constraints.txt; what is
not in it, such as the libraries of CUDA, is the newest that fits.

    image.txt        all but torch, for both of the next two
    torch-cuda.txt   torch of PyPI and the libraries of CUDA
    torch-cpu.txt    torch without CUDA, of PyTorch's own index
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
PYTHON = "3.11"  # of the Dockerfile
MACHINES = ("x86_64", "aarch64")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEAD = "# Made by scripts/lock_image.py.\n"

Package = Mapping[str, Any]


def requirements() -> list[str]:
    """Return what pyproject.toml asks for in the image: to run, with extras, to be installed."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = whole["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["smg"], *extras["tracing"]]
    return [*wanted, *whole["build-system"]["requires"]]


def constraints() -> list[str]:
    """Return the lines of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def lock(wanted: Iterable[str], *, torch_index: str = "") -> dict[str, Package]:
    """Return the packages that uv chooses for Linux on both machines, by name.

    Args:
        wanted: Requirements.
        torch_index: Where torch comes from; empty: from where the others do.
    Raises: ValueError if a machine needs what the other one does not.
    """
    environments = [f"sys_platform == 'linux' and platform_machine == '{m}'" for m in MACHINES]
    text = (
        f'[project]\nname = "image"\nversion = "0"\nrequires-python = "=={PYTHON}.*"\n'
        f"dependencies = {json.dumps(list(wanted))}\n"
        f"[tool.uv]\npackage = false\nconstraint-dependencies = {json.dumps(constraints())}\n"
        f"environments = {json.dumps(environments)}\n"
    )
    if torch_index:
        text += (
            '[tool.uv.sources]\ntorch = { index = "torch" }\n'
            f'[[tool.uv.index]]\nname = "torch"\nurl = "{torch_index}"\nexplicit = true\n'
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(text)
        subprocess.run(["uv", "lock", "--quiet", "--no-config", "--project", folder], check=True)
        locked = tomllib.loads((Path(folder) / "uv.lock").read_text())
    packages = {package["name"]: package for package in locked["package"]}
    needs = [need for package in packages.values() for need in package.get("dependencies", ())]
    anywhere = {need["name"] for need in needs if "marker" not in need}
    if len(packages) < len(locked["package"]) or {need["name"] for need in needs} - anywhere:
        raise ValueError("the machines differ in what they need: lock each of them by itself")
    del packages["image"]
    return packages


def fits(file_name: str) -> bool:
    """Return whether a wheel is for the image's Python and one of its machines."""
    return any(
        tag.interpreter in ("py3", f"cp{PYTHON.replace('.', '')}", "py2.py3")
        or (tag.abi == "abi3" and tag.interpreter.startswith("cp3"))
        for tag in parse_wheel_filename(file_name)[3]
        if tag.platform == "any"
        or (tag.platform.startswith("manylinux") and tag.platform.endswith(MACHINES))
    )


def write(name: str, packages: Iterable[Package], options: str = "") -> None:
    """Write a file of requirements with hashes.

    Raises: ValueError if a package has no wheel that fits.
    """
    text = HEAD + options
    for package in packages:
        hashes = sorted(
            wheel["hash"]
            for wheel in package.get("wheels", ())
            if fits(Path(unquote(urlsplit(wheel["url"]).path)).name)
        )
        if not hashes:
            raise ValueError(f"{package['name']} {package['version']} has no wheel that fits")
        pins = [f"{package['name']}=={package['version']}", *(f"--hash={h}" for h in hashes)]
        text += " \\\n    ".join(pins) + "\n"
    (FOLDER / name).write_text(text)


def is_of_cuda(name: str) -> bool:
    """Return whether a package differs, or is not there, without CUDA."""
    return name == "torch" or name.startswith(("nvidia-", "cuda-"))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep-cpu", action="store_true", help="leave torch-cpu.txt as it is")
    arguments = parser.parse_args()
    packages = lock(requirements())
    FOLDER.mkdir(exist_ok=True)
    write("image.txt", (p for name, p in packages.items() if not is_of_cuda(name)))
    write("torch-cuda.txt", (p for name, p in packages.items() if is_of_cuda(name)))
    if not arguments.keep_cpu:
        torch = lock(["torch"], torch_index=CPU_INDEX)["torch"]
        write("torch-cpu.txt", [torch], options=f"--extra-index-url {CPU_INDEX}\n")


if __name__ == "__main__":
    main()
