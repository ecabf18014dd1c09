"""A whole Generate on the Triton kernels, interpreted: no kernel of the package is an orphan."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shared.kernels
from tests.e2e.serving import Server, checkpoint_config, generate_all, generate_alone, running
from tests.marks import OLD_INTERPRETER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OLD_INTERPRETER, reason="workers interpret with Triton 3.7 or numpy < 2.4"),
]

# Hot enough that the noise, which draft and target share, decides most tokens.
REQUESTS: list[dict[str, Any]] = [
    {
        "token_ids": [72, 101, 108],
        "max_new_tokens": 20,
        "ignore_eos": True,
        "seed": 1,
        "temperature": 4.0,
        "top_k": 200,
        "top_p": 0.98,
        "min_p": 0.0001,
        "speculation": True,
        "num_steps": 2,
        "topk": 3,
        "num_draft_tokens": 8,
    },
    {
        "token_ids": [72, 105],
        "max_new_tokens": 14,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "logprobs": True,
        "top_logprobs": 2,
        "speculation": True,
        "num_steps": 2,
        "topk": 2,
        "num_draft_tokens": 4,
    },
]


@pytest.fixture(scope="module")
def server(checkpoint_dir: Path) -> Iterator[Server]:
    """Serve a two-layer model whose workers run the Triton kernels on the CPU."""
    from tests.checkpoints import Shape, write_eagle3, write_llama

    target = write_llama(checkpoint_dir / "two-layers", shape=Shape(num_layers=2))
    draft = write_eagle3(checkpoint_dir / "two-layers-eagle3", target, layer_ids=(0, 1))
    # A short context: what a target computes at its start is no longer than that.
    short = {"max_context_len": 40}
    config = checkpoint_config(
        target, draft, "eagle3", target={"self_test": False, **short}, draft=short
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with running(config) as server:
            yield server


def test_every_kernel_runs_in_a_worker(server: Server) -> None:
    """Trees with filters and T > 0 on the interpreted kernels equal plain decoding on them."""
    plain = generate_alone(server.address, REQUESTS)
    completions = generate_all(server.address, REQUESTS)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    stats = [completion.speculation for completion in completions]
    assert all(one.num_draft_tokens > 0 for one in stats)
    assert sum(one.num_moved_rounds for one in stats) > 0

    launches = [dict(server.info(name).load.kernel_launches) for name in ("target-0", "draft-0")]
    launched = {name for counts in launches for name, count in counts.items() if count > 0}
    assert launched == kernels()


def kernels() -> set[str]:
    """Return the name under which each Triton kernel of the package counts its launches, those of
    mailboxes left out.

    Raises: AssertionError if a function launches a kernel without counting it, or if there is a
        kernel that nothing launches and no other kernel calls.
    """
    paths = sorted(Path(shared.kernels.__file__).parent.glob("**/*.py"))
    found = [(path, function) for path in paths for function in functions(path)]
    defined = {function.name for _, function in found if is_jitted(function)}
    counted, used = set(), set()
    for path, function in found:
        launched = {name for name in map(launched_kernel, ast.walk(function)) if name}
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        if is_jitted(function):
            used |= names
        if launched & defined:
            used |= launched
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
