"""Latest report of each agent, and which agents are live."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass

from prism.messages.agent import AgentReport, ModelReport

ABSENT_STATES = ("failed",)


@dataclass(slots=True)
class LiveAgent:
    report: AgentReport
    seen_s: float  # arrival of the report, on the scheduler's monotonic clock
    started: bool = False  # all its engines have been up at the same time since the agent started


class AgentBook:
    """Latest report of every live agent. Not thread-safe: use from one event loop.

    An agent that has not reported yet counts as lost only after `start_grace_s`: it may be
    starting, or may not have noticed the scheduler's restart. After `start_max_s` the scheduler
    waits for no agent any more.
    """

    def __init__(
        self,
        devices: Iterable[str],
        now_s: float,
        start_grace_s: float,
        start_max_s: float = float("inf"),
    ) -> None:
        self._order: dict[str, int] = {}
        self._agents: dict[str, LiveAgent] = {}
        # Model -> device -> report; an index, since there are many models and devices.
        self._models: dict[str, dict[str, ModelReport]] = {}
        self._began_s = now_s
        self._grace_s = start_grace_s
        self._start_max_s = start_max_s
        self._heard_s: dict[str, float] = {}
        self.serve(devices)

    def serve(self, devices: Iterable[str]) -> None:
        """Sets the known devices and their order. Drops the agents of other devices."""
        self._order = {device: index for index, device in enumerate(devices)}
        for gone in self._agents.keys() - self._order.keys():
            self.drop(gone)
        for gone in self._heard_s.keys() - self._order.keys():
            del self._heard_s[gone]

    def expect_all_within(self, grace_s: float) -> None:
        """Expects all agents within `grace_s`, since they served before this scheduler started."""
        self._grace_s = grace_s

    def take(self, report: AgentReport, now_s: float) -> set[str]:
        """Records a report. Returns the models that are no longer active or activating there.

        A model whose engine died is not returned if the agent restarts it on another engine.
        """
        before = self._agents.get(report.device)
        started = report.engines_starting == 0 and report.engines_total > 0
        if before is not None and before.report.epoch == report.epoch:
            started = started or before.started
        if before is not None:
            self._forget(before.report)
        for model in report.models:
            self._models.setdefault(model.model, {})[report.device] = model
        self._agents[report.device] = LiveAgent(report, now_s, started)
        self._heard_s[report.device] = now_s
        if before is None:
            return set()
        kept = {m.model for m in report.models if m.state not in ABSENT_STATES}
        return _serving(before.report) - kept

    def silent(self, now_s: float, for_s: float) -> list[str]:
        """Returns the devices whose agent has not reported for more than `for_s`."""
        return [d for d, a in self._agents.items() if now_s - a.seen_s > for_s]

    def drop(self, device: str) -> set[str]:
        """Removes the device's agent. Returns the models that were active or activating there."""
        report = self._agents.pop(device).report
        self._forget(report)
        return _serving(report)

    def _forget(self, report: AgentReport) -> None:
        for model in report.models:
            there = self._models.get(model.model, {})
            there.pop(report.device, None)
            if not there:
                self._models.pop(model.model, None)

    def knows(self, device: str) -> bool:
        return device in self._order

    def report(self, device: str) -> AgentReport | None:
        agent = self._agents.get(device)
        return agent.report if agent else None

    def reports(self) -> list[AgentReport]:
        return [self._agents[d].report for d in self._order if d in self._agents]

    def seen_s(self, device: str) -> float:
        """Returns the arrival time of the latest report. REQUIRES: the device's agent is live."""
        return self._agents[device].seen_s

    def is_gone(self, device: str, now_s: float) -> bool:
        """Returns True if the device lacks a live agent and none is expected to start."""
        expected = device not in self._heard_s and self.in_grace(now_s)
        return device not in self._agents and not (expected and self.knows(device))

    def in_grace(self, now_s: float) -> bool:
        """Returns True while agents that have never reported are still expected."""
        return now_s < self._began_s + self._grace_s

    def all_live(self) -> bool:
        return len(self._agents) == len(self._order)

    def all_heard(self, now_s: float) -> bool:
        """Returns True if every device's agent has reported or exceeded the grace period."""
        heard = self._heard_s.keys() >= self._order.keys()
        return heard or (not self.in_grace(now_s) and bool(self._agents))

    def all_started(self, now_s: float) -> bool:
        """Returns True if every live agent's engines have been up and no more agents are expected.

        A device without a live agent delays this by the grace period. After `start_max_s` the
        result is True in any case.
        """
        absent = [d for d in self._order if d not in self._agents]
        last_s = max((self._heard_s.get(d, self._began_s) for d in absent), default=float("-inf"))
        up = all(agent.started for agent in self._agents.values())
        late = now_s >= self._began_s + self._start_max_s
        return late or (up and now_s >= last_s + self._grace_s)

    def not_started(self) -> list[str]:
        """Returns the devices with a live agent whose engines have not all been up yet."""
        return [device for device, agent in self._agents.items() if not agent.started]

    def any_started(self) -> bool:
        """Returns True if a live agent's engines have all been up."""
        return not self._order or any(agent.started for agent in self._agents.values())

    def model(self, device: str, name: str) -> ModelReport | None:
        return self._models.get(name, {}).get(device)

    def models(self) -> KeysView[str]:
        """Returns the models in all reports, in any state."""
        return self._models.keys()

    def of(self, name: str) -> list[tuple[str, ModelReport]]:
        """Returns (device, report) for each report on the model, in config order."""
        there = self._models.get(name, {})
        if len(there) < 2:
            return list(there.items())
        return sorted(there.items(), key=lambda item: self._order[item[0]])

    def state(self, device: str, name: str) -> str:
        """Returns "activating", "active", "draining", or "absent" (also if it failed)."""
        model = self.model(device, name)
        return "absent" if model is None or model.state in ABSENT_STATES else model.state

    def peers(self, device: str, name: str) -> tuple[str, ...]:
        """Returns the devices of ranks 1 and up of the model whose rank 0 is on `device`."""
        model = self.model(device, name)
        return model.peers if model else ()

    def where(self, name: str, *states: str) -> list[str]:
        """Returns the devices on which the model is reported in `states`, in config order."""
        return [d for d, model in self.of(name) if model.state in states]


def _serving(report: AgentReport) -> set[str]:
    return {m.model for m in report.models if m.state in ("active", "activating")}
