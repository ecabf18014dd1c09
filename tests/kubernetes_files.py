"""Read deploy/kubernetes as `kubectl kustomize` would, as far as those folders ask for it.

`test_kubernetes.py` compares this with kubectl where there is one.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
EXAMPLE = ROOT / "examples" / "kubernetes"
VARIANTS = {
    **{
        name: FOLDER / name
        for name in ("separate", "pairs", "separate-autoscaled", "pairs-autoscaled", "trial")
    },
    "example": EXAMPLE,
}
CONFIG_FILE = "coppice.toml"
Resource = dict[str, Any]

_UNDERSTOOD = {"apiVersion", "kind", "resources", "configMapGenerator", "patches"}
_UNDERSTOOD |= {"namespace", "images", "replicas"}


def render(folder: Path) -> list[Resource]:
    """Return the resources of a kustomization; names of generated maps have a hash."""
    resources = list(_built(folder))
    for resource in resources:
        if resource["kind"] == "ConfigMap":
            digest = hashlib.sha256(repr(resource["data"]).encode()).hexdigest()[:10]
            plain = resource["metadata"]["name"]
            resource["metadata"]["name"] = f"{plain}-{digest}"
            for pod in map(pod_of, workloads(resources)):
                for volume in pod["volumes"]:
                    if volume.get("configMap", {}).get("name") == plain:
                        volume["configMap"]["name"] = resource["metadata"]["name"]
    return resources


def _built(folder: Path) -> Iterator[Resource]:
    file = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert not file.keys() - _UNDERSTOOD, file.keys() - _UNDERSTOOD
    resources: list[Resource] = []
    for name in file.get("resources", []):
        path = folder / name
        found = _built(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
        resources += found
    for generator in file.get("configMapGenerator", []):
        _generate(generator, folder, resources)
    for patch in file.get("patches", []):
        _patch(patch, resources)
    for image in file.get("images", []):
        for workload in workloads(resources):
            for container in pod_of(workload)["containers"]:
                if container["image"].partition(":")[0] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    for replicas in file.get("replicas", []):
        named(resources, "StatefulSet", replicas["name"])["spec"]["replicas"] = replicas["count"]
    if "namespace" in file:
        for resource in resources:
            if resource["kind"] != "Namespace":
                resource["metadata"]["namespace"] = file["namespace"]
    yield from resources


def _generate(generator: Resource, folder: Path, resources: list[Resource]) -> None:
    data = {name: (folder / name).read_text() for name in generator["files"]}
    if generator.get("behavior") == "merge":
        named(resources, "ConfigMap", generator["name"])["data"].update(data)
        return
    metadata = {"name": generator["name"]}
    resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _patch(patch: Resource, resources: list[Resource]) -> None:
    """Apply the operations of RFC 6902 that the folders use."""
    resource = named(resources, **patch["target"])
    for operation in yaml.safe_load(patch["patch"]):
        *parents, last = (
            int(part) if part.isdecimal() else part.replace("~1", "/")
            for part in operation["path"].split("/")[1:]
        )
        place: Any = resource
        for part in parents:
            place = place[part]
        if operation["op"] == "add":
            assert last not in place, f"{operation['path']} is there already"
        else:
            place[last]  # a path that is not there is a mistake
        if operation["op"] == "remove":
            del place[last]
        else:
            place[last] = operation["value"]


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    """Return the only resource of a kind and name."""
    (found,) = (r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name))
    return found


def of_kind(resources: list[Resource], kind: str) -> list[Resource]:
    """Return the resources of a kind."""
    return [resource for resource in resources if resource["kind"] == kind]


def workloads(resources: list[Resource]) -> list[Resource]:
    """Return what runs pods."""
    return [r for r in resources if r["kind"] in ("Deployment", "StatefulSet")]


def pod_of(workload: Resource) -> Resource:
    """Return the specification of its pods."""
    pod: Resource = workload["spec"]["template"]["spec"]
    return pod


def labels_of(workload: Resource) -> dict[str, str]:
    """Return the labels of its pods."""
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a selector's labels are among a pod's."""
    return selector.items() <= labels.items()


@dataclass(frozen=True, slots=True)
class Service:
    """A container that runs a service of Coppice."""

    workload: Resource
    container: Resource
    settings: dict[str, Any]
    """Its table of the configuration file."""

    @property
    def role(self) -> str:
        """Return orchestrator, target or draft."""
        name: str = self.container["name"]
        return name


def services_of(resources: list[Resource]) -> list[Service]:
    """Return every container of every pod."""
    (config,) = of_kind(resources, "ConfigMap")
    tables = tomllib.loads(config["data"][CONFIG_FILE])
    return [
        Service(workload, container, tables[container["name"]])
        for workload in workloads(resources)
        for container in pod_of(workload)["containers"]
    ]
