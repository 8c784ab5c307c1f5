"""Tables of a running cluster, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from prism.config.schema.endpoints import node_of
from prism.config.schema.units import format_size
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.external import ExternalServer

_ANY_WIDTH = 10_000


class Fitted:
    """Table whose last columns are left out if the terminal is too narrow for them, so that names
    are shown whole. The first `kept` columns stay."""

    def __init__(self, table: Table, kept: int = 2) -> None:
        self._table = table
        self._kept = kept
        for column in table.columns:
            column.overflow = "fold"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, left_out = copy(self._table), 0
        table.columns = list(table.columns)
        wide = options.update(max_width=_ANY_WIDTH)
        while (
            len(table.columns) > self._kept
            and Measurement.get(console, wide, table).maximum > options.max_width
        ):
            table.columns.pop()
            left_out += 1
        yield table
        if left_out:
            yield Text(f"+{left_out} columns in a wider terminal; --json has all", "dim")


def cluster(status: ClusterStatus) -> RenderableType:
    """Returns tables of devices, models and external servers, and what is wrong."""
    parts: list[RenderableType] = [Fitted(_nodes_table(status))] if status.node else []
    parts.append(Fitted(_agents_table(status)) if status.agents else Text(_title(status)))
    models = models_table(status)
    if models.row_count or not status.external:
        parts.append(Fitted(models))
    if status.external:
        parts.append(Fitted(_external_table(status.external)))
        whys = [
            (s.url, why) for s in status.external for why in (s.reason or s.unmanaged, s.no_sleep)
        ]
        parts += [Text(f"{url}: {why}") for url, why in whys if why]
    if any(agent.gpu for agent in status.agents):
        parts.append(Fitted(_drivers_table(status)))
    refused = [(name, why) for name, why in status.refusals.items() if name not in status.degraded]
    parts += [Text(f"{model} cannot be placed now: {why}") for model, why in refused]
    parts += [Text(f"{model} was removed; its requests are finishing") for model in status.leaving]
    parts += [Text(f"{device}: {left}") for device, left in status.drained.items() if left]
    parts += [Text(f"{name}: {trouble}") for name, trouble in status.degraded.items()]
    return Group(*parts)


def _title(status: ClusterStatus) -> str:
    return f"policy {status.policy}, {'ready' if status.ready else 'not ready'}"


def device_name(status: ClusterStatus, device: str) -> str:
    """Returns a device's name and its drain state."""
    left = status.drained.get(device)
    return device if left is None else f"{device} ({'draining' if left else 'drained'})"


def _drivers_table(status: ClusterStatus) -> Table:
    table = Table(
        "GPU", "free, by its driver", "held beyond leases", "promised, not free",
        "engines replaced", "other processes", title="memory", title_justify="left",
    )  # fmt: skip
    for agent in status.agents:
        if (gpu := agent.gpu) is None:
            continue
        table.add_row(
            agent.device,
            f"{format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)}",
            format_size(gpu.drift_bytes),
            format_size(gpu.short_bytes),
            str(gpu.replaced_total),
            ", ".join(
                f"{p.pid} ({p.name or 'unknown'}) {format_size(p.used_bytes)}" for p in gpu.foreign
            ),
        )
    return table


def _agents_table(status: ClusterStatus) -> Table:
    table = Table(
        "device", "reserved", "capacity", "engines free", "KVPR", "resident", "starting",
        "replaced", title=_title(status), title_justify="left",
    )  # fmt: skip
    for agent in status.agents:
        table.add_row(
            device_name(status, agent.device),
            format_size(agent.reserved_bytes),
            format_size(agent.capacity_bytes),
            f"{agent.engines_free}/{agent.engines_total}",
            f"{status.kvpr.get(agent.device, 0):.3g}",
            format_size(agent.resident_bytes),
            str(agent.engines_starting),
            str(agent.engine_restarts_total),
        )
    return table


def _nodes_table(status: ClusterStatus) -> Table:
    """Returns a table of the nodes, including those whose devices do not answer."""
    table = Table(
        "node", "devices", "models", "waiting", "running", "reserved", "capacity", "engines free",
        title=f"nodes, {status.node} leads", title_justify="left",
    )  # fmt: skip
    silent = {node_of(device) for device in status.degraded | status.drained} - {""}
    by_node: dict[str, list[AgentReport]] = {node: [] for node in silent}
    for agent in status.agents:
        by_node.setdefault(node_of(agent.device), []).append(agent)
    for node, agents in sorted(by_node.items()):
        table.add_row(_node_name(status, node, agents), *_sums(agents))
    return table


def _node_name(status: ClusterStatus, node: str, agents: Sequence[AgentReport]) -> str:
    """Returns a node's name and the drain state of all its devices."""
    left = [status.drained.get(agent.device) for agent in agents]
    if not agents or None in left:
        return node
    return f"{node} ({'draining' if any(left) else 'drained'})"


def _sums(agents: Sequence[AgentReport]) -> list[str]:
    models = [model for agent in agents for model in agent.models]
    return [
        str(len(agents)),
        str(len({model.model for model in models})),
        str(sum(model.waiting for model in models)),
        str(sum(model.running for model in models)),
        format_size(sum(agent.reserved_bytes for agent in agents)),
        format_size(sum(agent.capacity_bytes for agent in agents)),
        f"{sum(a.engines_free for a in agents)}/{sum(a.engines_total for a in agents)}",
    ]


def models_table(status: ClusterStatus) -> Table:
    """Returns a row for each copy of a model, and one for each model without a device."""
    table = Table(
        "model", "device", "state", "waiting", "running", "KV mapped", "weights and fixed",
        "finished", "failed", "cancelled", "maps", "unmaps",
    )  # fmt: skip
    copies: dict[str, list[tuple[str, ModelReport]]] = {name: [] for name in status.models}
    for agent in status.agents:
        for report in agent.models:
            copies.setdefault(report.model, []).append((agent.device, report))
    for name in status.unplaced:
        copies.setdefault(name, [])
    for name, found in copies.items():
        for device, report in found:
            table.add_row(*_copy_row(device, report))
        if not found or name in status.unplaced:
            table.add_row(name, "-", _state(status, name), str(status.unplaced.get(name, 0)))
    return table


def _state(status: ClusterStatus, model: str) -> str:
    """Returns the state of a model without a device."""
    if model in status.overload:
        return "refused"
    return "unplaced" if model in status.unplaced else "not loaded"


def _external_table(servers: Sequence[ExternalServer]) -> Table:
    table = Table(
        "model", "server", "state", "open", "KV held", "limit", "minimum", "can be given up",
        "static", "device", title="external servers", title_justify="left",
    )  # fmt: skip
    for server in servers:
        state = "problem" if server.problem else "asleep" if server.asleep else "answers"
        # As a string, an IPv6 address in the URL would be markup.
        url, load = Text(server.url), str(server.load.requests)
        table.add_row(server.model, url, state, load, *_external_memory(server))
    return table


def _external_memory(server: ExternalServer) -> list[str]:
    """Returns the memory of all ranks together, and their devices."""
    clients = server.clients
    if not clients:
        return ["-"] * 6
    return [
        format_size(sum(client.held_bytes for client in clients)),
        "-" if server.limit_bytes is None else format_size(server.limit_bytes),
        format_size(sum(client.min_bytes for client in clients)),
        format_size(sum(client.evictable_bytes for client in clients)),
        format_size(sum(client.static_bytes for client in clients)),
        ", ".join(dict.fromkeys(f"{c.namespace}/{c.device}" for c in clients)),
    ]


def _copy_row(device: str, report: ModelReport) -> list[str]:
    return [
        report.model,
        ", ".join((device, *report.peers)),
        report.state,
        str(report.waiting),
        str(report.running),
        format_size(report.kv_mapped_bytes),
        format_size(report.static_bytes),
        str(report.finished_total),
        str(report.failed_total),
        str(report.cancelled_total),
        str(report.maps_total),
        str(report.unmaps_total),
    ]
