"""How a stack spreads GPUs, ports and configuration over its processes."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coppice.cli.main import build_parser
from coppice.cli.options import load_service_config
from coppice.cli.serve import ROLES
from coppice.stack import Stack, StackConfig
from coppice.stack import config as config_module
from coppice.stack import gpus as gpus_module
from coppice.stack.config import stack_config
from coppice.stack.gpus import DRAFT_KV_FRACTION, TARGET_KV_FRACTION
from coppice.stack.stack import FRONTS
from shared.config import (
    DraftConfig,
    GatewayConfig,
    OrchestratorConfig,
    TargetConfig,
    WorkerConfig,
)
from shared.errors import ConfigError
from shared.rpc.health_names import ORCHESTRATOR_SERVICE

GPUS = ["GPU-a", "GPU-b", "GPU-c"]


def built(config: StackConfig) -> Stack:
    """Return a stack whose commands are made but not started."""
    stack = Stack(config)
    stack.build()
    return stack


def config_of(
    stack: Stack, name: str
) -> TargetConfig | DraftConfig | OrchestratorConfig | GatewayConfig:
    """Parse a service's command line as the service will."""
    _, _, module, *argv = stack.services[name].command
    assert module == "coppice"
    arguments, extras = build_parser().parse_known_args(argv)
    assert extras == [] and arguments.exit_with_parent
    config_type, _ = ROLES[arguments.role]
    loaded = load_service_config(arguments, config_type, section=arguments.role)
    assert isinstance(loaded, TargetConfig | DraftConfig | OrchestratorConfig | GatewayConfig)
    return loaded


def gpus_of(config: StackConfig, monkeypatch: pytest.MonkeyPatch, found: list[str]) -> list[str]:
    monkeypatch.setattr(gpus_module, "visible_gpus", lambda: found)
    stack = built(config)
    workers = [name for name in stack.services if name not in FRONTS]
    return [getattr(config_of(stack, name), "gpus") for name in workers]  # noqa: B009


def show_gpus(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver show these."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(config_module, "visible_gpus", lambda: found)
    monkeypatch.setattr(config_module, "list_machine_gpus", lambda: found)


def test_every_process_has_a_name_a_port_and_its_configuration() -> None:
    config = StackConfig(
        target=TargetConfig(model="/t", page_size=4, self_test=False, device="cpu"),
        draft=DraftConfig(model="/d", target_model="/t", dtype="float16", device="cpu"),
        orchestrator=OrchestratorConfig(
            model="/t", num_steps=3, topk=2, num_draft_tokens=6, port=0
        ),
        num_targets=2,
        num_drafts=2,
    )
    stack = built(config)
    names = ["target-0", "target-1", "draft-0", "draft-1", "orchestrator"]
    assert list(stack.services) == names
    addresses = [service.address for service in stack.services.values()]
    assert len(set(addresses)) == 5 and all(a.startswith("127.0.0.1:") for a in addresses)
    port = int(addresses[1].rpartition(":")[2])
    expected = replace(config.target, host="127.0.0.1", port=port)
    assert config_of(stack, "target-1") == expected
    front = config_of(stack, "orchestrator")
    assert isinstance(front, OrchestratorConfig)
    assert front.targets.split(",") == stack.target_addresses == addresses[:2]
    assert front.drafts.split(",") == stack.draft_addresses == addresses[2:4]
    assert stack.address == addresses[4]


def test_the_gateway_calls_the_orchestrator_and_knows_no_secret() -> None:
    stack = built(StackConfig(gateway=GatewayConfig(port=0), metrics_port=9400))
    config = config_of(stack, "gateway")
    assert isinstance(config, GatewayConfig)
    assert config.orchestrators == stack.address and config.health_port
    assert stack.http_url == f"http://127.0.0.1:{config.port}"
    assert "COPPICE_SECRET" not in stack.services["gateway"].environ
    assert stack.metrics_urls["gateway"].endswith(":9403/metrics")
    assert built(StackConfig()).http_url == ""


@pytest.mark.parametrize(
    ("given", "port"),
    [
        ({}, 8000),
        ({"port": 0}, 0),
        ({"port": 0, "http_port": 8000}, 8000),
        ({"http_port": 81}, 81),
        ({"http_port": 0}, None),
        ({"tls_cert_file": "c", "tls_key_file": "k"}, None),
    ],
)
def test_up_serves_http_unless_it_is_told_not_to(given: dict[str, Any], port: int | None) -> None:
    gateway = stack_config(given).gateway
    assert (gateway and gateway.port) == port


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"http_port": 50051}, "--port and --http-port are both 50051"),
        ({"metrics_port": 50051}, r"--port and --metrics-port \(of orchestrator\) are both"),
        ({"metrics_port": 50050}, r"--port and --metrics-port \(of target-0\) are both 50051"),
        ({"metrics_port": 81, "http_port": 84}, r"--metrics-port \(of gateway\) and --http-port"),
        ({"port": 7000, "http_port": 8000}, "1000 above --port, and --http-port are both 8000"),
        ({"port": 0, "http_port": 81, "metrics_port": 90}, ""),
        ({"port": 8000}, ""),
        ({"port": 7000}, ""),
    ],
)
def test_ports_of_two_options_are_distinct(given: dict[str, Any], words: str) -> None:
    """HTTP, where its port is not given, gives way."""
    config = stack_config({"host": "127.0.0.1", "workers": 1, **given})
    if words:
        with pytest.raises(ConfigError, match=words):
            built(config)
        return
    stack = built(config)
    http, front = config_of(stack, "gateway"), config_of(stack, "orchestrator")
    assert isinstance(front, OrchestratorConfig)
    assert http.port not in (front.port, front.admin_port)


def test_up_gives_the_gateway_what_clients_are_asked_for() -> None:
    tls = {"tls_cert_file": "c", "tls_key_file": "k"}
    own = GatewayConfig(tls_ca_file="a", tool_call_parser="hermes")
    gateway = stack_config({**tls, "token_file": "t", "log_format": "json"}, gateway=own).gateway
    assert gateway is not None and gateway.log_format == "json"
    assert (gateway.tls_cert_file, gateway.token_file, gateway.tls_ca_file) == ("c", "t", "a")
    assert gateway.tool_call_parser == "hermes"
    with pytest.raises(ConfigError, match="tls_ca_file"):
        stack_config({**tls, "http_port": 8000})


def test_children_ignore_variables_meant_for_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_PAGE_SIZE", "3")
    monkeypatch.setenv("OTHER", "x")
    environ = built(StackConfig()).services["target-0"].environ
    assert environ["OTHER"] == "x"
    assert [name for name in environ if name.startswith("COPPICE_")] == ["COPPICE_SECRET"]


def test_workers_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StackConfig(num_targets=2, num_drafts=2)
    assert gpus_of(config, monkeypatch, GPUS) == ["GPU-a", "GPU-b", "GPU-c", "GPU-a"]
    assert gpus_of(config, monkeypatch, GPUS[:1]) == ["GPU-a"] * 4
    assert gpus_of(config, monkeypatch, []) == [""] * 4


def test_chosen_gpus_are_taken_in_turn_and_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StackConfig(num_targets=2, num_drafts=2, target_gpus=("0", "1"), draft_gpus=("1",))
    assert gpus_of(config, monkeypatch, GPUS) == ["0", "1", "1", "1"]


def test_workers_that_share_a_gpu_know_it_and_leave_each_other_memory() -> None:
    config = StackConfig(num_targets=3, num_drafts=2, target_gpus=("0", "1"), draft_gpus=("1", "2"))
    stack = built(config)
    alone = ["target-0", "target-2", "draft-1"]  # the targets of GPU 0 have no draft there
    found = {name: config_of(stack, name) for name in stack.services if name != "orchestrator"}
    assert all(isinstance(worker, WorkerConfig) for worker in found.values())
    shared = {name: getattr(worker, "kv_memory_fraction") for name, worker in found.items()}  # noqa: B009
    assert shared == {
        "target-0": TARGET_KV_FRACTION / 2,
        "target-1": TARGET_KV_FRACTION,
        "target-2": TARGET_KV_FRACTION / 2,
        "draft-0": DRAFT_KV_FRACTION,
        "draft-1": WorkerConfig.kv_memory_fraction,
    }
    assert [getattr(found[name], "gpu_is_shared") for name in alone] == [True, True, False]  # noqa: B009


def shares_of(stack: Stack) -> dict[str, tuple[bool, float]]:
    """Return what each worker is told: whether its GPU is shared, and of its memory."""
    workers = {name: config_of(stack, name) for name in stack.services if name not in FRONTS}
    return {
        name: (worker.gpu_is_shared, worker.kv_memory_fraction)
        for name, worker in workers.items()
        if isinstance(worker, WorkerConfig)
    }


def test_a_gpu_has_one_name_however_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are placed by index; the draft takes the machine's GPUs in turn, by uuid."""
    monkeypatch.setattr(gpus_module, "visible_gpus", lambda: GPUS[:2])
    assert shares_of(built(StackConfig(num_targets=2, target_gpus=("0", "1")))) == {
        "target-0": (True, TARGET_KV_FRACTION),
        "target-1": (False, WorkerConfig.kv_memory_fraction),
        "draft-0": (True, DRAFT_KV_FRACTION),
    }


def test_who_leases_a_gpu_shares_it_with_nobody() -> None:
    lease: dict[str, Any] = {"gpus": "0,1,2", "gpu_lease_dir": "/leases"}
    config = StackConfig(
        target=TargetConfig(**lease), draft=DraftConfig(**lease), num_targets=2, num_drafts=1
    )
    assert set(shares_of(built(config)).values()) == {(False, WorkerConfig.kv_memory_fraction)}


@pytest.mark.parametrize("own", [{"num_pages": 900}, {"kv_memory_fraction": 0.5}])
def test_memory_that_somebody_gave_stays_as_it_is(own: dict[str, Any]) -> None:
    config = StackConfig(target=TargetConfig(**own), target_gpus=("0",), draft_gpus=("0",))
    target = config_of(built(config), "target-0")
    assert isinstance(target, TargetConfig) and target.gpu_is_shared
    assert {name: getattr(target, name) for name in own} == own
    assert target.kv_memory_fraction in (WorkerConfig.kv_memory_fraction, 0.5)


def test_a_pair_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(GPUS, monkeypatch)
    assert gpus_of(stack_config({"pair_gpus": "0,2"}), monkeypatch, GPUS) == ["0", "2"] * 2
    assert gpus_of(stack_config({"pair_gpus": "all"}), monkeypatch, GPUS) == [*GPUS, *GPUS]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"num_targets": 2}, "--num-targets"),
        ({"num_drafts": 0}, "--num-drafts"),
        ({"draft_gpus": "1"}, "--draft-gpus"),
        ({"draft_model": "none"}, "needs a draft"),
        ({}, "is 0,1, and this machine shows no GPU"),
        ({"pair_gpus": "all"}, "is all, and this machine shows no GPU"),
    ],
)
def test_pairs_are_not_placed_twice(
    given: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "visible_gpus", list)
    with pytest.raises(ConfigError, match=word):
        stack_config({"pair_gpus": "0,1", **given})


def test_pairs_need_the_name_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(GPUS, monkeypatch)
    with pytest.raises(ConfigError, match="names no GPU"):
        stack_config({"pair_gpus": ","})


@pytest.mark.parametrize("flag", ["--target-gpus", "--draft-gpus"])
def test_gpus_that_no_worker_could_use_are_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that may choose its device would serve on the CPU without a word."""
    given = {flag[2:].replace("-", "_"): "7"}
    show_gpus([], monkeypatch)
    with pytest.raises(ConfigError, match=f"{flag} is 7, and this machine shows no GPU"):
        stack_config(given)
    show_gpus(GPUS, monkeypatch)
    with pytest.raises(ConfigError, match=f"{flag} names GPU 7, and this machine has 3"):
        stack_config(given)
    with pytest.raises(ConfigError, match=f"{flag} is 7, and the device there is cpu"):
        stack_config({**given, "device": "cpu"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")  # counts what only the driver knows
    stack_config(given)


def test_a_cpu_worker_and_a_lease_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StackConfig(
        target=TargetConfig(device="cpu"), draft=DraftConfig(gpus="1,2", gpu_lease_dir="/leases")
    )
    assert gpus_of(config, monkeypatch, GPUS) == ["", "1,2"]


def test_a_configuration_that_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="--page-size is 0"):
        Stack(StackConfig(draft=DraftConfig(page_size=0)))


@pytest.mark.parametrize("is_coppice", [True, False])
def test_a_taken_port_is_refused_before_anything_starts(*, is_coppice: bool) -> None:
    """And who has it is said."""
    servicer = health.HealthServicer()
    if is_coppice:
        servicer.set(ORCHESTRATOR_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    states: list[str] = []
    config = StackConfig(orchestrator=OrchestratorConfig(host="127.0.0.1", port=port))
    stack = Stack(config, on_state=lambda name, state: states.append(name))
    try:
        with pytest.raises(ConfigError) as caught:
            stack.start()
    finally:
        server.stop(None).wait()
    who = "another Coppice server runs there" if is_coppice else "another program has the port"
    assert f"cannot listen on 127.0.0.1:{port}: {who}; stop it" in str(caught.value)
    assert states == [] and stack.services == {}


def test_a_taken_port_of_the_gateway_is_refused_by_its_own_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = Stack(stack_config({"port": 0, "http_port": port}))
        with pytest.raises(
            ConfigError, match=rf":{port}: another program .*--http-port \(0 = none"
        ):
            stack.start()
    assert stack.services == {}


def test_a_port_that_nobody_asked_for_makes_room() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given, is_moved in (({}, True), ({"http_port": port}, False)):
            config = stack_config({"port": 0, **given})
            assert config.gateway is not None
            config = replace(config, gateway=replace(config.gateway, port=port))
            url = built(config).http_url
            assert url and url.endswith(f":{port}") is not is_moved


def test_an_address_of_another_machine_is_refused() -> None:
    config = StackConfig(orchestrator=OrchestratorConfig(host="192.0.2.1", port=50051))
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:50051: .*--host"):
        Stack(config).start()


def test_services_log_as_the_stack_is_told_to() -> None:
    stack = built(stack_config({"log_level": "warning", "log_format": "json", "port": 0}))
    for name in stack.services:
        config = config_of(stack, name)
        assert (config.log_level, config.log_format) == ("warning", "json"), name


def test_every_process_has_the_next_port_for_its_metrics() -> None:
    """Those of several orchestrator processes come first: each has one of its own."""
    orchestrator = OrchestratorConfig(port=0, workers=2)
    config = StackConfig(orchestrator=orchestrator, num_targets=2, metrics_port=9400)
    stack = built(config)
    names = ["orchestrator", "orchestrator.1", "target-0", "target-1", "draft-0"]
    urls = {name: f"http://127.0.0.1:{9400 + i}/metrics" for i, name in enumerate(names)}
    assert stack.metrics_urls == urls
    for name, service in stack.services.items():
        assert f"--metrics-port={9400 + names.index(name)}" in service.command


def test_without_a_port_nothing_has_metrics() -> None:
    stack = built(StackConfig(orchestrator=OrchestratorConfig(port=0)))
    assert stack.metrics_urls == {}
    assert not any("--metrics-port" in part for s in stack.services.values() for part in s.command)
