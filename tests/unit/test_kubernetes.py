"""deploy/kubernetes: fits the schemas, agrees with itself, and names what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from coppice.cli.main import build_parser
from coppice.cli.serve import ROLES
from shared.config.loader import load_config
from shared.metrics.catalog import metric_of
from shared.peer.ring import RING_DIR
from shared.rpc.health_names import (
    DRAFT_SERVICE,
    GATEWAY_SERVICE,
    ORCHESTRATOR_SERVICE,
    TARGET_SERVICE,
)
from tests.kubernetes_files import (
    EXAMPLE,
    FOLDER,
    ROOT,
    VARIANTS,
    Resource,
    Service,
    labels_of,
    named,
    of_kind,
    pod_of,
    render,
    selects,
    services_of,
    workloads,
)
from tests.kubernetes_schemas import POD_MONITOR, SCALED_OBJECT
from tests.unit.test_metrics import ALERTS

VERSIONS = ("1.29", "1.37")
"""The oldest that is promised, and the newest whose schemas there are."""
HEALTH_SERVICES = {
    "orchestrator": ORCHESTRATOR_SERVICE,
    "target": TARGET_SERVICE,
    "draft": DRAFT_SERVICE,
    "gateway": GATEWAY_SERVICE,
}
USER_ID = 10001

variants = pytest.mark.parametrize("variant", VARIANTS)


@cache
def rendered(variant: str) -> list[Resource]:
    return render(VARIANTS[variant])


def config_of(service: Service) -> Any:
    """Return the configuration that a container ends up with."""
    command = service.container["command"]
    arguments = build_parser().parse_args(command[1:])
    assert arguments.role == service.role
    return load_config(
        ROLES[service.role][0],
        section=service.role,
        flags=vars(arguments),
        environ={},
        file={service.role: service.settings},
        known_variables=(),
    )


def service_of(variant: str, role: str) -> Service:
    (service,) = (s for s in services_of(rendered(variant)) if s.role == role)
    return service


def autoscaler_of(scaled: Resource) -> Resource:
    """Return the autoscaler that KEDA would make of it."""
    spec = scaled["spec"]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "maxReplicas": spec["maxReplicaCount"],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_fits_its_schema(version: str) -> None:
    resources = {json.dumps(resource): resource for v in VARIANTS for resource in rendered(v)}
    for resource in resources.values():
        if resource["kind"] == "ScaledObject":
            jsonschema.validate(resource, SCALED_OBJECT)
            resource = autoscaler_of(resource)
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_mistake_does_not_fit_the_schema() -> None:
    deployment = named(render(VARIANTS["pairs"]), "Deployment", "coppice-orchestrator")
    deployment["spec"]["template"]["spec"]["containers"][0]["comand"] = ["coppice"]
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@variants
def test_kubectl_makes_the_same_of_it(variant: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    command = [kubectl, "kustomize", str(VARIANTS[variant])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def comparable(resources: list[Resource]) -> list[str]:
        """Without order, and without the hash in the name of the generated map."""
        words = (json.dumps(r, sort_keys=True) for r in resources)
        return sorted(re.sub(r"coppice-config-\w+", "coppice-config", word) for word in words)

    assert comparable(list(yaml.safe_load_all(output))) == comparable(rendered(variant))


@variants
def test_the_configuration_is_understood(variant: str) -> None:
    services = services_of(rendered(variant))
    assert {s.role for s in services} == set(HEALTH_SERVICES)
    for service in services:
        config = config_of(service)
        assert config.host == config.metrics_host == "0.0.0.0", "a pod is reached from outside"
        pod = pod_of(service.workload)
        hook = service.container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        pause_s = float(hook["command"][1]) if hook else 0.0
        assert config.drain_timeout_s + pause_s + 20 <= pod["terminationGracePeriodSeconds"]


@variants
def test_containers_of_a_pod_and_their_ports_do_not_collide(variant: str) -> None:
    """A pair shares the network of its pod."""
    for workload in workloads(rendered(variant)):
        ports = []
        for service in services_of(rendered(variant)):
            if service.workload is workload:
                config = config_of(service)
                own = [config.port, config.health_port, config.metrics_port]
                own += [config.peer_port] if service.role == "target" else []
                declared = [port["containerPort"] for port in service.container["ports"]]
                assert sorted(declared) == sorted(own)
                ports += own
        assert len(set(ports)) == len(ports)


@variants
def test_every_container_is_probed_at_its_health_port(variant: str) -> None:
    """Which speaks plain text, whatever the service's own port does: kubelet knows no TLS."""
    for service in services_of(rendered(variant)):
        port = config_of(service).health_port
        container = service.container
        assert container["livenessProbe"]["grpc"] == {"port": port, "service": ""}
        assert container["startupProbe"]["grpc"] == {"port": port, "service": ""}
        ready = {"port": port, "service": HEALTH_SERVICES[service.role]}
        assert container["readinessProbe"]["grpc"] == ready


@variants
def test_every_container_can_do_little(variant: str) -> None:
    """What the profile `restricted` of pod security asks for, and a root that is read only."""
    for workload in workloads(rendered(variant)):
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == USER_ID
        assert f"--uid {USER_ID}" in (ROOT / "Dockerfile").read_text()
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


@variants
def test_what_a_cluster_does_to_processes_is_provided_for(variant: str) -> None:
    for workload in workloads(rendered(variant)):
        pod = pod_of(workload)
        assert pod["enableServiceLinks"] is False, "its variables would be unknown ones"
        assert pod["shareProcessNamespace"] is True, "process 1 cannot be killed by its helper"


@variants
def test_files_of_the_configuration_are_mounted(variant: str) -> None:
    resources = rendered(variant)
    for service in services_of(resources):
        config = config_of(service)
        mounts = {m["mountPath"]: m["name"] for m in service.container["volumeMounts"]}
        volumes = {v["name"]: v for v in pod_of(service.workload)["volumes"]}
        assert mounts.keys() >= {"/tmp", "/home/coppice"}, "what a service writes"
        assert ("/models" in mounts) == (service.role != "gateway")
        assert set(mounts.values()) <= volumes.keys()
        secrets = {"secret_file": "coppice-secret", "token_file": "coppice-clients"}
        for key, secret in secrets.items():
            path = Path(getattr(config, key, ""))
            if path != Path():
                assert volumes[mounts[str(path.parent)]]["secret"]["secretName"] == secret
        file = Path(service.container["command"][4])
        (mounted,) = of_kind(resources, "ConfigMap")
        assert volumes[mounts[str(file.parent)]]["configMap"]["name"] == mounted["metadata"]["name"]
        assert file.name in mounted["data"]


@variants
def test_clients_and_orchestrators_prove_who_they_are(variant: str) -> None:
    for service in services_of(rendered(variant)):
        config = config_of(service)
        assert not config.insecure
        assert bool(config.secret_file) == (service.role != "gateway"), "it calls no worker"
        assert service.role not in ("orchestrator", "gateway") or config.token_file
    assert not of_kind(rendered(variant), "Secret"), "no secret is in the repository"


@variants
def test_the_orchestrator_finds_the_workers_by_the_names_of_headless_services(variant: str) -> None:
    resources = rendered(variant)
    config = config_of(service_of(variant, "orchestrator"))
    for role, names in (("target", config.targets), ("draft", config.drafts)):
        host, _, port = names.partition(":")
        headless = named(resources, "Service", host)["spec"]
        assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"] is True
        (found,) = (w for w in workloads(resources) if selects(headless["selector"], labels_of(w)))
        worker = service_of(variant, role)
        assert found is worker.workload
        assert int(port) == config_of(worker).port == headless["ports"][0]["port"]


@variants
def test_clients_find_orchestrator_and_gateway(variant: str) -> None:
    resources = rendered(variant)
    fronts = [s for s in of_kind(resources, "Service") if s["spec"].get("clusterIP") != "None"]
    assert {front["metadata"]["name"] for front in fronts} == {"coppice", "coppice-http"}
    for name, role in (("coppice", "orchestrator"), ("coppice-http", "gateway")):
        front, service = named(resources, "Service", name), service_of(variant, role)
        assert selects(front["spec"]["selector"], labels_of(service.workload))
        (port,) = front["spec"]["ports"]
        declared = {p["name"]: p["containerPort"] for p in service.container["ports"]}
        assert declared[port["targetPort"]] == config_of(service).port == port["port"]
    (called,) = config_of(service_of(variant, "gateway")).orchestrators.split(",")
    orchestrator = config_of(service_of(variant, "orchestrator"))
    assert called == f"coppice:{orchestrator.port}"


@variants
def test_an_eviction_takes_one_pod_at_a_time(variant: str) -> None:
    resources = rendered(variant)
    for workload in workloads(resources):
        selector = workload["spec"]["selector"]["matchLabels"]
        assert selects(selector, labels_of(workload))
        (budget,) = (
            b
            for b in of_kind(resources, "PodDisruptionBudget")
            if selects(b["spec"]["selector"]["matchLabels"], labels_of(workload))
        )
        assert budget["spec"]["maxUnavailable"] == 1


def may_connect(resources: list[Resource], source: Resource, to: Resource, port: int) -> bool:
    """Return whether the policies let pods of one workload reach a port of another's."""

    def allows(rules: list[Any], peers_key: str, other: Resource) -> bool:
        for rule in rules:
            peers = rule.get(peers_key)
            is_peer = peers is None or any(
                selects(peer.get("podSelector", {}).get("matchLabels", {}), labels_of(other))
                for peer in peers
                if "namespaceSelector" not in peer
            )
            spans = [(p["port"], p.get("endPort", p["port"])) for p in rule["ports"]]
            if is_peer and any(first <= port <= last for first, last in spans):
                return True
        return False

    def is_allowed(workload: Resource, direction: str, peers_key: str, other: Resource) -> bool:
        policies = [
            p["spec"]
            for p in of_kind(resources, "NetworkPolicy")
            if selects(p["spec"]["podSelector"]["matchLabels"], labels_of(workload))
        ]
        assert any(direction in policy["policyTypes"] for policy in policies)
        rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
        return allows(rules, peers_key, other)

    return is_allowed(source, "Egress", "to", to) and is_allowed(to, "Ingress", "from", source)


@variants
def test_who_calls_whom_may_and_nobody_else(variant: str) -> None:
    resources = rendered(variant)
    services = {role: service_of(variant, role) for role in HEALTH_SERVICES}
    configs = {role: config_of(service) for role, service in services.items()}
    target = configs["target"]
    allowed = {
        ("gateway", "orchestrator", configs["orchestrator"].port),
        ("orchestrator", "target", target.port),
        ("orchestrator", "draft", configs["draft"].port),
        ("draft", "target", target.port),
        ("draft", "target", target.peer_port),
    }
    ports = [(role, config.port) for role, config in configs.items()]
    ports.append(("target", target.peer_port))
    found = {
        (source, to, port)
        for source, (to, port) in product(services, ports)
        if may_connect(resources, services[source].workload, services[to].workload, port)
    }
    # Who may call one container of a pod may call from the other one, too.
    pods = {role: id(service.workload) for role, service in services.items()}
    expected = {
        (source, to, port)
        for source in services
        for caller, to, port in allowed
        if pods[source] == pods[caller]
    }
    # Clients may come from anywhere; who may go there is another matter.
    assert found == expected
    callers = {source for source, to, _ in found if to in ("orchestrator", "gateway")}
    assert callers == {"gateway"}, "no worker calls them"


def test_a_pair_shares_memory_and_has_a_gpu_each() -> None:
    pair = [service_of("pairs", role) for role in ("target", "draft")]
    assert pair[0].workload is pair[1].workload
    volumes = {v["name"]: v for v in pod_of(pair[0].workload)["volumes"]}
    for service in pair:
        mounts = {m["mountPath"]: m for m in service.container["volumeMounts"]}
        mount = mounts[str(RING_DIR)]
        assert "readOnly" not in mount and "subPath" not in mount
        memory = volumes[mount["name"]]["emptyDir"]
        assert memory == {"medium": "Memory", "sizeLimit": "2Gi"}
        assert service.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    target = config_of(pair[0])
    assert target.peer_socket and target.mailbox and 0 < 2 * target.feature_ring_mb <= 1024


def test_separate_workers_meet_over_tcp() -> None:
    target, draft = (service_of("separate", role) for role in ("target", "draft"))
    assert target.workload is not draft.workload
    config = config_of(target)
    assert config.peer_host == "0.0.0.0" and config.peer_port
    assert not config.peer_socket and not config.feature_ring_mb
    for service in (target, draft):
        assert service.container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_trial_needs_no_gpu() -> None:
    for service in services_of(rendered("trial")):
        assert "nvidia.com/gpu" not in service.container["resources"]["limits"]


@pytest.mark.parametrize("variant", ["separate-autoscaled", "pairs-autoscaled"])
def test_scaling_goes_by_metrics_that_there_are(variant: str) -> None:
    scaled = of_kind(rendered(variant), "ScaledObject")
    workers = {w["metadata"]["name"] for w in of_kind(rendered(variant), "StatefulSet")}
    assert {s["spec"]["scaleTargetRef"]["name"] for s in scaled} == workers
    for trigger in (trigger for s in scaled for trigger in s["spec"]["triggers"]):
        query = trigger["metadata"]["query"]
        metrics = re.findall(r"(coppice_\w+)(?:\{(\w+)=~?\"([\w|]+)\"\})?", query)
        assert metrics
        for name, label, value in metrics:
            metric = metric_of(name)
            assert label in ("", "role", *metric.labels)
            assert label != "role" or value in metric.roles
        assert float(trigger["metadata"]["threshold"]) > 0


@variants
def test_the_monitor_scrapes_every_container_once_under_the_job_of_the_alerts(variant: str) -> None:
    (monitor,) = render(FOLDER / "monitoring")
    jsonschema.validate(monitor, POD_MONITOR)
    spec, resources = monitor["spec"], rendered(variant)
    ports = [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
    for service in services_of(resources):
        labels = labels_of(service.workload)
        assert selects(spec["selector"]["matchLabels"], labels)
        assert f'up{{job="{labels[spec["jobLabel"]]}"}}' in ALERTS.read_text()
        named_ports = {p["name"]: p["containerPort"] for p in service.container["ports"]}
        (scraped,) = (named_ports[port] for port in ports if port in named_ports)
        assert scraped == config_of(service).metrics_port
        (rule,) = named(resources, "NetworkPolicy", "coppice-default")["spec"]["ingress"]
        (span,) = rule["ports"]
        assert span["port"] <= scraped <= span["endPort"]


@variants
def test_applying_again_keeps_what_an_autoscaler_has_chosen(variant: str) -> None:
    """A manifest has a number of replicas if, and only if, nobody else sets it."""
    resources = rendered(variant)
    scaled = {s["spec"]["scaleTargetRef"]["name"] for s in of_kind(resources, "ScaledObject")}
    free = {w["metadata"]["name"] for w in workloads(resources) if "replicas" not in w["spec"]}
    assert free == scaled


def test_the_example_replaces_models_and_nothing_else() -> None:
    """It is the whole file again: what the base says must not be forgotten there."""
    base = tomllib.loads((FOLDER / "base" / "coppice.toml").read_text())
    own = tomllib.loads((EXAMPLE / "coppice.toml").read_text())
    for role, table in base.items():
        changed = {key for key in table if table[key] != own[role][key]}
        assert changed <= {"model", "draft_model", "target_model"}
        assert own[role].keys() == table.keys()
    for workload in workloads(rendered("example")):
        volumes = {v["name"]: v for v in pod_of(workload)["volumes"]}
        if workload["metadata"]["name"] == "coppice-gateway":
            continue  # which reads no checkpoint
        assert volumes["models"]["persistentVolumeClaim"] == {
            "claimName": "checkpoints",
            "readOnly": True,
        }
