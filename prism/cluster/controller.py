"""Control loop of the scheduler's process: observe, repair, plan, act, publish.

The next step follows at once when something changes that plans depend on: a request for an absent
model, a finished action, or an agent's state. Otherwise it follows after the report interval, or
earlier if the policy asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from uuid import uuid4

from prism.cluster.actuator import Actuator
from prism.cluster.link import AgentLinks
from prism.cluster.reload import confirm
from prism.cluster.repairs import Remove, Reroute, Route, repairs
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.status import build_status
from prism.cluster.view import build_view
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.messages.agent import AgentReport
from prism.policies.data import Action, ClusterView, Refuse
from prism.queueing.requests import RequestQueue
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.journal import Planned, Refused, fields_of

STEP_GAP_S = 0.01
STEP_GAP_MAX_S = 0.2
LEASE_S = 1.0
BLOCK_S = 5.0

log = logging.getLogger("prism.cluster")


class ClusterController:
    """`ClusterPort` of the live cluster, and the loop that steps the scheduler on it."""

    def __init__(
        self, state: SchedulerState, queue: RequestQueue, link: AgentLinks, actuator: Actuator
    ) -> None:
        self._state = state
        self._queue = queue
        self._link = link
        self._actuator = actuator
        self._owner = f"scheduler-{uuid4().hex}"
        self._recovered: set[str] = set()
        self._devices: set[str] = set()  # includes devices that a reload removed
        self._resumed = False
        # `changes.version` and view of this step's plan.
        self._seen: tuple[int, ClusterView] | None = None
        self.scheduler = ClusterScheduler(
            self, state.policy, state.config.scheduler.settings(), state.config.scheduler.interval_s
        )
        self.scheduler.observe = self._note_plan

    # --- ClusterPort ------------------------------------------------------------------------

    def view(self) -> ClusterView:
        return build_view(self._state, self._state.now_s())

    def apply(self, action: Action) -> None:
        """Starts an action, or records a refusal for the status."""
        if isinstance(action, Refuse):
            self._refuse(action)
        else:
            self._actuator.start(action)

    def _note_plan(self, view: ClusterView, actions: tuple[Action, ...]) -> None:
        self._seen = self._state.changes.version, view
        journal = self._state.journal
        if journal is not None and journal.inputs:
            journal.add(Planned(time_s=view.now_s, view=view, actions=fields_of(actions)))

    # --- inputs -----------------------------------------------------------------------------

    def on_report(self, report: AgentReport) -> None:
        """Records an agent's report. Wakes the loop if more than counters changed."""
        state, device = self._state, report.device
        if not state.book.knows(device):
            log.warning("dropped a report about %s, which is not in the configuration", device)
            return
        before, now_s = state.book.report(device), self._state.now_s()
        for model in state.book.take(report, now_s):
            if model not in state.moves:
                self._lost(model, device)
        self._note_restarts(before, report)
        totals = {m.model: m.prompt_tokens_total + m.output_tokens_total for m in report.models}
        state.rates.observe(device, report.epoch, totals, now_s)
        state.sizes.observe(report)
        if before is None or _planning_state(before) != _planning_state(report):
            self._fail_commands_to_predecessor(before, report)
            self._state.changes.notify()

    async def watch_arrivals(self) -> None:
        """Wakes the loop when a request arrives for a model that is not placed."""
        cursor = "0"
        while True:
            try:
                cursor, arrived = await self._queue.wait_unplaced(cursor, BLOCK_S)
            except QueueUnavailableError:
                await asyncio.sleep(self._state.timing.queue_retry_s)
                continue
            if arrived:
                self._state.changes.notify()

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps until cancelled. Plans nothing while Redis is unavailable."""
        available = True
        while True:
            version, began_s = self._state.changes.version, time.thread_time()
            try:
                await self.step()
                available = True
            except QueueUnavailableError as error:
                if available:
                    log.warning("nothing is planned until Redis answers again: %s", error)
                available = False
                await asyncio.sleep(self._state.timing.queue_retry_s)
            # A step takes long with many models. Equal time is left to reports and commands, so
            # that the next step sees more of them.
            taken_s = time.thread_time() - began_s
            await asyncio.sleep(min(max(STEP_GAP_S, taken_s), STEP_GAP_MAX_S))
            pause_s = min(self._state.config.report_interval_s, self.scheduler.next_step_in_s)
            await self._state.changes.wait_since(version, pause_s)

    async def step(self) -> None:
        """Observes, repairs, plans, acts and publishes once. Raises QueueUnavailableError."""
        state = self._state
        if not self._resumed:
            await self._resume()
        await self._drop_lost_agents()
        # An action may end while Redis is read; its model is repaired in the next step.
        moving = set(state.moves)
        state.placement = await self._queue.placement()
        state.unplaced = await self._queue.unplaced_counts()
        await confirm(state, self._queue)
        await self._repair(moving)
        await self._recover_queues()
        self._seen = None
        if state.book.all_heard(self._state.now_s()):
            self._plan()
        if not self._awaits_first_report():
            await self._publish()

    async def _publish(self) -> None:
        state = self._state
        status = build_status(state, self._planned_view() or self.view())
        await self._queue.publish_status(status)
        if state.kept_drained != status.drained.keys():
            state.kept_drained = frozenset(status.drained)
            state.changes.notify()

    def _planned_view(self) -> ClusterView | None:
        """Returns the view of this step's plan, or None if anything has changed since."""
        version, view = self._seen or (-1, None)
        return view if version == self._state.changes.version else None

    async def _resume(self) -> None:
        """Restores drained devices and readiness from the last published status.

        If the cluster was ready, agents are expected within `lost_after_s`, and the initial
        placement is not made again.
        """
        state, before = self._state, await self._queue.status()
        state.kept_drained = frozenset(before.drained if before else ())
        state.drained.update(filter(state.book.knows, state.kept_drained))
        state.changes.notify()
        if before is not None and before.ready:
            state.started_all = True
            state.book.expect_all_within(state.timing.lost_after_s)
        self._resumed = True

    def _awaits_first_report(self) -> bool:
        """Returns True while the previous scheduler's last status should stay published."""
        state = self._state
        heard = bool(state.book.reports()) or not state.book.in_grace(state.now_s())
        return state.started_all and not heard

    def _plan(self) -> None:
        state = self._state
        if not state.planned_once:
            state.wanted |= self._wanted_at_start()
            state.planned_once = True
        actions = self.scheduler.step(self._state.now_s())
        refused = {action.model for action in actions if isinstance(action, Refuse)}
        for model in state.refusals.keys() - refused:
            del state.refusals[model]

    def _wanted_at_start(self) -> set[str]:
        """Returns all models, or after a restart of this process the models that were active."""
        state = self._state
        names = {model.name for model in state.config.models} - state.leaving
        seen = {m for m in names if m in state.placement or state.book.where(m, "active")}
        return seen if seen and state.policy.evicts else names

    def _refuse(self, action: Refuse) -> None:
        state = self._state
        failure = state.backoff.message(action.model, self._state.now_s())
        reason = f"{action.reason}: {failure}" if failure else action.reason
        if state.refusals.get(action.model) != reason:
            log.warning("%s is not placed: %s", action.model, reason)
            state.actions_total["refuse"] += 1
            self._note_refusal(action)
            state.changes.notify()
        state.refusals[action.model] = reason
        if state.policy.evicts and state.book.all_live() and not failure:
            # The model does not fit until a request for it evicts others.
            state.wanted.discard(action.model)

    def _note_refusal(self, action: Refuse) -> None:
        if (journal := self._state.journal) is not None:
            now_s = self._state.now_s()
            journal.add(Refused(time_s=now_s, model=action.model, reason=action.reason))

    # --- faults -----------------------------------------------------------------------------

    def _note_restarts(self, before: AgentReport | None, report: AgentReport) -> None:
        """Updates `repaid_s` of models that agents restarted on another engine.

        Requests that arrived during the restart do not indicate load.
        """
        coming = {m.model for m in before.models if m.state == "activating"} if before else set()
        for model in report.models:
            if model.state == "active" and model.model in coming:
                repaid_s = self._state.now_s() + model.activation_s
                self._state.repaid_s[model.model] = repaid_s

    def _lost(self, model: str, device: str) -> None:
        found = self._state.book.model(device, model)
        problem = (found.error if found else "") or f"its engine on {device} ended"
        log.warning("%s was lost on %s: %s", model, device, problem)
        self._state.actions_total["lost"] += 1
        self._state.backoff.died(model, device, problem, self._state.now_s())
        self._want({model})

    def _fail_commands_to_predecessor(
        self, before: AgentReport | None, report: AgentReport
    ) -> None:
        """Fails commands to a restarted agent's predecessor, which will not be answered."""
        if before is None or before.epoch == report.epoch:
            return
        for move in list(self._state.moves.values()):
            for device in (*move.devices, move.source):
                known = self._state.book.state(report.device, move.model) != "absent"
                if device == report.device and not known:
                    self._link.fail_pending(device, f"the agent of {device} restarted", move.model)

    async def _drop_lost_agents(self) -> None:
        """Drops agents that disconnected or have been silent for too long."""
        state, timing = self._state, self._state.timing
        suspects = {
            *state.book.silent(state.now_s(), timing.probe_after_s),
            *self._link.unreachable,
        }
        for device in sorted(suspects):
            if state.book.report(device) and not self._link.is_connected(device):
                self._drop_agent(device, "its connection is closed")
        self._link.unreachable.clear()
        for device in state.book.silent(state.now_s(), timing.lost_after_s):
            self._drop_agent(device, f"no report for {timing.lost_after_s:g} s")

    def _drop_agent(self, device: str, why: str) -> None:
        models = self._state.book.drop(device)
        served = ", ".join(sorted(models)) or "nothing"
        log.warning("the agent of %s is gone (%s); it served %s", device, why, served)
        self._state.actions_total["agent_lost"] += 1
        self._link.fail_pending(device, f"the agent of {device} is gone: {why}")
        self._want(models - self._state.moves.keys())

    def _want(self, models: Collection[str]) -> None:
        """Requests activation of those models that have no other active copy."""
        self._state.wanted |= {m for m in models if not self._state.book.where(m, "active")}

    async def _repair(self, moving: set[str]) -> None:
        for repair in repairs(self._state, self._state.now_s()):
            if isinstance(repair, Reroute):
                await self._reroute(repair)
            elif repair.model in moving or repair.model in self._state.moves:
                continue  # its action began or ended while Redis was read
            elif isinstance(repair, Route):
                where = ", ".join(repair.devices) or "no device"
                log.info("route %s to %s: %s", repair.model, where, repair.reason)
                moved = await self._queue.route(repair.model, *repair.devices)
                self._note_route(repair.model, repair.devices, moved)
            elif isinstance(repair, Remove):
                why = "not in the configuration"
                self._actuator.evict_all(repair.model, repair.devices, why)
            else:
                self._actuator.drop_copy(repair.model, repair.device, repair.served_by)

    async def _reroute(self, repair: Reroute) -> None:
        lost, instead = set(repair.lost), repair.instead
        devices = await self._actuator.reroute(
            repair.model, lambda placed: [d for d in placed if d not in lost] or instead
        )
        why = f"without {', '.join(repair.lost)}" if lost else "the placement was lost"
        log.info("route %s to %s: %s", repair.model, ", ".join(devices) or "no device", why)
        self._note_route(repair.model, devices, 0)

    def _note_route(self, model: str, devices: tuple[str, ...], moved: int) -> None:
        state, move = self._state, self._state.moves.get(model)
        state.unplaced.pop(model, None)
        if devices:
            state.placement[model] = devices
        else:
            state.placement.pop(model, None)
        if moved and not devices:
            state.unplaced[model] = moved
        known, active = state.reviving.get(model, frozenset()), state.book.where(model, "active")
        coming = known.intersection(active).union(state.book.where(model, "activating"))
        state.reviving[model] = coming.difference(devices, move.routes if move else ())

    async def _recover_queues(self) -> None:
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


def _planning_state(report: AgentReport) -> tuple[object, ...]:
    """Returns the part of a report that plans and waiting actions depend on."""
    states = sorted((m.model, m.state) for m in report.models)
    return (report.epoch, report.engines_free, report.engines_starting, states)
