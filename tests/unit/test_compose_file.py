"""docker-compose.yml and Dockerfile, checked without a Docker daemon."""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import re
import runpy
import subprocess
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from coppice.cli.serve import ROLES as SERVE_ROLES
from shared.config import DraftConfig, OrchestratorConfig, TargetConfig
from shared.config.check import parse_shape, parse_shapes
from shared.config.loader import load_config
from shared.errors import ConfigError
from shared.peer.ring import RING_DIR
from shared.rpc.gate import front_gate
from shared.rpc.health_names import (
    DRAFT_SERVICE,
    GATEWAY_SERVICE,
    ORCHESTRATOR_SERVICE,
    TARGET_SERVICE,
)
from tests.compose_file import COMPOSE_FILE, ROLES, ROOT, load_compose, services_of

HEALTH_SERVICES = {
    "orchestrator": ORCHESTRATOR_SERVICE,
    "target": TARGET_SERVICE,
    "draft": DRAFT_SERVICE,
}
GRACE_S = 60


def config_of(service: dict[str, Any], role: str) -> Any:
    """Return the configuration that a container of the service ends up with."""
    config_type, _ = SERVE_ROLES[role]
    return load_config(
        config_type,
        section=role,
        flags={},
        environ=service["environment"],
        file={},
        known_variables=(),
    )


def test_the_file_fits_the_compose_specification() -> None:
    folder = resources.files("check_jsonschema.builtin_schemas") / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text())
    document = yaml.safe_load(COMPOSE_FILE.read_text())
    jsonschema.validate(document, schema)
    document["services"]["orchestrator"]["restrat"] = "always"
    with pytest.raises(jsonschema.ValidationError, match="restrat"):
        jsonschema.validate(document, schema)


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        ("gpu", {"orchestrator", "target_service", "draft_service"}),
        ("cpu", {"orchestrator", "target_service_cpu", "draft_service_cpu"}),
    ],
)
def test_a_profile_starts_one_of_each(profile: str, names: set[str]) -> None:
    document = load_compose()
    assert set(services_of(document, profile)) == names
    assert profile in document["services"]["secret"]["profiles"]


@pytest.mark.parametrize("name", list(ROLES))
def test_every_service_runs_supervised_and_checked(name: str) -> None:
    service, role = load_compose()["services"][name], ROLES[name]
    insecure = ["--insecure"] if role == "orchestrator" else []
    assert service["command"] == ["coppice", "serve", role, *insecure]
    assert service["init"] is True
    assert service["restart"] == "unless-stopped"
    assert service["stop_grace_period"] == f"{GRACE_S}s"
    environment = service["environment"]
    port = environment.get("COPPICE_HEALTH_PORT", environment["COPPICE_PORT"])
    assert service["healthcheck"]["test"] == [
        "CMD",
        *("coppice", "health", f"localhost:{port}", "--service", HEALTH_SERVICES[role]),
    ]
    assert service["healthcheck"]["start_period"] == "900s"


@pytest.mark.parametrize("name", list(ROLES))
def test_the_environment_is_understood(name: str) -> None:
    service, role = load_compose()["services"][name], ROLES[name]
    config = config_of(service, role)
    assert config.model == "demo"
    assert config.drain_timeout_s < GRACE_S


def test_only_what_clients_call_is_published() -> None:
    document = load_compose({"PORT": "7000", "HTTP_PORT": "7001"})
    ports = {name: s["ports"] for name, s in document["services"].items() if "ports" in s}
    assert ports == {
        "orchestrator": ["127.0.0.1:7000:50051"],
        "gateway": ["127.0.0.1:7001:8000"],
    }
    workers = [document["services"][name] for name, role in ROLES.items() if role != "orchestrator"]
    assert all(list(worker["networks"]) == ["workers"] for worker in workers)
    assert document["networks"]["workers"] == {"internal": True}


def test_the_orchestrator_starts_after_healthy_targets_and_waits_for_no_draft() -> None:
    orchestrator = load_compose()["services"]["orchestrator"]
    awaited = dict(orchestrator["depends_on"])
    del awaited["secret"]
    assert set(awaited) == set(ROLES) - {"orchestrator"}
    for name, condition in awaited.items():
        state = "service_started" if "draft" in name else "service_healthy"
        assert condition == {"condition": state, "required": False}


@pytest.mark.parametrize("name", [*ROLES, "gateway", "secret"])
def test_every_container_can_do_little(name: str) -> None:
    service = load_compose()["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["pids_limit"] > 0 and service["mem_limit"] == "64g"
    assert load_compose({"MEM_LIMIT": "8g"})["services"][name]["mem_limit"] == "8g"
    folders = dict(mount.split(":") for mount in service["tmpfs"])
    assert set(folders) == {"/tmp", "/home/coppice"}
    assert "exec" in folders["/home/coppice"].split(","), "Triton loads what it has compiled"


@pytest.mark.parametrize("name", list(ROLES))
def test_every_service_has_the_secret_and_waits_for_it(name: str) -> None:
    document = load_compose()
    service, maker = document["services"][name], document["services"]["secret"]
    path = maker["environment"]["COPPICE_SECRET_FILE"]
    assert config_of(service, ROLES[name]).secret_file == path
    folder = path.rpartition("/")[0]
    assert f"secret:{folder}:ro" in service["volumes"] and f"secret:{folder}" in maker["volumes"]
    assert service["depends_on"]["secret"] == {"condition": "service_completed_successfully"}
    assert f"--mode=0700 {folder}\n" in (ROOT / "Dockerfile").read_text()


def test_a_secret_is_made_up_once(tmp_path: Path) -> None:
    """By the very command of the file."""
    maker = load_compose()["services"]["secret"]
    assert maker["restart"] == "no" and maker["network_mode"] == "none"
    path = tmp_path / "secret"
    environ = {**os.environ, "COPPICE_SECRET_FILE": str(path)}
    made = []
    for _ in range(2):
        subprocess.run(maker["command"], env=environ, check=True)
        made.append(path.read_text())
        assert path.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch("[0-9a-f]{64}", made[0]) and made[0] == made[1]
    assert list(tmp_path.iterdir()) == [path]


def test_beyond_this_host_clients_must_say_who_they_are() -> None:
    """Else the orchestrator does not start."""
    environ = {"PUBLISH_HOST": "0.0.0.0", "PORT": "443"}
    environ |= {"TOKEN_FILE": "/access/tokens", "TLS_CERT_FILE": "/access/chain.pem"}
    service = load_compose(environ)["services"]["orchestrator"]
    assert service["ports"] == ["0.0.0.0:443:50051"]
    assert service["command"][-1] == "--no-insecure"
    assert "./access:/access:ro" in service["volumes"]
    config = config_of(service, "orchestrator")
    assert (config.token_file, config.tls_cert_file) == ("/access/tokens", "/access/chain.pem")
    with pytest.raises(ConfigError, match="--token-file"):
        front_gate(replace(config, token_file=""))


def test_the_gateway_calls_the_orchestrator_and_has_what_clients_show_to_both() -> None:
    environ = {"PUBLISH_HOST": "0.0.0.0", "TOKEN_FILE": "/access/tokens"}
    document = load_compose({**environ, "TLS_CA_FILE": "/access/ca", "TLS_SERVER_NAME": "box"})
    gateway, orchestrator = document["services"]["gateway"], document["services"]["orchestrator"]
    config = config_of(gateway, "gateway")
    front = config_of(orchestrator, "orchestrator")
    assert config.orchestrators == f"orchestrator:{front.port}"
    assert set(gateway["networks"]) <= set(orchestrator["networks"]) - {"workers"}
    assert gateway["profiles"] == orchestrator["profiles"]
    assert (config.token_file, config.tls_ca_file, config.tls_server_name) == (
        "/access/tokens",
        "/access/ca",
        "box",
    )
    assert gateway["command"][-1] == "--no-insecure" and config.drain_timeout_s < GRACE_S
    with pytest.raises(ConfigError, match="--token-file"):
        front_gate(replace(config, token_file=""))
    check = ["coppice", "health", f"localhost:{config.health_port}", "--service", GATEWAY_SERVICE]
    assert gateway["healthcheck"]["test"] == ["CMD", *check]
    assert not any("secret" in str(volume) for volume in gateway["volumes"])


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_the_orchestrator_finds_the_workers_by_name(profile: str) -> None:
    services = services_of(load_compose(), profile)
    config = config_of(services.pop("orchestrator"), "orchestrator")
    reachable = set()
    for name, service in services.items():
        networks = service["networks"]
        aliases = networks["workers"]["aliases"] if isinstance(networks, dict) else []
        reachable |= {
            f"{host}:{service['environment']['COPPICE_PORT']}" for host in (name, *aliases)
        }
    assert {config.targets, config.drafts} <= reachable


@pytest.mark.parametrize("name", ["target_service", "draft_service"])
def test_gpu_workers_lease_a_gpu_of_their_pool(name: str) -> None:
    environ = {"TARGET_GPUS": "0,1", "DRAFT_GPUS": "2"}
    document = load_compose(environ)
    service = document["services"][name]
    config = config_of(service, ROLES[name])
    assert config.device == "cuda"
    assert config.gpus == {"target": "0,1", "draft": "2"}[ROLES[name]]
    assert f"gpu_leases:{config.gpu_lease_dir}" in service["volumes"]
    assert "gpu_leases" in document["volumes"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    shared = load_compose({"GPU_LEASE_DIR": ""})["services"][name]
    assert config_of(shared, ROLES[name]).gpu_lease_dir == ""


@pytest.mark.parametrize("name", ["target_service_cpu", "draft_service_cpu"])
def test_cpu_workers_ask_for_no_gpu(name: str) -> None:
    service = load_compose()["services"][name]
    assert "deploy" not in service
    assert config_of(service, ROLES[name]).device == "cpu"


def test_workers_share_their_shared_memory_and_nobody_else_has_it() -> None:
    document = load_compose()
    shared_memory = {
        "type": "volume",
        "source": "shared_memory",
        "target": str(RING_DIR),
        "volume": {"nocopy": True},  # else its mode is that of the image's folder
    }
    for name, role in ROLES.items():
        mounted = [v for v in document["services"][name]["volumes"] if isinstance(v, dict)]
        assert mounted == ([shared_memory] if role != "orchestrator" else [])
    options = document["volumes"]["shared_memory"]["driver_opts"]
    assert options["type"] == options["device"] == "tmpfs"
    size, mode, *rest = options["o"].split(",")
    assert size == "size=4g" and TargetConfig().feature_ring_mb * 8 <= 4096
    assert mode == "mode=1777", "for users that are not root; rings are their owners' alone"
    assert rest == ["nosuid", "nodev", "noexec"]


def test_models_and_tree_shape_come_from_the_shell() -> None:
    environ = {"TARGET_MODEL": "/models/t", "DRAFT_MODEL": "/models/d", "ALGORITHM": "eagle3"}
    environ |= {"NUM_STEPS": "3", "TOPK": "2", "NUM_DRAFT_TOKENS": "6", "PAGE_SIZE": "4"}
    services = load_compose(environ)["services"]
    target = config_of(services["target_service"], "target")
    draft = config_of(services["draft_service"], "draft")
    orchestrator = config_of(services["orchestrator"], "orchestrator")
    assert isinstance(target, TargetConfig) and isinstance(draft, DraftConfig)
    assert isinstance(orchestrator, OrchestratorConfig)
    assert (target.model, target.draft_model) == ("/models/t", "/models/d")
    assert (draft.target_model, draft.model) == ("/models/t", "/models/d")
    assert (orchestrator.model, target.page_size, draft.page_size) == ("/models/t", 4, 4)
    shape = (orchestrator.num_steps, orchestrator.topk, orchestrator.num_draft_tokens)
    assert shape == (3, 2, 6)
    assert target.algorithm == draft.algorithm == "eagle3"


@pytest.mark.parametrize("name", ["draft_service", "draft_service_cpu"])
@pytest.mark.parametrize(
    ("shape", "own"),
    [
        ({"NUM_STEPS": "4", "TOPK": "2", "NUM_DRAFT_TOKENS": "6"}, ["4/2/6"]),
        ({"NUM_STEPS": "4", "TOPK": "2"}, []),
        ({"NUM_STEPS": "0", "TOPK": "2", "NUM_DRAFT_TOKENS": "10"}, []),
        ({}, []),
    ],
)
def test_a_draft_gets_ready_for_the_trees_that_are_ordered(
    name: str, shape: dict[str, str], own: list[str]
) -> None:
    draft = config_of(load_compose(shape)["services"][name], "draft")
    expected = [*map(parse_shape, own), *parse_shapes(DraftConfig().warm_up_trees)]
    assert parse_shapes(draft.warm_up_trees) == expected


def test_the_trial_in_containers_changes_only_what_it_says() -> None:
    """scripts/compose_containers.py must go on understanding the file."""
    script = runpy.run_path(str(ROOT / "scripts" / "compose_containers.py"))
    document = yaml.safe_load(COMPOSE_FILE.read_text())
    adapted = script["adapted"](copy.deepcopy(document))
    profile = {n for n, s in document["services"].items() if "cpu" in s["profiles"]}
    assert adapted["services"].keys() == profile
    for name, service in adapted["services"].items():
        original = document["services"][name]
        changed = {key for key in original if service.get(key) != original[key]}
        assert changed <= {"build", "depends_on", "profiles", "healthcheck", "tmpfs", "volumes"}
        assert service.get("healthcheck", {}).items() <= original.get("healthcheck", {}).items()
        assert len(service["tmpfs"]) == len(original["tmpfs"])
        assert len(service.get("volumes", [])) == len(original.get("volumes", []))


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    kept = {line[1:] for line in ignore if line.startswith("!")}
    copied = [
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert ignore[0] == "*"
    assert set(copied) == kept
    for source in copied:
        assert (ROOT / source).exists()


def test_the_image_has_every_package_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    shipped = [name for name in packages if any(fnmatch.fnmatch(name, p) for p in patterns)]
    assert {"coppice", "shared"} <= set(shipped)
    for name in shipped:
        assert f"COPY {name} {name}\n" in dockerfile
    assert (ROOT / "coppice" / "bundled").is_dir()


def test_compose_up_alone_means_the_gpu_profile() -> None:
    # Compose reads .env beside the file; a --profile flag takes the place of COMPOSE_PROFILES.
    lines = (COMPOSE_FILE.parent / ".env").read_text().splitlines()
    assert "COMPOSE_PROFILES=gpu" in lines
