"""The last report of each agent, and which agents still answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prism.messages.agent import AgentReport, ModelReport

ABSENT_STATES = ("failed",)


@dataclass(slots=True)
class LiveAgent:
    report: AgentReport
    seen_s: float  # when the report came, on the scheduler's monotonic clock
    started: bool = False  # all its engines have been up at once since the agent started


class AgentBook:
    """The latest report of every live agent. For one event loop.

    An agent that has not reported yet counts as lost only after `start_grace_s`: it may be
    starting, or it may not have noticed yet that the scheduler is back.
    """

    def __init__(self, devices: Collection[str], now_s: float, start_grace_s: float) -> None:
        self._devices = tuple(devices)
        self._agents: dict[str, LiveAgent] = {}
        self._grace_until_s = now_s + start_grace_s
        self._ever_seen: set[str] = set()

    def take(self, report: AgentReport, now_s: float) -> set[str]:
        """Note a report. Returns the models that were active or activating there, and now are not.

        A model whose engine died stays if the agent brings it up on another engine.
        """
        before = self._agents.get(report.device)
        started = report.engines_starting == 0 and report.engines_total > 0
        if before is not None and before.report.epoch == report.epoch:
            started = started or before.started
        self._agents[report.device] = LiveAgent(report, now_s, started)
        self._ever_seen.add(report.device)
        if before is None:
            return set()
        kept = {m.model for m in report.models if m.state not in ABSENT_STATES}
        return _serving(before.report) - kept

    def silent(self, now_s: float, for_s: float) -> list[str]:
        """Devices whose agent has not reported for longer than that."""
        return [d for d, a in self._agents.items() if now_s - a.seen_s > for_s]

    def drop(self, device: str) -> set[str]:
        """Its agent is gone; returns the models that were up there."""
        return _serving(self._agents.pop(device).report)

    def knows(self, device: str) -> bool:
        return device in self._devices

    def report(self, device: str) -> AgentReport | None:
        agent = self._agents.get(device)
        return agent.report if agent else None

    def reports(self) -> list[AgentReport]:
        return [self._agents[d].report for d in self._devices if d in self._agents]

    def seen_s(self, device: str) -> float:
        """REQUIRES: the device's agent is live."""
        return self._agents[device].seen_s

    def is_gone(self, device: str, now_s: float) -> bool:
        """No agent answers there, and none is expected to start."""
        expected = device not in self._ever_seen and now_s < self._grace_until_s
        return device not in self._agents and not (expected and self.knows(device))

    def all_heard(self, now_s: float) -> bool:
        """Every device's agent has reported, or has had its time to do so."""
        heard = self._ever_seen.issuperset(self._devices)
        return heard or (now_s >= self._grace_until_s and bool(self._agents))

    def all_started(self, now_s: float) -> bool:
        """Each device has a live agent whose engines have been up, or was never heard from within
        the grace. An agent that reported and died is expected again."""
        absent = [d for d in self._devices if d not in self._agents]
        never_came = now_s >= self._grace_until_s and self._ever_seen.isdisjoint(absent)
        up = all(agent.started for agent in self._agents.values())
        return up and (not absent or never_came)

    def any_started(self) -> bool:
        """A device has a live agent whose engines have been up."""
        return any(agent.started for agent in self._agents.values())

    def model(self, device: str, name: str) -> ModelReport | None:
        report = self.report(device)
        models = report.models if report else []
        return next((m for m in models if m.model == name), None)

    def state(self, device: str, name: str) -> str:
        """ "activating", "active", "draining", or "absent" (also where it failed)."""
        model = self.model(device, name)
        return "absent" if model is None or model.state in ABSENT_STATES else model.state

    def peers(self, device: str, name: str) -> tuple[str, ...]:
        """Devices of the other ranks of the model whose rank 0 is on `device`."""
        model = self.model(device, name)
        return model.peers if model else ()

    def where(self, name: str, *states: str) -> list[str]:
        """Devices with a live agent on which the model is in one of `states`, in config order."""
        return [d for d in self._devices if d in self._agents and self.state(d, name) in states]


def _serving(report: AgentReport) -> set[str]:
    return {m.model for m in report.models if m.state in ("active", "activating")}
