"""The machines of a Ray cluster, and the processes to run on each of them. Nothing here talks to
Ray."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import yaml

from prism.config.checks.model_paths import hub_name_of
from prism.config.checks.nodes import nodes_of
from prism.config.reader import convert
from prism.config.schema.admin import host_and_port
from prism.config.schema.cluster_config import ServeYaml
from prism.config.schema.machines import is_gpu
from prism.errors import ConfigError

# Custom resource of Ray: number of a machine's host devices, if the file does not have nodes.
HOST_DEVICES = "prism_host_device"
GPU, HOST = "cuda:*", "host:*"  # names in a file without nodes
_VERSION_MIN = (2, 52)  # first version with tokens
_PATHS = (("access", "keys"), ("frontend", "tls_certificate"), ("frontend", "tls_key"))


class RayMachine(msgspec.Struct, frozen=True):
    """A raylet: its address, and its resources by name."""

    address: str
    resources: dict[str, float]


class Placement(msgspec.Struct, frozen=True):
    """A node of the cluster."""

    name: str
    address: str
    bundles: list[dict[str, float]]  # Ray's reservation, one for each device


class LaunchSpec(msgspec.Struct, frozen=True):
    """Specification of what runs on the machines."""

    address: str  # of Ray
    file: str  # the YAML, with absolute paths
    key: str  # of the cluster
    machines: list[RayMachine]  # the nodes in order, if the file does not have any
    options: tuple[str, ...]  # of each node's `prism-serve`
    settled: bool = False  # the cluster was ready before


class Layout(msgspec.Struct, frozen=True):
    """Nodes of the cluster and their placement."""

    text: str  # the YAML with `nodes`, for each node
    placements: list[Placement]


def check_ray() -> None:
    """Raises ConfigError if Ray is not installed, too old, or not protected by a token."""
    if find_spec("ray") is None:
        raise ConfigError("--ray: Ray is not installed; pip install 'prism-serving[ray]'")
    if tuple(int(part) for part in version("ray").split(".")[:2]) < _VERSION_MIN:
        raise ConfigError(
            f"--ray: Ray {version('ray')} does not support tokens; install"
            f" {'.'.join(map(str, _VERSION_MIN))} or later on all machines"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "--ray: any client of Ray's ports can run code on all its machines; set"
            " RAY_AUTH_MODE=token here and for ray start (ray get-auth-token --generate makes one)"
        )


def with_nodes(file: Mapping[str, Any], machines: Sequence[RayMachine]) -> dict[str, Any]:
    """Returns the file with `nodes`. If it does not have any, they are the machines that have GPUs
    or host devices, each device as `devices` describes its kind. Raises ConfigError."""
    whole = {key: value for key, value in file.items() if key != "ray"}
    if whole.get("nodes"):
        return whole
    kinds = _kinds(whole.pop("devices", []))
    nodes = [_node(each, kinds) for each in machines]
    whole["nodes"] = [node for node in nodes if node["devices"]]
    if not whole["nodes"]:
        raise ConfigError(
            f"devices: no machine of Ray has such devices; start Ray with --num-gpus=N, or"
            f" with --resources='{{\"{HOST_DEVICES}\": N}}' for host devices"
        )
    return whole


def layout(file: str, machines: Sequence[RayMachine]) -> Layout:
    """Returns the layout for a YAML. Raises ConfigError."""
    whole = with_nodes(yaml.safe_load(file), machines)
    return Layout(yaml.safe_dump(whole), placements(convert(whole, ServeYaml), machines))


def machines_with_devices(file: str, machines: Sequence[RayMachine]) -> list[RayMachine] | None:
    """Returns the machines that have devices of the file, or None if the file has `nodes`."""
    whole = yaml.safe_load(file)
    if whole.get("nodes"):
        return None
    kinds = _kinds(whole.get("devices", []))
    return [each for each in machines if _node(each, kinds)["devices"]]


def _kinds(devices: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the kinds of devices by Ray's resource. Raises ConfigError."""
    known = {GPU: "GPU", HOST: HOST_DEVICES}
    kinds: dict[str, Mapping[str, Any]] = {}
    for index, device in enumerate(devices):
        resource = known.get(device["name"])
        if resource is None or resource in kinds:
            raise ConfigError(
                f"devices[{index}].name: {device['name']!r} cannot be combined with ray; describe"
                " each kind of device once, as cuda:* or host:*, or add nodes"
            )
        if str(device.get("capacity", "%")).rstrip().endswith("%"):
            raise ConfigError(
                f"devices[{index}].capacity: must be a size such as 70GiB, since it holds for the"
                " devices of all machines"
            )
        kinds[resource] = device
    return kinds


def _node(machine: RayMachine, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a machine as a node, named by its address, which is the same after a restart."""
    devices = [
        {**kind, "name": kind["name"].replace("*", str(index))}
        for resource, kind in kinds.items()
        for index in range(int(machine.resources.get(resource, 0)))
    ]
    name = machine.address.replace(".", "-").replace(":", "-").strip("-")
    return {"name": name, "address": machine.address, "devices": devices}


def placements(data: ServeYaml, machines: Sequence[RayMachine]) -> list[Placement]:
    """Returns the placement of a file with nodes. Raises ConfigError if Ray does not have what they
    need."""
    if data.cluster_key is not None:
        raise ConfigError("cluster_key: cannot be combined with ray, which makes one; remove it")
    nodes_of(data)
    resources = {each.address: each.resources for each in machines}
    found = []
    for index, node in enumerate(data.nodes):
        address = normalized(node.address)
        if address not in resources:
            raise ConfigError(
                f"nodes[{index}].address: the Ray cluster does not have {node.address}; it has"
                f" {', '.join(sorted(resources))}; start Ray there (ray start --address=...), or"
                " correct it"
            )
        gpus, have = (
            sum(is_gpu(d.name) for d in node.devices),
            resources[address].get("GPU", 0),
        )
        if gpus > have:
            raise ConfigError(
                f"nodes[{index}].devices: {gpus} GPUs, but Ray's {node.address} has {have:g};"
                " remove some"
            )
        hosts = min(len(node.devices) - gpus, int(resources[address].get(HOST_DEVICES, 0)))
        bundles = [{"GPU": 1.0}] * gpus + [{HOST_DEVICES: 1.0}] * hosts
        found.append(Placement(node.name, address, bundles))
    return found


def with_absolute_paths(file: Mapping[str, Any], folder: Path) -> str:
    """Returns the YAML with absolute paths. Relative ones start at `folder`."""
    whole = deepcopy(dict(file))

    def make_absolute(section: dict[str, Any], *keys: str) -> None:
        for key in keys:
            if section.get(key):
                section[key] = str(folder / Path(section[key]).expanduser())

    for model in whole["models"]:
        for each in (model, *model.get("lora", [])):
            # Each machine looks for a hub's model in its own cache.
            if not hub_name_of(folder, each["path"]):
                make_absolute(each, "path")
    frontend, engine = whole.get("frontend", {}), whole.get("engine", {})
    make_absolute(whole.get("access", {}), "keys")
    make_absolute(frontend, "tls_certificate", "tls_key")
    if host_and_port(frontend.get("admin") or "") is None:
        make_absolute(frontend, "admin")
    make_absolute(engine.get("python", {}), *engine.get("python", {}))
    if engine.get("weight_store") not in ("auto", "off"):
        make_absolute(engine, "weight_store")
    return yaml.safe_dump(whole)


def normalized(address: str) -> str:
    """Returns an address in the form of Ray's nodes."""
    return str(ipaddress.ip_address(address))
