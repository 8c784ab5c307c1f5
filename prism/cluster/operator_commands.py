"""Operators' commands: activate, evict, prefetch, flush, drain, undrain, status.

The reply to each is one ActionResult.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from prism.cluster.actuator import Actuator
from prism.cluster.link import AgentLinks
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.status import build_status
from prism.cluster.view import build_view
from prism.errors import ActionError
from prism.messages.agent import ActionResult, AgentCommand, PrefetchModel, TrimModel
from prism.messages.cluster import OperatorCommand
from prism.policies.data import Migrate
from prism.tasks import cancel_all

COMMANDS = ("activate", "evict", "prefetch", "flush", "drain", "undrain", "status")
log = logging.getLogger("prism.cluster")


class Operator:
    """Executor of operators' commands, each in its own task.

    Not thread-safe: use from one event loop.
    """

    def __init__(self, state: SchedulerState, link: AgentLinks, actuator: Actuator) -> None:
        self._state = state
        self._link = link
        self._actuator = actuator
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, identity: bytes, command: OperatorCommand) -> None:
        """Starts a command. The reply is sent to the operator when it is done."""
        task = asyncio.create_task(self._answer(identity, command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        await cancel_all(self._tasks)

    async def _answer(self, identity: bytes, command: OperatorCommand) -> None:
        begun_s = self._state.now_s()
        outcome = await self.carry_out(command)
        log.info("operator: %s %s: %s", command.kind, command.model or "", outcome.message[:200])
        seconds = self._state.now_s() - begun_s
        self._link.answer(identity, msgspec.structs.replace(outcome, seconds=seconds))

    async def carry_out(self, command: OperatorCommand) -> ActionResult:
        """Executes a command. For an invalid command the result says what to change."""
        problem = self._problem(command)
        if problem:
            return _result(False, problem)
        if command.kind == "status":
            return self._status()
        if command.kind == "flush":
            return await self._flush(command)
        if command.kind in ("drain", "undrain"):
            return await self._drain(command)
        if command.model is None:
            return _result(False, f"{command.kind}: name a model")
        return await self._carry_out_on(command.model, command)

    async def _carry_out_on(self, model: str, command: OperatorCommand) -> ActionResult:
        if command.kind == "evict":
            return await self._evict(model)
        if command.kind == "prefetch":
            return await self._prefetch(model, command.device)
        return await self._activate(model, command.device)

    def _problem(self, command: OperatorCommand) -> str:
        models = [model.name for model in self._state.config.models]
        devices = [device.name for device in self._state.config.devices]
        if command.kind not in COMMANDS:
            return f"{command.kind!r} is not a command; use one of {', '.join(COMMANDS)}"
        if command.model is not None and command.model not in models:
            return f"{command.model!r} is not a configured model; models: {', '.join(models)}"
        if command.device is not None and command.device not in devices:
            return f"{command.device!r} is not a configured device; devices: {', '.join(devices)}"
        if command.kind == "activate" and command.device in self._state.demands.drained:
            return f"{command.device} is drained; run prism-serve undrain first"
        if command.kind in ("activate", "evict") and self._state.policy.turns is not None:
            why = f"models take turns under the policy {self._state.policy.name}"
            return f"{command.kind}: {why}; use another policy"
        return ""

    def _status(self) -> ActionResult:
        status = build_status(self._state, build_view(self._state, self._state.now_s()))
        return _result(True, msgspec.json.encode(status).decode())

    async def _drain(self, command: OperatorCommand) -> ActionResult:
        """Drains or undrains a device. Models leave a drained device after the reply.

        Waits until the drained devices are in Redis, so that a restarted scheduler knows them.
        """
        state, demands, device = self._state, self._state.demands, command.device
        if device is None:
            return _result(False, f"{command.kind}: name a device")
        if state.policy.never_moves:
            why = f"the policy {state.policy.name} never moves a model once it is placed"
            return _result(False, f"{command.kind}: {why}; use another policy")
        # The previous scheduler's drained devices are merged into this one's before any change.
        known = await state.changes.wait_until(
            lambda: demands.kept_drained is not None, state.timing.settle_s
        )
        if not known:
            return _result(False, "Redis does not answer the scheduler; try again")
        drains = command.kind == "drain"
        (demands.drained.add if drains else demands.drained.discard)(device)
        state.changes.notify()
        kept = await state.changes.wait_until(
            lambda: (device in (demands.kept_drained or ())) == drains, state.timing.settle_s
        )
        why = "not stored in Redis, so a restart of the scheduler would undo it; try again"
        return _result(kept, "" if kept else f"{command.kind} of {device}: {why}")

    async def _flush(self, command: OperatorCommand) -> ActionResult:
        """Returns idle memory to the devices: spare pages and unused prefix cache."""
        live = [r.device for r in self._state.book.reports()]
        devices = [command.device] if command.device else live
        if command.model is not None:
            devices = [d for d in devices if d in self._state.book.where(command.model, "active")]
        trim = TrimModel(0, command.model)
        return await self._ask_all("flush", devices, trim, self._state.timing.trim_s)

    async def _ask_all(
        self, what: str, devices: Sequence[str], command: AgentCommand, timeout_s: float
    ) -> ActionResult:
        outcomes = await asyncio.gather(*(self._ask(d, command, timeout_s) for d in devices))
        if not outcomes:
            return _result(False, f"{what}: no agent reports, or the model is not active there")
        return _result(all(o.ok for o in outcomes), "; ".join(o.message for o in outcomes))

    async def _ask(self, device: str, command: AgentCommand, timeout_s: float) -> ActionResult:
        try:
            result = await self._link.ask(device, command, timeout_s)
        except ActionError as error:
            return _result(False, f"{device}: {error}")
        return _result(True, f"{device}: {result.message or 'done'}")

    async def _prefetch(self, model: str, device: str | None) -> ActionResult:
        """Prefetches the model on the machine of `device`, or on all machines."""
        devices = [device] if device else [r.device for r in self._state.book.reports()]
        prefetch = PrefetchModel(0, self._state.config.model(model), "an operator asked for it")
        timeout_s = self._state.timing.prefetch_s
        result = await self._ask_all("prefetch", devices, prefetch, timeout_s)
        for name in devices if result.ok else ():
            self._state.starts.stored(name, model)
        return result

    async def _evict(self, model: str) -> ActionResult:
        if self._state.config.model(model).never_evict:
            why = f"{model} has never_evict, or replicas.min above 1"
            return _result(False, f"{why}; change its configuration first")
        if model in self._state.actions.moves:
            return _result(False, _busy(self._state, model))
        devices = self._state.book.where(model, "active")
        if not devices:
            return _result(True, f"{model} is not active")
        task = self._actuator.evict_all(model, devices, "an operator asked for it")
        problem = await self._wait_for(model, task)
        if problem:
            return _result(False, problem)
        return _result(True, f"{model} evicted from {', '.join(devices)}")

    async def _wait_for(self, model: str, task: asyncio.Task[str] | None) -> str:
        return await asyncio.shield(task) if task else _busy(self._state, model)

    async def _activate(self, model: str, device: str | None) -> ActionResult:
        spec = self._state.config.model(model)
        pinned = spec.pinned_device
        active = self._state.book.where(model, "active")
        tp = 1 + len(self._state.book.peers(active[0], model)) if active else spec.tp
        if device and tp > 1:
            why = f"the scheduler chooses the {tp} devices of {model}"
            return _result(False, f"{why}; omit the device")
        if device and pinned and device != pinned:
            return _result(False, f"{model} is pinned to {pinned}; it cannot be on {device}")
        if active and device in (None, *active):
            return self._active(model, device or active[0], "is active on")
        if active and device:
            move = self._state.config.scheduler.move_running
            reason = "an operator asked for it"
            action = Migrate(model, active[0], device, reason, move_running=move)
            problem = await self._wait_for(model, self._actuator.start(action))
            return _result(False, problem) if problem else self._active(model, device, "moved to")
        return await self._activate_by_policy(model, device)

    async def _activate_by_policy(self, model: str, device: str | None) -> ActionResult:
        """Lets the policy place the model as if a request waited. Waits for the outcome."""
        state = self._state
        if model in state.demands.activations:
            return _result(False, f"{model}: another operator is activating it")
        state.activations.clear(model)
        state.demands.activations[model] = device
        state.changes.notify()
        try:
            await state.changes.wait_until(
                lambda: self._is_settled(model), state.timing.activation_s
            )
        finally:
            del state.demands.activations[model]
        active = state.book.where(model, "active")
        if active:
            return self._active(model, active[0], "is active on")
        failure = state.activations.message(model, state.now_s())
        why = failure or state.activations.refusals.get(model) or "it took too long"
        return _result(False, f"{model} was not activated: {why}")

    def _active(self, model: str, device: str, verb: str) -> ActionResult:
        report = self._state.book.model(device, model)
        stages_s, link_bytes = (report.stages_s, report.link_bytes) if report else ({}, {})
        return ActionResult(
            0, True, f"{model} {verb} {device}", stages_s=stages_s, link_bytes=link_bytes
        )

    def _is_settled(self, model: str) -> bool:
        """Returns True if the model is active, refused or failed, and no action is in progress."""
        state = self._state
        ended = state.book.where(model, "active") or state.activations.failures(model)
        refused = model in state.activations.refusals
        return model not in state.actions.moves and bool(ended or refused)


def _busy(state: SchedulerState, model: str) -> str:
    move = state.actions.moves.get(model)
    what = f"{move.kind} on {move.device}" if move else "an action"
    return f"{model}: {what} is in progress; try again when it is done"


def _result(ok: bool, message: str) -> ActionResult:
    return ActionResult(0, ok, message)
