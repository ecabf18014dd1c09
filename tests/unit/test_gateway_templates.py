"""Chat templates render as transformers renders them, byte for byte, and can do nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from coppice.gateway import chat_template
from coppice.gateway.chat_template import ChatTemplate, TemplateError
from coppice.gateway.errors import ApiError
from coppice.gateway.messages import template_messages
from coppice.gateway.prompts import render
from orchestrator.model_card import read_model_card
from orchestrator.tokenizer import Tokenizer
from shared.errors import ConfigError
from tests.chat_templates import FAMILIES, SPECIAL_TOKENS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says the weather, e.g. "grün" <b>&',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "days": 2}},
}
ASK = {"role": "user", "content": " What's the weather\nin Zürich? <&> 🌦 "}
SYSTEM = {"role": "system", "content": "You are brief."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [ASK, {"role": "assistant", "content": " Wet. "}, {"role": "user", "content": "Why?"}],
    "calls": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "12 degrees"},
    ],
    "two_calls": [
        SYSTEM,
        ASK,
        {"role": "assistant", "content": "So:", "tool_calls": [CALL, {**CALL, "id": "bcdefghij"}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "12"},
        {"role": "tool", "tool_call_id": "bcdefghij", "content": "13"},
    ],
    "reasoning": [
        ASK,
        {"role": "assistant", "content": "Wet.", "reasoning_content": "It rains\n"},
    ],
    "marked": [
        ASK,
        {"role": "assistant", "content": "<think>\nIt rains\n</think>\n\nWet."},
        {"role": "user", "content": "Why?"},
    ],
    "nulls": [ASK, {"role": "assistant", "content": "Wet.", "tool_calls": None, "name": None}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"tools": [WEATHER, CLOCK]},
    "own": {"enable_thinking": False, "reasoning_effort": "high", "date_string": "1 May 2026"},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
}


def write_tokenizer(directory: Path, *, begins: bool) -> None:
    """Write a byte-level tokenizer that adds `<s>` by itself, or does not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|eot_id|>", "<|im_end|>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return transformers' tokenizer, whose template each test names."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("reference")
    write_tokenizer(directory, begins=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.AutoTokenizer.from_pretrained(str(directory))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_is_rendered_as_transformers_does(
    reference: Any, family: str, chat: str, options: str
) -> None:
    """Or refused where transformers refuses it."""
    template = ChatTemplate({"default": FAMILIES[family]}, SPECIAL_TOKENS)
    messages, given = CHATS[chat], dict(OPTIONS[options])
    prompts = {"add_generation_prompt": given.pop("add_generation_prompt", True)}
    prompts["continue_final_message"] = given.pop("continue_final_message", False)
    tools = given.pop("tools", None)
    try:
        expected = reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=FAMILIES[family],
            tokenize=False,
            **prompts,
            **given,
        )
    except Exception:  # of jinja2 or of transformers
        with pytest.raises(TemplateError):
            template.render(messages, tools=tools, options=given, **prompts)
        return
    assert template.render(messages, tools=tools, options=given, **prompts) == expected


def test_few_of_the_chats_above_are_refused() -> None:
    """Else the test above would compare refusals."""
    num_rendered = 0
    for source in FAMILIES.values():
        template = ChatTemplate({"default": source}, SPECIAL_TOKENS)
        for messages in CHATS.values():
            try:
                num_rendered += bool(template.render(messages, tools=[WEATHER]))
            except TemplateError:
                continue
    assert num_rendered >= 38, num_rendered


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("family", ["headers", "brackets", "turns", "thinking"])
def test_a_rendered_chat_has_exactly_one_begin(
    reference: Any, tmp_path: Path, family: str, *, begins: bool
) -> None:
    """Whether the tokenizer would add one by itself or not; and the ids are transformers'."""
    write_tokenizer(tmp_path, begins=begins)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    text = ChatTemplate({"default": FAMILIES[family]}, SPECIAL_TOKENS).render([ASK])
    ids = tokenizer.encode(text, adds_special=False)
    begin = tokenizer.encode("<s>", adds_special=False)
    assert len(begin) == 1 and ids[0] == begin[0] and ids.count(begin[0]) == 1
    encoded = reference.apply_chat_template(
        [ASK], chat_template=FAMILIES[family], add_generation_prompt=True, return_dict=False
    )
    assert list(ids) == list(encoded)
    if begins:
        assert tokenizer.encode(text).count(begin[0]) == 2, "what adding it again would give"


def test_the_template_of_tools_is_chosen_when_there_are_tools() -> None:
    templates = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    template = ChatTemplate(templates, {})
    assert template.render([ASK]) == "plain"
    assert template.render([ASK], tools=[WEATHER, CLOCK]) == "with 2"
    with pytest.raises(TemplateError, match="none of them is the default"):
        ChatTemplate({"rag": "x"}, {}).render([ASK])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ 'x' * n }}",
        "{% include 'file' %}",
    ],
)
def test_a_template_reaches_nothing_and_its_failure_is_a_refusal(source: str) -> None:
    try:
        text = ChatTemplate({"default": source}, {}).render([ASK])
    except TemplateError:
        return
    assert text == "", "the sandbox hides what it does not forbid"


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        ChatTemplate({"default": "{% if %}"}, {})


# --- where a checkpoint has its templates ------------------------------------------------------


def test_templates_are_read_from_where_checkpoints_have_them(tmp_path: Path) -> None:
    def card(**options: str) -> Any:
        return read_model_card(tmp_path, name="m", started_s=1.5, **options)

    assert card().chat_templates == {} and card().special_tokens == {}
    config: dict[str, Any] = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": "one",
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert card().chat_templates == {"default": "one"}
    assert card().special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<p>", "eos_token": "<e>"}')
    assert card().special_tokens == {"bos_token": "<s>", "eos_token": "<e>", "pad_token": "<p>"}
    config["chat_template"] = [{"name": "default", "template": "a"}, {"name": "x", "template": "b"}]
    config["added_tokens_decoder"] = {}
    path.write_text(json.dumps(config))
    assert card().chat_templates == {"default": "a", "x": "b"}
    assert card().special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("file ü")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert card().chat_templates == {"default": "file ü", "tool_use": "tools"}
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert card(chat_template=str(own)).chat_templates == {"default": "own"}
    with pytest.raises(ConfigError, match="--chat-template"):
        card(chat_template=str(tmp_path / "none"))
    path.write_text("{")
    assert card().special_tokens == {"eos_token": "<e>", "pad_token": "<p>"}


# --- messages ----------------------------------------------------------------------------------


def test_messages_become_what_templates_take() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "index": 0,
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                }
            ],
        },
    ]
    first, second, third = template_messages(messages, knows_developer=False)
    assert first == {"role": "system", "content": "a"}
    assert second["content"] == "b\nc"
    assert third == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        ],
    }
    assert template_messages(messages, knows_developer=True)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "pirate", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        ({"role": "assistant", "audio": {"id": "1"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_message_that_cannot_be_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        template_messages([message], knows_developer=False)
    assert caught.value.param == param and caught.value.status == 400


# --- what a chat may cost ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "limit", "value", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "MAX_CHARS", 5, "more than 5"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "MAX_RENDER_S", -1.0, "to render"),
        ("{{ 'x' * count }}", "MAX_CHARS", 5, "a product"),
        ("{{ count * [1, 2] }}", "MAX_CHARS", 5, "a product"),
        ("{{ 2 ** (count - 3) }}", "_MAX_NUMBER_BITS", 5, "a number"),
        ("{{ 2 * count }}", "_MAX_NUMBER_BITS", 4, "a number"),
    ],
)
def test_a_chat_has_a_largest_size_and_a_longest_time(
    source: str, limit: str, value: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate({"default": source}, {})
    options = {"count": 3}
    assert template.render([ASK, ASK], options=options)
    monkeypatch.setattr(chat_template, limit, value)
    with pytest.raises(TemplateError, match=text):
        template.render([ASK, ASK], options={"count": 6})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% set x = i * j %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(99) }}",
        "{% for i in [0] recursive %}{{ loop([0, 0]) if loop.depth < 99 }}{% endfor %}",
        "{% macro m(n) %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}"
        "{% for j in range(99999) if j < 0 or m is none %}{% endfor %}{% endfor %}",
    ],
    ids=["loops", "assignments", "macros", "recursion", "filtered"],
)
def test_what_would_go_on_for_ever_without_a_word_is_ended(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.02)
    with pytest.raises(TemplateError, match=r"more than 0\.02 s to render"):
        ChatTemplate({"default": source}, {}).render([ASK])


def test_products_are_what_they_were() -> None:
    source = "{{ 'ab' * 2 }} {{ 3 * 4 }} {{ 2.5 * 2 }} {{ [1] * 2 }} {{ 2 ** 3 }} {{ 2 ** -1 }}"
    assert ChatTemplate({"default": source}, {}).render([ASK]) == "abab 12 5.0 [1, 1] 8 0.5"


@pytest.mark.asyncio
async def test_others_are_served_while_a_chat_is_rendered() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def render_slowly(*_: object, **__: object) -> str:
        has_begun.set()
        assert may_end.wait(timeout=30), "the event loop stands still"
        return "prompt"

    template = SimpleNamespace(mentions=lambda _: False, render=render_slowly)
    coming = asyncio.create_task(
        render(
            cast(ChatTemplate, template),
            [ASK],
            tools=[],
            add_generation_prompt=True,
            continue_final_message=False,
            options={},
        )
    )
    while not has_begun.is_set():
        await asyncio.sleep(0.001)
    may_end.set()
    assert await coming == "prompt"
