"""The server's counters and KV memory during the replay, from its /status."""

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


@dataclass
class Growth:
    """How much counters grew since the first observation, as a Prometheus `increase`.

    A value below the last one means that the counter's process restarted. A counter that
    disappears keeps its growth.
    """

    from_zero: bool = False
    """Whether a counter that is first seen later began at 0. Otherwise it had its value already: a
    model that comes back keeps its device's count."""
    last: dict[str, int] = field(default_factory=dict)
    total: int = 0
    started: bool = False

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
    """Turns the server's absolute counters into growth since the first status."""

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
    """Field of Counters -> what is counted separately -> its value."""
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
    """Mapped KV bytes of each model over all devices."""
    totals: dict[str, int] = {}
    for agent in agents:
        for report in agent.models:
            totals[report.model] = totals.get(report.model, 0) + report.kv_mapped_bytes
    return totals


async def sample_status(
    http: httpx.AsyncClient, start_s: float, samples: list[StatusSample], tracker: StatusTracker
) -> None:
    """Append a sample each second until cancelled. start_s: the replay's zero (monotonic)."""
    due_s = start_s
    while True:
        status = await cluster_status(http)
        if status is not None:
            samples.append(tracker.sample(status, time.monotonic() - start_s))
        due_s = max(due_s + INTERVAL_S, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())


def _action(status: ClusterStatus, kind: str) -> dict[str, int]:
    return {kind: status.actions_total.get(kind, 0)}
