"""Chat messages -> the text of a prompt, by the checkpoint's own template, in jinja2's sandbox.

Templates see what transformers' `apply_chat_template` shows them, byte for byte the same: its
filters and functions, the special tokens, messages without empty fields. What a template cannot do
is reach anything else, or go on for ever: the sandbox forbids attributes of Python, messages are
plain JSON, and the compiled code looks at the time.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

DEFAULT, TOOL_USE = "default", "tool_use"
MAX_CHARS = 64 << 20
MAX_RENDER_S = 10.0
_MAX_NUMBER_BITS = 1 << 16
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Ends in a space, so that a template that strips its messages can be told.
_END_MARK = "COPPICE_CONTINUES_HERE "

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """A template that cannot render these messages, or refuses them."""


class ChatTemplate:
    """The templates of a model.

    Args:
        templates: By name; at least one.
        special_tokens: Texts of named special tokens.
    Raises: TemplateError if one is no Jinja template.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._compiled = {
                name: environment.from_string(source) for name, source in templates.items()
            }
            self._variables: frozenset[str] = frozenset().union(
                *(
                    jinja2.meta.find_undeclared_variables(environment.parse(source))
                    for source in templates.values()
                )
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template cannot be read: {error}") from error

    def mentions(self, text: str) -> bool:
        """Return whether a template has this text anywhere."""
        return any(text in source for source in self._sources.values())

    def reads(self, variable: str) -> bool:
        """Return whether a template looks at a variable that it does not set by itself."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: At least one.
            tools: JSON schemas of functions; None: none may be called.
            add_generation_prompt: End where the assistant begins to speak.
            continue_final_message: End inside of the last message, which the model goes on with.
            options: What else the template sees.
        Raises: TemplateError.
        """
        chat = [_aliased(_without_nulls(message)) for message in messages]
        name = self._name(has_tools=tools is not None)
        if continue_final_message:
            chat[-1] = self._marked(chat[-1], name)
        try:
            pieces = self._compiled[name].generate(
                **{**self._special_tokens, **(options or {})},
                messages=chat,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            text = _joined(pieces)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(f"the model's chat template refuses the chat: {error}") from error
        except (ArithmeticError, LookupError, RecursionError) as error:
            raise TemplateError(f"the model's chat template fails on the chat: {error}") from error
        return _cut(text) if continue_final_message else text

    def _name(self, *, has_tools: bool) -> str:
        if has_tools and TOOL_USE in self._compiled:
            return TOOL_USE
        if DEFAULT in self._compiled:
            return DEFAULT
        raise TemplateError(
            f"the model has chat templates {sorted(self._compiled)}, and none of them is the "
            "default; name one with --chat-template of the orchestrator"
        )

    def _marked(self, message: dict[str, Any], name: str) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, str) or not content:
            raise TemplateError("continue_final_message needs a last message with content")
        if "content" not in self._sources[name]:
            raise TemplateError("the model's chat template has no content to continue")
        return {**message, "content": content + _END_MARK}


def _joined(pieces: Iterable[str]) -> str:
    """Return the text of pieces. Raises: TemplateError if it gets too large."""
    found: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            raise TemplateError(f"the prompt has more than {MAX_CHARS} characters")
        found.append(piece)
    return "".join(found)


def _cut(text: str) -> str:
    """Return a text up to the mark; the spaces before it go if the template strips messages."""
    index = text.rfind(_END_MARK.strip())
    if index < 0:
        raise TemplateError("the model's chat template leaves out the last message")
    is_kept = text[index : index + len(_END_MARK)] == _END_MARK
    return text[:index] if is_kept else text[:index].rstrip()


def _without_nulls(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the names that templates look for."""
    given = (message[name] for name in _REASONING_FIELDS if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _GenerationBlocks(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}, with which training marks what the model said."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_pass_on", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _pass_on(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Context(jinja2.runtime.Context):
    """The variables of one rendering, and the time at which it must have ended."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._until_s = time.monotonic() + MAX_RENDER_S

    def check_time(self) -> None:
        """Raise TemplateError if the rendering takes too long."""
        if time.monotonic() > self._until_s:
            raise TemplateError(f"the prompt takes more than {MAX_RENDER_S:g} s to render")


class _TimedCode(jinja2.compiler.CodeGenerator):
    """Code that looks at the time in every turn of a loop and every call of a macro."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: Any) -> None:
        """Write a block of statements: the body of a loop, of a macro, of a branch."""
        self.writeline("context.check_time()")
        super().blockvisit(nodes, frame)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which no product is huge and nothing goes on for ever."""

    context_class = _Context
    code_generator_class = _TimedCode
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Return a product or a power unless it is larger than any prompt needs."""
        if _product_len(left, right) > MAX_CHARS:
            raise TemplateError(f"a product has more than {MAX_CHARS} characters or items")
        if _num_bits(operator, left, right) > _MAX_NUMBER_BITS:
            raise TemplateError(f"a number has more than {_MAX_NUMBER_BITS} bits")
        return super().call_binop(context, operator, left, right)


def _num_bits(operator: str, left: Any, right: Any) -> int:
    """Return the most bits that a product or a power of integers has; 0: others are no danger."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    if operator == "**":
        return left.bit_length() * right
    return left.bit_length() + right.bit_length()


def _product_len(left: Any, right: Any) -> int:
    """Return the length of a text or a list times a number; 0 for a product of numbers."""
    for whole, count in ((left, right), (right, left)):
        if isinstance(whole, str | list | tuple) and isinstance(count, int):
            return len(whole) * count
    return 0


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON as it is; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
