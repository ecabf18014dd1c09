"""Every container of deploy/kubernetes runs by its very command: a pair, and workers alone.

A pod becomes an address of the loopback net, on which its containers have the ports of the
manifests; a mounted file becomes a file of the test. What a headless service does, one name for all
its pods, is done by listing addresses.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from coppice import Client, FinishInfo, TokenDelta
from coppice.health import HealthProbe
from tests.e2e.test_command_line import NEVER_LATE, NO_SPARES
from tests.kubernetes_files import CONFIG_FILE, VARIANTS, Service, of_kind, render, services_of
from tests.processes import command, wait_for

pytestmark = pytest.mark.slow

NUM_PODS = {"pairs": 2, "separate": 1}
"""variant -> pods of each workload with workers."""
READY_TIMEOUT_S = 300.0
SECRETS = {"secret": "0123456789abcdef" * 4, "tokens": "tests:a-token-of-clients-1234567890"}
NUM_TOKENS = 60
PROMPT = "def read_lines(path):"


class Container:
    """A container of a pod as a process.

    Args:
        host: The pod's address.
        files: What is mounted: file name -> file of the test.
        environ: What differs from the manifest.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        files: dict[str, Path],
        environ: dict[str, str],
        log: Path,
    ) -> None:
        self.service = service
        self.host = host
        self._log = log
        mounted = {"COPPICE_METRICS_HOST": host}
        if service.role != "gateway":
            mounted["COPPICE_SECRET_FILE"] = str(files["secret"])
        if service.role in ("orchestrator", "gateway"):
            mounted["COPPICE_TOKEN_FILE"] = str(files["tokens"])
        else:
            mounted |= {"COPPICE_DEVICE": "cpu", "COPPICE_CPU_THREADS": "1", **NO_SPARES}
        if service.role == "orchestrator":
            mounted |= NEVER_LATE
        if service.role == "target":
            mounted["COPPICE_PEER_HOST"] = host
        program, *arguments = service.container["command"]
        arguments = [
            str(files[Path(argument).name]) if argument.endswith(CONFIG_FILE) else argument
            for argument in arguments
        ]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command(program), *arguments],
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("COPPICE_")},
                    "COPPICE_HOST": host,
                    "OMP_NUM_THREADS": "1",
                    **mounted,
                    **environ,
                },
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self) -> str:
        """Return what the process wrote."""
        return self._log.read_text(errors="replace")

    def passes(self, probe: str) -> bool:
        """Ask what kubelet asks for a probe of the manifest."""
        asked = self.service.container[probe]["grpc"]
        with HealthProbe(f"{self.host}:{asked['port']}") as health:
            return health.status(asked["service"], timeout_s=30.0) == "SERVING"

    def wait_ready(self) -> None:
        """Wait until the pod would be ready."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"{self.service.role} ended:\n{self.log()}"
            return self.passes("readinessProbe")

        wait_for(is_ready, READY_TIMEOUT_S, self.log)

    def stop(self) -> int:
        """End it as kubelet does; return the exit code."""
        self.process.terminate()
        pod = self.service.workload["spec"]["template"]["spec"]
        return self.process.wait(pod["terminationGracePeriodSeconds"])

    def close(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def addresses(variant: str) -> Iterator[str]:
    """Yield addresses for pods, of a net that no other run has."""
    high, low = divmod(os.getpid() % (1 << 14), 1 << 8)
    net = f"127.{64 * (1 + list(NUM_PODS).index(variant)) + high}.{low}"
    yield from (f"{net}.{host}" for host in range(128, 255))


@contextlib.contextmanager
def applied(variant: str, tmp_path: Path) -> Iterator[list[Container]]:
    """Start the pods of a variant; yields the containers, the orchestrator's last."""
    resources = render(VARIANTS[variant])
    services = services_of(resources)
    (config,) = of_kind(resources, "ConfigMap")
    files = {}
    for name, text in {**SECRETS, **config["data"]}.items():
        files[name] = tmp_path / name
        files[name].write_text(text)
        files[name].chmod(0o600)
    hosts = addresses(variant)
    containers: list[Container] = []
    with contextlib.ExitStack() as stack:

        def start(service: Service, host: str, environ: dict[str, str]) -> None:
            log = tmp_path / f"{len(containers)}.log"
            container = Container(service, host, files, environ, log)
            stack.callback(container.close)
            containers.append(container)

        workers = [service for service in services if service.role in ("target", "draft")]
        front, gateway = (
            next(service for service in services if service.role == role)
            for role in ("orchestrator", "gateway")
        )
        for workload in {id(service.workload): service.workload for service in workers}.values():
            for _ in range(NUM_PODS[variant]):
                host = next(hosts)
                for service in workers:
                    if service.workload is workload:
                        start(service, host, {})
        for container in containers:
            container.wait_ready()
        start(front, next(hosts), names_of(front, containers))
        orchestrator = containers[-1]
        orchestrator.wait_ready()
        (name,) = gateway.settings["orchestrators"]
        called = f"{orchestrator.host}:{name.rpartition(':')[2]}"
        start(gateway, next(hosts), {"COPPICE_ORCHESTRATORS": called})
        containers[-1].wait_ready()
        containers.remove(orchestrator)
        yield [*containers, orchestrator]


def names_of(front: Service, containers: list[Container]) -> dict[str, str]:
    """Return what the names of headless services stand for."""
    found = {}
    for key, role in (("targets", "target"), ("drafts", "draft")):
        (name,) = front.settings[key]
        port = name.rpartition(":")[2]
        found[f"COPPICE_{key.upper()}"] = ",".join(
            f"{c.host}:{port}" for c in containers if c.service.role == role
        )
    return found


def run(client: Client, *, speculation: bool) -> tuple[tuple[int, ...], FinishInfo]:
    """Return the output of a request, and how it was made."""
    token_ids: list[int] = []
    for event in client.stream(
        PROMPT, max_new_tokens=NUM_TOKENS, speculation=speculation, round_times=True
    ):
        if isinstance(event, TokenDelta):
            token_ids += event.token_ids
    assert isinstance(event, FinishInfo)
    return tuple(token_ids), event


@pytest.mark.parametrize(
    "variant", ["pairs", pytest.param("separate", marks=pytest.mark.exhaustive)]
)
def test_every_container_runs_by_its_command(variant: str, tmp_path: Path) -> None:
    token = SECRETS["tokens"].partition(":")[2]
    num_requests = 2 * NUM_PODS[variant]
    with applied(variant, tmp_path) as containers:
        front = containers[-1]
        address = f"{front.host}:{front.service.settings['port']}"
        with Client(address, token=token) as client, ThreadPoolExecutor(num_requests) as threads:
            plain, _ = run(client, speculation=False)
            assert len(plain) == NUM_TOKENS
            (gateway,) = (c for c in containers if c.service.role == "gateway")
            url = f"http://{gateway.host}:{gateway.service.settings['port']}/v1"
            with openai.OpenAI(base_url=url, api_key=token.strip(), max_retries=0) as http:
                asked = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
                extra = {"temperature": 0, "return_token_ids": True}
                choice = http.completions.create(**asked, extra_body=extra).choices[0]
            assert tuple((choice.model_extra or {})["token_ids"]) == plain

            def go_from_engine_to_engine() -> bool:
                """Return whether rounds of each request did, before its end."""
                at_once = [  # so that every target has some
                    threads.submit(run, client, speculation=True) for _ in range(num_requests)
                ]
                are_peer = []
                for request in at_once:
                    tokens, finish = request.result()
                    assert tokens == plain
                    names = {stage.name for times in finish.round_times for stage in times.stages}
                    are_peer.append("draft: channel" in names)
                return all(are_peer)

            wait_for(
                go_from_engine_to_engine, describe=lambda: "rounds do not go from engine to engine"
            )
        assert all(container.passes("livenessProbe") for container in containers)
        drafts = [c for c in containers if c.service.role == "draft"]
        attached = [re.findall(r"attached to (\S+ \S+ \S+)", draft.log()) for draft in drafts]
        is_by_socket = [names[0].startswith("coppice-channel-") for names in attached]
        assert is_by_socket == [variant == "pairs"] * len(drafts)
        assert len({names[0] for names in attached}) == len(drafts), "each has its own target"
        codes = [container.stop() for container in reversed(containers)]
        assert set(codes) == {0}, codes
