"""Generate over real gRPC: what a request gives, and the clients that read it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import grpc
import grpc.aio
import pytest
import tokenizers
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice import AsyncClient, Client, FinishInfo, FinishReason, PromptInfo, TokenDelta
from coppice.v1 import generation_pb2 as pb
from orchestrator import accept_watch
from shared.messages import DraftRound, FeatureSpec, VerifyRound
from shared.messages.batches import pack_events, unpack_events
from shared.rpc.health_names import ORCHESTRATOR_SERVICE, SPECULATION_SERVICE
from tests.contract.serving import freed, serving, write_model
from tests.fakes import FakeDraft, FakeTarget, fake_draft, fake_target, generate, routed_row
from tests.fakes.target import FORWARD_NS

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint directory with a tokenizer of the fakes' vocabulary."""
    return write_model(tmp_path_factory.mktemp("model"))


async def test_a_completion_has_everything(model: Path) -> None:
    """Tokens, text, usage, speculation, timings, seed, and nothing is left on the workers."""
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        done = await client.generate(
            token_ids=PROMPT, max_new_tokens=200, request_id="mine", logprobs=True
        )
        await freed(target, draft)
    assert list(done.token_ids) == generate(PROMPT, 200)
    assert (done.request_id, done.model) == ("mine", "fake")
    assert done.finish_reason is FinishReason.LENGTH
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    usage, stats, timings = done.usage, done.speculation, done.timings
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (5, 200)
    # How soon a draft has caught up is up to the machine.
    assert stats.num_root_only_rounds < stats.num_rounds and stats.accept_length > 1
    assert stats.num_moved_rounds > 0
    assert 0 < timings.queue_ms <= timings.time_to_first_token_ms < timings.total_ms
    assert timings.mean_verify_ms > 0 and timings.mean_draft_wait_ms > 0
    assert done.retries == 0


async def test_queueing_ends_where_prefilling_begins(model: Path) -> None:
    async with (
        fake_target(step_s=0.2) as target,
        serving(model, [target]) as server,
        AsyncClient(server.address) as client,
    ):
        timings = (await client.generate(token_ids=PROMPT, max_new_tokens=1)).timings
    assert timings.queue_ms > 0
    assert timings.time_to_first_token_ms - timings.queue_ms >= 199, "the step is no queueing"


STAGES = (
    "target: hop to it", "target: front", "target: forward", "target: answer",
    "target: hop back", "orchestrator: commit",
    "draft: hop to it", "draft: front", "draft: answer", "draft: hop back",
    "orchestrator: order",
)  # fmt: skip


@pytest.mark.parametrize("is_timed", [False, True])
async def test_rounds_are_timed_when_asked_for(model: Path, *, is_timed: bool) -> None:
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        async for event in client.stream(
            token_ids=PROMPT, max_new_tokens=200, speculation=True, round_times=is_timed
        ):
            finish = event
    assert isinstance(finish, FinishInfo)
    orders = [m for m in target.engine.received if isinstance(m, VerifyRound)]
    orders += [m for m in draft.engine.received if isinstance(m, DraftRound)]
    assert all(bool(order.received_ns) is is_timed for order in orders)
    assert len(finish.round_times) == (finish.speculation.num_rounds if is_timed else 0)
    relayed = [
        times for times in finish.round_times[:-1] if times.stages[0].name == "target: hop to it"
    ]
    assert bool(relayed) is is_timed
    whole = [t for t in relayed[1:] if tuple(s.name for s in t.stages) == STAGES]
    assert bool(whole) is is_timed, "an order that waits for its step has no stage at the front"
    for times in whole:
        took = [
            after - before
            for before, after in pairwise([times.begin_ns, *(s.end_ns for s in times.stages)])
        ]
        assert min(took) >= 0 and took[2] == FORWARD_NS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_trees_are_shown_to_who_asks(model: Path, temperature: float) -> None:
    """They change no token; every node has its text; whatever else of the output is left out."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    async with (
        fake_target(step_s=0.002) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        asked = {"token_ids": PROMPT, "max_new_tokens": 160, "seed": 7, "temperature": temperature}
        plain = await client.generate(**asked)  # type: ignore[arg-type]
        for is_silent in (False, True):
            events = client.stream(**asked, round_trees=True, omit_text=is_silent)  # type: ignore[arg-type]
            *deltas, finish = [e async for e in events if not isinstance(e, PromptInfo)]
            assert isinstance(finish, FinishInfo)
            root, seen = PROMPT[-1], []
            trees = [delta.tree for delta in deltas if isinstance(delta, TokenDelta)]
            for tree in trees:
                assert tree is not None and tree.token_ids[0] == root
                path = [tree.token_ids[node] for node in tree.accept_index[1:]]
                seen += [*path, tree.bonus_token_id]
                root = tree.bonus_token_id
                ids = [*tree.token_ids, tree.bonus_token_id]
                spelled = tuple(tokenizer.decode([i], skip_special_tokens=False) for i in ids)
                assert tree.texts == (() if is_silent else spelled)
            assert tuple(seen) == plain.token_ids
            num_nodes = sum(len(tree.token_ids) - 1 for tree in trees if tree is not None)
            assert num_nodes == finish.speculation.num_draft_tokens > 40
        await freed(target, draft)


@pytest.mark.parametrize("num_experts", [8, 300])
async def test_experts_are_said_to_who_asks(model: Path, num_experts: int) -> None:
    """A row per token; by hand-written and by merged messages, with and without a stop string."""
    async with (
        fake_target(FakeTarget(num_experts=num_experts), step_s=0.002) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        asked = {"token_ids": PROMPT, "max_new_tokens": 40}
        for extra in ({}, {"speculation": False}, {"stop_strings": ["no such text"]}):
            done = await client.generate(**asked, **extra, routed_experts=True)  # type: ignore[arg-type]
            tokens = [*PROMPT, *done.token_ids]
            rows = [routed_row(tokens[:n], num_experts) for n in range(len(PROMPT), len(tokens))]
            routed = done.routed_experts
            assert routed is not None and routed.ids == b"".join(rows)
            assert routed.shape == (len(done.token_ids), 2, 2)
            assert routed.dtype == ("uint8" if num_experts == 8 else "uint16")
        assert (await client.generate(**asked)).routed_experts is None  # type: ignore[arg-type]
        await freed(target, draft)


async def test_text_prompts_and_text_output(model: Path) -> None:
    """The template adds its special token; the text is the decoding of the ids."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    async with (
        fake_target() as target,
        serving(model, [target]) as server,
        AsyncClient(server.address) as client,
    ):
        done = await client.generate("hëllo", max_new_tokens=64)
        silent = await client.generate("hëllo", max_new_tokens=64, omit_text=True)
        (opened, _) = [m for m in target.engine.received if hasattr(m, "num_prompt_tokens")]
    prompt = tokenizer.encode("hëllo").ids
    assert prompt[0] == tokenizer.token_to_id("<|begin|>")
    assert list(opened.token_ids) == prompt
    assert list(done.token_ids) == generate(prompt, 64) == list(silent.token_ids)
    assert done.text == tokenizer.decode(list(done.token_ids))
    assert silent.text == ""


async def test_events_come_in_order_and_rounds_leave_whole(model: Path) -> None:
    """PromptInfo, deltas that go on from each other, FinishInfo; one delta per round."""
    async with (
        fake_target() as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        events = [event async for event in client.stream(token_ids=PROMPT, max_new_tokens=40)]
    assert isinstance(events[0], PromptInfo)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert len(events) == len(deltas) + 2
    offset = 0
    for delta in deltas:
        assert delta.token_offset == offset
        offset += len(delta.token_ids)
        assert delta.num_accepted_drafts >= len(delta.token_ids) - 1
    finish = events[-1]
    assert len([d for d in deltas if d.token_ids]) == finish.speculation.num_rounds + 1  # type: ignore[union-attr]


async def test_many_requests_at_once_equal_their_solo_runs_without_speculation(
    model: Path,
) -> None:
    """Sampling, greedy, trees of every shape: the draft decides nothing."""
    shapes = [(1, 1, 2), (3, 2, 6), (4, 1, 5), (5, 8, 32), (6, 8, 64)]
    async with (
        fake_target(step_s=0.002) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        prompts = [[index, 7] for index in range(16)]
        completions = await asyncio.gather(
            *(
                client.generate(
                    token_ids=prompt,
                    max_new_tokens=60,
                    temperature=float(index % 2),
                    seed=index,
                    **dict(
                        zip(
                            ("num_steps", "topk", "num_draft_tokens"),
                            shapes[index % 5],
                            strict=True,
                        )
                    ),  # type: ignore[arg-type]
                )
                for index, prompt in enumerate(prompts)
            )
        )
        load = target.engine.load
        assert load.num_request_steps > load.num_steps, "one by one"
        for index, (prompt, done) in enumerate(zip(prompts, completions, strict=True)):
            plain = await client.generate(
                token_ids=prompt,
                max_new_tokens=60,
                temperature=float(index % 2),
                seed=index,
                speculation=False,
            )
            assert plain.token_ids == done.token_ids
            assert plain.text == done.text
            assert plain.speculation.num_draft_tokens == 0
        # Of any one a slow machine may have no tree before the target is done with it.
        assert any(done.speculation.num_draft_tokens for done in completions)
        await freed(target, draft)


async def test_stop_strings_cut_text_tokens_logprobs_and_usage_alike(model: Path) -> None:
    """Found in the decoded text, wherever the tokens end."""
    async with (
        fake_target() as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        whole = await client.generate(token_ids=PROMPT, max_new_tokens=60)
        start = next(i for i in range(20, 60) if "�" not in whole.text[i : i + 3])
        stop = whole.text[start : start + 3]
        start = whole.text.index(stop)
        for includes in (False, True):
            done = await client.generate(
                token_ids=PROMPT,
                max_new_tokens=60,
                stop_strings=[stop],
                include_stop_in_output=includes,
                logprobs=True,
            )
            assert done.text == whole.text[: start + (3 if includes else 0)]
            assert (done.finish_reason, done.matched_stop) == (FinishReason.STOP, stop)
            assert done.token_ids == whole.token_ids[: len(done.token_ids)]
            assert len(done.logprobs) == len(done.token_ids) == done.usage.num_output_tokens
        await freed(target, draft)


async def test_eos_stops_unless_ignored(model: Path) -> None:
    """The target says which ids end an output."""
    whole = generate(PROMPT, 40)
    eos = whole[10]
    count = whole.index(eos)
    async with (
        fake_target(FakeTarget(eos_token_ids=(eos,))) as target,
        serving(model, [target]) as server,
        AsyncClient(server.address) as client,
    ):
        done = await client.generate(token_ids=PROMPT, max_new_tokens=40)
        assert list(done.token_ids) == whole[:count]
        assert (done.finish_reason, done.matched_stop) == (FinishReason.STOP, eos)
        ignored = await client.generate(token_ids=PROMPT, max_new_tokens=40, ignore_eos=True)
        assert list(ignored.token_ids) == whole


async def test_the_server_draws_a_seed_and_says_it(model: Path) -> None:
    """Sending it again gives the same output; another one does not."""
    async with (
        fake_target() as target,
        serving(model, [target]) as server,
        AsyncClient(server.address) as client,
    ):
        first, second = [
            await client.generate(token_ids=PROMPT, max_new_tokens=20, temperature=1.0)
            for _ in range(2)
        ]
        again = await client.generate(
            token_ids=PROMPT, max_new_tokens=20, temperature=1.0, seed=first.seed
        )
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert again.token_ids == first.token_ids and again.seed == first.seed


async def test_the_blocking_client_is_the_same(model: Path) -> None:
    """Also from several threads, and when its iterator is closed early."""
    async with (
        fake_target(step_s=0.002) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
    ):

        def use() -> None:
            with Client(server.address) as client:
                done = client.generate(token_ids=PROMPT, max_new_tokens=30)
                assert list(done.token_ids) == generate(PROMPT, 30)
                events = client.stream(token_ids=PROMPT, max_new_tokens=3000)
                assert isinstance(next(events), PromptInfo)
                assert isinstance(next(events), TokenDelta)
                events.close()

        await asyncio.gather(asyncio.to_thread(use), asyncio.to_thread(use))
        await freed(target, draft)


async def test_health_says_alive_ready_and_speculating(model: Path) -> None:
    """Not ready without a target; the speculation detail needs a draft that fits."""
    unfit = FakeDraft(incarnation="unfit")
    unfit.width = 7
    async with serving(model, ["127.0.0.1:1"], waits=False) as server:
        assert await health(server.address, "") == "SERVING"
        assert await health(server.address, ORCHESTRATOR_SERVICE) == "NOT_SERVING"
    async with fake_target() as target, fake_draft(unfit) as draft:
        async with serving(model, [target], [draft]) as server:
            await becomes(server.address, ORCHESTRATOR_SERVICE, "SERVING")
            assert await health(server.address, SPECULATION_SERVICE) == "NOT_SERVING"
            async with AsyncClient(server.address) as client:
                done = await client.generate(token_ids=PROMPT, max_new_tokens=20)
                assert list(done.token_ids) == generate(PROMPT, 20)
                assert done.speculation.num_draft_tokens == 0
    async with (
        fake_target() as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
    ):
        await becomes(server.address, SPECULATION_SERVICE, "SERVING")


async def test_reflection_describes_the_service(model: Path) -> None:
    """grpcurl needs no proto files."""
    async with (
        serving(model, ["127.0.0.1:1"], waits=False) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        newer = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol=ORCHESTRATOR_SERVICE
        )
        for ask in (stub.ServerReflectionInfo, newer):
            async for response in ask(iter([request])):
                (data,) = response.file_descriptor_response.file_descriptor_proto
                assert FileDescriptorProto.FromString(data).service[0].name == "GenerationService"
                break
            else:
                pytest.fail("no answer")


async def becomes(address: str, service: str, status: str) -> None:
    """Wait until the health service gives a status."""
    async with asyncio.timeout(60):
        while await health(address, service) != status:
            await asyncio.sleep(0.01)


async def health(address: str, service: str) -> str:
    """Return the status that the health service gives."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def test_events_survive_the_wire() -> None:
    """Protobuf and back, with every field set, and with none."""
    full = pb.GenerateResponse(
        finish=pb.FinishInfo(
            reason=pb.FINISH_REASON_STOP,
            stop_string="x",
            usage=pb.Usage(num_prompt_tokens=1, num_output_tokens=2, num_cached_tokens=3),
            speculation=pb.SpeculationStats(
                num_rounds=2,
                num_draft_tokens=9,
                num_accepted_drafts=3,
                accept_length=2.5,
                accept_length_histogram=[0, 1, 1],
                num_root_only_rounds=1,
                num_moved_rounds=1,
            ),
            timings=pb.Timings(
                queue_ms=1,
                time_to_first_token_ms=2,
                total_ms=3,
                mean_draft_wait_ms=4,
                mean_verify_ms=5,
            ),
            retries=6,
        )
    )
    delta = pb.GenerateResponse(
        delta=pb.TokenDelta(
            token_offset=1,
            token_ids=[2, 3],
            text="ab",
            logprobs=[
                pb.TokenLogprob(token_id=2, logprob=-1, top=[pb.TopLogprob(token_id=4, logprob=-2)])
            ],
            num_accepted_drafts=1,
            num_accepted_draft_chars=1,
        )
    )
    info = pb.GenerateResponse(
        prompt_info=pb.PromptInfo(
            request_id="r", model="m", num_prompt_tokens=1, num_cached_tokens=2, seed=2**64 - 1
        )
    )
    empty = [
        pb.GenerateResponse(finish=pb.FinishInfo()),
        pb.GenerateResponse(delta=pb.TokenDelta()),
        pb.GenerateResponse(prompt_info=pb.PromptInfo()),
    ]
    for message in (full, delta, info, *empty):
        events = unpack_events(message)
        assert unpack_events(pack_events(events)) == events
    for message in (full, delta, info):
        assert pack_events(unpack_events(message)) == message


async def test_the_orchestrator_and_the_client_import_no_tensor_library() -> None:
    """`tokenizers` is all that the orchestrator needs; the package itself loads no gRPC."""
    heavy = "('torch', 'transformers', 'triton')"
    for module, forbidden in (
        ("orchestrator.server", heavy),
        ("coppice.client", heavy),
        ("coppice", "('torch', 'transformers', 'triton', 'grpc', 'google.protobuf', 'numpy')"),
    ):
        code = (
            f"import sys, json, {module}; "
            f"print(json.dumps([name for name in {forbidden} if name in sys.modules]))"
        )
        result = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert json.loads(result.stdout) == [], module


@pytest.mark.parametrize("step_s", [0.0, 0.003])
async def test_requests_that_end_at_once_are_no_news(
    model: Path, caplog: pytest.LogCaptureFixture, *, step_s: float
) -> None:
    """Their drafts may still be about to read the prompt when the target has forgotten them."""
    async with (
        fake_target(step_s=step_s) as target,
        fake_draft(step_s=step_s) as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        counts = [1, 1, 1, 2, 3] * 8
        completions = await asyncio.gather(
            *(client.generate(token_ids=[i, 7], max_new_tokens=n) for i, n in enumerate(counts))
        )
        for i, (count, done) in enumerate(zip(counts, completions, strict=True)):
            assert list(done.token_ids) == generate([i, 7], count)
            assert done.retries == 0
        await freed(target, draft)
    assert "is lost" not in caplog.text


async def test_a_standalone_draft_needs_no_features(model: Path) -> None:
    """It drafts from the tokens alone, also for a target that captures nothing."""
    async with (
        fake_target(FakeTarget(has_features=False), step_s=0.005) as target,
        fake_draft(FakeDraft(needs_features=False)) as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        assert draft.engine.info.features == FeatureSpec()
        done = await client.generate(token_ids=PROMPT, max_new_tokens=200)
        assert list(done.token_ids) == generate(PROMPT, 200)
        assert done.speculation.num_root_only_rounds < done.speculation.num_rounds


async def test_a_draft_that_is_accepted_too_seldom_is_told_of(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_watch, "WINDOW_ROUNDS", 5)
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft], expected_accept_length=30.0) as server,
        AsyncClient(server.address) as client,
    ):
        for _ in range(2):
            done = await client.generate(token_ids=PROMPT, max_new_tokens=300)
            assert done.speculation.num_rounds - done.speculation.num_root_only_rounds >= 5
    assert caplog.text.count("--expected-accept-length 30.00") == 1
