"""Start, watch and stop a whole stack; `coppice up`, `coppice demo` and the tests use it.

with Stack(StackConfig()) as stack:
    Client(stack.address).generate("def main():")
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from coppice.health import HealthProbe
from coppice.stack.config import LOOPBACK, StackConfig
from coppice.stack.gpus import gpus_of_workers, on_gpu, places_of, shared_gpus
from coppice.stack.mps import MultiProcessService
from coppice.stack.ports import dialled, free_ports, is_taken, require_distinct, require_free
from coppice.stack.process import POLL_INTERVAL_S, ServiceFailedError, ServiceProcess, ServiceState
from shared.config import (
    SECRET_VARIABLE,
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
    admin_port,
    read_secret,
)
from shared.config.check import check_config
from shared.config.loader import ENV_PREFIX, to_arguments
from shared.rpc.gate import front_gate
from shared.rpc.health_names import (
    DRAFT_SERVICE,
    GATEWAY_SERVICE,
    ORCHESTRATOR_SERVICE,
    SPECULATION_SERVICE,
    TARGET_SERVICE,
)

PAIRING_TIMEOUT_S = 20.0
SECRET_BYTES = 32

Config = TypeVar("Config", OrchestratorConfig, TargetConfig, DraftConfig, GatewayConfig)
# The services that clients call: they end before the workers.
FRONTS = ("gateway", "orchestrator")


def _ignore(*_: Any) -> None:
    return


class Stack:
    """Targets, drafts, an orchestrator and perhaps a gateway on loopback ports of this machine.

    Services are named "gateway", "orchestrator", "target-0", "draft-0", ...

    Args:
        config: What to start.
        on_log: Called with (service, line) from threads.
        on_state: Called with (service, ServiceState) from threads.
    """

    def __init__(
        self,
        config: StackConfig,
        *,
        on_log: Callable[[str, str], None] = _ignore,
        on_state: Callable[[str, ServiceState], None] = _ignore,
    ) -> None:
        parts = (config.orchestrator, config.target, config.draft, config.gateway)
        for part in filter(None, parts):
            check_config(part)
        self.config = _with_one_secret(config)
        self.secret = _secret_of(self.config)
        self._on_log = on_log
        self._on_state = on_state
        self._mps = MultiProcessService(lambda line: on_log("mps", line))
        self.services: dict[str, ServiceProcess] = {}
        self._place_of: dict[str, str] = {}
        self._metrics_at: dict[str, tuple[str, int]] = {}

    @property
    def address(self) -> str:
        """Return HOST:PORT of the orchestrator."""
        return self.services["orchestrator"].address

    @property
    def http_url(self) -> str:
        """Return where the gateway listens; "": there is none."""
        if self.config.gateway is None:
            return ""
        scheme = "https" if self.config.gateway.tls_cert_file else "http"
        return f"{scheme}://{self.services['gateway'].address}"

    @property
    def target_addresses(self) -> list[str]:
        """Return HOST:PORT of every target."""
        return [s.address for name, s in self.services.items() if name.startswith("target-")]

    @property
    def draft_addresses(self) -> list[str]:
        """Return HOST:PORT of every draft."""
        return [s.address for name, s in self.services.items() if name.startswith("draft-")]

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Return where the metrics of every process are; empty: nowhere."""
        return {
            name: f"http://{dialled(host)}:{port}/metrics"
            for name, (host, port) in self._metrics_at.items()
        }

    def start(self) -> Stack:
        """Launch everything at once and wait until every service is ready.

        Raises: ConfigError if a port is taken, open to everybody or another option's, too;
            ServiceFailedError with the log of
            the service that ended or took too long. Nothing is left running then.
        """
        require_free(self.config.orchestrator.host, self.config.orchestrator.port)
        front_gate(self.config.orchestrator)
        if self.config.gateway is not None:
            host, port = self.config.gateway.host, self.config.gateway.port
            if not self.config.any_http_port:
                require_free(host, port, option="--http-port")
            front_gate(self.config.gateway)
        self.build()
        try:
            self._start_mps()
            for service in self.services.values():
                service.start()
            self.wait_ready(*self.services, timeout_s=self.config.start_timeout_s)
            if self.config.num_drafts:
                self._wait_speculating()
        except BaseException:
            self.stop(timeout_s=5.0)
            raise
        return self

    def build(self) -> None:
        """Choose ports and GPUs, and make every service; starts nothing.

        Raises: ConfigError if two options are the same port.
        """
        config = self.config
        num_workers = config.num_targets + config.num_drafts
        gpus = gpus_of_workers(config)
        places = places_of(config, gpus)
        of_targets, of_drafts = places[: config.num_targets], places[config.num_targets :]
        self._place_of = dict(zip(self._worker_names, places, strict=True))
        front = config.orchestrator
        with free_ports(num_workers + 5) as reserved:
            ports = iter(reserved)
        num_processes = max(1, front.workers)
        metrics_ports = itertools.count(config.metrics_port + num_processes)
        for index, place in enumerate(of_targets):
            target = on_gpu(config.target, place, alike=of_targets, others=of_drafts)
            target = replace(target, host=LOOPBACK, port=next(ports), gpus=gpus[index])
            target = self._with_metrics(f"target-{index}", target, metrics_ports)
            self._add(f"target-{index}", "target", target, TARGET_SERVICE)
        for index, place in enumerate(of_drafts):
            draft = on_gpu(config.draft, place, alike=of_drafts, others=of_targets)
            gpu = gpus[config.num_targets + index]
            draft = replace(draft, host=LOOPBACK, port=next(ports), gpus=gpu)
            draft = self._with_metrics(f"draft-{index}", draft, metrics_ports)
            self._add(f"draft-{index}", "draft", draft, DRAFT_SERVICE)
        orchestrator = replace(
            front,
            port=front.port or next(ports),
            # Who supervises need not have a certificate that the orchestrator takes.
            health_port=front.health_port or (next(ports) if front.tls_cert_file else 0),
            admin_port=admin_port(front) or next(ports),
            targets=",".join(self.target_addresses),
            drafts=",".join(self.draft_addresses),
        )
        ports_of_processes = itertools.count(config.metrics_port)
        orchestrator = self._with_metrics("orchestrator", orchestrator, ports_of_processes)
        for index in range(1, num_processes):  # they find their ports by themselves
            self._with_metrics(f"orchestrator.{index}", orchestrator, ports_of_processes)
        self._add("orchestrator", "orchestrator", orchestrator, ORCHESTRATOR_SERVICE)
        if config.gateway is not None:
            self._add_gateway(config.gateway, ports, metrics_ports)
        require_distinct(self._ports_of_options)

    def _add_gateway(
        self, config: GatewayConfig, ports: Iterator[int], metrics_ports: Iterator[int]
    ) -> None:
        config = self._with_metrics("gateway", config, metrics_ports)
        http_port = config.port
        own = {port for _, _, port in self._ports_of_options}
        if self.config.any_http_port and (http_port in own or is_taken(config.host, http_port)):
            http_port = 0
        config = replace(
            config,
            port=http_port or next(ports),
            health_port=config.health_port or next(ports),
            orchestrators=self.address,
        )
        self._add("gateway", "gateway", config, GATEWAY_SERVICE)
        self.services["gateway"].environ.pop(SECRET_VARIABLE)

    def _with_metrics(self, name: str, config: Config, ports: Iterator[int]) -> Config:
        """Return a configuration with the next of these ports for metrics, if there are any."""
        if not self.config.metrics_port:
            return config
        port = next(ports)
        self._metrics_at[name] = (config.metrics_host, port)
        return replace(config, metrics_port=port)

    @property
    def _ports_of_options(self) -> list[tuple[str, str, int]]:
        """Return option, host and port of what listens at a port that somebody chose."""
        front, gateway = self.config.orchestrator, self.config.gateway
        admin = "admin_port" if front.admin_port else "the admin port, 1000 above --port,"
        ports = [
            ("--port", front.host, front.port),
            (admin, front.admin_host, admin_port(front)),
            *((f"--metrics-port (of {name})", *at) for name, at in self._metrics_at.items()),
        ]
        if gateway is not None and not self.config.any_http_port:
            ports.append(("--http-port", gateway.host, gateway.port))
        return ports

    def wait_ready(self, *names: str, timeout_s: float) -> None:
        """Wait until the named services are ready.

        Raises: ServiceFailedError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = {name: self.services[name].state for name in names}
            if all(state is ServiceState.READY for state in states.values()):
                return
            for name, state in states.items():
                if state in (ServiceState.FAILED, ServiceState.STOPPED):
                    service = self.services[name]
                    raise ServiceFailedError(
                        f"{name} ended before it was ready\n{service.log_tail()}",
                        exit_code=service.exit_code,
                    )
            if time.monotonic() > deadline:
                late = [n for n, s in states.items() if s is not ServiceState.READY]
                raise ServiceFailedError(
                    f"{', '.join(late)} not ready after {timeout_s:g} s\n"
                    f"{self.services[late[0]].log_tail()}"
                )
            time.sleep(POLL_INTERVAL_S)

    def stop(self, *, timeout_s: float | None = None) -> None:
        """End gateway and orchestrator first, so that their requests may finish, then the workers.

        Args:
            timeout_s: Before processes are killed; None: what the services' own budgets need.
        """
        deadline = time.monotonic() + (
            self.config.stop_budget_s if timeout_s is None else timeout_s
        )
        fronts = [service for name, service in self.services.items() if name in FRONTS]
        workers = [service for name, service in self.services.items() if name not in FRONTS]
        try:
            for group in (fronts, workers):
                for service in group:
                    service.request_stop()
                for service in group:
                    service.join(deadline - time.monotonic())
        except BaseException:  # an impatient second Ctrl-C
            for service in (*fronts, *workers):
                service.request_stop()
                service.kill()
            raise
        finally:
            self._mps.stop()

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_speculating(self) -> None:
        """Wait until the orchestrator has paired a draft with a target; workers are ready by now.

        Raises: ServiceFailedError if none fits.
        """
        deadline = time.monotonic() + PAIRING_TIMEOUT_S
        with HealthProbe(self.services["orchestrator"].health_address) as probe:
            while probe.status(SPECULATION_SERVICE, timeout_s=1.0) != "SERVING":
                if time.monotonic() > deadline:
                    raise ServiceFailedError(
                        "the orchestrator found no draft that fits its target\n"
                        + self.services["orchestrator"].log_tail()
                    )
                time.sleep(POLL_INTERVAL_S)

    def _start_mps(self) -> None:
        """Start what workers that share a GPU need, and tell them of it."""
        shared = shared_gpus(list(self._place_of.values())) if self.config.mps else ()
        if shared:
            self._mps.start()
        for name, place in self._place_of.items():
            if place in shared:
                self.services[name].environ.update(self._mps.environ)

    @property
    def _worker_names(self) -> list[str]:
        """Return the names of targets, then of drafts."""
        return [
            *(f"target-{index}" for index in range(self.config.num_targets)),
            *(f"draft-{index}" for index in range(self.config.num_drafts)),
        ]

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment of a service: it is configured by flags, but for the secret."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        return {**environ, "PYTHONUNBUFFERED": "1", SECRET_VARIABLE: self.secret}

    def _add(self, name: str, role: str, config: Any, health_service: str) -> None:
        command = [sys.executable, "-m", "coppice", "serve", role, "--exit-with-parent"]
        self.services[name] = ServiceProcess(
            name,
            command + to_arguments(config),
            address=f"{dialled(config.host)}:{config.port}",
            health_address=f"{dialled(config.host)}:{config.health_port or config.port}",
            health_service=health_service,
            environ=self.environ,
            on_log=self._on_log,
            on_state=self._on_state,
            is_restarted=True,
        )


def _with_one_secret(config: StackConfig) -> StackConfig:
    """Give the file with the secret, if one service has it, to those that have none."""
    parts = {name: getattr(config, name) for name in ("orchestrator", "target", "draft")}
    path = next((part.secret_file for part in parts.values() if part.secret_file), "")
    own = {name: part.secret_file or path for name, part in parts.items()}
    return replace(
        config, **{name: replace(part, secret_file=own[name]) for name, part in parts.items()}
    )


def _secret_of(config: StackConfig) -> str:
    """Return the secret that services find in their environment; a file of theirs goes first.

    Raises: ConfigError if what was given cannot be one.
    """
    given = os.environ.get(SECRET_VARIABLE, "")
    read_secret(config.orchestrator, os.environ)
    return given or secrets.token_hex(SECRET_BYTES)
