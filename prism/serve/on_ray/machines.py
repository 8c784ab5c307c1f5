"""The machines of a Ray cluster, and what is to run on each of them. Nothing here talks to Ray."""

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

from prism.config.admin import host_and_port
from prism.config.machines import is_gpu
from prism.config.nodes import nodes_of
from prism.config.reader import convert
from prism.config.schema import ServeYaml
from prism.errors import ConfigError

# A custom resource of Ray: how many host devices a machine has, where the file names no nodes.
HOST_DEVICES = "prism_host_device"
GPU, HOST = "cuda:*", "host:*"  # what the file calls them then
_OLDEST = (2, 52)  # the first with tokens
_PATHS = (("access", "keys"), ("frontend", "tls_certificate"), ("frontend", "tls_key"))


class RayMachine(msgspec.Struct, frozen=True):
    """A raylet: its address, and its resources by name."""

    address: str
    resources: dict[str, float]


class Placement(msgspec.Struct, frozen=True):
    """A node of the cluster. bundles: what Ray is to reserve there, one for each device."""

    name: str
    address: str
    bundles: list[dict[str, float]]


class LaunchSpec(msgspec.Struct, frozen=True):
    """What is to run on the machines. address: Ray's. file: the YAML, with absolute paths.
    machines: those that are nodes, in their order, where the file names none. options: of each
    node's `prism-serve`. settled: the cluster was ready before."""

    address: str
    file: str
    key: str
    machines: list[RayMachine]
    options: tuple[str, ...]
    settled: bool = False


class Layout(msgspec.Struct, frozen=True):
    """text: the YAML with the nodes, as each of them reads it."""

    text: str
    placements: list[Placement]


def check_ray() -> None:
    """Raises ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError("--ray: Ray is not installed; pip install 'prism-serving[ray]'")
    if tuple(int(part) for part in version("ray").split(".")[:2]) < _OLDEST:
        raise ConfigError(
            f"--ray: Ray {version('ray')} has no tokens; install"
            f" {'.'.join(map(str, _OLDEST))} or later on all machines"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "--ray: who reaches Ray's ports runs code on all its machines; set RAY_AUTH_MODE=token"
            " here and for ray start (ray get-auth-token --generate makes the token)"
        )


def with_nodes(file: Mapping[str, Any], machines: Sequence[RayMachine]) -> dict[str, Any]:
    """The file with `nodes`: where it names none, they are the machines that have GPUs or host
    devices, with each device as `devices` describes its kind. Raises ConfigError."""
    whole = {key: value for key, value in file.items() if key != "ray"}
    if whole.get("nodes"):
        return whole
    kinds = _kinds(whole.pop("devices", []))
    nodes = [_node(each, kinds) for each in machines]
    whole["nodes"] = [node for node in nodes if node["devices"]]
    if not whole["nodes"]:
        raise ConfigError(
            f"devices: no machine of Ray has what they describe; start Ray with --num-gpus=N, or"
            f" with --resources='{{\"{HOST_DEVICES}\": N}}' for host devices"
        )
    return whole


def layout(file: str, machines: Sequence[RayMachine]) -> Layout:
    """`file`: the YAML. Raises ConfigError."""
    whole = with_nodes(yaml.safe_load(file), machines)
    return Layout(yaml.safe_dump(whole), placements(convert(whole, ServeYaml), machines))


def usable(file: str, machines: Sequence[RayMachine]) -> list[RayMachine] | None:
    """Those that have devices of the file. None: it names its nodes."""
    whole = yaml.safe_load(file)
    if whole.get("nodes"):
        return None
    kinds = _kinds(whole.get("devices", []))
    return [each for each in machines if _node(each, kinds)["devices"]]


def _kinds(devices: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By Ray's resource."""
    known = {GPU: "GPU", HOST: HOST_DEVICES}
    kinds: dict[str, Mapping[str, Any]] = {}
    for index, device in enumerate(devices):
        resource = known.get(device["name"])
        if resource is None or resource in kinds:
            raise ConfigError(
                f"devices[{index}].name: {device['name']!r} cannot be used: Ray has the machines;"
                " describe each kind of device once, as cuda:* or host:*, or name the nodes"
            )
        kinds[resource] = device
    return kinds


def _node(machine: RayMachine, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Named by its address: it stays the same over restarts."""
    devices = [
        {**kind, "name": kind["name"].replace("*", str(index))}
        for resource, kind in kinds.items()
        for index in range(int(machine.resources.get(resource, 0)))
    ]
    name = machine.address.replace(".", "-").replace(":", "-").strip("-")
    return {"name": name, "address": machine.address, "devices": devices}


def placements(data: ServeYaml, machines: Sequence[RayMachine]) -> list[Placement]:
    """`data`: with nodes. Raises ConfigError where Ray has not what they need."""
    if data.cluster_key is not None:
        raise ConfigError("cluster_key: Ray hands a new one out; leave the key out")
    nodes_of(data)
    there = {each.address: each.resources for each in machines}
    found = []
    for index, node in enumerate(data.nodes):
        address = plain(node.address)
        if address not in there:
            raise ConfigError(
                f"nodes[{index}].address: no machine of the Ray cluster has {node.address}: it has"
                f" {', '.join(sorted(there))}; start Ray there (ray start --address=...), or"
                " correct it"
            )
        gpus, have = sum(is_gpu(d.name) for d in node.devices), there[address].get("GPU", 0)
        if gpus > have:
            raise ConfigError(
                f"nodes[{index}].devices: {gpus} GPUs, and Ray's {node.address} has {have:g}; take"
                " some out"
            )
        hosts = min(len(node.devices) - gpus, int(there[address].get(HOST_DEVICES, 0)))
        bundles = [{"GPU": 1.0}] * gpus + [{HOST_DEVICES: 1.0}] * hosts
        found.append(Placement(node.name, address, bundles))
    return found


def portable(file: Mapping[str, Any], folder: Path) -> str:
    """The file without relative paths, which start at `folder`."""
    whole = deepcopy(dict(file))

    def make_absolute(section: dict[str, Any], *keys: str) -> None:
        for key in keys:
            if section.get(key):
                section[key] = str(folder / Path(section[key]).expanduser())

    for model in whole["models"]:
        for each in (model, *model.get("lora", [])):
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


def plain(address: str) -> str:
    """As Ray's nodes say it."""
    return str(ipaddress.ip_address(address))
