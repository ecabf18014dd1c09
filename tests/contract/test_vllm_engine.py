"""VllmEngine over real gRPC: a gateway of others gets what our own clients get."""

from __future__ import annotations

import contextlib
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from coppice import AsyncClient
from coppice.v1 import generation_pb2 as pb
from orchestrator.vllm_engine import TokenizerArchive, generation_request
from tests.contract.serving import Serving, freed, serving, write_model
from tests.fakes import FakeWorker, eventually, fake_draft, fake_target

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def engine(
    model: Path, *, step_s: float = 0.0, **fields: Any
) -> AsyncIterator[tuple[Any, Serving, FakeWorker]]:
    """Yield a stub of the service, the orchestrator and its target."""
    async with (
        fake_target(step_s=step_s) as target,
        fake_draft() as draft,
        serving(model, [target], [draft], vllm_engine=True, **fields) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel), server, target


def request(**fields: Any) -> Any:
    """Return a request; fields of its parameters are given as such."""
    own = {name: fields.pop(name) for name in ("request_id", "stream") if name in fields}
    return vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT),
        sampling_params=vllm_engine_pb2.SamplingParams(**fields),
        **own,
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_outputs_are_those_of_our_own_service(model: Path, *, stream: bool) -> None:
    async with engine(model) as (stub, server, target), AsyncClient(server.address) as client:
        plain = await client.generate(
            token_ids=PROMPT,
            max_new_tokens=30,
            temperature=1.0,
            seed=2**64 - 5,
            logprobs=True,
            top_logprobs=2,
        )
        asked = request(stream=stream, max_tokens=30, seed=-5, logprobs=2)
        *chunks, last = [reply async for reply in stub.Generate(asked)]
        ids = [token_id for reply in chunks for token_id in reply.chunk.token_ids]
        assert ids == (list(plain.token_ids) if stream else [])
        complete = last.complete
        assert list(complete.output_ids) == list(plain.token_ids)
        assert (complete.finish_reason, complete.prompt_tokens) == ("length", len(PROMPT))
        assert complete.completion_tokens == 30
        assert complete.spec_accepted_tokens <= complete.spec_draft_tokens
        assert list(complete.output_logprobs.token_logprobs) == [e.logprob for e in plain.logprobs]
        top = complete.output_logprobs.top_logprobs[3]
        assert list(zip(top.token_ids, top.values, strict=True)) == list(plain.logprobs[3].top)
        await freed(target)


async def test_several_outputs_and_their_end(model: Path) -> None:
    async with engine(model, step_s=0.005) as (stub, server, target):
        async with AsyncClient(server.address) as client:
            expected = [
                (
                    await client.generate(
                        token_ids=PROMPT, max_new_tokens=9, temperature=1.0, seed=7 + i
                    )
                ).token_ids
                for i in range(3)
            ]
        asked = request(stream=True, max_tokens=9, seed=7, n=3, request_id="r")
        found: dict[int, tuple[int, ...]] = {}
        async for reply in stub.Generate(asked):
            if reply.HasField("complete"):
                found[reply.complete.index] = tuple(reply.complete.output_ids)
        assert [found[i] for i in range(3)] == expected
        call = stub.Generate(request(stream=True, max_tokens=3000, n=2, request_id="r"))
        await eventually(lambda: len(target.engine.requests) == 2, what="two requests")
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r", "unknown"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await freed(target)


async def test_nobody_ends_requests_of_others(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:alice-0123456789abcdef\nbob:bob-0123456789abcdef\n")
    alice, bob = ([("authorization", f"Bearer {n}-0123456789abcdef")] for n in ("alice", "bob"))
    async with engine(model, step_s=0.005, token_file=str(tokens)) as (stub, _, target):
        calls = [
            stub.Generate(
                request(stream=True, max_tokens=3000, request_id=name, ignore_eos=True),
                metadata=alice,
            )
            for name in ("r", "r-1")
        ]
        for call in calls:
            await call.read()

        async def abort(name: str, who: Any) -> None:
            asked = vllm_engine_pb2.AbortRequest(request_ids=[name])
            await stub.Abort(asked, metadata=who)

        await abort("r", bob)
        assert all([(await call.read()).HasField("chunk") for call in calls])  # noqa: C419
        await abort("r", alice)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await calls[0].read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await eventually(lambda: len(target.engine.requests) == 1, what="the other request alone")
        for _ in range(20):
            assert (await calls[1].read()).HasField("chunk"), "its name only begins like the other"
        calls[1].cancel()
        await freed(target)


async def test_who_asks_is_told_what_runs(model: Path) -> None:
    async with engine(model, served_model_name="name") as (stub, server, target):
        healthy = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert healthy.healthy and info.served_model_name == "name" and info.is_generation
        assert info.max_context_length == target.engine.info.max_context_len
        assert info.tokenizer_path == str(model) and info.model_type == "llama"
        runs = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert runs.server_type == "vllm-grpc" and runs.active_requests == 0
        (load,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
        assert load.num_total_reqs == 0 and load.max_running_requests == 1024
        asked = common_pb2.GetTokenizerRequest()
        chunks = [chunk async for chunk in stub.GetTokenizer(asked)]
        data = b"".join(chunk.data for chunk in chunks)
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.read("tokenizer.json") == (model / "tokenizer.json").read_bytes()
        for call in (
            stub.Embed(vllm_engine_pb2.EmbedRequest()),
            stub.FlushCache(common_pb2.FlushCacheRequest()),
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        del server


async def test_what_an_output_must_be_is_passed_on() -> None:
    texts = vllm_engine_pb2.ChoiceConstraint(choices=["a", "b"])
    for given, expected in (
        ({"json_schema": "{}"}, pb.StructuredOutput(json_schema="{}")),
        ({"json_object": True}, pb.StructuredOutput(json_schema='{"type": "object"}')),
        ({"regex": "a"}, pb.StructuredOutput(regex="a")),
        ({"grammar": "root ::= x"}, pb.StructuredOutput(ebnf="root ::= x")),
        ({"structural_tag": "{}"}, pb.StructuredOutput(structural_tag="{}")),
        ({"choice": texts}, pb.StructuredOutput(choice=pb.Choices(texts=["a", "b"]))),
    ):
        assert generation_request(request(**given)).structured_output == expected
    for free in ({}, {"json_object": False}):
        assert not generation_request(request(**free)).HasField("structured_output")


async def test_the_tokenizer_is_packed_once_until_its_files_change(tmp_path: Path) -> None:
    archive = TokenizerArchive(write_model(tmp_path / "model"))
    before = archive.current()
    assert archive.current() is before
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    data, digest = archive.current()
    assert digest == hashlib.sha256(data).hexdigest() != before[1]
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert found.read("chat_template.jinja") == b"{{ messages }}"


async def test_what_cannot_be_honoured_is_refused_by_name(model: Path) -> None:
    async with engine(model) as (stub, _, target):
        media = request(max_tokens=1)
        media.mm_inputs.SetInParent()
        for asked, field in (
            (request(json_schema="{"), "structured_output.json_schema"),
            (request(regex="a$b"), "structured_output.regex"),
            (request(json_object=True, ignore_eos=True), "ignore_eos does not go with"),
            (request(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
            (request(logprobs=-1), "sampling_params.logprobs"),
            (request(n=129), "sampling_params.n"),
            (media, "mm_inputs"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(asked).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (caught.value.details() or "")
        await freed(target)


async def test_a_caller_that_goes_away_frees_the_workers(model: Path) -> None:
    async with engine(model, step_s=0.01) as (stub, _, target):
        call = stub.Generate(request(stream=True, max_tokens=3000, n=2))
        await call.read()
        assert target.engine.requests
        call.cancel()
        await freed(target)


async def test_nobody_answers_unless_it_is_asked_for(model: Path) -> None:
    async with (
        fake_target() as target,
        serving(model, [target]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
