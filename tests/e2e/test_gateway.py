"""OpenAI's client against real processes: a gateway, an orchestrator, a target and its draft."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import httpx2
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from coppice import Client, CoppiceError
from coppice.client import DeadlineExceededError
from shared.config import GatewayConfig
from shared.messages import FinishReason
from tests.e2e.serving import (
    READY_TIMEOUT_S,
    Server,
    generate_all,
    generate_plain,
    running,
    stack_config,
)
from tests.e2e.streaming import streams
from tests.marks import exhaustive
from tests.processes import wait_for, with_path
from tests.scrape import free_ports

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CODE = "def read_lines(path):"
# Half of a character may be a token: the model is asked to go on with characters of four bytes.
EMOJI = "# 🌲🌳🌴\nTREES = '🌲🌳🌴🌲🌳🌴🌲🌳"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11}


class Role(BaseModel):
    """What an answer is parsed into."""

    role: Literal["admin", "guest"]


@pytest.fixture(scope="module")
def front() -> Iterator[Server]:
    gateway = GatewayConfig(port=0, drain_timeout_s=5.0)
    config = stack_config(orchestrator={"vllm_engine": True}, gateway=gateway)
    with running(config) as server:
        yield server


@pytest.fixture
def client(front: Server) -> Iterator[openai.OpenAI]:
    url = f"{front.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300.0) as found:
        yield found


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (CODE, {"temperature": 0.0}),
        (EMOJI, SAMPLED),
        *exhaustive([(CODE, SAMPLED), (EMOJI, {"temperature": 0.0})]),
    ],
)
def test_every_endpoint_says_what_grpc_says(
    front: Server, client: openai.OpenAI, prompt: str, sampling: dict[str, Any]
) -> None:
    """Streamed, whole, by prompt, by ids and as a chat, with and without speculation."""
    with Client(front.address) as grpc_client:
        plain = grpc_client.generate(
            prompt, max_new_tokens=24, logprobs=True, top_logprobs=3, speculation=False, **sampling
        )
        ids = grpc_client.tokenize(prompt)
        (model,) = grpc_client.models()
        assert (model.name, model.max_context_len) == ("demo", 2048) and model.can_speculate
        spelled = grpc_client.detokenize(plain.token_ids).token_bytes
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 24, **sampling}
    for given in (prompt, list(ids)):
        for mode in ("on", "off"):
            whole = client.completions.create(
                **asked, prompt=given, logprobs=3, extra_body={"speculation": mode}
            )
            assert whole.choices[0].text == plain.text
            logprobs = whole.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs == [entry.logprob for entry in plain.logprobs]
    chat: dict[str, Any] = {**asked, "messages": [{"role": "user", "content": prompt}]}
    answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3)
    assert answer.choices[0].message.content == plain.text
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content is not None
    for entry, expected, token in zip(content, plain.logprobs, spelled, strict=True):
        assert (entry.logprob, entry.bytes) == (expected.logprob, list(token))
        assert [top.logprob for top in entry.top_logprobs] == [value for _, value in expected.top]
    with client.chat.completions.stream(
        **{**chat, "max_tokens": openai.omit}, max_completion_tokens=24, n=1, logprobs=True
    ) as stream:
        text, kinds = "", set()
        for event in stream:
            kinds.add(event.type)
            if event.type == "content.delta":
                text += event.delta
    assert text == plain.text and {"content.delta", "content.done", "chunk"} <= kinds


def test_chats_of_several_turns_and_stops_inside_of_them(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "system", "content": "import os"}]
    for text in ("def main():", "if __name__ == '__main__':"):
        turns.append({"role": "user", "content": text})
        answer = client.chat.completions.create(
            model="demo", messages=turns, temperature=0, max_tokens=24, stop=["\n\n", "zzz"]
        )
        said = answer.choices[0].message.content
        assert said and "\n\n" not in said
        turns.append(answer.choices[0].message.model_dump(exclude_none=True))
    stop = said[3:7]
    again = client.chat.completions.create(
        model="demo", messages=turns[:-1], temperature=0, max_tokens=24, stop=stop
    )
    assert again.choices[0].message.content == said[: said.index(stop)]
    assert again.choices[0].finish_reason == "stop"


def test_who_goes_away_frees_the_pages(front: Server, client: openai.OpenAI) -> None:
    """The fixture of this folder looks at the workers after the test; here at once, in between."""
    asked: dict[str, Any] = {"model": "demo", "prompt": CODE, "max_tokens": 1500}
    extra = {"ignore_eos": True}
    stream = client.completions.create(**asked, n=3, stream=True, extra_body=extra)
    next(iter(stream))
    assert front.info("target-0").load.num_running > 0
    stream.close()
    front.check_idle()

    async def leave() -> None:
        url = f"{front.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as other:
            task = asyncio.create_task(other.completions.create(**asked, extra_body=extra))
            while not front.info("target-0").load.num_running:
                await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    front.check_idle()


def test_the_example_runs_with_nothing_but_another_url(front: Server) -> None:
    command = [sys.executable, str(ROOT / "examples" / "openai_sdk.py")]
    ran = subprocess.run(
        [*command, f"{front.http_url}/v1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=with_path(ROOT),
    )
    assert ran.returncode == 0, ran.stderr
    assert "\n48 tokens\n" in ran.stdout and ran.stdout.count("log-probability") == 2
    alone = subprocess.run(
        [*command, "http://127.0.0.1:1/v1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=with_path(ROOT),
    )
    assert alone.returncode == 1 and "Connection" in alone.stderr
    assert "Traceback" not in alone.stderr


USER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green 🌲"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
CALL = {"type": "json_schema", "json_schema": USER, "max_whitespace_cnt": 1}
TAG = {"type": "tag", "begin": "<call>", "content": CALL, "end": "</call>"}
# Of GenerateRequest; the same over HTTP; and what an output is matched by, if it is no JSON.
KINDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"json_schema": USER}, {"guided_json": USER}, ""),
    ({"regex": r"[a-z]{3}-[0-9]{4}"}, {"regex": r"[a-z]{3}-[0-9]{4}"}, r"[a-z]{3}-[0-9]{4}"),
    ({"ebnf": 'root ::= "é" | "b" root'}, {"ebnf": 'root ::= "é" | "b" root'}, "b*é"),
    ({"choice": ["yes", "no", "maybe"]}, {"guided_choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
    (
        {"structural_tag": {"type": "structural_tag", "format": TAG}},
        {"structured_outputs": {"structural_tag": {"format": TAG}}},
        r"<call>\{.*\}</call>",
    ),
]


# Samplings, and the ways to speculate beside none.
WAYS: list[tuple[dict[str, Any], list[bool | None]]] = [
    ({"temperature": 0.0, "seed": 1}, [None]),
    (SAMPLED, [None, True]),
]


@pytest.mark.parametrize(("asked", "over_http", "pattern"), KINDS, ids=[min(k[0]) for k in KINDS])
def test_an_output_is_what_it_must_be_with_any_speculation(
    front: Server,
    client: openai.OpenAI,
    asked: dict[str, Any],
    over_http: dict[str, Any],
    pattern: str,
) -> None:
    """All at once: a step of many requests takes a target hardly longer than one of one."""
    requests = [
        {"prompt": "config = ", "max_new_tokens": 120, "speculation": mode, **sampling, **asked}
        for sampling, modes in WAYS
        for mode in (False, *modes)
    ]

    def complete(sampling: dict[str, Any]) -> str:
        answer = client.completions.create(
            model="demo",
            prompt="config = ",
            max_tokens=120,
            extra_body=over_http,
            **sampling,
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(len(WAYS)) as threads:
        texts = threads.map(complete, [sampling for sampling, _ in WAYS])
        completions = iter(generate_all(front.address, requests))
    for (_, modes), text in zip(WAYS, texts, strict=True):
        plain, *others = itertools.islice(completions, 1 + len(modes))
        assert all(other.token_ids == plain.token_ids for other in others)
        assert text == plain.text
        if plain.finish_reason is FinishReason.LENGTH:
            continue
        assert re.fullmatch(pattern, plain.text, re.DOTALL) or not pattern, plain.text
        if not pattern:
            jsonschema.validate(json.loads(plain.text), USER)


def test_a_chat_is_parsed_into_a_model_and_a_call_is_made(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.7, "seed": 5, "max_tokens": 150}
    asked["messages"] = [{"role": "user", "content": "def role():"}]
    answer = client.chat.completions.parse(**asked, response_format=Role)
    assert answer.choices[0].message.parsed in (Role(role="admin"), Role(role="guest"))
    with client.chat.completions.stream(**asked, response_format=Role) as stream:
        assert stream.get_final_completion().choices[0].message == answer.choices[0].message


@pytest.mark.exhaustive
def test_an_output_goes_on_in_its_format_when_the_target_dies(front: Server) -> None:
    text = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 100}
    asked = {"prompt": CODE, "json_schema": text, "max_new_tokens": 500, **SAMPLED}
    (plain,) = generate_plain(front.address, [asked])
    with streams(front.address, [asked], max_retries=9) as (stream,):
        stream.reaches(20)
        os.kill(front.engine("target-0"), signal.SIGKILL)
        assert stream.result().retries >= 1
    assert stream.token_ids == plain.token_ids
    front.wait_paired()


LARGE = {"enum": [f"{i:06d}-é" for i in range(12_000)]}
HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a{1000}){1000}"},
    {"regex": "((a|b)*c){500}"},
    {"json_schema": LARGE},
    {"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    {"json_schema": {"$ref": "#"}},
    {"ebnf": 'root ::= root "a"'},
    {"ebnf": 'root ::= ("a"{1000}){1000}'},
    {"choice": ["\x00\ufeff", "🌲" * 500]},
]


def test_nobody_waits_for_who_asks_for_too_much(front: Server) -> None:
    """Each ends with an output or is refused; requests beside them are answered meanwhile."""
    (plain,) = generate_plain(front.address, [{"prompt": CODE, "max_new_tokens": 8}])
    with Client(front.address) as grpc_client, ThreadPoolExecutor(len(HOSTILE)) as threads:

        def ask(constraint: dict[str, Any]) -> str:
            try:
                return grpc_client.generate(CODE, max_new_tokens=8, **constraint).text
            except CoppiceError as error:
                return f"{error.reason} {error.message}"

        asked = [threads.submit(ask, constraint) for constraint in HOSTILE]
        while not all(one.done() for one in asked):
            assert grpc_client.generate(CODE, max_new_tokens=8).token_ids == plain.token_ids
        said = [one.result() for one in asked]
    assert sum(text.startswith("INVALID_") for text in said) >= 3, said
    assert not any(text.startswith("INTERNAL") for text in said), said


def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing(front: Server) -> None:
    with Client(front.address) as grpc_client:
        with pytest.raises(DeadlineExceededError):
            other = {"enum": [*LARGE["enum"], "x"]}
            grpc_client.generate(CODE, json_schema=other, timeout_s=0.2)
        front.check_idle()
        assert grpc_client.generate(CODE, choice=["a"], max_new_tokens=8).text == "a"


def test_a_gateway_that_dies_is_started_again_and_nothing_is_held(
    front: Server, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": CODE, "max_tokens": 1500}
    stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    before = front.services["gateway"].pid
    front.kill("gateway", signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx2.HTTPError)):
        for _ in stream:
            pass
    front.check_idle()
    wait_for(lambda: front.services["gateway"].pid not in (None, before))
    front.wait_ready("gateway", timeout_s=READY_TIMEOUT_S)
    assert client.completions.create(model="demo", prompt=CODE, max_tokens=4).choices[0].text


def test_its_environment_has_no_secret(front: Server) -> None:
    pid = front.services["gateway"].pid
    assert pid is not None and os.path.isdir(f"/proc/{pid}")
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"COPPICE_SECRET" not in environ


def test_a_gateway_of_others_serves_it_as_it_is(front: Server, tmp_path: Path) -> None:
    """smg tokenizes, renders and parses; the orchestrator answers it as an engine of vLLM's."""
    port, metrics_port = free_ports(1), free_ports(1)
    model = resources.files("coppice") / "bundled" / "target"
    command = [sys.executable, "-m", "smg.launch_router", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--prometheus-port={metrics_port}", "--model-path", str(model)]
    log = tmp_path / "smg.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--worker-urls", f"grpc://{front.address}"], stdout=stream, stderr=stream
        )
    try:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300.0
        ) as client:

            def is_there() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return [model.id for model in client.models.list()] == ["demo"]
                except openai.APIError:
                    return False

            wait_for(is_there, describe=log.read_text)
            with Client(front.address) as grpc_client:
                plain = grpc_client.generate(CODE, max_new_tokens=24)
            asked: dict[str, Any] = {"model": "demo", "max_tokens": 24, "temperature": 0}
            whole = client.completions.create(**asked, prompt=CODE)
            assert whole.choices[0].text == plain.text
            text = ""
            messages: list[Any] = [{"role": "user", "content": CODE}]
            for chunk in client.chat.completions.create(**asked, messages=messages, stream=True):
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            assert text == plain.text
    finally:
        process.terminate()
        process.wait(120)
