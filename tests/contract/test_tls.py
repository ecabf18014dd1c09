"""TLS and mutual TLS on every hop: who gets through, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice import AsyncClient, Client, Tls, UnavailableError
from coppice.health import HealthProbe, can_connect, is_listening
from shared.config import DraftConfig, OrchestratorConfig, TargetConfig
from shared.errors import ConfigError
from shared.rpc.channel import open_channel
from shared.rpc.gate import admin_gate, front_gate, worker_gate
from shared.rpc.health_names import ORCHESTRATOR_SERVICE
from tests.certificates import Authority, Files
from tests.contract.serving import Serving, drafted, serving, write_model
from tests.fakes import fake_draft, fake_target
from tests.scrape import free_ports

pytestmark = pytest.mark.asyncio

HOSTS = ("localhost", "127.0.0.1")
NAME = "worker.coppice.internal"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def listening(files: Files, clients: Authority | None = None) -> dict[str, str]:
    fields = {"tls_cert_file": files.cert, "tls_key_file": files.key}
    return {**fields, "tls_client_ca_file": clients.file} if clients else fields


@contextlib.asynccontextmanager
async def front_with(model: Path, **fields: Any) -> AsyncIterator[Serving]:
    """An orchestrator whose workers have no TLS."""
    async with fake_target() as target, serving(model, [target], **fields) as front:
        yield front


async def num_tokens(address: str, tls: Tls | None) -> int:
    """Generate four tokens by a connection of its own."""
    async with AsyncClient(address, tls=tls, max_retries=0) as client:
        whole = await client.generate(token_ids=[1, 2, 3], max_new_tokens=4)
    return whole.usage.num_output_tokens


async def test_every_hop_has_mutual_tls(
    model: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers are known by a name of their own, whatever address they are dialled at."""
    caplog.set_level(logging.INFO)
    worker = authority.issue("worker", hosts=(NAME,))
    front = authority.issue("front", hosts=HOSTS)
    alice = authority.issue("alice")
    dials = {"tls_ca_file": authority.file, "tls_server_name": NAME}
    async with (
        fake_target(**listening(worker, authority), step_s=0.005) as target,
        fake_draft(**listening(worker, authority), **dials) as draft,
        serving(model, [target], [draft], **listening(front, authority), **dials) as orchestrator,
        AsyncClient(
            orchestrator.address,
            tls=Tls(ca_file=authority.file, cert_file=alice.cert, key_file=alice.key),
        ) as client,
    ):
        await drafted(
            client, token_ids=[1, 2], max_new_tokens=200, speculation=True, request_id="r1"
        )
    assert "[r1 of alice round" in caplog.text, "the certificate names the tenant"


@pytest.mark.parametrize(
    ("who", "gets_through"),
    [
        ("nobody", False),
        ("one of another authority", False),
        ("one that has expired", False),
        ("plain text", False),
        ("the right one", True),
    ],
)
async def test_a_server_with_mutual_tls_takes_certificates_of_its_authority(
    model: Path, authority: Authority, tmp_path: Path, who: str, *, gets_through: bool
) -> None:
    other = Authority(tmp_path, "another")
    shown = {
        "nobody": Files("", ""),
        "one of another authority": other.issue("eve"),
        "one that has expired": authority.issue("late", is_expired=True),
        "the right one": authority.issue("alice"),
    }
    front = authority.issue("front", hosts=HOSTS)
    tls = None
    if files := shown.get(who):
        tls = Tls(ca_file=authority.file, cert_file=files.cert, key_file=files.key)
    async with front_with(model, **listening(front, authority)) as server:
        if gets_through:
            assert await num_tokens(server.address, tls) == 4
        else:
            with pytest.raises(UnavailableError):
                await num_tokens(server.address, tls)


@pytest.mark.parametrize("what", ["another authority", "expired", "another name"])
async def test_a_client_does_not_talk_to_a_server_that_is_not_the_right_one(
    model: Path, authority: Authority, tmp_path: Path, what: str
) -> None:
    hosts = ("elsewhere",) if what == "another name" else HOSTS
    files = authority.issue("front", hosts=hosts, is_expired=what == "expired")
    known = Authority(tmp_path, "another") if what == "another authority" else authority
    tls = Tls(ca_file=known.file)
    async with front_with(model, **listening(files)) as server:
        with pytest.raises(UnavailableError):
            await num_tokens(server.address, tls)
        if what == "another name":
            assert await num_tokens(server.address, replace(tls, server_name="elsewhere")) == 4


async def test_a_blocking_client_and_probes_talk_tls(model: Path, authority: Authority) -> None:
    tls = Tls(ca_file=authority.file)

    def talk(address: str) -> tuple[int, str, bool, bool, bool]:
        with Client(address, tls=tls) as client, HealthProbe(address, tls=tls) as probe:
            whole = client.generate(token_ids=[1, 2], max_new_tokens=3)
            return (
                whole.usage.num_output_tokens,
                probe.status(ORCHESTRATOR_SERVICE),
                can_connect(address, timeout_s=5.0, tls=tls),
                can_connect(address, timeout_s=5.0),
                is_listening(address, timeout_s=60.0),
            )

    async with front_with(model, **listening(authority.issue("front", hosts=HOSTS))) as server:
        said = await asyncio.to_thread(talk, server.address)
    assert said == (3, "SERVING", True, False, True)


async def test_certificates_are_read_again_when_they_change(
    model: Path, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New connections see the new one; those that are open go on; a mistake changes nothing."""
    front = authority.issue("front", hosts=HOSTS)
    old, later = Tls(ca_file=authority.file), Authority(tmp_path, "later")
    new = Tls(ca_file=later.file)
    async with (
        front_with(model, **listening(front)) as server,
        AsyncClient(server.address, tls=old) as connected,
    ):
        assert (await connected.generate(token_ids=[1], max_new_tokens=1)).token_ids
        assert later.issue("front", hosts=HOSTS) == front
        assert await num_tokens(server.address, new) == 4
        with pytest.raises(UnavailableError):
            await num_tokens(server.address, old)
        assert (await connected.generate(token_ids=[1], max_new_tokens=1)).token_ids
        Path(front.key).write_text("half a key")
        assert await num_tokens(server.address, new) == 4
        assert "kept as before" in caplog.text
        authority.issue("front", hosts=HOSTS)
        assert await num_tokens(server.address, old) == 4


async def test_authorities_of_clients_are_read_again_when_they_change(
    model: Path, authority: Authority, tmp_path: Path
) -> None:
    front = authority.issue("front", hosts=HOSTS)
    later = Authority(tmp_path, "later")
    bob = later.issue("bob")
    tls = Tls(ca_file=authority.file, cert_file=bob.cert, key_file=bob.key)
    clients = tmp_path / "clients.pem"
    clients.write_bytes(Path(authority.file).read_bytes())
    fields = {**listening(front), "tls_client_ca_file": str(clients)}
    async with front_with(model, **fields) as server:
        with pytest.raises(UnavailableError):
            await num_tokens(server.address, tls)
        clients.write_bytes(Path(authority.file).read_bytes() + Path(later.file).read_bytes())
        assert await num_tokens(server.address, tls) == 4


async def test_a_health_port_answers_in_plain_text_and_nothing_else(
    authority: Authority,
) -> None:
    files, port = authority.issue("worker", hosts=HOSTS), free_ports(1)
    fields = {**listening(files, authority), "health_port": port}
    async with fake_target(**fields), open_channel(f"127.0.0.1:{port}") as channel:
        asked = health_pb2.HealthCheckRequest(service="coppice.v1.TargetService")
        reply = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/coppice.v1.TargetService/GetInfo")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "worker-3"])
async def test_who_listens_beyond_loopback_asks_who_calls(
    host: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue("any", hosts=HOSTS)
    tokens, secret = tmp_path / "tokens", tmp_path / "secret"
    tokens.write_text("alice:0123456789abcdef\n")
    secret.write_text("0123456789abcdef")
    only_tls, mutual = listening(files), listening(files, authority)
    for config_type in (TargetConfig, DraftConfig):
        refused = "--secret-file .*--tls-client-ca-file .*--host 127.0.0.1; --insecure"
        for fields in ({}, only_tls):
            with pytest.raises(ConfigError, match=refused):
                worker_gate(config_type(host=host, **fields), {})
        for fields in ({"secret_file": str(secret)}, mutual, {"insecure": True}):
            worker_gate(config_type(host=host, **fields), {})
        worker_gate(config_type(host=host), {"COPPICE_SECRET": "0123456789abcdef"})
    for fields in ({}, only_tls, {"secret_file": str(secret)}):
        with pytest.raises(ConfigError, match="--token-file .*--tls-client-ca-file .*--insecure"):
            front_gate(OrchestratorConfig(host=host, **fields))
    for fields in ({"token_file": str(tokens)}, mutual, {"insecure": True}):
        front_gate(OrchestratorConfig(host=host, **fields))
    for fields in ({}, mutual, {"token_file": str(tokens)}):  # whom clients are known by
        with pytest.raises(ConfigError, match="--admin-host .* --admin-token-file .*--insecure"):
            admin_gate(OrchestratorConfig(admin_host=host, **fields))
    operators = {"admin_token_file": str(tokens)}
    for fields in (operators, {"insecure": True}):
        admin_gate(OrchestratorConfig(admin_host=host, **fields))
    gate = admin_gate(OrchestratorConfig(admin_host=host, **operators, **only_tls))
    assert gate.tls is not None, "beyond loopback as clients have it"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "localhost", "::1", "[::1]"])
async def test_this_host_alone_is_asked_nothing(host: str) -> None:
    assert worker_gate(TargetConfig(host=host), {}).check is None
    assert front_gate(OrchestratorConfig(host=host)).check is None
    assert admin_gate(OrchestratorConfig(admin_host=host)).check is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tls_cert_file": "c"}, "--tls-cert-file needs --tls-key-file"),
        ({"tls_key_file": "k"}, "--tls-key-file means something with --tls-cert-file only"),
        ({"tls_client_ca_file": "k"}, "--tls-client-ca-file means something with --tls-cert-file"),
        ({"tls_cert_file": "none", "tls_key_file": "none"}, "no certificate chain"),
        ({"tls_cert_file": "CERT", "tls_key_file": "garbage"}, "no certificate chain"),
        ({"tls_cert_file": "CERT", "tls_key_file": "OTHER"}, "(?i)key.*mismatch"),
        ({"tls_cert_file": "CERT", "tls_key_file": "KEY", "tls_client_ca_file": "garbage"},
         "garbage holds no certificates"),
        ({"token_file": "none"}, "cannot read --token-file .*none: No such file"),
        ({"token_file": "empty"}, "holds no token"),
        ({"token_file": "one"}, "one, line 2: expected name:token"),
        ({"token_file": "short"}, "short, line 1: the token has 5 characters, expected 16"),
        ({"token_file": "never"}, "never, line 1: the token's end is 'never', expected a date"),
        ({"token_file": "twice"}, "twice, line 2: the token stands there twice"),
    ],
)  # fmt: skip
async def test_what_cannot_work_is_refused_by_name(
    authority: Authority, tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    files, other = authority.issue("any"), authority.issue("other")
    token = "0123456789abcdef"
    for name, text in {
        "garbage": "no PEM",
        "empty": "# nothing\n\n",
        "one": f"# a line without a name\n{token}\n",
        "short": "alice:short\n",
        "never": f"alice:{token}:never\n",
        "twice": f"alice:{token}\nbob:{token}\n",
    }.items():
        (tmp_path / name).write_text(text)
    known = {"CERT": files.cert, "KEY": files.key, "OTHER": other.key}
    given = {key: known.get(name, str(tmp_path / name)) for key, name in fields.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        front_gate(OrchestratorConfig(**given))
    assert token not in str(caught.value)
