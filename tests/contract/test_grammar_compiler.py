"""The processes that compile grammars: what they refuse, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.errors import InvalidArgumentError, UnavailableError
from shared.grammar import compiler as compiler_module
from shared.grammar.compiler import GrammarCompiler, TokenSource
from shared.grammar.source import Grammar, GrammarKind
from tests.checkpoints import EOS_ID, VOCAB_SIZE, write_tokenizer
from tests.grammars import CASES, compiled_for
from tests.processes import children

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def regex(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=source)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TokenSource:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokens"))
    return TokenSource(directory=directory, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(source: TokenSource) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(source, timeout_s=60.0)
    yield made
    await made.close()
    assert not compile_processes(), "a process is left"


def compile_processes() -> list[int]:
    """Return the processes that compile for this one."""
    pids = []
    for pid in children():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"compile_main" in command:
            pids.append(pid)
    return pids


async def test_every_kind_is_compiled_as_in_this_process(
    compiler: GrammarCompiler, source: TokenSource
) -> None:
    found = await asyncio.gather(*[compiler.compile(case.grammar) for case in CASES.values()])
    assert found == [compiled_for(source.directory, name) for name in CASES]
    assert len(compile_processes()) <= 2


async def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    grammar = regex("(once|twice)[0-9]{3}")
    assert compiler.known(grammar) is None
    first, second = await asyncio.gather(compiler.compile(grammar), compiler.compile(grammar))
    assert first is second is compiler.known(grammar)


async def test_refusals_say_why_and_are_remembered(compiler: GrammarCompiler) -> None:
    for grammar, text in (
        (regex("("), "parenthesis"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, source="false"), "cannot accept"),
        (Grammar(kind=GrammarKind.EBNF, source='root ::= root "a"'), "no token"),
        (Grammar(kind=GrammarKind.STRUCTURAL_TAG, source="{}"), "format"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match=text) as caught:
                await compiler.compile(grammar)
            assert caught.value.reason == "INVALID_GRAMMAR"
            assert caught.value.field == "structured_output"
            assert "/project/" not in caught.value.message and "\n" not in caught.value.message


async def test_who_does_not_wait_any_more_changes_nothing(compiler: GrammarCompiler) -> None:
    grammar = regex("(left|right)[0-9]{4}")
    waiting = asyncio.create_task(compiler.compile(grammar))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await compiler.compile(grammar)


async def test_a_process_that_hangs_is_killed(source: TokenSource) -> None:
    before, hurried = compile_processes(), GrammarCompiler(source, timeout_s=0.2)
    try:
        await hurried.start_process()
        (pid,) = set(compile_processes()) - set(before)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(InvalidArgumentError, match="takes longer than"):
            await hurried.compile(regex("slow"))
        assert pid not in compile_processes()
    finally:
        await hurried.close()


async def test_a_process_that_dies_is_replaced(compiler: GrammarCompiler) -> None:
    """Whether it was idle or not: who was there need not be to blame."""
    await compiler.start_process()
    for pid in compile_processes():
        os.kill(pid, signal.SIGKILL)
    assert await compiler.compile(regex("lucky{7}"))

    pids = compile_processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    compiling = asyncio.create_task(compiler.compile(regex("unlucky{7}")))
    await asyncio.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert await compiling


async def test_a_process_that_does_not_start_is_said(
    source: TokenSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler_module.sys, "executable", "/bin/false")
    broken = GrammarCompiler(source)
    with pytest.raises(UnavailableError, match="does not start") as caught:
        await broken.compile(regex("x"))
    assert caught.value.reason == "GRAMMAR_COMPILER"
    await broken.close()


async def test_who_is_there_whenever_a_process_dies_is_refused(
    source: TokenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly, made = regex("deadly"), GrammarCompiler(source, timeout_s=60.0)

    async def die(process: object, grammar: object, timeout_s: float) -> bytes:
        os.kill(process._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return await compile_by(process, grammar, timeout_s)

    compile_by = compiler_module._Process.compile
    monkeypatch.setattr(compiler_module._Process, "compile", die)
    with pytest.raises(InvalidArgumentError, match="memory"):
        await made.compile(deadly)
    await made.close()
