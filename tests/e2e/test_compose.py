"""Every service of docker-compose.yml runs by its very command: workers in replicas, one front.

Containers become processes, each on a loopback address of its own; what Docker's DNS does, one name
for all replicas, is done by listing the replicas' addresses.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from coppice import Client
from tests.compose_file import ROLES, load_compose, services_of
from tests.e2e.test_command_line import NEVER_LATE, NO_SPARES
from tests.marks import exhaustive
from tests.processes import command, wait_for

pytestmark = pytest.mark.slow

PROFILES = ("cpu", "gpu")
READY_TIMEOUT_S = 300.0
ALMOST_READY = ("ready address=", "listening on port")
"""What workers and servers log: before it, a health check would be a process for nothing."""
PROMPT = "def read_lines(path):"


class Container:
    """A service's command as a process that listens on its own address.

    Args:
        service: The service as the file describes it.
        changes: What differs from the container's environment.
    """

    def __init__(
        self, name: str, service: dict[str, Any], host: str, changes: dict[str, str], log: Path
    ) -> None:
        self.name = name
        self._service = service
        self.host = host
        self._log = log
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("COPPICE_")},
            **service["environment"],
            "COPPICE_HOST": host,
            "COPPICE_METRICS_HOST": host,
            "OMP_NUM_THREADS": "1",
            "COPPICE_CPU_THREADS": "1",
            **NO_SPARES,
            **changes,
        }
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command(service["command"][0]), *service["command"][1:]],
                env=self._environ,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self) -> str:
        """Return what the process wrote."""
        return self._log.read_text(errors="replace")

    def is_healthy(self) -> bool:
        """Run the health check of the file; its localhost is this container's address."""
        kind, program, *arguments = self._service["healthcheck"]["test"]
        assert kind == "CMD"
        arguments = [a.replace("localhost", self.host) for a in arguments]
        check = [*command(program), *arguments]
        return subprocess.run(check, capture_output=True, check=False).returncode == 0

    def wait_healthy(self) -> None:
        """Wait for the health check to pass, as depends_on does."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not any(text in self.log() for text in ALMOST_READY) and self.process.poll() is None:
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.log()}"
            time.sleep(0.1)
        while not self.is_healthy():
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"{self.name} is not healthy:\n{self.log()}"
            time.sleep(1.0)  # a check is a process of its own

    def stop(self) -> int:
        """Do what `docker compose stop` does; return the exit code."""
        self.process.terminate()
        grace_s = float(self._service["stop_grace_period"].removesuffix("s"))
        return self.process.wait(grace_s)

    def close(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def addresses(profile: str) -> Iterator[str]:
    """Yield loopback addresses of a net of this process and profile: no other run has them."""
    high, low = divmod(os.getpid() % (1 << 14), 1 << 8)
    net = f"127.{64 * (1 + PROFILES.index(profile)) + high}.{low}"
    yield from (f"{net}.{host}" for host in range(1, 255))


@contextlib.contextmanager
def compose_up(
    profile: str, num_replicas: int, tmp_path: Path
) -> Iterator[dict[str, list[Container]]]:
    """Start a profile with replicas of each worker; yields role -> containers."""
    document = load_compose()
    services = services_of(document, profile)
    hosts = addresses(profile)
    secret = {"COPPICE_SECRET_FILE": str(tmp_path / "secret")}
    subprocess.run(
        document["services"]["secret"]["command"], env={**os.environ, **secret}, check=True
    )
    containers: dict[str, list[Container]] = {"target": [], "draft": [], "orchestrator": []}
    names: dict[str, list[str]] = {}  # DNS name -> addresses
    with contextlib.ExitStack() as stack:
        for name, service in services.items():
            role = ROLES[name]
            if role == "orchestrator":
                continue
            networks = service["networks"]
            aliases = networks["workers"]["aliases"] if isinstance(networks, dict) else []
            for index in range(num_replicas):
                host = next(hosts)
                for alias in (name, *aliases):
                    names.setdefault(alias, []).append(host)
                log = tmp_path / f"{name}-{index}.log"
                # No GPU here: the command is the same, the device is not.
                changes = {"COPPICE_DEVICE": "cpu", **secret}
                container = Container(f"{name}-{index}", service, host, changes, log)
                stack.callback(container.close)
                containers[role].append(container)
        for container in containers["target"] + containers["draft"]:
            container.wait_healthy()
        front = services["orchestrator"]
        changes = {**secret, **NEVER_LATE}
        for key in ("COPPICE_TARGETS", "COPPICE_DRAFTS"):
            host, _, port = front["environment"][key].partition(":")
            changes[key] = ",".join(f"{address}:{port}" for address in names[host])
        log = tmp_path / "orchestrator.log"
        container = Container("orchestrator", front, next(hosts), changes, log)
        stack.callback(container.close)
        containers["orchestrator"].append(container)
        container.wait_healthy()
        gateway = document["services"]["gateway"]
        front_port = gateway["environment"]["COPPICE_ORCHESTRATORS"].rpartition(":")[2]
        changes = {"COPPICE_ORCHESTRATORS": f"{container.host}:{front_port}"}
        log = tmp_path / "gateway.log"
        container = Container("gateway", gateway, next(hosts), changes, log)
        stack.callback(container.close)
        containers["gateway"] = [container]
        container.wait_healthy()
        yield containers


# What replicas share, both profiles share, and so do two pods of test_kubernetes.py.
@pytest.mark.parametrize(
    ("profile", "num_replicas"), [("cpu", 1), ("gpu", 1), *exhaustive([("cpu", 2)])]
)
def test_every_service_runs_by_its_command(profile: str, num_replicas: int, tmp_path: Path) -> None:
    with compose_up(profile, num_replicas, tmp_path) as containers:
        (front,) = containers["orchestrator"]
        environment = services_of(load_compose(), profile)["orchestrator"]["environment"]
        address = f"{front.host}:{environment['COPPICE_PORT']}"
        with Client(address) as client:
            plain = client.generate(PROMPT, max_new_tokens=24, speculation=False)

            def has_tree() -> bool:
                """Return whether a request had a tree before its end."""
                drafted = client.generate(PROMPT, max_new_tokens=24, speculation=True)
                assert drafted.token_ids == plain.token_ids
                return drafted.speculation.num_draft_tokens > 0

            for _ in range(2 * num_replicas):
                wait_for(has_tree)
        assert plain.usage.num_output_tokens == 24
        (http,) = containers["gateway"]
        port = load_compose()["services"]["gateway"]["environment"]["COPPICE_PORT"]
        url = f"http://{http.host}:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=24, temperature=0
            )
        assert whole.choices[0].text == plain.text
        found = front.log()
        for container in containers["target"] + containers["draft"]:
            assert f"{container.host}:" in found, f"{container.name} was never found"
        codes = {c.name: c.stop() for role in containers.values() for c in reversed(role)}
        assert set(codes.values()) == {0}, codes
