"""The server's counters and KV memory over the run, from its /status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from prism.messages import AgentReport, ClusterStatus
from prism.replay.client import cluster_status
from prism.replay.results import Counters, Sample

INTERVAL_S = 1.0


@dataclass
class Growth:
    """How much counters grew since the first observation, as a Prometheus `increase`.

    A value below the last one means that the counter began anew with its process; a counter
    that is gone keeps what it had grown by.
    """

    last: dict[str, int] = field(default_factory=dict)
    total: int = 0
    started: bool = False

    def observe(self, values: Mapping[str, int]) -> int:
        for key, value in values.items():
            before = self.last.get(key, 0 if self.started else value)
            self.total += value - before if value >= before else value
            self.last[key] = value
        self.started = True
        return self.total


@dataclass
class StatusTracker:
    """Turns the server's absolute counters into growth since the first status seen."""

    growths: dict[str, Growth] = field(default_factory=dict)

    def counters(self, status: ClusterStatus) -> Counters:
        values = counter_values(status)
        return Counters(
            **{
                name: self.growths.setdefault(name, Growth()).observe(found)
                for name, found in values.items()
            }
        )

    def sample(self, status: ClusterStatus, t_s: float) -> Sample:
        return Sample(
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
    actions = {name.lower(): count for name, count in status.actions_total.items()}
    return {
        "maps": {key: report.maps_total for key, report in reports.items()},
        "unmaps": {key: report.unmaps_total for key, report in reports.items()},
        "retractions": {key: report.retractions_total for key, report in reports.items()},
        "activations": _matching(actions, "activat"),
        "evictions": _matching(actions, "evict"),
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
    http: httpx.AsyncClient, start_s: float, samples: list[Sample], tracker: StatusTracker
) -> None:
    """Append a sample each second until cancelled. start_s: the replay's zero (monotonic)."""
    due_s = start_s
    while True:
        status = await cluster_status(http)
        if status is not None:
            samples.append(tracker.sample(status, time.monotonic() - start_s))
        due_s = max(due_s + INTERVAL_S, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())


def _matching(actions: dict[str, int], prefix: str) -> dict[str, int]:
    return {name: count for name, count in actions.items() if name.startswith(prefix)}
