"""Between a target's sessions and its engine: an open with a grammar waits until that is compiled.

Nobody else waits for it, neither requests nor the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shared.errors import CoppiceError, UnavailableError
from shared.grammar.compiler import GrammarCompiler
from shared.messages import RequestFailure, TargetClose, TargetOpen
from shared.rpc.status import failure_of


class GrammarGate:
    """Lets messages through, those of one request in order.

    Args:
        send: Queues messages for the engine.
        refuse: Takes the failures of requests whose grammar cannot be followed.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Any]], None],
        refuse: Callable[[Sequence[RequestFailure]], None],
    ) -> None:
        self.compiler: GrammarCompiler | None = None
        self._send = send
        self._refuse = refuse
        self._waiting: dict[str, asyncio.Task[None]] = {}  # by request_id

    @property
    def num_waiting(self) -> int:
        """Return the requests that wait for their grammars."""
        return len(self._waiting)

    def send(self, messages: Sequence[Any]) -> None:
        """Send messages on, but for opens whose grammars are not compiled yet."""
        self._send([ready for message in messages if (ready := self._pass(message)) is not None])

    async def close(self) -> None:
        """End all waits."""
        tasks = [*self._waiting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.compiler is not None:
            await self.compiler.close()

    def _pass(self, message: Any) -> Any | None:
        """Return what the engine gets now; None: nothing yet, or nothing at all."""
        if isinstance(message, TargetOpen | TargetClose):
            waiting = self._waiting.pop(message.request_id, None)
            if waiting is not None:
                waiting.cancel()
        if not isinstance(message, TargetOpen) or message.grammar is None:
            return message
        compiled = None if self.compiler is None else self.compiler.known(message.grammar)
        if compiled is not None:
            return replace(message, compiled_grammar=compiled)
        task = asyncio.create_task(self._compile(message))
        self._waiting[message.request_id] = task
        return None

    async def _compile(self, message: TargetOpen) -> None:
        assert message.grammar is not None
        try:
            if self.compiler is None:
                raise UnavailableError("the target is not ready", field="structured_output")
            compiled = await self.compiler.compile(message.grammar)
        except CoppiceError as error:
            self._forget(message)
            self._refuse(
                [
                    failure_of(
                        error, request_id=message.request_id, target_epoch=message.target_epoch
                    )
                ]
            )
        else:
            self._forget(message)
            self._send([replace(message, compiled_grammar=compiled)])

    def _forget(self, message: TargetOpen) -> None:
        if self._waiting.get(message.request_id) is asyncio.current_task():
            del self._waiting[message.request_id]
