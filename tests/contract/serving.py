"""An orchestrator on the loopback interface, for tests of the public API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from coppice import AsyncClient, Completion
from orchestrator.endpoints import Lookup, lookup
from orchestrator.server import Orchestrator
from shared.config import OrchestratorConfig
from tests.fakes import VOCAB_SIZE, FakeWorker, eventually


class Serving:
    """A running orchestrator.

    Args:
        port: Where it listens.
    """

    def __init__(self, orchestrator: Orchestrator, port: int) -> None:
        self.orchestrator = orchestrator
        self.port = port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_targets(self) -> int:
        return len(self.orchestrator.pool.targets)

    @property
    def num_drafts(self) -> int:
        return len(self.orchestrator.pool.drafts)

    async def sees(self, *, targets: int = 1, drafts: int = 1) -> None:
        """Wait until so many workers are in use."""
        await eventually(
            lambda: (self.num_targets, self.num_drafts) == (targets, drafts),
            what=f"{targets} targets and {drafts} drafts",
        )


@contextlib.asynccontextmanager
async def serving(
    model: Path,
    targets: Sequence[FakeWorker | str] = (),
    drafts: Sequence[FakeWorker | str] = (),
    *,
    lookup: Lookup = lookup,
    waits: bool = True,
    **fields: Any,
) -> AsyncIterator[Serving]:
    """Serve with these workers, given as such or by their addresses.

    Args:
        waits: Until all of them are in use.
        fields: Of OrchestratorConfig.
    """
    config = OrchestratorConfig(
        **{
            "host": "127.0.0.1",
            "port": 0,
            "targets": ",".join(map(_address, targets)),
            "drafts": ",".join(map(_address, drafts)),
            "model": str(model),
            "resolve_interval_s": 0.1,
            # A process that has to wait for a core for seconds must not look like a worker's fault.
            "step_timeout_s": 60.0,
            "draft_timeout_ms": 5_000.0,
            "draft_open_timeout_ms": 60_000.0,
            "drain_timeout_s": 0.2,
            "grammar_after_s": 0.0,
            **fields,
        }
    )
    orchestrator = Orchestrator(config, lookup=lookup)
    server = Serving(orchestrator, await orchestrator.start())
    try:
        if waits:
            await server.sees(targets=len(targets), drafts=len(drafts))
        yield server
    finally:
        await orchestrator.stop()


def write_model(directory: Path) -> Path:
    """Write what an orchestrator reads of a checkpoint, for the fakes' vocabulary."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    while len(vocab) < VOCAB_SIZE - 1:
        # Pairs of letters, so that tokens are of several lengths.
        count = len(vocab)
        vocab[f"{alphabet[count % 26 + 33]}{alphabet[count // 26 + 40]}"] = count
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    assert begin == VOCAB_SIZE - 1
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


async def drafted(client: AsyncClient, **request: Any) -> Completion:
    """Generate until some round had a tree in time, which is up to the machine."""
    async with asyncio.timeout(60):
        while True:
            done = await client.generate(**request)
            if done.speculation.num_draft_tokens:
                return done


async def freed(*workers: FakeWorker) -> None:
    """Wait until no worker holds a request."""
    for worker in workers:
        engine = worker.engine
        await eventually(lambda engine=engine: not engine.requests, what="every request freed")  # type: ignore[misc]


async def closed(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _address(worker: FakeWorker | str) -> str:
    return worker if isinstance(worker, str) else worker.address
