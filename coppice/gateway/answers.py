"""Parts of outputs -> JSON of OpenAI's API: chunks of a stream, or one whole answer.

A whole answer is put together from the same parts as the chunks, so the two say the same.
"""

from __future__ import annotations

import base64
import codecs
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from coppice.gateway.outputs import Part
from coppice.gateway.tool_calls import ToolCall
from coppice.gateway.upstreams import TokenTexts
from shared.messages import (
    FinishInfo,
    PromptInfo,
    RoutedExperts,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from shared.messages.routed_experts import join_routed

Json = dict[str, Any]
# OpenAI's word for a token that cannot be: JSON has no infinity.
_LEAST_LOGPROB = -9999.0


class Answer(ABC):
    """The answer to one HTTP request, as it comes.

    Args:
        answer_id: Of the answer.
        model: As the client called it.
        num_outputs: In all.
        n: Outputs of each prompt.
        tokens: Bytes of the model's tokens.
        returns_ids: The client wants token ids.
        returns_speculation: The client wants to see how its text was speculated.
        is_whole: It is sent whole, so that its parts must be kept.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        num_outputs: int,
        n: int,
        tokens: TokenTexts,
        returns_ids: bool,
        returns_speculation: bool,
        is_whole: bool,
    ) -> None:
        self._is_whole = is_whole
        self._head: Json = {"id": answer_id, "created": int(time.time()), "model": model}
        self.num_output_tokens = 0
        """Of all outputs so far."""
        self._n = n
        self._tokens = tokens
        self._returns_ids = returns_ids
        self._returns_speculation = returns_speculation
        self._usage: dict[int, Usage] = {}
        self._infos: dict[int, PromptInfo] = {}
        self._finish: dict[int, tuple[str, FinishInfo | None]] = {}
        self._ids: list[list[int]] = [[] for _ in range(num_outputs)]
        self._rounds: list[list[Json]] = [[] for _ in range(num_outputs)]
        self._routed: list[list[RoutedExperts | None]] = [[] for _ in range(num_outputs)]

    @abstractmethod
    def choice_of(self, part: Part) -> Json | None:
        """Return the choice of a chunk; None: there is nothing to say."""

    @abstractmethod
    def whole_choice(self, index: int) -> Json:
        """Return a choice of the whole answer."""

    def note(self, part: Part) -> None:
        """Keep what a part says of its output."""
        if part.info is not None:
            self._infos[part.index] = part.info
            self._head["system_fingerprint"] = part.info.model_fingerprint
        if part.delta is not None:
            self.num_output_tokens += len(part.delta.token_ids)
            if self._is_whole:
                self._ids[part.index] += part.delta.token_ids
                self._rounds[part.index].append(_round(part.delta, part.text))
                self._routed[part.index].append(part.routed_experts)
        if part.finish_reason:
            assert part.usage is not None
            self._usage[part.index] = part.usage
            self._finish[part.index] = part.finish_reason, part.finish

    def chunk(self, part: Part, *, has_usage: bool) -> Json | None:
        """Return the chunk of a part; None: there is nothing to say.

        Args:
            has_usage: A last chunk has the usage, so that the others have a null.
        """
        choice = self.choice_of(part)
        if choice is None:
            return None
        choice["index"] = part.index
        choice["finish_reason"] = part.finish_reason or None
        choice |= self._own_fields(part)
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        return {**chunk, "usage": None} if has_usage else chunk

    def usage_chunk(self) -> Json:
        """Return the last chunk of a stream whose client wants the usage."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage}

    def whole(self) -> Json:
        """Return the whole answer."""
        choices = []
        for index, ids in enumerate(self._ids):
            reason, finish = self._finish[index]
            choice = {"index": index, **self.whole_choice(index), "finish_reason": reason}
            if self._returns_ids:
                choice["token_ids"] = ids
            if (routed := join_routed(self._routed[index])) is not None:
                choice["routed_experts"] = _routed(routed)
            if self._returns_speculation:
                choice["coppice"] = {
                    "rounds": self._rounds[index],
                    **self._statistics(index, finish),
                }
            choices.append(choice)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> Json:
        """Return the tokens of all outputs; a prompt counts once, however many outputs it has."""
        firsts = [self._usage[index] for index in sorted(self._usage) if index % self._n == 0]
        num_prompt = sum(usage.num_prompt_tokens for usage in firsts)
        num_output = sum(usage.num_output_tokens for usage in self._usage.values())
        num_cached = sum(usage.num_cached_tokens for usage in firsts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _own_fields(self, part: Part) -> Json:
        """Return the fields of a chunk's choice that OpenAI's API does not have."""
        found: Json = {}
        if self._returns_ids and part.delta is not None:
            found["token_ids"] = list(part.delta.token_ids)
        if part.routed_experts is not None:
            found["routed_experts"] = _routed(part.routed_experts)
        if self._returns_speculation:
            if part.delta is not None:
                found["coppice"] = _round(part.delta, part.text)
            elif part.finish_reason:
                found["coppice"] = self._statistics(part.index, part.finish)
        return found

    def _statistics(self, index: int, finish: FinishInfo | None) -> Json:
        info = self._infos[index]
        found = {
            "request_id": info.request_id,
            "seed": info.seed,
            "model_fingerprint": info.model_fingerprint,
        }
        if finish is None:  # ended by the gateway, after a tool call
            return found
        stats, timings = finish.speculation, finish.timings
        return {
            **found,
            "accept_length": round(stats.accept_length, 3),
            "num_rounds": stats.num_rounds,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_drafts": stats.num_accepted_drafts,
            "num_root_only_rounds": stats.num_root_only_rounds,
            "tree_size_histogram": list(stats.tree_size_histogram),
            "queue_ms": round(timings.queue_ms, 3),
            "time_to_first_token_ms": round(timings.time_to_first_token_ms, 3),
            "total_ms": round(timings.total_ms, 3),
        }


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, *, has_logprobs: bool, **options: Any) -> None:
        super().__init__(**options)
        num_outputs = options["num_outputs"]
        self._has_logprobs = has_logprobs
        self._texts: list[list[str]] = [[] for _ in range(num_outputs)]
        self._reasoning: list[list[str]] = [[] for _ in range(num_outputs)]
        self._calls: list[list[ToolCall]] = [[] for _ in range(num_outputs)]
        self._logprobs: list[list[Json]] = [[] for _ in range(num_outputs)]

    def note(self, part: Part) -> None:
        """Keep what a part says of its output."""
        super().note(part)
        index = part.index
        self._calls[index] += part.calls
        if self._is_whole:
            self._texts[index].append(part.text)
            self._reasoning[index].append(part.reasoning)
            self._logprobs[index] += self._content(part.logprobs)

    def choice_of(self, part: Part) -> Json | None:
        """Return the choice of a chunk."""
        delta = self._delta_of(part)
        has_more = part.finish_reason or part.logprobs or part.routed_experts
        if not (delta or has_more or self._returns_ids or self._returns_speculation):
            return None
        content = self._content(part.logprobs)
        logprobs = {"content": content, "refusal": None} if content else None
        return {"delta": delta, "logprobs": logprobs}

    def _delta_of(self, part: Part) -> Json:
        """Return what a chunk adds to the message, after `note`."""
        delta: Json = {}
        if part.info is not None:
            delta = {"role": "assistant", "content": "", "refusal": None}
        if part.text:
            delta["content"] = part.text
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.calls:
            before = len(self._calls[part.index]) - len(part.calls)
            delta["tool_calls"] = [
                {"index": before + i, **_call(call)} for i, call in enumerate(part.calls)
            ]
        return delta

    def whole_choice(self, index: int) -> Json:
        """Return a choice of the whole answer."""
        text, calls = "".join(self._texts[index]), self._calls[index]
        message: Json = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if reasoning := "".join(self._reasoning[index]):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = list(map(_call, calls))
        logprobs = None
        if self._has_logprobs:
            logprobs = {"content": self._logprobs[index], "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def _content(self, entries: Sequence[TokenLogprob]) -> list[Json]:
        return [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(*pair) for pair in entry.top],
            }
            for entry in entries
        ]

    def _entry(self, token_id: int, logprob: float) -> Json:
        token = self._tokens[token_id]
        return {
            "token": token.decode(errors="replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(token),
        }


class CompletionAnswer(Answer):
    """Of /v1/completions.

    Args:
        echoes: Text of each prompt that its outputs begin with; empty texts: they do not.
        has_logprobs: They were asked for.
    """

    kind = chunk_kind = "text_completion"

    def __init__(self, *, echoes: Sequence[str], has_logprobs: bool, **options: Any) -> None:
        super().__init__(**options)
        num_outputs = options["num_outputs"]
        self._echoes = echoes
        self._has_logprobs = has_logprobs
        self._new_logprobs = _no_logprobs()
        self._texts: list[list[str]] = [[] for _ in range(num_outputs)]
        self._logprobs: list[Json] = [_no_logprobs() for _ in range(num_outputs)]
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [decoder("replace") for _ in range(num_outputs)]
        self._offsets = [len(echoes[index // options["n"]]) for index in range(num_outputs)]

    def note(self, part: Part) -> None:
        """Keep what a part says of its output."""
        super().note(part)
        self._new_logprobs = self._columns(part)
        if self._is_whole:
            self._texts[part.index].append(self._text_of(part))
            for name, values in self._new_logprobs.items():
                self._logprobs[part.index][name] += values

    def choice_of(self, part: Part) -> Json | None:
        """Return the choice of a chunk."""
        text = self._text_of(part)
        has_more = part.finish_reason or part.logprobs or part.routed_experts
        if not (text or has_more or self._returns_ids or self._returns_speculation):
            return None
        return {"text": text, "logprobs": self._new_logprobs if part.logprobs else None}

    def whole_choice(self, index: int) -> Json:
        """Return a choice of the whole answer."""
        logprobs = self._logprobs[index] if self._has_logprobs else None
        return {"text": "".join(self._texts[index]), "logprobs": logprobs}

    def _text_of(self, part: Part) -> str:
        echo = self._echoes[part.index // self._n] if part.info is not None else ""
        return echo + part.reasoning + part.text

    def _columns(self, part: Part) -> Json:
        """Return the logprobs of a part as this API has them."""
        columns = _no_logprobs()
        for entry in part.logprobs:
            columns["tokens"].append(self._spelled(entry.token_id))
            columns["token_logprobs"].append(max(entry.logprob, _LEAST_LOGPROB))
            top = {
                self._spelled(token_id): max(logprob, _LEAST_LOGPROB)
                for token_id, logprob in entry.top
            }
            columns["top_logprobs"].append(top)
            columns["text_offset"].append(self._offsets[part.index])
            text = self._decoders[part.index].decode(self._tokens[entry.token_id])
            self._offsets[part.index] += len(text)
        return columns

    def _spelled(self, token_id: int) -> str:
        """Return the text of a token; one of half a character is spelled by its bytes."""
        token = self._tokens[token_id]
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _no_logprobs() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _routed(routed: RoutedExperts) -> Json:
    return {
        "ids": base64.b64encode(routed.ids).decode(),
        "shape": list(routed.shape),
        "dtype": routed.dtype,
        "num_experts": routed.num_experts,
    }


def _round(delta: TokenDelta, text: str) -> Json:
    found: Json = {
        "num_tokens": len(delta.token_ids),
        "num_accepted_drafts": delta.num_accepted_drafts,
        "num_accepted_draft_chars": min(delta.num_accepted_draft_chars, len(text)),
    }
    return found if delta.tree is None else {**found, "tree": dataclasses.asdict(delta.tree)}
