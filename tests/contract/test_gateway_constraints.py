"""What HTTP says of outputs, as the orchestrator hears it; OpenAI's helpers get what they want."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from coppice.v1 import generation_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.rpc.status import to_status
from tests.chat_templates import CHATML
from tests.contract.test_gateway import Front, gateway
from tests.contract.test_gateway_chats import Player
from tests.fakes.generation import serving

pytestmark = pytest.mark.asyncio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


class User(BaseModel):
    """What is parsed."""

    name: str
    role: Literal["admin", "guest"]


class Refuser(Player):
    """Refuses every grammar."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        error = InvalidArgumentError(
            "structured_output.json_schema cannot be followed",
            reason="INVALID_GRAMMAR",
            field="structured_output.json_schema",
        )
        context.abort_with_status(to_status(error))
        yield pb.GenerateResponse()


async def sent(front: Front, player: Player, path: str, **fields: Any) -> pb.StructuredOutput:
    """Return what the orchestrator is asked for."""
    asked = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    answer = await front.http.post(f"/v1/{path}", json={"model": "m", **asked, **fields})
    assert answer.status_code == 200, answer.text
    return player.requests[-1].structured_output


MESSAGES: Any = [{"role": "user", "content": "x"}]
BOTH = ("completions", "chat/completions")
# Fields, and what they mean: a field of StructuredOutput and its value.
SAID: list[tuple[dict[str, Any], str, Any]] = [
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", TAG),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_regex": "a"}, "regex", "a"),
    ({"guided_choice": ["a"]}, "choice", ["a"]),
    ({"guided_grammar": "g"}, "ebnf", "g"),
    ({"json_schema": TEXT}, "json_schema", SCHEMA),
    ({"regex": "a"}, "regex", "a"),
    ({"ebnf": "g"}, "ebnf", "g"),
]
FORMATS: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "json_object"}, "json_schema", {"type": "object"}),
    (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "json_schema",
        SCHEMA,
    ),
    (TAG, "structural_tag", TAG),
]


def meant(message: pb.StructuredOutput) -> tuple[str, Any]:
    name = message.WhichOneof("constraint")
    assert name is not None
    value = getattr(message, name)
    if name == "choice":
        return name, list(value.texts)
    return name, json.loads(value) if name in ("json_schema", "structural_tag") else value


async def test_every_field_reaches_the_orchestrator() -> None:
    player = Player(CHATML, "x")
    with serving(player) as address:
        async with gateway(address, waits=False) as front:
            for fields, name, value in SAID:
                assert meant(await sent(front, player, BOTH[0], **fields)) == (name, value)
                chat = await sent(front, player, BOTH[1], **fields)
                # CHATML's models may think before they answer: it is a part of a tag.
                assert meant(chat)[0] == "structural_tag", name
            for form, name, value in FORMATS:
                plain = await sent(front, player, BOTH[1], response_format=form)
                tag = await sent(front, player, BOTH[1], response_format=form, tools=[TOOL])
                assert plain.WhichOneof("constraint") == "structural_tag", name
                assert json.dumps(value.get("format", value)) in plain.structural_tag
                assert json.dumps(SCHEMA) in tag.structural_tag
            for free in ({"response_format": {"type": "text"}}, {"guided_json": None}, {}):
                found = await sent(front, player, BOTH[1], **free)
                assert found.WhichOneof("constraint") is None
            for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
                found = await sent(front, player, BOTH[1], tools=[TOOL], tool_choice=choice)
                assert json.dumps(SCHEMA) in found.structural_tag


async def test_what_cannot_be_is_refused_by_its_field() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": "a", "guided_choice": ["a"]}, "regex"),
        ({"structured_outputs": {"regex": "a"}, "ebnf": "a"}, "structured_outputs"),
        ({"response_format": schema, "regex": "a"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [TOOL], "regex": "a"}, "regex"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
    ]
    with serving(Player(CHATML, "x")) as address:
        async with gateway(address, waits=False) as front:
            for fields, param in cases:
                asked = {"model": "m", "messages": MESSAGES, **fields}
                answer = await front.http.post("/v1/chat/completions", json=asked)
                error = answer.json()["error"]
                assert answer.status_code == 400, fields
                assert param in (error["param"], error["param"].partition("[")[0]), error
                assert error["param"].partition(".")[0].partition("[")[0] in error["message"]


async def test_what_the_orchestrator_refuses_has_the_clients_field() -> None:
    with serving(Refuser(CHATML, "x")) as address:
        async with gateway(address, waits=False) as front:
            for fields, param in (
                ({"guided_json": SCHEMA}, "guided_json"),
                ({"response_format": {"type": "json_object"}}, "response_format"),
                ({"tools": [TOOL]}, "tools"),
            ):
                for stream in (False, True):
                    asked = {"model": "m", "messages": MESSAGES, "stream": stream, **fields}
                    answer = await front.http.post("/v1/chat/completions", json=asked)
                    text = answer.text.partition("data: ")[2] if stream else answer.text
                    error = json.loads((text or answer.text).splitlines()[0])["error"]
                    assert (error["param"], error["code"]) == (param, "invalid_grammar")
                    assert error["message"] == f"{param} cannot be followed"


async def test_openais_parser_gets_its_model_whole_and_streamed() -> None:
    user = User(name="Zoë 🌲", role="guest")
    player = Player(CHATML, user.model_dump_json())
    with serving(player) as address:
        async with gateway(address, waits=False) as front:
            chat = front.client().chat.completions
            answer = await chat.parse(model="m", messages=MESSAGES, response_format=User)
            assert answer.choices[0].message.parsed == user
            async with chat.stream(model="m", messages=MESSAGES, response_format=User) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_completion()
            assert streamed.choices[0].message.parsed == user
            player.text = (
                f'<tool_call>\n{{"name": "User", "arguments": {player.text}}}\n</tool_call>'
            )
            tool = openai.pydantic_function_tool(User)
            called = await chat.parse(
                model="m", messages=MESSAGES, tools=[tool], tool_choice="required"
            )
            (call,) = called.choices[0].message.tool_calls or []
            assert call.function.parsed_arguments == user
    assert all(request.HasField("structured_output") for request in player.requests)
