"""Requests of OpenAI's API -> prompts and the outputs that are asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from coppice.client import AsyncClient
from coppice.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from coppice.gateway.chat_template import ChatTemplate, TemplateError
from coppice.gateway.constraints import Constraint, after_reasoning, constraint_of
from coppice.gateway.errors import ApiError, bad_request, unsupported
from coppice.gateway.fields import ChatFields, CompletionFields, GenerationFields, Tool
from coppice.gateway.messages import template_messages, text_of
from coppice.gateway.outputs import Output
from coppice.gateway.reasoning import ReasoningMarks, ReasoningSplitter, reasoning_marks
from coppice.gateway.tool_calls import needs_special_tokens, tool_format, tool_parser
from coppice.gateway.tool_choice import must_call, tool_constraint
from coppice.gateway.upstreams import QUESTION_TIMEOUT_S, Model
from coppice.request import RequestOptions

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """How texts of models are read, as configured: names, or "auto"."""

    tool_calls: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks for.

    Args:
        answer: Takes what comes.
    """

    outputs: list[Output]
    answer: Answer


async def completion_job(
    fields: CompletionFields, model: Model, client: AsyncClient, *, answer_id: str, max_choices: int
) -> Job:
    """Return the job of /v1/completions.

    Raises: ApiError, CoppiceError.
    """
    prompts = fields.prompts
    if fields.best_of not in (None, fields.n):
        raise unsupported("best_of", f"no outputs are thrown away; it may be n = {fields.n}")
    if fields.echo and fields.logprobs is not None:
        raise unsupported("echo", "tokens of prompts have no logprobs; leave out logprobs or echo")
    _check_count(len(prompts) * fields.n, max_choices)
    constraint = constraint_of(fields)
    outputs = []
    for index, (prompt, choice) in enumerate(itertools.product(prompts, range(fields.n))):
        options = fields.options(choice=choice)
        options["max_new_tokens"] = fields.max_tokens
        options["logprobs"] = fields.logprobs is not None
        options["top_logprobs"] = fields.logprobs or 0
        options["add_special_tokens"] = fields.add_special_tokens
        _name(options, fields.request_id, index, len(prompts) * fields.n)
        output = _output(index, prompt, options, model)
        _constrain(output, constraint)
        outputs.append(output)
    echoes = [await _echo(prompt, client) if fields.echo else "" for prompt in prompts]
    answer = CompletionAnswer(
        answer_id=f"cmpl-{answer_id}",
        num_outputs=len(outputs),
        echoes=echoes,
        has_logprobs=fields.logprobs is not None,
        **_answer_options(fields, model),
    )
    return Job(outputs=outputs, answer=answer)


async def chat_job(
    fields: ChatFields, model: Model, parsers: Parsers, *, answer_id: str, max_choices: int
) -> Job:
    """Return the job of /v1/chat/completions.

    Raises: ApiError.
    """
    constraint = constraint_of(fields)
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs needs logprobs; set it as well", param="top_logprobs")
    _check_count(fields.n, max_choices)
    template = template_of(model)
    marks = reasoning_marks(parsers.reasoning, template)
    tools = _tools(fields, template, parsers)
    if tools:
        has_args_mark = template.mentions("[ARGS]")
        constraint = tool_constraint(fields, tools, constraint, has_args_mark=has_args_mark)
    prompt = await render(
        template,
        fields.messages,
        tools=fields.tools if tools else [],
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        options=_template_options(fields, template),
    )
    continued = text_of(fields.messages[-1]) if fields.continue_final_message else ""
    outputs = []
    for index in range(fields.n):
        options = _chat_options(fields, index, tools, marks)
        output = _output(index, prompt, options, model)
        output.splitter = _splitter(marks, prompt, continued)
        if constraint is not None:
            is_open = marks is not None and marks.is_open_in(prompt, continued=continued)
            _constrain(output, after_reasoning(constraint, marks, is_open=is_open))
        if tools:
            names = [tool.function.name for tool in fields.tools]
            output.parser = tool_parser(tools, names)
            output.ends_after_call = not fields.parallel_tool_calls
        outputs.append(output)
    answer = ChatAnswer(
        answer_id=f"chatcmpl-{answer_id}",
        num_outputs=len(outputs),
        has_logprobs=fields.logprobs,
        **_answer_options(fields, model),
    )
    return Job(outputs=outputs, answer=answer)


def _chat_options(
    fields: ChatFields, index: int, tools: str, marks: ReasoningMarks | None
) -> RequestOptions:
    """Return what is asked of the orchestrator for one output of a chat.

    Args:
        tools: Format of tool calls; "": there are no tools.
        marks: Of reasoning; None: it is not told from the answer.
    """
    options = fields.options(choice=index)
    options["max_new_tokens"] = fields.max_new_tokens
    options["logprobs"], options["top_logprobs"] = fields.logprobs, fields.top_logprobs
    options["add_special_tokens"] = fields.add_special_tokens
    options["session_id"] = fields.session_id or fields.prompt_cache_key
    if (tools and needs_special_tokens(tools)) or (marks and marks.is_special):
        options["keep_special_tokens"] = True
    _name(options, fields.request_id, index, fields.n)
    return options


def template_of(model: Model) -> ChatTemplate:
    """Return the chat template of a model.

    Raises: ApiError if it has none that can be used.
    """
    try:
        template = model.template
    except TemplateError as error:
        raise _refused(error) from None
    if template is None:
        raise bad_request(
            f"the model {model.card.name!r} has no chat template: use /v1/completions, or give the "
            "orchestrator one with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    return template


async def render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    *,
    tools: list[Tool],
    add_generation_prompt: bool,
    continue_final_message: bool,
    options: Mapping[str, Any],
) -> str:
    """Return the prompt of a chat; other requests go on meanwhile.

    Raises: ApiError.
    """
    if continue_final_message and add_generation_prompt:
        raise bad_request(
            "continue_final_message goes on with a message, add_generation_prompt begins a new "
            "one; set the latter to false",
            param="continue_final_message",
        )

    def work() -> str:
        knows_developer = template.mentions("developer")
        schemas = [tool.model_dump(exclude_none=True) for tool in tools]
        return template.render(
            template_messages(messages, knows_developer=knows_developer),
            tools=schemas or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options,
        )

    try:
        return await asyncio.to_thread(work)
    except TemplateError as error:
        raise _refused(error) from None


def check_template_options(options: Mapping[str, Any]) -> None:
    """Refuse options of templates that are fields of their own. Raises: ApiError."""
    for name in sorted(_RESERVED & options.keys()):
        param = f"chat_template_kwargs.{name}"
        raise bad_request(f"{param} is a field of the request; set it there", param=param)


def _template_options(fields: ChatFields, template: ChatTemplate) -> dict[str, Any]:
    check_template_options(fields.chat_template_kwargs)
    options = dict(fields.chat_template_kwargs)
    if fields.reasoning_effort is not None:
        if not template.reads("reasoning_effort"):
            raise unsupported("reasoning_effort", "the model's chat template takes no such hint")
        options.setdefault("reasoning_effort", fields.reasoning_effort)
    return options


def _tools(fields: ChatFields, template: ChatTemplate, parsers: Parsers) -> str:
    """Return the format of tool calls; "": the model is given no tools.

    Raises: ApiError if it cannot take any.
    """
    must_call(fields)
    if not fields.tools or fields.tool_choice == "none":
        return ""
    if not template.reads("tools"):
        raise unsupported("tools", "the model's chat template has no place for them")
    name = tool_format(parsers.tool_calls, template)
    if name == "none":
        raise unsupported(
            "tools", "the model's format of tool calls is not known; see --tool-call-parser"
        )
    return name


def _splitter(
    marks: ReasoningMarks | None, prompt: str, continued: str
) -> ReasoningSplitter | None:
    if marks is None:
        return None
    return ReasoningSplitter(marks, is_open=marks.is_open_in(prompt, continued=continued))


def _output(index: int, prompt: str | list[int], options: RequestOptions, model: Model) -> Output:
    if isinstance(prompt, str):
        return Output(index=index, prompt=prompt, options=options, tokens=model.tokens)
    options["token_ids"] = prompt
    return Output(index=index, prompt=None, options=options, tokens=model.tokens)


def _constrain(output: Output, constraint: Constraint | None) -> None:
    if constraint is not None:
        options = cast(dict[str, Any], output.options)
        options[constraint.keyword] = constraint.value
        output.constraint_param = constraint.param


def _answer_options(fields: GenerationFields, model: Model) -> dict[str, Any]:
    if fields.return_trees and not fields.stream:
        raise bad_request(
            "return_trees needs stream: an answer is not kept with its trees", param="return_trees"
        )
    return {
        "model": fields.model,
        "n": fields.n,
        "tokens": model.tokens,
        "returns_ids": fields.return_token_ids,
        "returns_speculation": fields.return_speculation or fields.return_trees,
        "is_whole": not fields.stream,
    }


def _name(options: RequestOptions, request_id: str, index: int, count: int) -> None:
    """Name a request to the orchestrator as the client does; of several each has a number."""
    if request_id:
        options["request_id"] = request_id if count == 1 else f"{request_id}-{index}"


async def _echo(prompt: str | list[int], client: AsyncClient) -> str:
    if isinstance(prompt, str):
        return prompt
    found = await client.detokenize(prompt, skip_special_tokens=True, timeout_s=QUESTION_TIMEOUT_S)
    return found.text


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise bad_request(f"{count} outputs are asked for, at most {most} are allowed", param="n")


def _refused(error: TemplateError) -> ApiError:
    return bad_request(str(error), param="messages", code="chat_template_error")
