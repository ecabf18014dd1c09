"""What documents name exists, and their commands are understood; module names are explained."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from coppice.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coppice", "orchestrator", "draft_service", "target_service", "shared")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"))
)
# Words of module names that mean what they mean elsewhere.
PLAIN_WORDS = frozenset(
    """
    access allocator allowed answers auth bench check checkpoint children client
    compile config costs decoder demo dense embedding endpoints errors factory failures field
    files filters generate generation graphs growth head health held input interceptors kernels
    language launch linear lines llama loader loading log main math memory messages models names
    nodes norm option options output packing params penalties phases plot process progress
    render request runner sampler sampling scheduler select serve server service shape shared
    sizing stack startup state status stop store test timer times tokenizer up validation vector
    walk warm watch watched worker
    """.split()
)
_REFERENCE = re.compile(r"`([\w./*-]+\.(?:py|md|proto|sh|yml|toml|json))(?::([\w.]+))?`")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^(?:\w+\$ +)?(coppice [a-z].*)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the functions, classes, methods and names that a module defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{member.name}")
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    found.add(f"{node.name}.{member.target.id}")
    return frozenset(found)


def is_there(name: str, document: Path) -> bool:
    places = (ROOT, ROOT / "tests", document.parent)
    return any(any(place.glob(name)) for place in places)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_functions_of_a_document_exist(document: str) -> None:
    path = ROOT / document
    for name, member in _REFERENCE.findall(path.read_text()):
        if "/" not in name and not name.endswith(".py"):
            continue  # a user's file, such as config.json
        assert is_there(name, path), f"{document} names {name}"
        if member and name.endswith(".py"):
            assert member in definitions(ROOT / name), f"{document} names {name}:{member}"


@cache
def members_of_classes() -> frozenset[str]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return frozenset().union(*map(definitions, files))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_methods_of_a_document_exist(document: str) -> None:
    members = members_of_classes()
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / document).read_text()):
        if owner in members:  # else a message, whose fields are the protos'
            assert f"{owner}.{name}" in members, f"{document} names {owner}.{name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_a_document_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in _LINK.findall(_FENCED.sub("", path.read_text())):
        assert (path.parent / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_a_document_are_understood(document: str) -> None:
    """Those in blocks of code: their options exist and take such values."""
    blocks = "".join(_FENCED.findall((ROOT / document).read_text())).replace("\\\n", " ")
    for command in _COMMAND.findall(blocks):
        _, *arguments = shlex.split(command, comments=True)
        _, unknown = build_parser().parse_known_args(arguments)
        assert not unknown, f"{document}: {command}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_workers_of_a_document_listen_where_its_orchestrator_looks(document: str) -> None:
    """Without `--port` they take any free one, which the orchestrator beside them cannot name."""
    for block in _FENCED.findall((ROOT / document).read_text()):
        commands = [
            vars(build_parser().parse_known_args(shlex.split(command, comments=True)[1:])[0])
            for command in _COMMAND.findall(block.replace("\\\n", " "))
            if command.startswith("coppice serve")
        ]
        named = {
            role: re.findall(r":(\d+)", command.get(f"{role}s") or "")
            for command in commands
            for role in ("target", "draft")
            if command.get("role") == "orchestrator"
        }
        for command in commands:
            if ports := named.get(command.get("role", "")):
                assert command.get("port") in ports, f"{document}: {command}"


def test_architecture_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) < 250


def module_words() -> set[str]:
    modules = [
        path.relative_to(ROOT).with_suffix("")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "_pb2" not in path.name and not path.name.startswith("__")
    ]
    return {word for module in modules for part in module.parts[1:] for word in part.split("_")}


def test_every_word_of_a_module_name_is_in_the_glossary_or_plain() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text().lower()
    words = set(re.findall(r"[a-z0-9]+", glossary))
    unknown = {
        word
        for word in module_words() - PLAIN_WORDS
        if not {word, word.rstrip("s"), word + "s", word.removesuffix("es")} & words
    }
    assert not unknown
