"""The process that compiles grammars: one JSON line in, one out, until its input ends.

    python -m shared.grammar.compile_main PARENT_PID DIRECTORY VOCAB_SIZE EOS_ID ...

A grammar that takes all memory or overflows the stack ends the process, and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import sys
from pathlib import Path

import xgrammar

from shared.errors import InvalidArgumentError
from shared.grammar.compile import compile_grammar
from shared.grammar.source import Grammar, GrammarKind
from shared.grammar.tokens import token_info
from shared.rpc.engine_main import die_with_parent

MAX_BYTES = 1 << 30
"""Of memory, beside what the process has when it is ready."""


def main() -> None:
    """Say "ready", then answer."""
    parent_pid, directory, vocab_size, *eos_token_ids = sys.argv[1:]
    die_with_parent(int(parent_pid))
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tokens = token_info(Path(directory), int(vocab_size), [int(i) for i in eos_token_ids])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=_num_threads(), cache_enabled=False)
    _limit_memory()
    _say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        grammar = Grammar(kind=GrammarKind(order["kind"]), source=order["source"])
        try:
            compiled = compile_grammar(compiler, grammar)
            _say({"compiled": base64.b64encode(compiled).decode()})
        except InvalidArgumentError as error:
            _say({"error": error.message})
        except MemoryError:
            os._exit(1)


def _num_threads() -> int:
    """Return how many threads compile: a long string of limited length takes one seconds."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        num_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MAX_BYTES, num_bytes + MAX_BYTES))


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
