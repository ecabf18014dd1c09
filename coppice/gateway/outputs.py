"""The outputs of one HTTP request: each is a request of its own to an orchestrator.

n outputs of a prompt have the seeds seed, seed + 1, ...; each is resumed by itself if an
orchestrator goes away, and all are cancelled when one of them fails or nobody reads them any more.
GenerateRequest has no n: one call for all would have to say of each event, refusal and resumption
whose it is, and would save but the bytes of the prompt, as targets share no KV between requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from coppice.client import AsyncClient
from coppice.gateway.reasoning import ReasoningSplitter
from coppice.gateway.tool_calls import Parsed, ToolCall, ToolParser
from coppice.gateway.upstreams import TokenTexts
from coppice.request import RequestOptions
from shared.errors import CoppiceError
from shared.messages import (
    FinishInfo,
    FinishReason,
    GenerateEvent,
    PromptInfo,
    RoutedExperts,
    TokenDelta,
    TokenLogprob,
    Usage,
)

_UNREAD_PARTS = 4
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.ABORTED: "stop",
}
TOOL_CALLS = "tool_calls"


@dataclass(slots=True, kw_only=True)
class Part:
    """What is new of one output.

    Args:
        index: Of the output in the HTTP request.
        text: Of the answer; what is reasoning or a tool call is not in it.
        info: Said first.
        delta: As the orchestrator said it.
        finish_reason: OpenAI's word for why the output ended; "": it has not.
        finish: Said last, unless the gateway itself has ended the output.
        usage: With the finish reason.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    info: PromptInfo | None = None
    delta: TokenDelta | None = None
    finish_reason: str = ""
    finish: FinishInfo | None = None
    usage: Usage | None = None

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return those of its tokens, if they were asked for."""
        return self.delta.logprobs if self.delta is not None else ()

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Return those of its tokens, if they were asked for."""
        return self.delta.routed_experts if self.delta is not None else None


@dataclass(slots=True, kw_only=True)
class Output:
    """One output: what is asked of the orchestrator, and how its text is read.

    Args:
        prompt: Text, or None: `options` has token ids.
        splitter: None: reasoning is not told from the answer.
        parser: None: there are no tools.
        ends_after_call: One tool call is all that is wanted.
        constraint_param: Field of the HTTP request that says what the output must be.
        tokens: Bytes of the model's tokens.
    """

    index: int
    prompt: str | None
    options: RequestOptions
    tokens: TokenTexts
    splitter: ReasoningSplitter | None = None
    parser: ToolParser | None = None
    ends_after_call: bool = False
    constraint_param: str = ""
    has_calls: bool = False
    num_tokens: int = 0
    info: PromptInfo | None = None

    async def parts(self, client: AsyncClient) -> AsyncGenerator[Part, None]:
        """Yield what comes; closing the generator cancels the request.

        Raises: CoppiceError.
        """
        stream = client.stream(self.prompt, **self.options)
        async with contextlib.aclosing(stream):
            async for event in self._blamed(stream):
                match event:
                    case PromptInfo():
                        self.info = event
                        yield Part(index=self.index, info=event)
                    case TokenDelta():
                        if event.logprobs:
                            await self.tokens.learn(_ids_of(event.logprobs), client)
                        self.num_tokens += len(event.token_ids)
                        part = self._read(event)
                        yield part
                        if part.finish_reason:
                            return
                    case FinishInfo():
                        yield self._end(event)

    async def _blamed(
        self, stream: AsyncGenerator[GenerateEvent, None]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield events; what is wrong with the grammar has the field that the client has sent."""
        try:
            async for event in stream:
                yield event
        except CoppiceError as error:
            if error.field and error.field.startswith("structured_output"):
                error.message = error.message.replace(error.field, self.constraint_param)
                error.field = self.constraint_param
            raise

    def _read(self, delta: TokenDelta) -> Part:
        reasoning, text = "", delta.text
        if self.splitter is not None:
            reasoning, text = self.splitter.feed(text)
        parsed = self.parser.feed(text) if self.parser is not None else Parsed(text)
        part = Part(index=self.index, text=parsed.text, reasoning=reasoning, delta=delta)
        return self._with_calls(part, parsed.calls)

    def _end(self, finish: FinishInfo) -> Part:
        """Return the last part: what was held back, and why the output ended."""
        reasoning, text = self.splitter.flush() if self.splitter is not None else ("", "")
        calls: tuple[ToolCall, ...] = ()
        if self.parser is not None:
            last, rest = self.parser.feed(text), self.parser.flush()
            text, calls = last.text + rest.text, last.calls + rest.calls
        part = Part(index=self.index, text=text, reasoning=reasoning, finish=finish)
        part = self._with_calls(part, calls)
        part.usage = finish.usage
        is_call = self.has_calls and finish.reason is FinishReason.STOP
        part.finish_reason = part.finish_reason or (
            TOOL_CALLS if is_call else _REASONS[finish.reason]
        )
        return part

    def _with_calls(self, part: Part, calls: tuple[ToolCall, ...]) -> Part:
        """Add tool calls; the first one may be all that is wanted."""
        if self.ends_after_call and calls:
            assert self.info is not None, "a stream begins with its PromptInfo"
            calls = calls[:1]
            part.finish_reason = TOOL_CALLS
            part.usage = Usage(
                num_prompt_tokens=self.info.num_prompt_tokens,
                num_output_tokens=self.num_tokens,
                num_cached_tokens=self.info.num_cached_tokens,
            )
        part.calls = calls
        self.has_calls = self.has_calls or bool(calls)
        return part


async def all_parts(outputs: Sequence[Output], client: AsyncClient) -> AsyncGenerator[Part, None]:
    """Yield the parts of several outputs as they come, those of each in their order.

    Raises: CoppiceError of the first that fails; the others are cancelled.
    """
    if len(outputs) == 1:
        async with contextlib.aclosing(outputs[0].parts(client)) as parts:
            async for part in parts:
                yield part
        return
    async with contextlib.aclosing(_merged(outputs, client)) as parts:
        async for part in parts:
            yield part


async def _merged(outputs: Sequence[Output], client: AsyncClient) -> AsyncGenerator[Part, None]:
    # Bounded: who reads slowly makes the orchestrator wait, as with a single output.
    queue: asyncio.Queue[Part | BaseException | None] = asyncio.Queue(_UNREAD_PARTS)

    async def pump(output: Output) -> None:
        try:
            async with contextlib.aclosing(output.parts(client)) as parts:
                async for part in parts:
                    await queue.put(part)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(output)) for output in outputs]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ids_of(logprobs: Sequence[TokenLogprob]) -> Iterator[int]:
    for entry in logprobs:
        yield entry.token_id
        for token_id, _ in entry.top:
            yield token_id
