"""What models write, by the gateway to OpenAI's client: an orchestrator plays back text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.errors import UnavailableError
from shared.rpc.status import to_status
from tests.chat_templates import BRACKETS, CHATML, HEADERS, SPECIAL_TOKENS, THINKING
from tests.contract.test_gateway import Front, gateway
from tests.fakes.generation import serving

pytestmark = pytest.mark.asyncio

WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '{"name": "weather", "arguments": {"city": "Zürich 🌦"}}'
TEMPLATES = {
    "hermes": CHATML,
    "llama3": HEADERS,
    "mistral": BRACKETS,
    "thinking": THINKING,
}


class Player(pb_grpc.GenerationServiceServicer):
    """Says the same text to everybody, a few characters per token.

    Args:
        template: Of its model, whose name is "m".
    """

    def __init__(self, template: str, text: str) -> None:
        self.text = text
        self.requests: list[pb.GenerateRequest] = []
        self.breaks_after = -1
        self._card = pb.ModelCard(
            name="m",
            model_fingerprint="f00d",
            max_context_len=1000,
            vocab_size=1000,
            has_tokenizer=True,
            chat_templates={"default": template},
            special_tokens=SPECIAL_TOKENS,
        )

    def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._card])

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        data = self.text.encode()
        pieces = [data[2 * i : 2 * i + 2] for i in request.token_ids]
        return pb.DetokenizeResponse(text="", token_bytes=pieces)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        info = pb.PromptInfo(
            request_id="r", model="m", num_prompt_tokens=5, seed=3, model_fingerprint="f00d"
        )
        yield pb.GenerateResponse(prompt_info=info)
        data = self.text.encode()
        sent = len(request.resume_token_ids.ids)
        known = data[: 2 * sent].decode(errors="ignore")
        while 2 * sent < len(data):
            if sent == self.breaks_after:
                self.breaks_after = -1
                context.abort_with_status(to_status(UnavailableError("gone", reason="DRAINING")))
            so_far = data[: 2 * sent + 2].decode(errors="ignore")  # two bytes per token
            delta = pb.TokenDelta(token_ids=[sent], token_offset=sent, text=so_far[len(known) :])
            if request.output.logprobs:
                delta.logprobs.add(token_id=sent, logprob=-math.inf if sent == 1 else -0.5)
            known = so_far
            sent += 1
            yield pb.GenerateResponse(delta=delta)
        finish = pb.FinishInfo(reason=pb.FINISH_REASON_STOP)
        finish.usage.num_prompt_tokens, finish.usage.num_output_tokens = 5, sent
        yield pb.GenerateResponse(finish=finish)


def played(template: str, text: str) -> tuple[Player, Any]:
    """Return a player, and a context in which it serves at an address."""
    player = Player(template, text)
    return player, serving(player)


async def ask(front: Front, **fields: Any) -> tuple[ChatCompletion, ChatCompletion]:
    """Return the answer, whole and put together of a stream by OpenAI's own helper."""
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Weather?"}],
        **fields,
    }
    client = front.client()
    whole = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    return whole, streamed


def said(completion: ChatCompletion) -> tuple[Any, ...]:
    """Return what an answer says but for the ids that are made up."""
    choice = completion.choices[0]
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or []
        if call.type == "function"
    ]
    reasoning = (choice.message.model_extra or {}).get("reasoning_content")
    return choice.message.content or "", calls, reasoning, choice.finish_reason


CALLED = [("weather", {"city": "Zürich 🌦"})]
CASES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("hermes", "It rains 🌦.", ("It rains 🌦.", [], None, "stop")),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", CALLED, None, "tool_calls")),
    (
        "hermes",
        f"<think>\nHm 🤔\n</think>\n\nLet me see.\n<tool_call>{CALL}</tool_call>"
        f"\n<tool_call>{CALL}</tool_call>",
        ("Let me see.\n", CALLED * 2, "\nHm 🤔\n", "tool_calls"),
    ),
    ("hermes", "<tool_call>none</tool_call>", ("<tool_call>none</tool_call>", [], None, "stop")),
    ("llama3", f"<|python_tag|>{CALL}", ("", CALLED, None, "tool_calls")),
    ("llama3", CALL, ("", CALLED, None, "tool_calls")),
    ("mistral", f"[TOOL_CALLS][{CALL}]", ("", CALLED, None, "tool_calls")),
]


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
async def test_calls_and_reasoning_are_told_from_the_answer(
    family: str, text: str, expected: tuple[Any, ...]
) -> None:
    player, server = played(TEMPLATES[family], text)
    with server as address:
        async with gateway(address, waits=False) as front:
            whole, streamed = await ask(front, tools=[WEATHER])
    assert said(whole) == expected
    assert said(streamed) == expected
    asked = player.requests[0]
    assert asked.HasField("add_special_tokens") and not asked.add_special_tokens
    assert asked.output.keep_special_tokens == (family != "hermes")
    assert "weather" in asked.text and not asked.stopping.HasField("max_new_tokens")
    if family != "hermes":
        assert asked.text.count("<s>") == 1 and asked.text.startswith("<s>")


async def test_a_prompt_that_begins_reasoning_has_its_answer_split() -> None:
    player, server = played(THINKING, "Rain.</think>\n\nIt rains.")
    with server as address:
        async with gateway(address, waits=False) as front:
            whole, streamed = await ask(front, logprobs=True)
    assert player.requests[0].text.endswith("<think>\n")
    assert said(whole) == said(streamed) == ("It rains.", [], "Rain.", "stop")
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(e.bytes or b"") for e in logprobs.content).decode() == player.text
    assert [e.logprob for e in logprobs.content[:3]] == [-0.5, -9999.0, -0.5]


async def test_one_call_is_enough_where_no_more_are_wanted() -> None:
    """The rest is not generated: the request is cancelled."""
    text = f"<tool_call>{CALL}</tool_call>" * 50
    player, server = played(CHATML, text)
    with server as address:
        async with gateway(address, waits=False) as front:
            whole, streamed = await ask(front, tools=[WEATHER], parallel_tool_calls=False)
    assert said(whole) == said(streamed) == ("", CALLED, None, "tool_calls")
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= len(text.encode()) // 100 + 2


async def test_tools_that_may_not_be_called_are_not_shown() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    player, server = played(CHATML, text)
    with server as address:
        async with gateway(address, waits=False) as front:
            whole, _ = await ask(front, tools=[WEATHER], tool_choice="none")
    assert said(whole) == (text, [], None, "stop")
    assert "weather" not in player.requests[0].text


async def test_the_answer_goes_back_into_the_next_turn() -> None:
    """As OpenAI's client has it: calls, their results, and then text."""
    player, server = played(CHATML, f"<tool_call>{CALL}</tool_call>")
    with server as address:
        async with gateway(address, waits=False) as front:
            messages: list[Any] = [{"role": "user", "content": "Weather?"}]
            answer, _ = await ask(front, tools=[WEATHER], messages=messages)
            message = answer.choices[0].message
            assert message.tool_calls is not None
            messages += [
                message.model_dump(),
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet 🌧"},
            ]
            player.text = "It is wet."
            again, _ = await ask(front, tools=[WEATHER], messages=messages)
    assert said(again) == ("It is wet.", [], None, "stop")
    assert f"<tool_call>\n{CALL}\n</tool_call>" in player.requests[-1].text
    assert "<tool_response>\nwet 🌧\n</tool_response>" in player.requests[-1].text


async def test_a_stream_that_breaks_is_resumed_exactly() -> None:
    text = f"Déjà vu 🌲🌳 <tool_call>{CALL}</tool_call>"
    player, server = played(CHATML, text)
    player.breaks_after = 9
    with server as address:
        async with gateway(address, waits=False) as front:
            client = front.client()
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            found = ""
            async for chunk in stream:
                found += chunk.choices[0].delta.content or ""
    assert found == text
    resumed = player.requests[-1]
    assert list(resumed.resume_token_ids.ids) == list(range(9))
    assert (resumed.sampling.seed, resumed.resume_fingerprint) == (3, "f00d")


async def test_a_template_that_refuses_the_chat_is_the_clients_fault() -> None:
    _, server = played(BRACKETS, "x")
    with server as address:
        async with gateway(address, waits=False) as front:
            turn = {"role": "user", "content": "x"}
            with pytest.raises(openai.BadRequestError, match="must alternate") as caught:
                await ask(front, messages=[turn, turn])
            assert caught.value.code == "chat_template_error"
            for name in ("messages", "tools"):
                with pytest.raises(openai.BadRequestError) as caught:
                    await ask(front, extra_body={"chat_template_kwargs": {name: 1}})
                assert caught.value.param == f"chat_template_kwargs.{name}"
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(front, extra_body={"continue_final_message": True})
            assert caught.value.param == "continue_final_message"
