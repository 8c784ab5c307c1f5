"""Control loop of the scheduler's process: observe, repair, plan, act, publish.

The next step follows at once when something changes that plans depend on: a request for an absent
model, a finished action, or an agent's state. Otherwise it follows after the report interval, or
earlier if the policy asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from prism.cluster.actuator import Actuator
from prism.cluster.agent_monitor import AgentMonitor
from prism.cluster.cluster_reload import confirm
from prism.cluster.repairs import Remove, Reroute, Route, repairs
from prism.cluster.requests.bindings import Bindings
from prism.cluster.requests.turn_bindings import TurnBindings
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.status import build_status
from prism.cluster.view import build_view
from prism.errors import QueueUnavailableError
from prism.policies.data import Action, Activate, ClusterView, Evict, Refuse
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.cluster_scheduler import ClusterScheduler

STEP_GAP_S = 0.01
STEP_GAP_MAX_S = 0.2
BLOCK_S = 5.0

log = logging.getLogger("prism.cluster")


class ClusterController:
    """`ClusterPort` of the live cluster, and the loop that steps the scheduler on it."""

    def __init__(
        self, state: SchedulerState, queue: RequestQueue, monitor: AgentMonitor, actuator: Actuator
    ) -> None:
        self._state = state
        self._queue = queue
        self._monitor = monitor
        self._actuator = actuator
        self._bindings = _bindings(state, queue)
        self._resumed = False
        # Devices of evictions in this step's plan that could not start.
        self._occupied: set[str] = set()
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
        """Starts an action, or records a refusal for the status.

        An eviction does not start while its model has another action. Then no activation of the
        same plan takes its place.
        """
        if isinstance(action, Refuse):
            self._refuse(action)
        elif isinstance(action, Activate) and self._occupied.intersection(
            (action.device, *action.peers)
        ):
            log.debug("activate %s on %s: not yet", action.model, action.device)
        elif self._actuator.start(action) is None and isinstance(action, Evict):
            peers = self._state.book.peers(action.device, action.model)
            self._occupied.update((action.device, *peers))

    def _note_plan(self, view: ClusterView, actions: tuple[Action, ...]) -> None:
        self._seen = self._state.changes.version, view
        self._occupied.clear()
        self._state.actions.note_plan(view, actions)

    # --- the loop ---------------------------------------------------------------------------

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

    async def watch_traffic(self) -> None:
        """Counts the requests that arrive at the frontends, until cancelled."""
        while True:
            with suppress(QueueUnavailableError):
                frontends = await self._queue.frontends()
                arrivals = {name: frontend.arrivals for name, frontend in frontends.items()}
                self._state.traffic.arrived(arrivals, self._state.now_s())
            await asyncio.sleep(self._state.config.report_interval_s)

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
            if self._bindings is not None:
                pause_s = min(pause_s, self._bindings.due_in_s)
            await self._state.changes.wait_since(version, pause_s)

    async def step(self) -> None:
        """Observes, repairs, plans, acts and publishes once. Raises QueueUnavailableError."""
        state = self._state
        if not self._resumed:
            await self._resume()
        self._monitor.drop_lost()
        # An action may end while Redis is read; its model is repaired in the next step.
        moving = set(state.actions.moves)
        bindings = self._bindings
        unplaced = self._queue.unplaced_counts if bindings is None else bindings.read
        await state.routes.read(self._queue, unplaced)
        await confirm(state, self._queue)
        await self._repair(moving)
        await self._monitor.recover_queues()
        self._seen = None
        searching = state.policy.search is not None and state.target is None
        if state.book.all_heard(state.now_s()) and not searching:
            if bindings is not None:
                await bindings.step()
            # Else the routes do not show the result of an action that has ended since they were
            # read. The next step follows at once.
            if moving <= state.actions.moves.keys():
                self._plan()
        if not self._awaits_first_report():
            await self._publish()

    async def _publish(self) -> None:
        state = self._state
        status = build_status(state, self._planned_view() or self.view())
        await self._queue.publish_status(status)
        if state.demands.kept_drained != status.drained.keys():
            state.demands.kept_drained = frozenset(status.drained)
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
        if self._bindings is None:
            await self._queue.stop_holding()  # an earlier policy's
        state.demands.kept_drained = frozenset(before.drained if before else ())
        state.demands.drained.update(filter(state.book.knows, state.demands.kept_drained))
        state.external = list(before.external) if before else []
        state.changes.notify()
        if before is not None and before.ready:
            state.startup.complete = True
            state.book.expect_all_within(state.timing.lost_after_s)
        self._resumed = True

    def _awaits_first_report(self) -> bool:
        """Returns True while the previous scheduler's last status should stay published."""
        state = self._state
        heard = bool(state.book.reports()) or not state.book.in_grace(state.now_s())
        heard = heard or not state.config.devices
        return state.startup.complete and not heard

    def _plan(self) -> None:
        state = self._state
        if not state.startup.planned_once:
            state.startup.wanted |= self._wanted_at_start()
            state.startup.planned_once = True
        before = set(state.activations.overload)
        refusals = [a for a in self.scheduler.step(state.now_s()) if isinstance(a, Refuse)]
        state.activations.keep_refusals({action.model for action in refusals})
        if self._bindings is not None and not state.actions.moves:
            state.startup.wanted.clear()  # models without a device follow their requests
        for model in sorted(before - state.activations.overload):
            log.info("requests for %s are not rejected any more", model)

    def _wanted_at_start(self) -> set[str]:
        """Returns all models, or after a restart of this process the models that were active."""
        state = self._state
        names = {model.name for model in state.served.staying()}
        seen = {m for m in names if m in state.routes.placement or state.book.where(m, "active")}
        return seen if seen and state.policy.evicts else names

    def _refuse(self, action: Refuse) -> None:
        state = self._state
        failure = state.activations.message(action.model, state.now_s())
        reason = f"{action.reason}: {failure}" if failure else action.reason
        if state.activations.refuse(action.model, reason, overload=action.overload):
            rejected = " and its requests are rejected" if action.overload else ""
            log.warning("%s is not placed%s: %s", action.model, rejected, reason)
            state.actions.refuse(action)
            state.changes.notify()
        wanted = action.model in state.startup.wanted
        fits_later = state.policy.evicts and state.book.all_live() and not failure
        if action.overload or (wanted and fits_later):
            # The model does not fit until a request for it evicts others, or memory is to spare.
            state.startup.defer(action.model)

    # --- repairs ----------------------------------------------------------------------------

    async def _repair(self, moving: set[str]) -> None:
        for repair in repairs(self._state, self._state.now_s()):
            if isinstance(repair, Reroute):
                await self._reroute(repair)
            elif repair.model in moving or repair.model in self._state.actions.moves:
                continue  # its action began or ended while Redis was read
            elif isinstance(repair, Route):
                where = ", ".join(repair.devices) or "no device"
                log.info("route %s to %s: %s", repair.model, where, repair.reason)
                moved = await self._queue.route(repair.model, *repair.devices)
                self._state.routes.changed(repair.model, repair.devices, moved)
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
        self._state.routes.changed(repair.model, devices, 0)


def _bindings(state: SchedulerState, queue: RequestQueue) -> Bindings | TurnBindings | None:
    if state.policy.turns is not None:
        return TurnBindings(state, queue, state.policy.turns)
    return None if state.policy.assign is None else Bindings(state, queue, state.policy.assign)
