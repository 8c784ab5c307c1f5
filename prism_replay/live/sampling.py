"""Samples of the server's counters and KV memory during the replay, from /status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus
from prism_replay.live.client import cluster_status
from prism_replay.results import Counters, StatusSample

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

    def counters(self, status: ClusterStatus) -> Counters:
        values = counter_values(status)
        return Counters(**{name: self._growth(name).observe(v) for name, v in values.items()})

    def _growth(self, name: str) -> Growth:
        return self.growths.setdefault(name, Growth(name in FROM_ZERO))

    def sample(self, status: ClusterStatus, t_s: float) -> StatusSample:
        return StatusSample(
            t_s=round(t_s, 3),
            kv_bytes=kv_bytes(status.agents),
            resident_bytes=sum(agent.resident_bytes for agent in status.agents),
            capacity_bytes=sum(agent.capacity_bytes for agent in status.agents),
            counters=self.counters(status),
        )


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
