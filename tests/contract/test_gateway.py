"""The gateway over real HTTP, by OpenAI's own client: orchestrators are real, engines are fakes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from coppice import AsyncClient, DeadlineExceededError, TokenDelta
from coppice.gateway.server import GatewayServer
from coppice.gateway.upstreams import Upstream, Upstreams
from orchestrator.server import Orchestrator
from orchestrator.service import GenerationService
from shared.config import GatewayConfig
from shared.errors import AbortedError, ConfigError
from shared.metrics.catalog import METRICS, metric_of
from tests.certificates import Authority
from tests.contract.serving import Serving, freed, serving, write_model
from tests.fakes import FakeTarget, eventually, fake_draft, fake_target
from tests.scrape import Scrape, free_ports

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
TOKEN = "alice-0123456789abcdef"
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Front:
    """A running gateway and clients of it."""

    def __init__(self, server: GatewayServer, port: int) -> None:
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.AsyncClient(base_url=self.url, timeout=120.0)
        self._clients: dict[tuple[str, int], openai.AsyncOpenAI] = {}

    def client(self, token: str = "none", *, max_retries: int = 0) -> openai.AsyncOpenAI:
        """Return a client of OpenAI's."""
        key = token, max_retries
        if key not in self._clients:
            self._clients[key] = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key=token, max_retries=max_retries, timeout=120.0
            )
        return self._clients[key]

    async def close(self) -> None:
        await self.http.aclose()
        for client in self._clients.values():
            await client.close()

    @property
    def counts(self) -> dict[str, float]:
        return self.server.gateway.samples()


@contextlib.asynccontextmanager
async def gateway(
    *servers: Serving | str, waits: bool = True, **fields: Any
) -> AsyncIterator[Front]:
    """Serve HTTP in front of orchestrators."""
    addresses = [server if isinstance(server, str) else server.address for server in servers]
    config = GatewayConfig(
        **{"port": 0, "orchestrators": ",".join(addresses), "drain_timeout_s": 5.0, **fields}
    )
    server = GatewayServer(config)
    front = Front(server, await server.start())
    try:
        if waits:
            await eventually(lambda: server.gateway.is_ready, what="a gateway that is ready")
        yield front
    finally:
        await front.close()
        await server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint directory with a tokenizer of the fakes' vocabulary and a template."""
    directory = write_model(tmp_path_factory.mktemp("model"))
    (directory / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    )
    config = {"bos_token": "<|begin|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@contextlib.asynccontextmanager
async def one(model: Path, *, step_s: float = 0.0, **fields: Any) -> AsyncIterator[Any]:
    """Serve one model by one target and one draft; yields the gateway, server and workers."""
    async with (
        fake_target(step_s=step_s) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        gateway(server, **fields) as front,
    ):
        yield front, server, target, draft


async def test_answers_say_what_grpc_says(model: Path) -> None:
    """Text, tokens, logprobs and usage, streamed and whole, of prompts of every kind."""
    async with one(model) as (front, server, _, _), AsyncClient(server.address) as grpc_client:
        client = front.client()
        for prompt in ("ab", PROMPT):
            options = {"token_ids": prompt} if isinstance(prompt, list) else {"prompt": prompt}
            plain = await grpc_client.generate(
                **options, max_new_tokens=20, logprobs=True, top_logprobs=2, seed=7, temperature=1.0
            )
            asked: dict[str, Any] = {
                "model": model.name,
                "prompt": prompt,
                "max_tokens": 20,
                "logprobs": 2,
                "seed": 7,
                "extra_body": {"return_token_ids": True},
            }
            whole = await client.completions.create(**asked)
            choice = whole.choices[0]
            assert choice.text == plain.text
            assert choice.model_extra is not None
            assert choice.model_extra["token_ids"] == list(plain.token_ids)
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == [entry.logprob for entry in plain.logprobs]
            assert choice.finish_reason == "length"
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == plain.usage.num_prompt_tokens
            assert whole.usage.completion_tokens == 20
            text, ids, logprobs = "", [], []
            stream = await client.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            for chunk in chunks[:-1]:
                assert chunk.usage is None
                text += chunk.choices[0].text
                ids += (chunk.choices[0].model_extra or {}).get("token_ids", [])
                if chunk.choices[0].logprobs is not None:
                    logprobs += chunk.choices[0].logprobs.token_logprobs or []
            assert (text, ids) == (plain.text, list(plain.token_ids))
            assert logprobs == [entry.logprob for entry in plain.logprobs]
            assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
            assert len({chunk.id for chunk in chunks}) == 1


async def test_chunks_bring_the_trees_that_grpc_brings(model: Path) -> None:
    """A chunk for each round; a whole answer is not kept with its trees."""
    async with one(model) as (front, server, _, _), AsyncClient(server.address) as grpc_client:
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 20, "seed": 7}
        stream = await front.client().completions.create(
            **asked, stream=True, extra_body={"return_trees": True, "speculation": "off"}
        )
        extras = [chunk.choices[0].model_extra or {} async for chunk in stream]
        found = [extra["coppice"] for extra in extras if "coppice" in extra]
        events = grpc_client.stream(
            "ab", max_new_tokens=20, seed=7, temperature=1.0, speculation=False, round_trees=True
        )
        trees = [event.tree async for event in events if isinstance(event, TokenDelta)]
        assert len(trees) == 20
        expected = [dataclasses.asdict(tree) for tree in trees if tree is not None]
        assert json.loads(json.dumps(expected)) == [
            each["tree"] for each in found if "tree" in each
        ]
        for kept in (True, False):
            with pytest.raises(openai.BadRequestError) as refused:
                await front.client().completions.create(
                    **asked, extra_body={"return_trees": True, "return_speculation": kept}
                )
            assert refused.value.param == "return_trees"
        with_rounds = await front.client().completions.create(
            **asked, extra_body={"return_speculation": True}
        )
        (choice,) = with_rounds.choices
        assert choice.model_extra is not None
        assert all("tree" not in each for each in choice.model_extra["coppice"]["rounds"])


@pytest.mark.parametrize("num_experts", [8, 300])
async def test_choices_bring_the_experts_that_grpc_brings(model: Path, num_experts: int) -> None:
    """Whole and in chunks, of both endpoints; refused by the name that the client gave."""
    dtype = "uint8" if num_experts == 8 else "<u2"
    async with (
        fake_target(FakeTarget(num_experts=num_experts)) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        gateway(server) as front,
        AsyncClient(server.address) as grpc_client,
    ):
        client = front.client()
        plain = await grpc_client.generate("ab", max_new_tokens=20, routed_experts=True)
        assert plain.routed_experts is not None
        asked: dict[str, Any] = {"model": model.name, "max_tokens": 20, "temperature": 0}
        wanted: dict[str, Any] = {"extra_body": {"return_routed_experts": True}}
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.completions.create(prompt="ab", **asked, **wanted)
        chat = await client.chat.completions.create(messages=messages, **asked, **wanted)
        stream = await client.completions.create(prompt="ab", stream=True, **asked, **wanted)
        chunks = [(chunk.choices[0].model_extra or {}) async for chunk in stream]
        found = [
            [(choice.model_extra or {})["routed_experts"]]
            for choice in (whole.choices[0], chat.choices[0])
        ]
        found.append([chunk["routed_experts"] for chunk in chunks if "routed_experts" in chunk])
        decoded = []
        for parts in found:
            ids = [np.frombuffer(base64.b64decode(part["ids"]), dtype) for part in parts]
            arrays = [i.reshape(part["shape"]) for i, part in zip(ids, parts, strict=True)]
            assert {(part["dtype"], part["num_experts"]) for part in parts} == {
                (plain.routed_experts.dtype, num_experts)
            }
            decoded.append(np.concatenate(arrays).tolist())
        assert decoded[0] == decoded[2] == plain.routed_experts.tolist()
        assert len(decoded[1]) == 20 and decoded[1] != decoded[0]
        silent = await client.completions.create(prompt="ab", **asked)
        assert "routed_experts" not in (silent.choices[0].model_extra or {})
        await freed(target, draft)
    async with one(model) as (front, _, _, _):
        with pytest.raises(openai.BadRequestError, match="no experts") as refused:
            await front.client().completions.create(prompt="ab", **asked, **wanted)
        assert (refused.value.param, refused.value.code) == ("return_routed_experts", "no_experts")
        assert "leave return_routed_experts out" in refused.value.message


async def test_a_chat_is_a_templated_prompt_with_one_begin(model: Path) -> None:
    async with one(model) as (front, server, target, _), AsyncClient(server.address) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = await front.client().chat.completions.create(
            model=model.name, messages=messages, max_tokens=12, temperature=0, logprobs=True
        )
        text = "<|begin|>user: hi;"
        plain = await client.generate(
            text, max_new_tokens=12, add_special_tokens=False, logprobs=True
        )
        choice = answer.choices[0]
        assert choice.message.content == plain.text and choice.message.role == "assistant"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        spelled = await client.detokenize(plain.token_ids)
        for entry, logprob, token in zip(
            choice.logprobs.content, plain.logprobs, spelled.token_bytes, strict=True
        ):
            assert (entry.logprob, entry.bytes) == (logprob.logprob, list(token))
            assert entry.token == token.decode(errors="replace")
        ids = await client.tokenize(text, add_special_tokens=False)
        begin = await client.tokenize("<|begin|>", add_special_tokens=False)
        assert ids[:1] == begin and ids.count(begin[0]) == 1
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
        asked = {"messages": messages, "model": model.name}
        tokenized = (await front.http.post("/tokenize", json=asked)).json()
        assert tokenized["tokens"] == list(ids)
        await freed(target)


async def test_several_outputs_and_prompts_have_their_places_and_seeds(model: Path) -> None:
    async with one(model, step_s=0.001) as (front, server, target, draft):
        client = front.client()
        asked: dict[str, Any] = {"model": model.name, "prompt": ["ab", "cd"], "max_tokens": 9}
        whole = await client.completions.create(**asked, n=3, seed=40)
        assert [choice.index for choice in whole.choices] == list(range(6))
        async with AsyncClient(server.address) as grpc_client:
            for choice in whole.choices:
                plain = await grpc_client.generate(
                    "ab" if choice.index < 3 else "cd",
                    max_new_tokens=9,
                    temperature=1.0,
                    seed=40 + choice.index % 3,
                )
                assert choice.text == plain.text
                if choice.index % 3 == 0:
                    num_prompt = plain.usage.num_prompt_tokens
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 2 * num_prompt and whole.usage.completion_tokens == 54
        texts = [""] * 6
        stream = await client.completions.create(**asked, n=3, seed=40, stream=True)
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]
        with pytest.raises(openai.BadRequestError, match="at most 128") as caught:
            await client.completions.create(**asked, n=65)
        assert caught.value.param == "n"
        await freed(target, draft)


async def test_echo_and_stops(model: Path) -> None:
    async with one(model) as (front, _, _, _):
        client = front.client()
        asked: dict[str, Any] = {"model": model.name, "max_tokens": 16, "temperature": 0}
        plain = (await client.completions.create(**asked, prompt="ab")).choices[0].text
        for prompt in ("ab", PROMPT):
            echoed = await client.completions.create(**asked, prompt=prompt, echo=True)
            alone = await client.completions.create(**asked, prompt=prompt)
            said = (await front.http.post("/detokenize", json={"tokens": PROMPT})).json()["prompt"]
            begin = prompt if isinstance(prompt, str) else said
            assert echoed.choices[0].text == begin + alone.choices[0].text
        stop = plain[6:9]
        stopped = await client.completions.create(**asked, prompt="ab", stop=stop)
        assert stopped.choices[0].text == plain[: plain.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
        kept = await client.completions.create(
            **asked, prompt="ab", stop=[stop], extra_body={"include_stop_str_in_output": True}
        )
        assert kept.choices[0].text == plain[: plain.index(stop) + len(stop)]


async def test_special_tokens_are_added_and_kept_as_asked(model: Path) -> None:
    async with one(model) as (front, server, _, _), AsyncClient(server.address) as grpc_client:
        bare = await grpc_client.tokenize("ab", add_special_tokens=False)
        begun = await grpc_client.tokenize("ab")
        assert len(begun) == len(bare) + 1
        spelled = await grpc_client.detokenize(begun)
        skipped = await grpc_client.detokenize(begun, skip_special_tokens=True)
        assert (spelled.text, skipped.text) == ("<|begin|>ab", "ab")
        assert b"".join(spelled.token_bytes) == b"<|begin|>ab"
        asked: dict[str, Any] = {
            "model": model.name,
            "prompt": "ab",
            "max_tokens": 4,
            "extra_body": {"add_special_tokens": False},
        }
        answer = await front.client().completions.create(**asked)
        assert answer.usage is not None and answer.usage.prompt_tokens == len(bare)
        begin = begun[0]
        forced: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 3, "ignore_eos": True}
        forced["logit_bias"] = {begin: 100.0}
        for keeps in (False, True):
            said = await grpc_client.generate(**forced, keep_special_tokens=keeps)
            count = said.token_ids.count(begin)
            assert said.text.count("<|begin|>") == (count if keeps else 0)


async def test_what_cannot_be_is_refused_as_openai_does(model: Path) -> None:
    async with one(model, max_body_mb=1) as (front, _, target, draft):
        client = front.client()
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 4}
        cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None, str]] = [
            ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
            ({"temperature": -1.0}, openai.BadRequestError, "temperature", "invalid_value"),
            ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
            ({"prompt": []}, openai.BadRequestError, "prompt", "invalid_value"),
            ({"prompt": ""}, openai.BadRequestError, "prompt", "invalid_value"),
            ({"logprobs": 21}, openai.BadRequestError, "logprobs", "invalid_value"),
            (
                {"extra_body": {"speculation": {"num_steps": 30}}},
                openai.BadRequestError,
                "speculation.num_steps",
                "invalid_tree_shape",
            ),
            (
                {"prompt": "x" * 500_000},
                openai.BadRequestError,
                "prompt",
                "context_length_exceeded",
            ),
            ({"prompt": [99999]}, openai.BadRequestError, "prompt", "token_out_of_vocabulary"),
            ({"prompt": "x" * (1 << 20)}, openai.APIStatusError, None, "request_too_large"),
            ({"suffix": "x"}, openai.BadRequestError, "suffix", "unsupported_parameter"),
            ({"best_of": 3}, openai.BadRequestError, "best_of", "unsupported_parameter"),
            (
                {"echo": True, "logprobs": 1},
                openai.BadRequestError,
                "echo",
                "unsupported_parameter",
            ),
            ({"extra_body": {"x": 1}}, openai.BadRequestError, "x", "unknown_parameter"),
            (
                {"stream_options": {"include_usage": True}},
                openai.BadRequestError,
                "stream_options",
                "invalid_value",
            ),
            (
                {"extra_body": {"resume_fingerprint": "other"}},
                openai.BadRequestError,
                "resume_fingerprint",
                "model_changed",
            ),
        ]
        for changes, kind, param, code in cases:
            with pytest.raises(kind) as caught:
                await client.completions.create(**{**asked, **changes})
            assert (caught.value.param, caught.value.code) == (param, code), changes
            if param in changes and code == "invalid_value":
                assert caught.value.body["message"].startswith(param), caught.value.body
            if "stream_options" in changes:
                continue
            with pytest.raises(kind) as streamed:
                await client.completions.create(**{**asked, **changes}, stream=True)
            assert streamed.value.status_code == caught.value.status_code
        raw = json.dumps({**asked, "prompt": "\ud800"})  # no text at all
        head = {"content-type": "application/json"}
        answer = await front.http.post("/v1/completions", content=raw, headers=head)
        assert answer.status_code == 400
        for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
            answer = await front.http.post("/v1/completions", content=content, headers=head)
            assert answer.status_code == 400 and "error" in answer.json()
        answer = await front.http.post("/v1/completions", content=raw)
        assert answer.status_code == 415, "what a page of another site could send"
        for tokens in ([1] * 100_000, [10**6]):
            answer = await front.http.post("/detokenize", json={"tokens": tokens})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "tokens", error
            assert error["message"].startswith("tokens"), error
        answer = await front.http.get("/v2")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"
        assert "/v1/models/NAME" in answer.json()["error"]["message"]
        answer = await front.http.get("/v1/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert answer.json()["error"]["code"] == "method_not_allowed"
        assert answer.json()["error"]["message"] == "/v1/completions takes POST, not GET"
        answer = await front.http.post("/v1/models/x")
        assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"
        await freed(target, draft)
        assert front.counts["coppice_http_requests_running"] == 0


async def test_what_the_model_cannot_take_is_refused_by_name(model: Path) -> None:
    async with one(model) as (front, _, _, _):
        asked: dict[str, Any] = {
            "model": model.name,
            "messages": [{"role": "user", "content": "a"}],
        }
        for changes, param in (
            ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
            ({"tools": [TOOL]}, "tools"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await front.client().chat.completions.create(**asked, **changes)
            assert caught.value.param == param and caught.value.code == "unsupported_parameter"
        await front.client().chat.completions.create(
            **asked,
            response_format={"type": "text"},
            tool_choice="none",
            tools=[TOOL],
            max_tokens=2,
        )


async def test_a_client_that_goes_away_frees_the_workers(model: Path) -> None:
    """Streamed or not, whatever it waits for."""
    async with one(model, step_s=0.01) as (front, _, target, draft):
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 3000, "n": 2}
        stream = await front.client().completions.create(**asked, stream=True)
        async for _ in stream:
            break
        await eventually(lambda: len(target.engine.requests) == 2, what="both requests")
        await stream.close()
        await freed(target, draft)
        task = asyncio.create_task(front.client().completions.create(**asked))
        await eventually(lambda: len(target.engine.requests) == 2, what="two requests")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await freed(target, draft)
        name = 'coppice_http_requests_total{path="/v1/completions",status="499"}'
        await eventually(lambda: front.counts.get(name) == 2.0, what="two that went away")


async def test_an_output_that_fails_ends_the_others(model: Path) -> None:
    async with one(model, step_s=0.01) as (front, server, target, draft):
        extra = {"request_id": "mine"}
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 3000, "n": 3}
        task = asyncio.create_task(front.client().completions.create(**asked, extra_body=extra))
        await eventually(lambda: len(target.engine.requests) == 3, what="three requests")
        assert server.orchestrator._running.end("mine-1", AbortedError("an operator has ended it"))
        with pytest.raises(openai.ConflictError) as caught:
            await task
        assert caught.value.code == "aborted"
        assert caught.value.response.headers["x-should-retry"] == "false"
        await freed(target, draft)


async def test_an_error_in_a_stream_is_an_event(model: Path) -> None:
    async with one(model, step_s=0.01) as (front, server, target, _):
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 3000}
        stream = await front.client().completions.create(
            **asked, stream=True, extra_body={"request_id": "mine"}
        )
        with pytest.raises(openai.APIError, match="operator"):
            async for _ in stream:
                server.orchestrator._running.end("mine", AbortedError("an operator has ended it"))
        await freed(target)


async def test_a_server_without_room_says_when_to_come_again(model: Path) -> None:
    async with (
        fake_target(step_s=0.02) as target,
        serving(model, [target], max_num_requests=1) as server,
        gateway(server) as front,
    ):
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab"}
        first = await front.client().completions.create(**asked, max_tokens=3000, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await front.client().completions.create(**asked)
        headers = caught.value.response.headers
        assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) > 0
        assert caught.value.code == "overloaded"
        patient = asyncio.create_task(front.client(max_retries=5).completions.create(**asked))
        await asyncio.sleep(0.3)
        await first.close()
        assert (await patient).choices[0].finish_reason == "length"
        await freed(target)


async def test_the_gateway_itself_takes_so_many_requests(model: Path) -> None:
    async with one(model, step_s=0.01, max_num_requests=1) as (front, _, target, draft):
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 3000}
        stream = await front.client().completions.create(**asked, stream=True)
        with pytest.raises(openai.RateLimitError, match="1 requests at once"):
            await front.client().completions.create(**asked)
        assert (await front.http.get("/health")).status_code == 200
        await stream.close()
        await freed(target, draft)


async def test_tokens_of_clients_are_asked_for_and_passed_on(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{TOKEN}\n")
    async with (
        fake_target() as target,
        serving(model, [target], token_file=str(tokens)) as server,
        gateway(server) as passing,
        gateway(server, token_file=str(tokens)) as asking,
    ):
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab", "max_tokens": 3}
        for front in (passing, asking):
            for token in ("none", TOKEN + "x"):
                client = front.client(token)
                with pytest.raises(openai.AuthenticationError) as caught:
                    await client.completions.create(**asked)
                assert caught.value.code == "invalid_api_key"
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            answer = await front.client(TOKEN).completions.create(**asked)
            assert answer.choices[0].finish_reason == "length"
            assert [entry.id async for entry in front.client(TOKEN).models.list()] == [model.name]
            with pytest.raises(openai.AuthenticationError):  # what it knows by now helps nobody
                await front.client("none").completions.create(**asked)
            with pytest.raises(openai.AuthenticationError):
                await front.client("none").models.list()
            assert (await front.http.get("/health")).status_code == 200
        assert (await passing.http.get("/metrics")).status_code == 200
        assert (await asking.http.get("/metrics")).status_code == 401


async def test_whoever_could_call_from_elsewhere_is_asked_for_a_token() -> None:
    for fields, text in (
        ({"host": "0.0.0.0", "orchestrators": "a:1"}, "--token-file"),
        ({}, "--orchestrators"),
        ({"orchestrators": "a:1,b"}, "--orchestrators holds 'b', expected HOST:PORT"),
        ({"orchestrators": "http://a:1"}, "--orchestrators holds 'http://a:1'"),
        ({"orchestrators": "a:1", "tls_key_file": "x"}, "--tls-cert-file"),
        ({"orchestrators": "a:1", "tls_server_name": "x"}, "--tls-ca-file"),
    ):
        with pytest.raises(ConfigError, match=text):
            GatewayServer(GatewayConfig(**fields))  # type: ignore[arg-type]


async def test_a_port_that_is_taken_is_refused(model: Path) -> None:
    async with one(model) as (front, _, _, _):
        with pytest.raises(ConfigError, match="is the port taken"):
            await GatewayServer(GatewayConfig(port=front.port, orchestrators="a:1")).start()


async def test_several_models_are_found_by_name(model: Path, tmp_path: Path) -> None:
    """And replicas of one share its requests."""
    other = write_model(tmp_path / "other")
    async with (
        fake_target() as target,
        serving(model, [target]) as first,
        serving(model, [target]) as twin,
        serving(other, [target], served_model_name="org/other") as second,
        gateway(first, twin, second, "127.0.0.1:1") as front,
    ):
        client = front.client()
        names = sorted([entry.id async for entry in client.models.list()])
        assert names == sorted([model.name, "org/other"])
        card = await client.models.retrieve("org/other")
        assert card.id == "org/other" and card.owned_by == "coppice"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/none")
        for path, asked in (("/tokenize", {"prompt": "ab"}), ("/detokenize", {"tokens": [1]})):
            answer = await front.http.post(path, json=asked)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "model"), error
            assert error["code"] == "missing_required_parameter"
            assert "here are 2" in error["message"]
        for name in names * 4:
            await client.completions.create(model=name, prompt="ab", max_tokens=2)

        def ended() -> list[int]:
            return [_num_ended(server.orchestrator) for server in (first, twin, second)]

        # A client may hear of the end before it is counted.
        await eventually(lambda: ended() == [2, 2, 4], what="a share for each")
        for _ in range(3):
            await client.completions.create(
                model=model.name, prompt="ab", max_tokens=2, extra_body={"session_id": "s"}
            )
        await eventually(lambda: sorted(ended()) == [2, 4, 5], what="one for a session")
        with pytest.raises(openai.BadRequestError, match="has no chat template") as caught:
            await client.chat.completions.create(
                model="org/other", messages=[{"role": "user", "content": "x"}]
            )
        assert caught.value.code == "no_chat_template"


async def test_it_is_not_ready_before_each_orchestrator_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a model of one not yet heard of would not be found."""
    answers = asyncio.Event()

    async def ask(upstream: Upstream) -> str:
        if upstream.address == "late:1":
            await answers.wait()
        return "" if upstream.address == "ready:1" else "it hangs"

    monkeypatch.setattr(Upstream, "_ask_health", ask)
    upstreams = Upstreams(["ready:1", "late:1"], tls=None, num_connections=1)
    following = asyncio.create_task(upstreams.follow_health())
    await asyncio.sleep(0.05)
    assert not upstreams.is_ready
    answers.set()
    await eventually(lambda: upstreams.is_ready, what="one that is ready")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await upstreams.close()


def _num_ended(orchestrator: Orchestrator) -> int:
    samples = orchestrator._samples()
    return int(sum(v for k, v in samples.items() if k.startswith("coppice_requests_total")))


async def test_nobody_behind_it_is_said_at_once(model: Path) -> None:
    async with gateway("127.0.0.1:1", waits=False) as front:
        answer = await front.http.get("/health")
        assert answer.status_code == 503 and answer.json() == {"status": "not ready"}
        with pytest.raises(openai.InternalServerError) as caught:
            await front.client().completions.create(model="x", prompt="ab")
        assert caught.value.status_code == 503


async def test_a_late_answer_of_an_orchestrator_costs_no_client_a_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the gateway wants to know for itself it asks again."""
    num_late = {"ListModels": 2, "Detokenize": 1}
    for name in num_late:
        answer = getattr(GenerationService, name)

        async def late_once(
            service: Any, request: Any, context: Any, *, name: str = name, answer: Any = answer
        ) -> Any:
            num_late[name] -= 1
            if num_late[name] >= 0:
                await asyncio.sleep(3600)
            return await answer(service, request, context)

        monkeypatch.setattr(GenerationService, name, late_once)
    monkeypatch.setattr("coppice.gateway.upstreams._ASK_TIMEOUT_S", 2.0)
    monkeypatch.setattr("coppice.gateway.upstreams._LEARN_TIMEOUT_S", 2.0)
    async with one(model) as (front, server, _, _), AsyncClient(server.address) as client:
        with pytest.raises(DeadlineExceededError, match="not answered in timeout_s = 0.2"):
            await client.models(timeout_s=0.2)
        done = await front.client().completions.create(
            model=model.name, prompt="ab", max_tokens=5, temperature=0, logprobs=2
        )
        plain = await client.generate(prompt="ab", max_new_tokens=5)
        assert done.choices[0].text == plain.text
        assert max(num_late.values()) < 0, "each was asked again"


async def test_a_stream_goes_on_when_its_orchestrator_is_replaced(model: Path) -> None:
    async with fake_target(step_s=0.01) as target:
        async with serving(model, [target], port=free_ports(1)) as server:
            async with AsyncClient(server.address) as client:
                whole = await client.generate(token_ids=PROMPT, max_new_tokens=300)
            port = server.port
            async with gateway(server) as front:
                stream = await front.client().completions.create(
                    model=model.name, prompt=PROMPT, max_tokens=300, temperature=0, stream=True
                )
                text = ""
                has_moved = False
                async with contextlib.AsyncExitStack() as later:
                    async for chunk in stream:
                        text += chunk.choices[0].text
                        if not has_moved and len(text) > 20:
                            has_moved = True
                            await server.orchestrator.stop()
                            await later.enter_async_context(serving(model, [target], port=port))
                assert has_moved and text == whole.text


async def test_draining_lets_requests_end_and_takes_none(model: Path) -> None:
    async with one(model, step_s=0.005, drain_timeout_s=10.0) as (front, _, target, draft):
        asked: dict[str, Any] = {"model": model.name, "prompt": "ab"}
        short = await front.client().completions.create(**asked, max_tokens=20, stream=True)
        long = await front.client().completions.create(**asked, max_tokens=3000, stream=True)
        draining = asyncio.create_task(front.server.gateway.drain())
        await eventually(lambda: front.server.gateway.is_draining, what="draining")
        with pytest.raises(openai.InternalServerError) as caught:
            await front.client().completions.create(**asked)
        assert (caught.value.status_code, caught.value.code) == (503, "draining")
        assert (await front.http.get("/health")).json() == {"status": "draining"}
        assert [chunk async for chunk in short][-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIError, match="shuts down"):
            async for _ in long:
                pass
        await draining
        await freed(target, draft)


async def test_a_reader_that_does_not_read_slows_nobody_and_is_cut(model: Path) -> None:
    async with one(model, read_timeout_s=3.0) as (front, _, target, draft):
        body = json.dumps(
            {
                "model": model.name,
                "prompt": PROMPT,
                "max_tokens": 3500,
                "stream": True,
                "logprobs": 20,
                "ignore_eos": True,
                "n": 4,
            }
        ).encode()
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", front.port))
        _, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await eventually(lambda: bool(target.engine.requests), what="a request")
        assert front.server._http is not None
        connections = front.server._http.server_state.connections
        (held,) = connections
        sending = held.transport.get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the kernel takes all
        answer = await front.client().completions.create(
            model=model.name, prompt="ab", max_tokens=50
        )
        assert answer.choices[0].finish_reason == "length"
        name = 'coppice_http_requests_total{path="/v1/completions",status="499"}'
        await eventually(lambda: front.counts.get(name) == 1.0, what="one that was cut")
        await freed(target, draft)
        await eventually(lambda: held not in connections, what="the end of its connection")
        writer.close()


async def test_metrics_are_those_of_the_catalog(model: Path) -> None:
    port = free_ports(1)
    async with one(model, metrics_port=port) as (front, _, _, _):
        await front.client().completions.create(model=model.name, prompt="ab", max_tokens=5)
        seen = Scrape((await front.http.get("/metrics")).text)
        said = {metric_of(name).name for name in seen.names if name.startswith("coppice_http")}
        expected = {metric.name for metric in METRICS.values() if "gateway" in metric.roles}
        assert said | {"coppice_build_info", "coppice_ready"} == expected
        assert seen.value("coppice_http_tokens_total", role="gateway") == 5
        assert seen.value("coppice_ready") == 1
        async with httpx2.AsyncClient() as http:
            own = Scrape((await http.get(f"http://127.0.0.1:{port}/metrics")).text)
        assert own.value("coppice_http_tokens_total") == 5


async def shown(context: ssl.SSLContext, port: int) -> int:
    """Open a connection; return the serial number of the certificate that is shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        certificate = writer.get_extra_info("peercert")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        return int(certificate["serialNumber"], 16)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_tls_both_ways_and_certificates_that_change(model: Path, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    files = authority.issue("front", hosts=("localhost", "127.0.0.1"))
    own = authority.issue("client")
    listening: dict[str, Any] = {
        "tls_cert_file": files.cert,
        "tls_key_file": files.key,
        "tls_client_ca_file": authority.file,
    }
    async with (
        fake_target() as target,
        serving(model, [target], **listening) as server,
        gateway(server, **listening, tls_ca_file=authority.file) as front,
    ):
        context = ssl.create_default_context(cafile=authority.file)
        context.load_cert_chain(own.cert, own.key)
        first = await shown(context, front.port)
        async with httpx2.AsyncClient(verify=context) as http:
            body = {"model": model.name, "prompt": "ab", "max_tokens": 3}
            url = f"https://127.0.0.1:{front.port}/v1/completions"
            answer = await http.post(url, json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        authority.issue("front", hosts=("localhost", "127.0.0.1"))
        assert await shown(context, front.port) != first, "the new one"
        nobody = ssl.create_default_context(cafile=authority.file)
        unknown = ssl.create_default_context(cafile=authority.file)
        other = stranger.issue("other")
        unknown.load_cert_chain(other.cert, other.key)
        for refused in (nobody, unknown, ssl.create_default_context(cafile=stranger.file)):
            with pytest.raises((OSError, AssertionError)):  # at once, or when it reads
                await shown(refused, front.port)
        (tmp_path / "front.pem").write_text("no certificate")
        assert await shown(context, front.port) != first, "the one before stays"


async def test_a_body_that_does_not_come_is_not_waited_for(model: Path) -> None:
    async with one(model, read_timeout_s=0.3) as (front, _, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/detokenize", {"tokens": [10**30]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/v1/completions", {"prompt": [10**30], "echo": True}),
        ("/v1/completions", {"prompt": "ab", "session_id": "\udc00"}),
        ("/v1/completions", {"prompt": "ab", "top_k": 10**30}),
        ("/v1/completions", {"prompt": "ab", "temperature": float("nan")}),
        ("/v1/completions", {"prompt": DEEP}),
        ("/v1/chat/completions", {"messages": [{"role": DEEP, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [DEEP]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 200_000}}],
                    }
                ]
            },
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 5000}),
    ],
)
async def test_what_is_malformed_is_the_client_s_to_mend(
    model: Path, path: str, changes: dict[str, Any]
) -> None:
    async with one(model) as (front, _, _, _):
        body = json.dumps({"model": model.name, **changes})
        head = {"content-type": "application/json"}
        answer = await front.http.post(path, content=body, headers=head)
        assert answer.status_code == 400 and answer.json()["error"]["code"], answer.text


@pytest.mark.parametrize(
    ("name", "status"), [("traceparent", 200), ("tracestate", 200), ("authorization", 401)]
)
async def test_headers_that_grpc_does_not_carry(model: Path, name: str, status: int) -> None:
    async with one(model) as (front, _, _, _):
        headers = [(name.encode(), "Bearer ü".encode())]
        answer = await front.http.get("/v1/models", headers=headers)
        assert answer.status_code == status
