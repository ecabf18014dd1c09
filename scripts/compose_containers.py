"""Containers of docker-compose.yml's CPU profile, as podman and podman-compose run them."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from coppice import Client

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "coppice-trial"
IMAGE = "coppice:trial"
VOLUME = f"{PROJECT}_shared_memory"
FILLER, HOLDER = f"{PROJECT}-filler", f"{PROJECT}-holder"
SECRET = "secret"
TARGET, DRAFT = "target_service_cpu", "draft_service_cpu"
ORCHESTRATOR, GATEWAY = "orchestrator", "gateway"
SERVICES = (TARGET, DRAFT, ORCHESTRATOR, GATEWAY)
"""In the order in which they start."""
READY_TIMEOUT_S = 180.0
_READ_METRICS = """
import urllib.request
print(urllib.request.urlopen("http://localhost:9400/metrics").read().decode())
"""

logger = logging.getLogger("compose_trial")


def adapted(document: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU profile as podman 4.3 and podman-compose can run it.

    - `start_interval` of health checks and `size=` of a tmpfs volume are not known to them.
    - `depends_on` would wait for health checks that nobody runs; services are started in order.
    - `uid=` and `gid=` of a tmpfs are not known to them, so that it has to be everybody's.
    - `nocopy` of a volume is not known to podman-compose; see `Deployment.hold_shared_memory`.
    - `build` is left to `podman build`, and profiles are chosen here.
    """
    document["services"] = {name: document["services"][name] for name in (SECRET, *SERVICES)}
    for service in document["services"].values():
        for key in ("build", "depends_on", "profiles"):
            service.pop(key, None)
        service.get("healthcheck", {}).pop("start_interval", None)
        service["tmpfs"] = [_everybodys(mount) for mount in service["tmpfs"]]
        for volume in service["volumes"]:
            if isinstance(volume, dict):
                volume.pop("volume", None)  # services share this object
    options = document["volumes"]["shared_memory"]["driver_opts"]
    options["o"] = ",".join(o for o in options["o"].split(",") if not o.startswith("size="))
    return document


def _everybodys(tmpfs: str) -> str:
    """Return a tmpfs that has no owner, and nothing of the image's folder."""
    path, _, options = tmpfs.partition(":")
    kept = [o for o in options.split(",") if o.partition("=")[0] not in ("uid", "gid", "mode")]
    return f"{path}:{','.join([*kept, 'mode=1777', 'notmpcopyup'])}"


def require(condition: object, message: str) -> None:
    """Raise AssertionError unless a promise holds."""
    if not condition:
        raise AssertionError(message)


def output_of(*command: str, check: bool = True) -> str:
    """Return what a command wrote to its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def podman(*arguments: str, check: bool = True) -> str:
    """Run podman; return its output."""
    return output_of("podman", *arguments, check=check)


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait for a condition; return how long that took, seconds."""
    began = time.monotonic()
    while not condition():
        require(time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.5)
    return time.monotonic() - began


class Container:
    """A running container of a service."""

    def __init__(self, name: str) -> None:
        self.name = name

    def facts(self) -> dict[str, Any]:
        """Return what `podman inspect` says."""
        found: dict[str, Any] = json.loads(podman("inspect", self.name))[0]
        return found

    def address(self) -> str:
        """Return its address in the network of the workers."""
        networks = self.facts()["NetworkSettings"]["Networks"]
        address: str = networks[f"{PROJECT}_workers"]["IPAddress"]
        return address

    def is_healthy(self) -> bool:
        """Run the health check of the compose file, in the container."""
        command = ("podman", "healthcheck", "run", self.name)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def wait_healthy(self) -> float:
        """Wait for the health check to pass; return how long that took, seconds."""
        try:
            return wait_for(self.is_healthy, READY_TIMEOUT_S, f"{self.name} is healthy")
        except AssertionError:
            logger.error("%s", podman("logs", "--tail", "40", self.name, check=False))
            raise

    def processes(self) -> dict[str, int]:
        """Return its processes by what they are, as process ids of the host.

        A spare engine is younger than the engine.
        """
        found: dict[str, int] = {}
        for line in podman("top", self.name, "hpid", "args").splitlines()[1:]:
            pid, _, arguments = line.strip().partition(" ")
            if "spawn_main" in arguments:
                found["spare" if "engine" in found else "engine"] = int(pid)
            elif re.search(r"python\S* \S*coppice serve", arguments):
                found.setdefault("front", int(pid))
        return found

    def num_engine_ends(self, cause: str) -> int:
        """Return how many engines ended for a cause, as its metrics say; 0 if nobody answers."""
        text = podman("exec", self.name, "python", "-c", _READ_METRICS, check=False)
        pattern = rf'^coppice_engine_ends_total{{.*cause="{cause}".*}} (\d+)'
        found = re.search(pattern, text, re.MULTILINE)
        return int(found[1]) if found else 0

    def signal(self, process: str, number: str) -> None:
        """Send a signal to one of its processes, as a fault would."""
        output_of("kill", f"-{number}", str(self.processes()[process]))

    def errors_of(self, *command: str) -> str:
        """Return what a command in the container says when it fails."""
        whole = ("podman", "exec", self.name, *command)
        return subprocess.run(whole, capture_output=True, text=True, check=False).stderr

    def log(self) -> str:
        """Return what it has written, also before it was started again."""
        command = ("podman", "logs", self.name)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def wait_restarted(self, before: str) -> float:
        """Wait until it was started again after a moment; return how long that took, seconds."""
        return wait_for(lambda: self.started_at() != before, 120.0, f"{self.name} starts again")

    def started_at(self) -> str:
        """Return when it was started last."""
        return str(self.facts()["State"]["StartedAt"])


class Deployment:
    """The CPU profile as podman-compose runs it.

    Args:
        folder: For the adapted compose file; its `models` is mounted at /models.
        port: Where the orchestrator is published.
        http_port: Where the gateway is.
    """

    def __init__(self, folder: Path, port: int, http_port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://127.0.0.1:{http_port}"
        for mounted in ("models", "access"):
            (folder / mounted).mkdir()
        self._document = adapted(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))
        self._file = folder / "docker-compose.yml"
        self._file.write_text(yaml.safe_dump(self._document))
        self.access = folder / "access"
        self._variables = folder / ".env"
        self._ports = {"PORT": str(port), "HTTP_PORT": str(http_port)}
        self.configure()

    def configure(self, **variables: str) -> None:
        """Set the variables of the compose file, for what is started from now on."""
        settings = {**self._ports, "COPPICE_TAG": "trial", **variables}
        self._variables.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))

    def compose(self, *arguments: str) -> None:
        """Run podman-compose."""
        output_of("podman-compose", "-p", PROJECT, "-f", str(self._file), *arguments)

    def scale(self, service: str, num_replicas: int) -> list[Container]:
        """Start containers of a service until there are so many, and wait for their health."""
        self.compose("up", "--detach", "--no-deps", "--scale", f"{service}={num_replicas}", service)
        containers = self.containers(service)
        require(len(containers) == num_replicas, f"{service}: {len(containers)} containers")
        for container in containers:
            container.wait_healthy()
        return containers

    def replace(self, service: str, *, is_awaited: bool = True, **variables: str) -> None:
        """Remove the container of a service, if there is one, and start it with these variables.

        Args:
            is_awaited: Until it is healthy.
        """
        podman("rm", "--force", "--time", "60", f"{PROJECT}_{service}_1", check=False)
        self.configure(**variables)
        if is_awaited:
            self.scale(service, 1)
        else:
            self.compose("up", "--detach", "--no-deps", service)

    def containers(self, service: str) -> list[Container]:
        """Return the running containers of a service."""
        label = f"com.docker.compose.service={service}"
        project = f"io.podman.compose.project={PROJECT}"
        filters = ("--filter", f"label={label}", "--filter", f"label={project}")
        return [*map(Container, podman("ps", "--format", "{{.Names}}", *filters).split())]

    def container(self, service: str) -> Container:
        """Return the only running container of a service."""
        (container,) = self.containers(service)
        return container

    def hold_shared_memory(self) -> None:
        """Make the volume for shared memory and mount it where the image has no folder.

        Podman copies a folder of the image into a volume when it is mounted first, and never again.
        The container that has it mounted can tell what others left in it.
        """
        options = self._document["volumes"]["shared_memory"]["driver_opts"]
        options = [part for key, value in options.items() for part in ("--opt", f"{key}={value}")]
        podman("volume", "create", *options, VOLUME)
        podman(
            *("run", "--detach", "--name", HOLDER, "--network", "none"),
            *("--volume", f"{VOLUME}:/held", IMAGE, "sleep", "infinity"),
        )

    def up(self) -> None:
        """Start workers, then the orchestrator and the gateway, as depends_on asks for."""
        self.hold_shared_memory()
        self.compose("up", "--detach", "--no-deps", SECRET)
        podman("wait", f"{PROJECT}_{SECRET}_1")
        for service in SERVICES:
            took_s = -time.monotonic()
            self.scale(service, 1)
            logger.info("%s is healthy after %.1f s", service, took_s + time.monotonic())
        self.wait_speculating()

    def wait_speculating(self) -> None:
        """Wait until some draft fits some target."""
        service = "coppice.v1.GenerationService/speculation"
        command = ["coppice", "health", "localhost:50051", "--service", service]
        container = self.container(ORCHESTRATOR)

        def is_serving() -> bool:
            return podman("exec", container.name, *command, check=False) == "SERVING"

        wait_for(is_serving, READY_TIMEOUT_S, "a draft fits a target")

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        for service in (SECRET, *SERVICES):
            for name in podman(
                "ps", "-a", "--format", "{{.Names}}", "--filter", f"name={PROJECT}_{service}"
            ).split():
                podman("rm", "--force", "--time", "30", name, check=False)
        for name in (FILLER, HOLDER):
            podman("rm", "--force", "--time", "0", name, check=False)
        for network in ("clients", "workers"):
            podman("network", "rm", f"{PROJECT}_{network}", check=False)
        for volume in (VOLUME, f"{PROJECT}_gpu_leases", f"{PROJECT}_secret"):
            podman("volume", "rm", volume, check=False)

    def client(self, token: str = "") -> Client:
        """Return a client at the published port; it resumes what breaks."""
        return Client(self.address, max_retries=60, token=token)
