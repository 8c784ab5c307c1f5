"""Samples of the server's counters and KV memory during the replay, from /status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus, Decision
from prism_replay.live.client import cluster_status
from prism_replay.results import (
    CHANGES,
    Counters,
    DeviceMemory,
    PlacementChange,
    StatusSample,
)

INTERVAL_S = 1.0
FROM_ZERO = {"activations", "evictions", "migrations", "engine_restarts"}
"""Counters that start at 0 when they first appear."""


@dataclass
class Growth:
    """Growth of counters since the first observation, like Prometheus's `increase`.

    A value below the previous one means that the counter's process restarted. The growth of a
    counter that disappears is kept.
    """

    from_zero: bool = False
    """True if a counter that appears after the first observation started at 0. False if it already
    had its value: a model that returns to a device keeps that device's count."""
    last: dict[str, int] = field(default_factory=dict)
    """Counter -> its last value."""
    total: int = 0
    """Growth of all counters together."""
    started: bool = False
    """True after the first observation."""

    def observe(self, values: Mapping[str, int]) -> int:
        for key, value in values.items():
            absent = 0 if self.started and self.from_zero else value
            before = self.last.get(key, absent)
            self.total += value - before if value >= before else value
            self.last[key] = value
        self.started = True
        return self.total


@dataclass
class StatusTracker:
    """Converter of the server's absolute counters to growth since the first status."""

    growths: dict[str, Growth] = field(default_factory=dict)
    _decisions: dict[tuple[float, str, str, str], Decision] = field(default_factory=dict)

    def counters(self, status: ClusterStatus) -> Counters:
        values = counter_values(status)
        return Counters(**{name: self._growth(name).observe(v) for name, v in values.items()})

    def _growth(self, name: str) -> Growth:
        return self.growths.setdefault(name, Growth(name in FROM_ZERO))

    def sample(self, status: ClusterStatus, t_s: float) -> StatusSample:
        self._observe_decisions(status)
        return StatusSample(
            t_s=round(t_s, 3),
            kv_bytes=kv_bytes(status.agents),
            resident_bytes=sum(agent.resident_bytes for agent in status.agents),
            capacity_bytes=sum(agent.capacity_bytes for agent in status.agents),
            counters=self.counters(status),
            devices=device_memory(status.agents),
        )

    def _observe_decisions(self, status: ClusterStatus) -> None:
        """Notes the decisions of a status, which has the latest ones only."""
        for decision in status.decisions:
            if decision.kind in CHANGES:
                key = (decision.time_unix_s, decision.kind, decision.model, decision.device)
                self._decisions[key] = decision

    def changes(self, start_unix_s: float) -> list[PlacementChange]:
        """Returns the decisions since a time, in their order."""
        return [
            PlacementChange(
                round(each.time_unix_s - start_unix_s, 3),
                each.kind,
                each.model,
                each.device,
                each.target,
                each.reason,
                each.seconds,
            )
            for each in sorted(self._decisions.values(), key=lambda d: d.time_unix_s)
            if each.time_unix_s >= start_unix_s
        ]


def counter_values(status: ClusterStatus) -> dict[str, dict[str, int]]:
    """Returns field of Counters -> key of a separate counter -> its value."""
    reports = {
        f"{agent.device}/{report.model}": report
        for agent in status.agents
        for report in agent.models
    }
    return {
        "maps": {key: report.maps_total for key, report in reports.items()},
        "unmaps": {key: report.unmaps_total for key, report in reports.items()},
        "retractions": {key: report.retractions_total for key, report in reports.items()},
        "activations": _action(status, "activate"),
        "evictions": _action(status, "evict"),
        "migrations": _action(status, "migrate"),
        "engine_restarts": {a.device: a.engine_restarts_total for a in status.agents},
    }


def kv_bytes(agents: list[AgentReport]) -> dict[str, int]:
    """Returns the mapped KV bytes of each model over all devices."""
    totals: dict[str, int] = {}
    for agent in agents:
        for report in agent.models:
            totals[report.model] = totals.get(report.model, 0) + report.kv_mapped_bytes
    return totals


def device_memory(agents: Sequence[AgentReport]) -> dict[str, DeviceMemory]:
    """Returns the memory of each device. A model over several devices has one report, which holds
    for each of them."""
    found = {agent.device: DeviceMemory(agent.capacity_bytes, {}, {}) for agent in agents}
    for agent in agents:
        for report in agent.models:
            for device in (agent.device, *report.peers):
                if device in found:
                    found[device].weights_bytes[report.model] = report.static_bytes
                    found[device].kv_bytes[report.model] = report.kv_mapped_bytes
    return found


async def sample_status(
    http: httpx.AsyncClient, start_s: float, samples: list[StatusSample], tracker: StatusTracker
) -> None:
    """Appends a sample each second until cancelled.

    Args:
        start_s: Start of the replay on time.monotonic().
    """
    due_s = start_s
    while True:
        status = await cluster_status(http)
        if status is not None:
            samples.append(tracker.sample(status, time.monotonic() - start_s))
        due_s = max(due_s + INTERVAL_S, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())


def _action(status: ClusterStatus, kind: str) -> dict[str, int]:
    return {kind: status.actions_total.get(kind, 0)}
