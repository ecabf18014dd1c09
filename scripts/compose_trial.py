"""Run docker-compose.yml's CPU profile in real containers, by podman, and try what it promises.

    python scripts/compose_trial.py                   builds the image, tries all, cleans up
    python scripts/compose_trial.py --no-build hang   one trial, with the image that is there

Needs podman (as root where there is no rootless setup), podman-compose and an environment in which
this package is installed; no Docker and no systemd. Where no registry can be reached:

    --base-image IMAGE   the Dockerfile's BASE_IMAGE: a Debian with Python 3.11, pip and `python`,
                         where pip may install (no EXTERNALLY-MANAGED)
    --build-args '...'   more arguments of `podman build`, such as `--volume` of a configuration of
                         pip and of what it names
    STORAGE_DRIVER=vfs   where there is no overlay; each layer is a full copy, so there is one

podman-compose is no Docker: `adapted` of compose_containers.py says what differs. Health checks,
which podman leaves to systemd, are run from here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compose_clients import Http, HttpStream, Stream, completion
from compose_containers import (
    DRAFT,
    FILLER,
    GATEWAY,
    HOLDER,
    IMAGE,
    ORCHESTRATOR,
    PROJECT,
    READY_TIMEOUT_S,
    ROOT,
    SERVICES,
    TARGET,
    Container,
    Deployment,
    podman,
    require,
    wait_for,
)

from coppice import Client, Completion
from shared.errors import EXIT_CONFIG, UnauthenticatedError

USER_ID = 10001
NUM_TOKENS = 160
NUM_HTTP_TOKENS = 900
"""Of a stream that is still running when a process is found and killed."""
CALL_WITHOUT_IDENTITY = """
import grpc
from coppice.v1 import target_pb2, target_pb2_grpc
channel = grpc.insecure_channel("localhost:50052")
target_pb2_grpc.TargetServiceStub(channel).GetInfo(target_pb2.TargetServiceGetInfoRequest())
"""
PROMPTS = ("def read_lines(path):", "class Stack:", "import os\n\ndef main():")

logger = logging.getLogger("compose_trial")


class Trials:
    """What is tried, in order; every output must be that of a plain run."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._plain: dict[str, Completion] = {}

    def names(self) -> list[str]:
        """Return the names of the trials."""
        return [name.removeprefix("try_") for name in vars(type(self)) if name.startswith("try_")]

    def run(self, name: str) -> None:
        """Run one trial."""
        began = time.monotonic()
        getattr(self, f"try_{name}")()
        logger.info("ok: %s, %.0f s", name.replace("_", " "), time.monotonic() - began)

    def try_isolation(self) -> None:
        """No root, no new privileges; workers reach nothing and are not published."""
        deployment = self._deployment
        for service in SERVICES:
            container = deployment.container(service)
            user = podman("exec", container.name, "id", "-u")
            require(user == str(USER_ID), f"{service} runs as {user}")
            status = podman("exec", container.name, "cat", "/proc/1/status")
            require("NoNewPrivs:\t1" in status, f"{service} may gain privileges")
            require("CapBnd:\t0000000000000000" in status, f"{service} has capabilities")
            tried = container.errors_of("touch", "/opt/coppice/file")
            require("Read-only" in tried, f"{service} may write to its root: {tried}")
            ports = container.facts()["NetworkSettings"]["Ports"].values()
            published = [port["HostIp"] for found in ports for port in found or ()]
            expected = ["127.0.0.1"] if service in (ORCHESTRATOR, GATEWAY) else []
            require(published == expected, f"{service} is published at {published}")
        target = deployment.container(TARGET)
        code = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
        require("unreachable" in target.errors_of("python", "-c", code), "a worker has a way out")
        code = f"import socket; socket.create_connection(('{target.address()}', 50052), 3)"
        gateway = deployment.container(GATEWAY)
        require(gateway.errors_of("python", "-c", code), "the gateway reaches workers")
        require(
            "UNAUTHENTICATED" in target.errors_of("python", "-c", CALL_WITHOUT_IDENTITY),
            "a worker answers anybody",
        )

    def try_generate(self) -> None:
        """Trees change no token, and rounds go from engine to engine, through shared memory."""
        with self._deployment.client() as client:
            for prompt in PROMPTS:
                expected = self._expected(client, prompt)
                stream = Stream(client, prompt, NUM_TOKENS, round_times=True)
                finish = stream.result()
                require(tuple(stream.token_ids) == expected, f"{prompt!r} differs with trees")
                names = {stage.name for times in finish.round_times for stage in times.stages}
                require("draft: channel" in names, f"no peer round: {sorted(names)}")
                logger.info("accept_length %.2f", finish.speculation.accept_length)

    def try_http(self) -> None:
        """OpenAI's API gives over HTTP what gRPC says; a chat does not depend on speculation."""
        gateway = Http(self._deployment.url)
        models = [found["id"] for found in gateway.ask("/v1/models")["data"]]
        require(models == ["demo"], f"models: {models}")
        with self._deployment.client() as client:
            for prompt in PROMPTS:
                stream = HttpStream(gateway, completion(prompt, NUM_TOKENS))
                stream.wait()
                require(stream.error is None, f"{stream.error!r}")
                require(
                    tuple(stream.token_ids) == self._expected(client, prompt), f"{prompt!r} differs"
                )
        chat = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Write a stack in Python."}],
            "max_tokens": 64,
            "temperature": 0,
        }
        texts = [
            gateway.ask("/v1/chat/completions", {**chat, "speculation": is_on})["choices"][0][
                "message"
            ]["content"]
            for is_on in (True, False)
        ]
        require(texts[0] and texts[0] == texts[1], f"two chats: {texts}")

    def try_http_faults(self) -> None:
        """A stream over HTTP outlives the orchestrator; a dead gateway's successor answers."""
        deployment, gateway = self._deployment, Http(self._deployment.url)
        body = completion(PROMPTS[0], NUM_HTTP_TOKENS, ignore_eos=True)
        plain = HttpStream(gateway, {**body, "speculation": False})
        plain.wait()
        require(len(plain.token_ids) == NUM_HTTP_TOKENS, f"{plain.error!r}")
        for service in (ORCHESTRATOR, GATEWAY):
            container = deployment.container(service)
            before = container.started_at()
            stream = HttpStream(gateway, body)
            stream.reaches(8)
            container.signal("front", "KILL")
            num_tokens = len(stream.token_ids)
            require(num_tokens < NUM_HTTP_TOKENS, "it was over before the fault")
            stream.wait()
            container.wait_restarted(before)
            container.wait_healthy()
            token_ids = stream.token_ids
            if service == GATEWAY:
                require(stream.error is not None, "its connection survived it")
                stream = HttpStream(gateway, {**body, "resume_token_ids": token_ids})
                stream.wait()
                token_ids = token_ids + stream.token_ids
            require(stream.error is None, f"{stream.error!r}")
            require(token_ids == plain.token_ids, f"an output differs: {service} was killed")
            logger.info("%s was killed after %d tokens over HTTP", service, num_tokens)
        deployment.wait_speculating()

    def try_refusal(self) -> None:
        """A configuration that cannot work ends a container with code 2, again and again."""
        deployment = self._deployment
        deployment.replace(TARGET, is_awaited=False, PAGE_SIZE="0")
        container = Container(f"{PROJECT}_{TARGET}_1")
        for what, is_so in (
            ("it is restarted", lambda: container.facts()["RestartCount"] >= 2),
            ("it ends with code 2", lambda: container.facts()["State"]["ExitCode"] == EXIT_CONFIG),
        ):
            wait_for(is_so, READY_TIMEOUT_S, what)
        require("--page-size" in container.log(), "its log does not name the flag")
        deployment.replace(TARGET)
        deployment.wait_speculating()

    def try_access(self) -> None:
        """Published to all, orchestrator and gateway start only with tokens, and ask for them."""
        deployment, token = self._deployment, "0123456789abcdef0123456789abcdef"
        for service in (ORCHESTRATOR, GATEWAY):
            deployment.replace(service, is_awaited=False, PUBLISH_HOST="0.0.0.0")
            wait_for(
                lambda name=f"{PROJECT}_{service}_1": "--token-file" in Container(name).log(),
                READY_TIMEOUT_S,
                f"{service} refuses to serve everybody",
            )
        (deployment.access / "tokens").write_text(f"trial:{token}\n")
        for service in (ORCHESTRATOR, GATEWAY):
            deployment.replace(service, PUBLISH_HOST="0.0.0.0", TOKEN_FILE="/access/tokens")
        try:
            with deployment.client() as client:
                client.generate(PROMPTS[0], max_new_tokens=4)
            raise AssertionError("it serves a client without a token")
        except UnauthenticatedError:
            pass
        with deployment.client(token) as client:
            client.generate(PROMPTS[0], max_new_tokens=4)
        require(Http(deployment.url).status("/v1/models") == 401, "HTTP without a token")
        Http(deployment.url, token).ask("/v1/completions", completion(PROMPTS[0], 4))
        for service in (ORCHESTRATOR, GATEWAY):
            deployment.replace(service)
        deployment.wait_speculating()

    def try_scale(self) -> None:
        """New replicas are found by their name, and serve; those that go are missed by nobody."""
        deployment = self._deployment
        for service in (TARGET, DRAFT):
            for replica in deployment.scale(service, 2):
                self._wait_found(replica.address())
        with self._streams(2) as streams:
            for service in (TARGET, DRAFT):
                newest = max(deployment.containers(service), key=lambda c: c.started_at())
                podman("rm", "--force", "--time", "60", newest.name)
                require(len(deployment.containers(service)) == 1, "more than one is left")
            self._finish(streams)

    def try_replace_target(self) -> None:
        """The only target is killed and replaced at another address: streams go on."""
        deployment = self._deployment
        target = deployment.container(TARGET)
        address = target.address()
        with self._streams(2) as streams:
            podman("rm", "--force", "--time", "0", target.name)
            # Takes the address, so that the next target must get another one.
            podman(
                *("run", "--detach", "--name", FILLER, "--ip", address),
                *("--network", f"{PROJECT}_workers", IMAGE, "sleep", "infinity"),
            )
            (successor,) = deployment.scale(TARGET, 1)
            require(successor.address() != address, f"it is at {address} again")
            self._finish(streams)
        podman("rm", "--force", "--time", "0", FILLER)

    def try_kill(self) -> None:
        """A process of each service is killed: its container starts again, streams go on."""
        for service in SERVICES:
            self._fault(service, "front", "KILL")

    def try_hang(self) -> None:
        """An engine that hangs is replaced by a spare one, a service that hangs restarts."""
        for service in (TARGET, DRAFT):
            self._hang_engine(service)
        for service in SERVICES:
            self._fault(service, "front", "STOP")

    def try_stop(self) -> None:
        """SIGTERM ends every service in order, within its grace; nothing stays in shared memory."""
        deployment = self._deployment
        require(podman("exec", HOLDER, "ls", "/held"), "nothing is in shared memory")
        for service in reversed(SERVICES):
            container = deployment.container(service)
            podman("stop", "--time", "60", container.name)
            code = container.facts()["State"]["ExitCode"]
            require(code == 0, f"{service} ended with {code}")
        left = podman("exec", HOLDER, "ls", "/held")
        require(not left, f"left in shared memory: {left}")

    def _hang_engine(self, service: str) -> None:
        container = self._deployment.container(service)
        wait_for(lambda: "spare" in container.processes(), READY_TIMEOUT_S, "a spare engine")
        before, num_hung = container.started_at(), container.num_engine_ends("hung")
        with self._streams(1) as streams:
            container.signal("engine", "STOP")
            self._finish(streams)
        wait_for(
            lambda: container.num_engine_ends("hung") > num_hung,
            READY_TIMEOUT_S,
            f"the spare engine of {service} takes over",
        )
        require(container.started_at() == before, f"{service} was restarted")
        self._deployment.wait_speculating()
        pause_s = max(stream.longest_pause_s for stream in streams)
        logger.info("the engine of %s hung: longest pause of the stream %.1f s", service, pause_s)

    def _fault(self, service: str, process: str, number: str) -> None:
        container = self._deployment.container(service)
        before = container.started_at()
        with self._streams(1) as streams:
            container.signal(process, number)
            took_s = container.wait_restarted(before)
            self._finish(streams)
        ready_s = container.wait_healthy()
        self._deployment.wait_speculating()
        logger.info(
            "SIG%s of the %s of %s: longest pause of the stream %.1f s; started again after "
            "%.1f s, healthy %.1f s after the stream",
            number,
            process,
            service,
            max(stream.longest_pause_s for stream in streams),
            took_s,
            ready_s,
        )

    def _wait_found(self, address: str) -> None:
        """Wait until the orchestrator has a session with the worker at an address."""
        orchestrator = self._deployment.container(ORCHESTRATOR)

        def is_found() -> bool:
            return bool(re.search(rf" {re.escape(address)}:\d+ serves ", orchestrator.log()))

        wait_for(is_found, 60.0, f"the orchestrator finds {address}")

    def _expected(self, client: Client, prompt: str) -> tuple[int, ...]:
        if prompt not in self._plain:
            self._plain[prompt] = client.generate(
                prompt, max_new_tokens=NUM_TOKENS, speculation=False
            )
        return tuple(self._plain[prompt].token_ids)

    @contextmanager
    def _streams(self, num_streams: int) -> Iterator[list[Stream]]:
        """Start requests that are running when the block begins."""
        with self._deployment.client() as client:
            for prompt in PROMPTS[:num_streams]:
                self._expected(client, prompt)
            streams = [Stream(client, prompt, NUM_TOKENS) for prompt in PROMPTS[:num_streams]]
            for stream in streams:
                stream.reaches(8)
            yield streams

    def _finish(self, streams: Sequence[Stream]) -> None:
        """Wait for the ends of requests and compare their outputs with plain ones."""
        for stream, prompt in zip(streams, PROMPTS, strict=False):
            stream.result()
            expected = tuple(self._plain[prompt].token_ids)
            require(tuple(stream.token_ids) == expected, f"{prompt!r} differs after a fault")


def build(base_image: str, arguments: str) -> None:
    """Build the Dockerfile."""
    command = ["build", "--isolation", "chroot", "--layers=false", "--tag", IMAGE]
    if base_image:
        command += ["--build-arg", f"BASE_IMAGE={base_image}"]
    podman(*command, *shlex.split(arguments), str(ROOT))


def describe_image() -> None:
    """Log the size of the image, and check its user."""
    (image,) = json.loads(podman("image", "inspect", IMAGE))
    logger.info("image: %.2f GB", image["Size"] / 1e9)
    require(image["Config"]["User"] == "coppice", "the image runs as root")


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def main() -> int:
    """Run the trials; 0 if all hold, 1 if one does not, 2 if something is not installed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trials", nargs="*", help="some of the trials (default: all)")
    parser.add_argument("--base-image", default="", help="the Dockerfile's BASE_IMAGE")
    parser.add_argument("--build-args", default="", help="more arguments of `podman build`")
    parser.add_argument("--no-build", action="store_true", help=f"use {IMAGE} as it is")
    parser.add_argument(
        "--keep", action="store_true", help="leave the containers and what they mount"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    missing = [name for name in ("podman", "podman-compose") if shutil.which(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}")
    if not arguments.no_build:
        build(arguments.base_image, arguments.build_args)
    describe_image()
    folder = Path(tempfile.mkdtemp())
    deployment = Deployment(folder, free_port(), free_port())
    trials = Trials(deployment)
    try:
        deployment.up()
        for name in arguments.trials or trials.names():
            trials.run(name)
    except AssertionError as error:
        logger.error("failed: %s", error)
        return 1
    finally:
        if not arguments.keep:
            deployment.down()
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PODMAN_IGNORE_CGROUPSV1_WARNING", "1")
    sys.exit(main())
