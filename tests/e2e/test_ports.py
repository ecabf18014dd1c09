"""`coppice up` with TLS and tokens, as a user sets it up and calls it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from coppice import Client, Tls, UnauthenticatedError, UnavailableError
from coppice.health import HealthProbe
from shared.rpc.health_names import ORCHESTRATOR_SERVICE, TARGET_SERVICE
from tests.certificates import Authority
from tests.e2e.serving import Server, running, stack_config
from tests.processes import command, wait_for

pytestmark = pytest.mark.slow

TOKEN = "alice-0123456789abcdef"
PATIENT = ("--timeout-s=60",)


@dataclass(frozen=True)
class Secured:
    """A server with TLS and tokens.

    Args:
        authority: That its certificate comes from, for clients.
    """

    server: Server
    authority: str


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("access")
    authority = Authority(folder)
    files = authority.issue("front", hosts=("localhost", "127.0.0.1"))
    tokens = folder / "tokens"
    tokens.write_text(f"alice:{TOKEN}\n")
    front = {
        "tls_cert_file": files.cert,
        "tls_key_file": files.key,
        "token_file": str(tokens),
        "workers": 2,
    }
    with running(stack_config(orchestrator=front)) as server:
        yield Secured(server, authority.file)


def coppice(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COPPICE_")}
    return subprocess.run(
        [*command("coppice"), *arguments],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_client_with_a_token_generates_and_others_are_refused(secured: Secured) -> None:
    address, tls = secured.server.address, Tls(ca_file=secured.authority)
    with Client(address, tls=tls, token=TOKEN) as client:

        def speculates() -> bool:
            """Return whether a tree came in time, which is up to the machine."""
            try:
                whole = client.generate(
                    "def main():", max_new_tokens=200, ignore_eos=True, speculation=True
                )
            except UnavailableError as error:  # of two processes one may not have paired yet
                assert error.reason == "NO_DRAFT"
                return False
            assert whole.usage.num_output_tokens == 200
            named = f"[{whole.request_id} of alice round"
            secured.server.wait_logged(named, service="orchestrator")
            return whole.speculation.num_draft_tokens > 0

        wait_for(speculates)
    with Client(address, tls=tls) as client, pytest.raises(UnauthenticatedError):
        client.generate("def main():")
    with Client(address, max_retries=0, token=TOKEN) as client:
        with pytest.raises(UnavailableError):
            client.generate("def main():")
    assert not secured.server.logged(TOKEN)


def test_the_commands_talk_tls_and_show_a_token(secured: Secured, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    server = ("--server", secured.server.address)
    tls = ("--tls-ca-file", secured.authority)
    prompt = ("def main():", "--max-new-tokens=8", "--ignore-eos")
    by_file = coppice("generate", *prompt, *server, *tls, "--token-file", str(token))
    by_variable = coppice("generate", *prompt, *server, *tls, COPPICE_TOKEN=TOKEN)
    assert (by_file.returncode, by_variable.returncode) == (0, 0), by_file.stderr
    assert by_file.stdout == by_variable.stdout != "\n"
    refused = coppice("generate", *prompt, *server, *tls)
    assert refused.returncode == 1 and "UNAUTHENTICATED NO_IDENTITY" in refused.stderr
    plain = coppice("generate", *prompt, *server, COPPICE_TOKEN=TOKEN)
    assert plain.returncode == 1 and "but answers no plain gRPC" in plain.stderr
    health = ("health", secured.server.address, "--service", ORCHESTRATOR_SERVICE, *PATIENT)
    assert coppice(*health, *tls).stdout == "SERVING\n"
    bench = ("--concurrency=1", "--new-tokens=4", "--repeat=1", "--speculation=auto")
    measured = coppice("bench", *bench, *server, *tls, COPPICE_TOKEN=TOKEN)
    assert measured.returncode == 0, measured.stderr


def test_a_server_that_makes_up_a_secret_takes_no_calls_at_its_workers(secured: Secured) -> None:
    """Health checks but for: they say nothing that a port scan does not."""
    target = secured.server.target_addresses[0]
    method = f"/{TARGET_SERVICE}/GetInfo"
    with grpc.insecure_channel(target) as channel, HealthProbe(target) as probe:
        assert probe.status(TARGET_SERVICE, timeout_s=60.0) == "SERVING"
        ask = channel.unary_unary(method)
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        caller = secured.server.caller
        assert ask(b"", timeout=60, metadata=caller.metadata(method))
        other = replace(caller, secret=Server(stack_config()).caller.secret)
        with pytest.raises(grpc.RpcError):
            ask(b"", timeout=60, metadata=other.metadata(method))
    assert not secured.server.logged(secured.server.secret)
    for service in secured.server.services.values():
        assert not any(secured.server.secret in word for word in service.command)
