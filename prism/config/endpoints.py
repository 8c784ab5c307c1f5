"""Where the processes of a cluster find each other, on one machine and over several."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SCHEDULERS_MAX = 3  # nodes whose scheduler may lead
FRONTEND_PORTS = 64  # of a node, behind those of its scheduler and its agents


class NodeConfig(msgspec.Struct, frozen=True):
    """A machine of the cluster."""

    name: str
    address: str
    port: int  # the scheduler's; those of the agents and of the frontends follow
    frontends: int
    devices: int  # how many
    network_bytes_s: float = 1.25e9
    disk_bytes_s: float = 2e9


def on_node(device: str, node: str) -> str:
    """A device's name in the cluster: unlike that of any other node's."""
    return f"{device}@{node}" if node else device


def local_name(device: str) -> str:
    """What its machine calls it."""
    return device.partition("@")[0]


def node_of(device: str) -> str:
    """Empty where the cluster has one machine."""
    return device.partition("@")[2]


def beside(devices: tuple[str, ...] | list[str]) -> bool:
    """Whether all of these are on one machine."""
    return len({node_of(device) for device in devices}) < 2


def nearest(device: str, others: Sequence[str]) -> str | None:
    """Of the others the first one on the machine of `device`, or else the first one."""
    return min(others, key=lambda other: node_of(other) != node_of(device), default=None)


class _Nodes(msgspec.Struct, frozen=True, kw_only=True):
    # This machine; empty, with no `nodes`, where it is the only one.
    node: str = ""
    nodes: list[NodeConfig] = []
    # A secret of CURVE.
    cluster_key: str = ""


class Endpoints(_Nodes, frozen=True):
    """The part of a `ClusterConfig` that addresses follow from.

    Within a machine processes talk over Unix sockets in `run_dir`, to other nodes over TCP with
    `cluster_key`.
    """

    # Separates the shared-memory segments and Redis keys of two clusters on one machine.
    namespace: str
    # Mode 0700. It holds sockets, logs and the resolved configuration.
    run_dir: str

    def place(self, node: str) -> NodeConfig:
        """Raises ValueError for what is no node."""
        for each in self.nodes:
            if each.name == node:
                return each
        raise ValueError(f"{node!r:.100} is no node")

    @property
    def here(self) -> NodeConfig | None:
        return self.place(self.node) if self.node else None

    # --- the scheduler ----------------------------------------------------------------------

    @property
    def schedules(self) -> bool:
        """Whether the scheduler of this machine may lead; another one may do so at present."""
        return not self.node or self.node in (n.name for n in self.nodes[:SCHEDULERS_MAX])

    @property
    def scheduler_endpoint(self) -> str:
        """Of the scheduler of this machine."""
        return self._ipc("scheduler")

    @property
    def own_scheduler_endpoints(self) -> list[str]:
        """What the scheduler of this machine is bound to."""
        here = self.here
        return [self.scheduler_endpoint, *([_tcp(here, 0)] if here else [])]

    @property
    def scheduler_endpoints(self) -> list[str]:
        """Where a scheduler may be: one of them is."""
        others = [n for n in self.nodes[:SCHEDULERS_MAX] if n.name != self.node]
        own = [self.scheduler_endpoint] if self.schedules else []
        return [*own, *(_tcp(node, 0) for node in others)]

    # --- agents -----------------------------------------------------------------------------

    def agent_engines_endpoint(self, device: str) -> str:
        """REQUIRES: a device of this machine."""
        return self._ipc(f"engines-{_plain(device)}")

    def own_cancel_endpoints(self, device: str) -> list[str]:
        """What the agent of `device`, which is on this machine, is bound to."""
        here = self.here
        return [self._ipc(f"cancel-{_plain(device)}"), *([self._tcp_agent(device)] if here else [])]

    def agent_cancel_endpoint(self, device: str) -> str:
        if node_of(device) == self.node:
            return self._ipc(f"cancel-{_plain(device)}")
        return self._tcp_agent(device)

    def _tcp_agent(self, device: str) -> str:
        node = self.place(node_of(device))
        return _tcp(node, 1 + self._index(device))

    def _index(self, device: str) -> int:
        """Of the device among those of its node."""
        raise NotImplementedError

    # --- weights ----------------------------------------------------------------------------

    def weights_endpoint(self, node: str) -> str:
        """Where other machines read a machine's weight store: behind the ports of frontends."""
        place = self.place(node)
        return _tcp(place, 1 + place.devices + FRONTEND_PORTS)

    def links_bytes_s(self) -> dict[str, float]:
        """To each other machine: the slower of the two ends."""
        here = self.here
        if here is None:
            return {}
        others = (node for node in self.nodes if node.name != here.name)
        return {node.name: min(node.network_bytes_s, here.network_bytes_s) for node in others}

    # --- frontends --------------------------------------------------------------------------

    def frontend_endpoint(self, frontend_id: str) -> str:
        """An id is NAME on this machine, and NAME@NODE:PORT:START with several. So it leads to no
        address beyond the cluster, whoever wrote it. Raises ValueError for what is no id."""
        if "/" in frontend_id:
            raise ValueError(f"{frontend_id!r:.100} is no frontend's id")
        name, _, place = frontend_id.partition("@")
        node, _, port = place.partition(":")
        if node == self.node or not place:
            return self._ipc(f"frontend-{name}")
        return _tcp(self.place(node), 0, int(port.partition(":")[0]))

    def own_frontend_endpoints(self, frontend_id: str) -> list[str]:
        """What the frontend with this id is bound to. Raises ValueError as `frontend_endpoint`."""
        own, place = self.frontend_endpoint(frontend_id), frontend_id.partition("@")[2]
        if not place:
            return [own]
        return [own, _tcp(self.place(self.node), 0, int(place.split(":")[1]))]

    @property
    def frontend_ports(self) -> range:
        """Which of them a frontend of this node may take. REQUIRES: there are nodes."""
        here = self.place(self.node)
        return range(here.port + 1 + here.devices, here.port + 1 + here.devices + FRONTEND_PORTS)

    @property
    def moves_dir(self) -> str:
        """Where KV of requests waits for its next engine: in shared memory."""
        return f"/dev/shm/{self.namespace}-moves"

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}"


def _plain(device: str) -> str:
    return local_name(device).replace(":", "")


def _tcp(node: NodeConfig, beyond: int, port: int | None = None) -> str:
    host = f"[{node.address}]" if ":" in node.address else node.address
    return f"tcp://{host}:{node.port + beyond if port is None else port}"
