"""Machines and devices of the YAML, checked."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, ServeYaml
from prism.config.schema.endpoints import FRONTEND_PORTS, NodeConfig, on_node
from prism.config.schema.machines import DeviceYaml, NodeYaml
from prism.curve import public_key
from prism.errors import ConfigError

FRONTENDS_MAX = 16
_DEVICE_NAME = re.compile(r"(host|cuda):\d{1,4}")
_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?")
_PAGE_GRAIN_BYTES = 4096
_ENGINES_MAX = 64


def devices_of(data: ServeYaml) -> list[DeviceConfig]:
    """Returns the devices of all machines, in the file's order. Raises ConfigError."""
    if data.ray is not None:
        raise ConfigError(
            "ray: Ray starts the machines of this file; use prism-serve up, which checks the file"
        )
    if data.nodes and data.devices:
        raise ConfigError("devices: each of the nodes has its own; leave this key out")
    if not data.nodes:
        return [_device(d, f"devices[{i}]") for i, d in enumerate(data.devices)]
    return [
        _device(device, f"nodes[{n}].devices[{i}]", node.name)
        for n, node in enumerate(data.nodes)
        for i, device in enumerate(node.devices)
    ]


def nodes_of(data: ServeYaml) -> list[NodeConfig]:
    """Returns the machines. Raises ConfigError."""
    for index, node in enumerate(data.nodes):
        _check_node(node, f"nodes[{index}]", data.nodes[:index])
    if not data.nodes:
        return []
    if not any(node.frontends for node in data.nodes):
        raise ConfigError("nodes[].frontends: no node serves the API; give one at least 1")
    if data.redis is None:
        raise ConfigError("redis: is required with nodes; give the URL of a server for all")
    return [
        NodeConfig(
            n.name,
            n.address,
            n.port,
            n.frontends,
            len(n.devices),
            network_bytes_s=float(n.network_rate),
            disk_bytes_s=float(n.disk_rate),
        )
        for n in data.nodes
    ]


def cluster_key_of(data: ServeYaml, base_dir: Path) -> str:
    """Returns the cluster's key. Empty if there is one machine. Raises ConfigError."""
    if not data.nodes:
        return ""
    if data.cluster_key is None:
        raise ConfigError(
            "cluster_key: is required with nodes; make the file with prism-serve new-cluster-key"
        )
    return _read_cluster_key(base_dir / Path(data.cluster_key).expanduser())


def check_node(config: ClusterConfig) -> None:
    """Raises ConfigError if the configuration does not say which node this machine is."""
    names = [node.name for node in config.nodes]
    if config.node not in (names or [""]):
        problem = f"unknown node {config.node!r}" if config.node else "is missing"
        remedy = f"choose one of {', '.join(names)}" if names else "the file does not have nodes"
        raise ConfigError(f"--node: {problem}; {remedy}")


def _read_cluster_key(path: Path) -> str:
    """Returns the key in a file. Raises ConfigError, also if other users may read the file."""
    try:
        text, found = path.read_text().strip(), path.stat()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"cluster_key: cannot read {path}: {why}; make it with prism-serve new-cluster-key"
        ) from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
        raise ConfigError(
            f"cluster_key: {path} is a secret that other users may read; chown it to this user and"
            " chmod 600"
        )
    try:
        public_key(text)
    except ValueError as error:
        raise ConfigError(
            f"cluster_key: {path} is not a valid key; make it with prism-serve new-cluster-key"
        ) from error
    return text


def _check_node(node: NodeYaml, key: str, before: Sequence[NodeYaml]) -> None:
    if not _NODE_NAME.fullmatch(node.name):
        raise ConfigError(
            f"{key}.name: {node.name!r} is not a valid name; write up to 16 lower-case letters,"
            " digits and dashes"
        )
    try:
        ipaddress.ip_address(node.address)
    except ValueError as error:
        raise ConfigError(
            f"{key}.address: {node.address!r} is not an IP address; write 10.0.0.1, for example"
        ) from error
    if not 0 <= node.frontends <= FRONTENDS_MAX:
        raise ConfigError(
            f"{key}.frontends: {node.frontends} is out of range; choose 0 to {FRONTENDS_MAX}"
        )
    last = _last_port(node)
    if not node.port >= 1 or last > 65535:
        raise ConfigError(f"{key}.port: {node.port} to {last} are not all ports; choose another")
    if node.disk_rate < 1:
        raise ConfigError(
            f"{key}.disk_rate: {node.disk_rate.text} is not a rate; give bytes per second"
        )
    if node.network_rate < 1:
        raise ConfigError(
            f"{key}.network_rate: {node.network_rate.text} is not a rate; give bytes per second"
        )
    for other in before:
        if other.name == node.name:
            raise ConfigError(f"{key}.name: {node.name!r} is used twice; rename one")
        if other.address == node.address and _overlap(other, node):
            raise ConfigError(
                f"{key}.port: {other.name} uses the same address and ports; choose others"
            )


def _overlap(one: NodeYaml, other: NodeYaml) -> bool:
    """Returns True if two nodes of one address share ports."""
    low, high = sorted((one, other), key=lambda node: node.port)
    return high.port <= _last_port(low)


def _last_port(node: NodeYaml) -> int:
    """Returns the port for weights."""
    return node.port + 1 + len(node.devices) + FRONTEND_PORTS


def _device(data: DeviceYaml, key: str, node: str = "") -> DeviceConfig:
    if not _DEVICE_NAME.fullmatch(data.name):
        raise ConfigError(
            f"{key}.name: {data.name!r} is not a valid device; use host:0, host:1, ... or"
            " cuda:0, ..."
        )
    if data.capacity is None or data.capacity.share is not None:
        raise ConfigError(
            f"{key}.capacity: must be a size such as 70GiB, since other machines do not know the"
            " device's memory"
        )
    page_bytes, capacity_bytes = int(data.page), int(data.capacity)
    if page_bytes % _PAGE_GRAIN_BYTES or page_bytes & (page_bytes - 1):
        raise ConfigError(
            f"{key}.page: {data.page.text} is not a power of two of at least 4KiB; use 64KiB or"
            " 2MiB"
        )
    if capacity_bytes < page_bytes:
        raise ConfigError(
            f"{key}.capacity: {data.capacity.text} is below one page ({data.page.text}); raise"
            f" capacity or lower {key}.page"
        )
    if not 1 <= data.engines <= _ENGINES_MAX:
        raise ConfigError(f"{key}.engines: {data.engines} is out of range; choose 1 to 64")
    whole = capacity_bytes - capacity_bytes % page_bytes
    shares = _sm_percent(data, f"{key}.sm_percent")
    name = on_node(data.name, node)
    return DeviceConfig(
        name, whole, page_bytes, data.engines, data.capacity.origin, sm_percent=shares
    )


def _sm_percent(data: DeviceYaml, key: str) -> tuple[int, ...]:
    shares = tuple(data.sm_percent or ())
    if shares and len(shares) != data.engines:
        raise ConfigError(f"{key}: {len(shares)} numbers for {data.engines} engines; give each one")
    wrong = [share for share in shares if not 1 <= share <= 100]
    if wrong:
        raise ConfigError(f"{key}: {wrong[0]} is not a valid percentage; choose 1 to 100")
    return shares
