"""Every RPC of every service, called without, with a wrong, an expired and the right identity."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython.cygrpc import InternalError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from coppice import AsyncClient, ResourceExhaustedError, UnauthenticatedError
from coppice.admin import AdminClient
from coppice.credentials import Credentials
from coppice.v1 import admin_pb2, control_pb2, draft_pb2, generation_pb2, target_pb2
from shared.access import proofs
from shared.access.proofs import VALID_S, prove
from shared.access.tokens import bearer
from shared.config import CALLS, Secret
from shared.rpc.channel import open_channel
from shared.rpc.status import from_rpc_error
from tests.contract.serving import drafted, serving, write_model
from tests.fakes import eventually, fake_draft, fake_target
from tests.scrape import free_ports, num_refused, scrape

pytestmark = pytest.mark.asyncio

SECRET, OTHER = "a secret of this deployment", "a secret of another one"
TOKENS = """
# name:token[:until]
alice:alice-0123456789abcdef
alice:alice-second-0123456789
bob:bob-0123456789abcdef:2999-12-31
late:late-0123456789abcdef:2020-01-01
"""
KEY = Secret(SECRET.encode()).keys(CALLS)[0]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MODULES = (target_pb2, draft_pb2, control_pb2, generation_pb2, admin_pb2, reflection_pb2)
STREAMS = {
    f"/{service.full_name}/{method.name}"
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.client_streaming
}


def methods(*modules: Any) -> list[str]:
    return [
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


TARGET, DRAFT, CONTROL = methods(target_pb2), methods(draft_pb2), methods(control_pb2)
FRONT, ADMIN = methods(generation_pb2), methods(admin_pb2)
HEALTH = methods(health_pb2)


def proof(
    method: str, *, secret: str = SECRET, ago_s: float = 0.0, of: str = ""
) -> tuple[tuple[str, str], ...]:
    key = Secret(secret.encode()).keys(CALLS)[0]
    return (("authorization", prove(key, of or method, now=time.time() - ago_s)),)


def identities_of_a_service(method: str) -> Iterator[tuple[str, Any, str]]:
    """Yield what is shown to a worker: (what it is, metadata, reason of the refusal or "")."""
    good = proof(method)[0][1]
    yield "none", (), "NO_IDENTITY"
    yield "a client's token", bearer("alice-0123456789abcdef"), "NO_IDENTITY"
    yield "two at once", proof(method) + proof(method), "NO_IDENTITY"
    yield "another secret", proof(method, secret=OTHER), "WRONG_IDENTITY"
    yield "the secret itself", (("authorization", f"coppice-v1 {SECRET}"),), "WRONG_IDENTITY"
    yield "another method", proof(method, of="/x/Y"), "WRONG_IDENTITY"
    yield "a changed time", (("authorization", good.replace(" 1", " 2")),), "WRONG_IDENTITY"
    yield "cut off", (("authorization", good[:-1]),), "WRONG_IDENTITY"
    yield "not a number", (("authorization", "coppice-v1 x.y.z"),), "WRONG_IDENTITY"
    yield "expired", proof(method, ago_s=VALID_S + 30), "EXPIRED_IDENTITY"
    yield "of the future", proof(method, ago_s=-VALID_S - 30), "EXPIRED_IDENTITY"
    yield "right", proof(method), ""
    used = proof(method)
    yield "right, once", used, ""
    yield "right, but used before", used, "WRONG_IDENTITY"


def identities_of_a_client(method: str) -> Iterator[tuple[str, Any, str]]:
    yield "none", (), "NO_IDENTITY"
    yield "a service's proof", proof(method), "NO_IDENTITY"
    yield "an unknown token", bearer("nobody-0123456789abcdef"), "WRONG_IDENTITY"
    yield "no token", (("authorization", "Bearer "),), "WRONG_IDENTITY"
    yield "a name", bearer("alice"), "WRONG_IDENTITY"
    yield "expired", bearer("late-0123456789abcdef"), "EXPIRED_IDENTITY"
    yield "right", bearer("alice-0123456789abcdef"), ""
    yield "right, the second one", bearer("alice-second-0123456789"), ""
    yield "right, for a while", bearer("bob-0123456789abcdef"), ""
    yield "right, in lower case", (("authorization", "bearer bob-0123456789abcdef"),), ""


async def refusal_of(channel: grpc.aio.Channel, method: str, metadata: Any) -> str:
    """Return why a call is refused, "" if it is not; whatever comes of it else."""
    call: Any
    if method in STREAMS:  # nothing is written: grpc.aio makes INTERNAL of a write that is too late
        call = channel.stream_stream(method)(metadata=metadata, timeout=60)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, InternalError):
            await call.done_writing()
    else:
        call = channel.unary_stream(method)(b"", metadata=metadata, timeout=60)
    try:
        async for _ in call:
            return ""
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return ""
        known = from_rpc_error(error)
        assert known.message and SECRET not in known.message
        return known.reason
    finally:
        call.cancel()
    return ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return str(path)


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return str(path)


@contextlib.asynccontextmanager
async def worker_of(method: str, **fields: Any) -> AsyncIterator[str]:
    make = fake_draft if method in DRAFT else fake_target
    async with make(**fields) as worker:
        yield worker.address


@pytest.mark.parametrize("method", [*TARGET, *DRAFT, *CONTROL, REFLECTION])
async def test_a_worker_takes_calls_of_its_deployment_only(method: str, secret_file: str) -> None:
    async with worker_of(method, secret_file=secret_file) as address, open_channel(address) as ch:
        for name, metadata, reason in identities_of_a_service(method):
            assert await refusal_of(ch, method, metadata) == reason, name


@pytest.mark.parametrize("method", [*FRONT, REFLECTION])
async def test_an_orchestrator_takes_calls_of_clients_with_tokens_only(
    method: str, model: Path, token_file: str
) -> None:
    async with fake_target() as target, serving(model, [target], token_file=token_file) as front:
        async with open_channel(front.address) as channel:
            for name, metadata, reason in identities_of_a_client(method):
                assert await refusal_of(channel, method, metadata) == reason, name


async def test_operators_have_tokens_of_their_own(
    model: Path, token_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a client is none, and theirs is none of a client."""
    clients = tmp_path / "clients"
    clients.write_text("carol:carol-0123456789abcdef\n")
    fields = {"admin_token_file": token_file, "token_file": str(clients)}
    async with fake_target() as target, serving(model, [target], **fields) as front:
        address = f"127.0.0.1:{front.orchestrator.admin_port}"
        async with open_channel(address) as channel:
            for method in (*ADMIN, REFLECTION):
                for name, metadata, reason in identities_of_a_client(method):
                    assert await refusal_of(channel, method, metadata) == reason, name
                client = bearer("carol-0123456789abcdef")
                assert await refusal_of(channel, method, client) == "WRONG_IDENTITY"
        async with open_channel(front.address) as channel:
            operator = bearer("alice-0123456789abcdef")
            assert await refusal_of(channel, FRONT[0], operator) == "WRONG_IDENTITY"

        def count_workers() -> int:
            credentials = Credentials(token="alice-0123456789abcdef")
            with AdminClient(address, credentials=credentials) as client:
                return len(client.call("ListWorkers").workers)

        assert await asyncio.to_thread(count_workers) == 1


async def test_operators_reach_workers_through_an_orchestrator_that_knows_the_secret(
    model: Path, secret_file: str
) -> None:
    fields = {"secret_file": secret_file}
    async with fake_target(**fields) as target, serving(model, [target], **fields) as front:

        def ask() -> str:
            with AdminClient(f"127.0.0.1:{front.orchestrator.admin_port}") as client:
                client.call("Drain", worker=target.address)
                client.call("Undrain", worker=target.address)
                values = client.call("GetConfig", worker=target.address).values
            assert not any(SECRET in value for value in values.values())
            return values["secret_file"]

        assert secret_file in await asyncio.to_thread(ask)


async def test_health_checks_are_open_to_everybody(
    model: Path, secret_file: str, token_file: str
) -> None:
    fields = {"secret_file": secret_file}
    async with (
        fake_target(**fields) as target,
        fake_draft(**fields) as draft,
        serving(model, [target], token_file=token_file, **fields) as front,
    ):
        for address in (target.address, draft.address, front.address):
            async with open_channel(address) as channel:
                for method in HEALTH:
                    assert await refusal_of(channel, method, ()) == ""


async def test_services_with_the_secret_work_together(
    model: Path, secret_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"secret_file": secret_file}
    caplog.set_level(logging.INFO)
    async with (
        fake_target(**fields, step_s=0.005) as target,
        fake_draft(**fields) as draft,
        serving(model, [target], [draft], **fields) as front,
        AsyncClient(front.address) as client,
    ):
        await drafted(client, token_ids=[1, 2, 3], max_new_tokens=200, speculation=True)
    assert "UNAUTHENTICATED" not in caplog.text and "refused" not in caplog.text


@pytest.mark.parametrize("own", ["none", "another"])
async def test_a_worker_of_another_deployment_is_not_used_and_the_log_says_why(
    own: str, model: Path, secret_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "another").write_text(OTHER)
    fields = {"secret_file": str(tmp_path / "another")} if own == "another" else {}
    async with (
        fake_target(secret_file=secret_file) as guarded,
        fake_target(**fields) as target,
        serving(model, [target, guarded], waits=False, **fields) as front,
    ):
        await front.sees(targets=1, drafts=0)
    assert "the same --secret-file" in caplog.text and guarded.address in caplog.text


async def test_the_log_says_by_how_much_clocks_differ_also_if_the_worker_came_late(
    model: Path, secret_file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempts found nobody there; those were of another kind."""
    late = SimpleNamespace(time=lambda: time.time() - 2 * VALID_S)
    fields = {"secret_file": secret_file}
    caplog.set_level(logging.INFO)
    port = free_ports(1)
    address = f"127.0.0.1:{port}"
    async with serving(model, [address], waits=False, **fields) as front:
        await eventually(lambda: f"{address} does not answer: UNAVAILABLE" in caplog.text)
        monkeypatch.setattr(proofs, "time", late)
        async with fake_target(port=port, **fields):
            await eventually(lambda: "set the clocks" in caplog.text)
            errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert len(errors) == 1 and address in errors[0] and "s apart" in errors[0]
            monkeypatch.undo()
            await front.sees(targets=1, drafts=0)


async def test_a_secret_is_replaced_while_services_run(
    model: Path, secret_file: str, tmp_path: Path
) -> None:
    """One that knows both is between those that know one of them."""
    both, new = tmp_path / "both", tmp_path / "new"
    both.write_text(f"{OTHER}\n{SECRET}\n")
    new.write_text(OTHER)
    async with (
        fake_target(secret_file=str(both)) as target,
        fake_draft(secret_file=str(new)) as draft,
        serving(model, [target], [draft], secret_file=str(both)) as front,
        serving(model, [target], secret_file=secret_file),
        AsyncClient(front.address) as client,
    ):
        whole = await client.generate(token_ids=[1, 2, 3], max_new_tokens=4)
    assert whole.usage.num_output_tokens == 4


async def test_tokens_come_and_go_while_the_server_runs(model: Path, token_file: str) -> None:
    path = Path(token_file)
    async with fake_target() as target, serving(model, [target], token_file=token_file) as front:

        async def generate(token: str) -> int:
            async with AsyncClient(front.address, token=token) as client:
                whole = await client.generate(token_ids=[1, 2], max_new_tokens=2)
            return whole.usage.num_output_tokens

        assert await generate("alice-0123456789abcdef") == 2
        path.write_text("carol:carol-0123456789abcdef\n")
        assert await generate("carol-0123456789abcdef") == 2
        with pytest.raises(UnauthenticatedError, match="not one of the server's"):
            await generate("alice-0123456789abcdef")
        path.write_text("carol:short\n")  # a mistake: what was there before holds
        assert await generate("carol-0123456789abcdef") == 2


async def test_a_token_s_tenant_has_as_many_requests_as_it_may(
    model: Path, token_file: str
) -> None:
    """All its tokens together; other tenants are served meanwhile, and the refusal is counted."""
    port = free_ports(1)
    limits = {"max_requests_per_tenant": "alice=1", "metrics_port": port}
    async with (
        fake_target() as target,
        serving(model, [target], token_file=token_file, **limits) as front,
        AsyncClient(front.address, token="alice-0123456789abcdef") as alice,
        AsyncClient(front.address, token="alice-second-0123456789", max_retries=0) as second,
        AsyncClient(front.address, token="bob-0123456789abcdef") as bob,
    ):
        request = {"token_ids": [1, 2], "max_new_tokens": 2}
        target.handle.pause()
        waiting = [asyncio.create_task(each.generate(**request)) for each in (alice, bob, bob)]
        await eventually(lambda: front.orchestrator.admission.num_requests == 3)
        with pytest.raises(ResourceExhaustedError, match="1 requests of alice") as caught:
            await second.generate(**request)
        assert caught.value.reason == "TENANT_LIMIT" and caught.value.retry_after_s > 0
        seen = await asyncio.to_thread(scrape, f"http://127.0.0.1:{port}/metrics")
        assert seen.value("coppice_refusals_total", reason="TENANT_LIMIT") == 1
        waiting.append(asyncio.create_task(alice.generate(**request)))  # it comes again
        target.handle.resume()
        for whole in await asyncio.gather(*waiting):
            assert whole.usage.num_output_tokens == 2


async def test_a_client_without_a_token_is_told_how_to_give_one(
    model: Path, token_file: str
) -> None:
    async with fake_target() as target, serving(model, [target], token_file=token_file) as front:
        async with AsyncClient(front.address) as client:
            with pytest.raises(UnauthenticatedError, match="COPPICE_TOKEN") as caught:
                await client.generate(token_ids=[1, 2], max_new_tokens=2)
    assert caught.value.reason == "NO_IDENTITY"


async def test_refusals_are_logged_but_not_each_and_no_token_is(
    secret_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = TARGET[0]
    async with fake_target(secret_file=secret_file) as target:
        async with open_channel(target.address) as channel:
            for _ in range(5):
                await refusal_of(channel, method, bearer("mistaken-0123456789"))
        seen = target.worker.server.samples
        assert num_refused(seen, "NO_IDENTITY") == num_refused(seen) == 5
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(lines) == 1 and method in lines[0] and "127.0.0.1" in lines[0]
    assert "mistaken" not in caplog.text
    assert "mistaken" not in repr(Credentials(token="mistaken-0123456789"))


async def test_the_message_of_who_is_refused_is_not_parsed(model: Path, token_file: str) -> None:
    async with fake_target() as target, serving(model, [target], token_file=token_file) as front:
        async with open_channel(front.address) as channel:
            call = channel.unary_stream(FRONT[0])(b"\xff\xff\xff\xff", timeout=60)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_reflection_can_be_off() -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    for is_on in (True, False):
        async with fake_target(reflection=is_on) as target, open_channel(target.address) as channel:
            call = channel.stream_stream(REFLECTION)(iter([asked]), timeout=60)
            if is_on:
                assert b"TargetService" in await call.read()
            else:
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
