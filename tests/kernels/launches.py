"""Which kernels there are, and the names under which their launches are counted."""

from __future__ import annotations

import ast
from pathlib import Path

import shared.kernels


def counted_kernels() -> set[str]:
    """Return the name under which each Triton kernel of the package counts its launches, those of
    mailboxes left out.

    Raises: AssertionError if a function launches a kernel without counting it, or if there is a
        kernel that nothing launches or chooses for a launch, and no other kernel calls.
    """
    paths = sorted(Path(shared.kernels.__file__).parent.glob("**/*.py"))
    found = [(path, function) for path in paths for function in functions(path)]
    defined = {function.name for _, function in found if is_jitted(function)}
    counted, used = set(), set()
    for path, function in found:
        launched = {name for name in map(launched_kernel, ast.walk(function)) if name}
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        attributes = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        used |= names if is_jitted(function) else (names | attributes) & defined
        if launched & defined:
            own = counted_names(function)
            assert own, f"{path.name}: {function.name} launches {launched} uncounted"
            if not path.name.startswith("mailbox_"):  # workers on a CPU have no mailbox
                counted |= own
    assert defined <= used, f"nobody runs {sorted(defined - used)}"
    assert counted
    return counted


def functions(path: Path) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef)]


def is_jitted(function: ast.FunctionDef) -> bool:
    """Return whether a function has @triton.jit, or @triton.jit(...), among its decorators."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "jit"
        for decorator in function.decorator_list
        for node in ast.walk(decorator)
    )


def launched_kernel(node: ast.AST) -> str:
    """Return "kernel" of a call `kernel[grid](...)`, else "" ."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    ):
        return node.func.value.id
    return ""


def counted_names(function: ast.FunctionDef) -> set[str]:
    """Return the arguments of `count_launch` in a function."""
    return {
        argument.value
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "count_launch"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
