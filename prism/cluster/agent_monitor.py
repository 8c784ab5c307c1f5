"""Monitor of the agents: takes their reports, drops lost agents and recovers their requests."""

from __future__ import annotations

import logging
from uuid import uuid4

from prism.cluster.link import AgentLinks
from prism.cluster.state.scheduler_state import SchedulerState
from prism.errors import LeaseLostError
from prism.messages.agent import AgentReport
from prism.queueing.request_queue import RequestQueue

LEASE_S = 1.0

log = logging.getLogger("prism.cluster")


class AgentMonitor:
    """Monitor of the agents. Models that they lost are activated again."""

    def __init__(self, state: SchedulerState, link: AgentLinks, queue: RequestQueue) -> None:
        self._state = state
        self._link = link
        self._queue = queue
        self._owner = f"scheduler-{uuid4().hex}"
        self._recovered: set[str] = set()
        self._devices: set[str] = set()  # includes devices that a reload removed

    def on_report(self, report: AgentReport) -> None:
        """Records an agent's report. Wakes the loop if more than counters changed."""
        state, device = self._state, report.device
        if not state.book.knows(device):
            log.warning("dropped a report about %s, which is not in the configuration", device)
            return
        before, now_s = state.book.report(device), state.now_s()
        for model in state.book.take(report, now_s):
            if model not in state.actions.moves:
                self._lost(model, device)
        self._note_restarts(before, report)
        totals = {m.model: m.prompt_tokens_total + m.output_tokens_total for m in report.models}
        state.rates.observe(device, report.epoch, totals, now_s)
        outputs = {m.model: dict(m.output_lengths) for m in report.models}
        state.traffic.ended(device, outputs, now_s)
        state.sizes.observe(report)
        turn = state.turn_on(device)
        state.speeds.observe(report, only_decodes=turn is not None and not turn.prefills)
        if state.policy.next_interval is not None:
            state.attainment.observe(device, report.models)
        if state.policy.asks_startup:
            state.starts.observe(report, state.config)
        if before is None or _planning_state(before) != _planning_state(report):
            self._fail_commands_to_predecessor(before, report)
            state.changes.notify()

    def drop_lost(self) -> None:
        """Drops agents that disconnected or have been silent for too long."""
        state, timing = self._state, self._state.timing
        suspects = {
            *state.book.silent(state.now_s(), timing.probe_after_s),
            *self._link.unreachable,
        }
        for device in sorted(suspects):
            if state.book.report(device) and not self._link.is_connected(device):
                self._drop(device, "its connection is closed")
        self._link.unreachable.clear()
        for device in state.book.silent(state.now_s(), timing.lost_after_s):
            self._drop(device, f"no report for {timing.lost_after_s:g} s")

    async def recover_queues(self) -> None:
        """Requeues requests that lost agents left running, to their model's current route."""
        self._devices.update(device.name for device in self._state.config.devices)
        for device in sorted(self._devices):
            if not self._state.book.is_gone(device, self._state.now_s()):
                self._recovered.discard(device)
            elif device not in self._recovered:
                await self._recover_queue(device)

    async def _recover_queue(self, device: str) -> None:
        try:
            epoch = await self._queue.acquire(device, self._owner, LEASE_S)
        except LeaseLostError:
            return  # the agent's lease has not expired yet
        await self._queue.release(device, self._owner, epoch)
        self._recovered.add(device)
        self._state.changes.notify()

    def _drop(self, device: str, why: str) -> None:
        state, models = self._state, self._state.book.drop(device)
        served = ", ".join(sorted(models)) or "nothing"
        log.warning("the agent of %s is gone (%s); it served %s", device, why, served)
        state.actions.totals["agent_lost"] += 1
        self._link.fail_pending(device, f"the agent of {device} is gone: {why}")
        state.startup.lost(models - state.actions.moves.keys())

    def _lost(self, model: str, device: str) -> None:
        state, found = self._state, self._state.book.model(device, model)
        problem = (found.error if found else "") or f"its engine on {device} ended"
        log.warning("%s was lost on %s: %s", model, device, problem)
        state.actions.totals["lost"] += 1
        state.activations.died(model, device, problem, state.now_s())
        state.startup.lost([model])

    def _note_restarts(self, before: AgentReport | None, report: AgentReport) -> None:
        """Records models that the agent restarted on another engine.

        Requests that arrived during the restart do not indicate load.
        """
        coming = {m.model for m in before.models if m.state == "activating"} if before else set()
        for model in report.models:
            if model.state == "active" and model.model in coming:
                now_s = self._state.now_s()
                self._state.activations.restarted(model.model, model.activation_s, now_s)

    def _fail_commands_to_predecessor(
        self, before: AgentReport | None, report: AgentReport
    ) -> None:
        """Fails commands to a restarted agent's predecessor, which will not be answered."""
        if before is None or before.epoch == report.epoch:
            return
        for move in list(self._state.actions.moves.values()):
            for device in (*move.devices, move.source):
                known = self._state.book.state(report.device, move.model) != "absent"
                if device == report.device and not known:
                    self._link.fail_pending(device, f"the agent of {device} restarted", move.model)


def _planning_state(report: AgentReport) -> tuple[object, ...]:
    """Returns the part of a report that plans and waiting actions depend on."""
    states = sorted((m.model, m.state, m.has_output) for m in report.models)
    return (report.epoch, report.engines_free, report.engines_starting, states)
