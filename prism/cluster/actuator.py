"""Executor of actions. Each action is a task that sends commands to agents and routes in Redis.

A failure is logged, counted and followed by a pause (state/activation_history.py). The agents'
reports show what a failed action left incomplete, and the controller's next step repairs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial

from prism.cluster.link import AgentLinks, wait_for_result
from prism.cluster.state.actions import Move
from prism.cluster.state.scheduler_state import SchedulerState
from prism.config.checks.memory_needs import spread_over
from prism.config.schema.endpoints import nearest
from prism.errors import ActionError, QueueUnavailableError
from prism.messages.agent import ActionResult, ActivateModel, EvictModel, PrefetchModel
from prism.messages.model_spec import ModelSpec
from prism.policies.data import Action, Activate, Evict, Migrate
from prism.queueing.request_queue import RequestQueue
from prism.tasks import cancel_all

log = logging.getLogger("prism.cluster")


class Actuator:
    """Executor of actions, at most one per model at a time.

    An activation waits for the evictions in progress on its devices when it starts. Not
    thread-safe: use from one event loop.
    """

    def __init__(self, state: SchedulerState, link: AgentLinks, queue: RequestQueue) -> None:
        self._state = state
        self._link = link
        self._queue = queue
        self._tasks: dict[str, asyncio.Task[str]] = {}
        self._routing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model

    def start(self, action: Action) -> asyncio.Task[str] | None:
        """Starts an action. Returns its task, whose result is an error message or "".

        Returns None if there is nothing to do or the model has an action in progress.
        """
        if action.model in self._state.actions.moves:
            return None
        if isinstance(action, Activate):
            move = Move("activate", action.model, action.device, peers=action.peers)
            earlier = self._evictions_on(move.devices)
            return self._begin(move, action.reason, self._activate(action, earlier))
        if isinstance(action, Evict):
            peers = self._state.book.peers(action.device, action.model)
            move = Move("evict", action.model, action.device, peers=peers)
            return self._begin(move, action.reason, self._evict(action))
        if isinstance(action, Migrate):
            peers = action.peers
            move = Move("migrate", action.model, action.target, action.source, peers)
            return self._begin(move, action.reason, self._migrate(action))
        return None

    def drop_copy(self, model: str, device: str, served_by: str) -> None:
        """Evicts `model` from `device` while requests are routed to its copy on `served_by`."""
        if model not in self._state.actions.moves:
            why = f"a second copy, {served_by} serves it"
            move = Move("drop_copy", model, device, served_by)
            self._begin(move, why, self._take_down(EvictModel(0, model, why), device))

    def evict_all(
        self, model: str, devices: Sequence[str], reason: str
    ) -> asyncio.Task[str] | None:
        """Evicts the copies that are active on `devices`, as one action. Returns as `start`."""
        if model in self._state.actions.moves:
            return None
        held = [part for d in devices for part in (d, *self._state.book.peers(d, model))]
        move = Move("evict", model, held[0], peers=tuple(held[1:]))
        return self._begin(move, reason, self._evict_all(model, devices, reason))

    async def reroute(
        self, model: str, change: Callable[[tuple[str, ...]], Iterable[str]]
    ) -> tuple[str, ...]:
        """Applies `change` to the model's route and returns the new devices.

        Changes of one model are serialized, so that none is lost. If Redis has no route for the
        model, `change` gets the devices on which it is active and that no action is changing.
        Raises QueueUnavailableError.
        """
        async with self._routing[model]:
            placed = (await self._queue.placement(model)).get(model) or self._serving(model)
            devices = tuple(change(placed))
            await self._queue.route(model, *devices)
        return devices

    def _serving(self, model: str) -> tuple[str, ...]:
        move, active = self._state.actions.moves.get(model), self._state.book.where(model, "active")
        return tuple(d for d in active if move is None or d not in move.routes)

    async def stop(self) -> None:
        """Cancels the tasks. Agents finish their commands; the next scheduler sees the result."""
        await cancel_all(self._tasks.values())

    # --- bookkeeping ------------------------------------------------------------------------

    def _begin(self, move: Move, reason: str, work: Awaitable[None]) -> asyncio.Task[str]:
        log.info("%s %s on %s: %s", move.kind, move.model, move.device, reason)
        number = self._state.actions.begin(move, reason)
        task = asyncio.create_task(self._finish(move, work, number))
        self._tasks[move.model] = task
        self._state.changes.notify()
        return task

    async def _finish(self, move: Move, work: Awaitable[None], number: int) -> str:
        problem = ""
        try:
            await work
            self._succeeded(move)
        except (ActionError, QueueUnavailableError) as error:
            problem = str(error)
            self._failed(move, problem, lasting=isinstance(error, ActionError) and error.lasting)
        finally:
            self._state.actions.end(number, move, problem)
            del self._tasks[move.model]
            self._state.changes.notify()
        return problem

    def _succeeded(self, move: Move) -> None:
        self._state.actions.totals[move.kind] += 1
        if move.brings_up or move.model not in self._state.activations.overload:
            self._state.startup.settle(move.model)
        if move.kind == "activate":
            self._state.activations.ended(move.model, self._state.now_s())

    def _failed(self, move: Move, problem: str, *, lasting: bool) -> None:
        log.warning("%s of %s on %s failed: %s", move.kind, move.model, move.device, problem)
        self._state.actions.totals[f"{move.kind}_failed"] += 1
        if move.brings_up:
            failed = self._state.activations.failed
            failed(move.model, move.device, problem, self._state.now_s(), lasting=lasting)

    def _evictions_on(self, devices: Collection[str]) -> list[tuple[str, asyncio.Task[str]]]:
        evictions = (m for m in self._state.actions.moves.values() if m.kind == "evict")
        leaving = [m.model for m in evictions if not set(m.devices).isdisjoint(devices)]
        return [(model, self._tasks[model]) for model in leaving]

    # --- the sequences ----------------------------------------------------------------------

    async def _activate(
        self, action: Activate, earlier: Sequence[tuple[str, asyncio.Task[str]]]
    ) -> None:
        if earlier:
            await self._hint(action)
        for model, eviction in earlier:
            problem = await asyncio.shield(eviction)
            if problem:
                raise ActionError(f"{model} could not be evicted from {action.device}: {problem}")
        name, device = action.model, action.device
        # Requests that are bound to devices wait elsewhere, and other copies serve.
        joins = action.joins or self._state.policy.binds_requests
        await self._bring_up(name, device, action, route_at_once=not joins)
        if joins:
            await self.reroute(name, lambda placed: [*(d for d in placed if d != device), device])

    async def _hint(self, action: Activate) -> None:
        """Tells the device's machine to read the model's files during the evictions.

        Does not wait for the result.
        """
        config = self._state.config
        if config.engine.weight_store:
            spec = self._spec(action.model, 1 + len(action.peers))
            command = PrefetchModel(0, spec, action.reason)
            read = partial(self._note_hint, action.device, action.model)
            self._link.post(action.device, command).add_done_callback(read)

    def _note_hint(self, device: str, model: str, outcome: asyncio.Future[ActionResult]) -> None:
        """Records a prefetch. A failed one only costs time, and the agent logs the reason."""
        if outcome.cancelled():
            return
        if (error := outcome.exception()) is not None:
            log.debug("prefetch failed: %s", error)
        else:
            self._state.starts.stored(device, model)

    async def _evict(self, action: Evict) -> None:
        # The route changes first: no request may arrive at a model that is being evicted.
        name = action.model
        kept = await self.reroute(name, lambda placed: (d for d in placed if d != action.device))
        await self._take_down(_eviction(action, kept, self._state), action.device)

    async def _evict_all(self, model: str, devices: Sequence[str], reason: str) -> None:
        await self.reroute(model, lambda _: ())
        command = EvictModel(0, model, reason, self._state.policy.turns is not None)
        ends = (self._take_down(command, device) for device in devices)
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _migrate(self, action: Migrate) -> None:
        """Activates the model on the target, then evicts it from the source (make before break).

        Requests that are running on the source finish there, or move to the target with their KV.
        """
        await self._bring_up(action.model, action.target, action, route_at_once=False)
        ends = (action.source, action.target)
        await self.reroute(
            action.model, lambda placed: [action.target, *(d for d in placed if d not in ends)]
        )
        targets, move = (action.target, *action.peers), action.move_running
        command = EvictModel(0, action.model, action.reason, move, targets)
        await self._take_down(command, action.source)

    async def _bring_up(
        self, name: str, device: str, action: Activate | Migrate, route_at_once: bool
    ) -> None:
        limit_bytes = action.kv_limit_bytes if isinstance(action, Activate) else None
        spec = self._spec(name, 1 + len(action.peers))
        target, turn = self._state.target, self._state.turn_on(device)
        command = ActivateModel(
            action_id=0,
            model=spec,
            kv_limit_bytes=limit_bytes,
            reason=action.reason,
            peers=action.peers,
            sm_share=target.sm_share(name, device) if target else 1.0,
            restarts_engine=self._state.policy.restarts_engine,
            prefills=turn is not None and turn.prefills,
        )
        since_s = self._state.now_s()
        result = self._link.post(device, command)
        try:
            if route_at_once:  # so that requests wait in the queue of their future device
                await self.reroute(name, lambda _: (device,))
            await wait_for_result(result, device, self._state.timing.activation_s)
        finally:
            result.cancel()
        await self._wait_for_report(device, name, "active")
        now_s = self._state.now_s()
        self._state.activations.loaded(name, now_s - since_s, now_s)

    def _spec(self, name: str, tp: int) -> ModelSpec:
        """Returns the model on `tp` devices. Raises ActionError if it cannot be spread over as
        many."""
        model = self._state.config.model(name)
        if tp not in model.possible_degrees:
            known = ", ".join(map(str, model.possible_degrees))
            raise ActionError(f"{name} cannot be on {tp} devices; its degrees are {known}")
        return spread_over(model, tp)

    async def _take_down(self, command: EvictModel, device: str) -> None:
        timing, changes = self._state.timing, self._state.changes
        timeout_s = self._state.config.engine.drain_timeout_s + timing.eviction_slack_s
        result = self._link.post(device, command)
        try:
            if command.finish_all:
                result.add_done_callback(lambda _: changes.notify())
                await changes.wait_until(
                    lambda: (
                        result.done() or self._state.book.state(device, command.model) == "absent"
                    ),
                    None,
                )
            await wait_for_result(result, device, timeout_s)
        finally:
            result.cancel()
        await self._wait_for_report(device, command.model, "absent")

    async def _wait_for_report(self, device: str, name: str, stage: str) -> None:
        """Waits until the agent's report shows the result, since plans are made on reports."""
        await self._state.changes.wait_until(
            lambda: self._state.book.state(device, name) == stage, self._state.timing.settle_s
        )


def _eviction(action: Evict, kept: Sequence[str], state: SchedulerState) -> EvictModel:
    """Returns the order to evict a copy. kept: devices of the others."""
    if state.policy.turns is not None:  # the requests wait in host memory
        return EvictModel(0, action.model, action.reason, move_running=True)
    # A copy on the same machine is preferred: KV is moved there without the network.
    target = nearest(action.device, kept)
    targets = (target, *state.book.peers(target, action.model)) if target else ()
    move = action.move_running and bool(targets)
    # Without another copy, a stream that is cut may have no place to continue.
    return EvictModel(0, action.model, action.reason, move, targets, finish_all=not targets)
