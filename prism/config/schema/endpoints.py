"""Addresses by which the processes of a cluster connect, on one machine and across machines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SCHEDULERS_MAX = 3  # nodes whose scheduler may lead
FRONTEND_PORTS = 64  # per node, after the ports of its scheduler and its agents


class NodeConfig(msgspec.Struct, frozen=True):
    """A machine of the cluster."""

    name: str
    address: str
    port: int  # of the scheduler; the ports of agents and frontends follow
    frontends: int  # number of processes
    devices: int  # number of devices
    network_bytes_s: float = 1.25e9
    disk_bytes_s: float = 2e9


def on_node(device: str, node: str) -> str:
    """Returns a device's name in the cluster, which is unique across its nodes."""
    return f"{device}@{node}" if node else device


def local_name(device: str) -> str:
    """Returns a device's name on its machine."""
    return device.partition("@")[0]


def node_of(device: str) -> str:
    """Returns a device's node. Empty if the cluster has one machine."""
    return device.partition("@")[2]


def on_same_machine(devices: tuple[str, ...] | list[str]) -> bool:
    """Returns True if all devices are on one machine."""
    return len({node_of(device) for device in devices}) < 2


def nearest(device: str, others: Sequence[str]) -> str | None:
    """Returns the first of `others` on the machine of `device`, or else the first one."""
    return min(others, key=lambda other: node_of(other) != node_of(device), default=None)


class _Nodes(msgspec.Struct, frozen=True, kw_only=True):
    # This machine's node. Empty, as `nodes`, if the cluster has one machine.
    node: str = ""
    nodes: list[NodeConfig] = []
    # Secret key of CURVE.
    cluster_key: str = ""


class Endpoints(_Nodes, frozen=True):
    """Part of a `ClusterConfig` from which addresses are derived.

    Processes of a machine use Unix sockets in `run_dir`. Other nodes are reached over TCP with
    `cluster_key`.
    """

    # Separates the shared-memory segments and Redis keys of two clusters on one machine.
    namespace: str
    # Mode 0700. It holds sockets, logs and the resolved configuration.
    run_dir: str

    def place(self, node: str) -> NodeConfig:
        """Returns the configuration of `node`. Raises ValueError if it is not a configured node."""
        for each in self.nodes:
            if each.name == node:
                return each
        names = ", ".join(each.name for each in self.nodes)
        raise ValueError(f"{node!r:.100} is not a configured node; nodes: {names}")

    @property
    def here(self) -> NodeConfig | None:
        """Configuration of this node. None: the cluster has one machine."""
        return self.place(self.node) if self.node else None

    # --- the scheduler ----------------------------------------------------------------------

    @property
    def schedules(self) -> bool:
        """True if this machine's scheduler may lead. Another one may lead at present."""
        return not self.node or self.node in (n.name for n in self.nodes[:SCHEDULERS_MAX])

    @property
    def scheduler_endpoint(self) -> str:
        """Endpoint of this machine's scheduler."""
        return self._ipc("scheduler")

    @property
    def own_scheduler_endpoints(self) -> list[str]:
        """Endpoints that this machine's scheduler is bound to."""
        here = self.here
        return [self.scheduler_endpoint, *([_tcp(here, 0)] if here else [])]

    @property
    def scheduler_endpoints(self) -> list[str]:
        """Endpoints of all schedulers, one of which leads."""
        others = [n for n in self.nodes[:SCHEDULERS_MAX] if n.name != self.node]
        own = [self.scheduler_endpoint] if self.schedules else []
        return [*own, *(_tcp(node, 0) for node in others)]

    # --- agents -----------------------------------------------------------------------------

    def agent_engines_endpoint(self, device: str) -> str:
        """Returns the endpoint for the engines of `device`.

        REQUIRES: a device of this machine.
        """
        return self._ipc(f"engines-{_plain(device)}")

    def own_cancel_endpoints(self, device: str) -> list[str]:
        """Returns the endpoints that the agent of `device`, on this machine, is bound to."""
        here = self.here
        return [self._ipc(f"cancel-{_plain(device)}"), *([self._tcp_agent(device)] if here else [])]

    def agent_cancel_endpoint(self, device: str) -> str:
        """Returns the endpoint for messages to the agent of `device`."""
        if node_of(device) == self.node:
            return self._ipc(f"cancel-{_plain(device)}")
        return self._tcp_agent(device)

    def _tcp_agent(self, device: str) -> str:
        node = self.place(node_of(device))
        return _tcp(node, 1 + self._index(device))

    def _index(self, device: str) -> int:
        """Returns the index of a device among those of its node."""
        raise NotImplementedError

    # --- weights ----------------------------------------------------------------------------

    def weights_endpoint(self, node: str) -> str:
        """Returns the endpoint of a machine's weight store for other machines, after the frontends'
        ports."""
        place = self.place(node)
        return _tcp(place, 1 + place.devices + FRONTEND_PORTS)

    def links_bytes_s(self) -> dict[str, float]:
        """Returns the rate to each other machine: the slower of both ends."""
        here = self.here
        if here is None:
            return {}
        others = (node for node in self.nodes if node.name != here.name)
        return {node.name: min(node.network_bytes_s, here.network_bytes_s) for node in others}

    # --- frontends --------------------------------------------------------------------------

    def frontend_endpoint(self, frontend_id: str) -> str:
        """Returns the endpoint of a frontend. An id is NAME on one machine, and
        NAME@NODE:PORT:START with several nodes, so that no id leads outside of the cluster. Raises
        ValueError if it is not a valid id."""
        if "/" in frontend_id:
            raise ValueError(f"{frontend_id!r:.100} is not a valid frontend id")
        name, _, place = frontend_id.partition("@")
        node, _, port = place.partition(":")
        if node == self.node or not place:
            return self._ipc(f"frontend-{name}")
        return _tcp(self.place(node), 0, int(port.partition(":")[0]))

    def own_frontend_endpoints(self, frontend_id: str) -> list[str]:
        """Returns the endpoints that the frontend with this id is bound to. Raises ValueError as
        `frontend_endpoint`."""
        own, place = self.frontend_endpoint(frontend_id), frontend_id.partition("@")[2]
        if not place:
            return [own]
        return [own, _tcp(self.place(self.node), 0, int(place.split(":")[1]))]

    @property
    def frontend_ports(self) -> range:
        """Ports that frontends of this node may use.

        REQUIRES: the cluster has nodes.
        """
        here = self.place(self.node)
        return range(here.port + 1 + here.devices, here.port + 1 + here.devices + FRONTEND_PORTS)

    @property
    def moves_dir(self) -> str:
        """Directory in shared memory for KV of requests that move to another engine."""
        return f"/dev/shm/{self.namespace}-moves"

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}"


def _plain(device: str) -> str:
    return local_name(device).replace(":", "")


def _tcp(node: NodeConfig, beyond: int, port: int | None = None) -> str:
    host = f"[{node.address}]" if ":" in node.address else node.address
    return f"tcp://{host}:{node.port + beyond if port is None else port}"
