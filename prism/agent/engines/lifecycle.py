"""State machine of the device's models and engines, which carries out the scheduler's orders.

Step-driven: its inputs are messages and `tick`, its outputs are calls of `Effects`. Owns no task.
"""

from __future__ import annotations

import logging

from prism.agent.engines.activations import Activations
from prism.agent.engines.lifecycle_effects import Effects
from prism.agent.engines.silence import SilenceWatch
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EngineProcess, EngineState
from prism.messages.agent import ActionResult, ActivateModel, EvictModel
from prism.messages.engine import (
    Activated,
    ActivationFailed,
    Deactivate,
    Deactivated,
    Export,
    SetLimit,
)

log = logging.getLogger(__name__)


class Lifecycle:
    """State machine. Not thread-safe.

    Args:
        max_running: requests that an engine may run at once.
        drain_timeout_s: time for requests to end before their model is evicted, unless all of
            them have to.
    """

    def __init__(
        self,
        state: DeviceState,
        effects: Effects,
        max_running: int,
        drain_timeout_s: float,
    ) -> None:
        self._pool = state.pool
        self._models = state.models
        self._timing = state.timing
        self._now_s = state.now_s
        self._effects = effects
        self._drain_timeout_s = drain_timeout_s
        self._activations = Activations(state, effects, max_running)
        self._silence = SilenceWatch(state)

    # --- the scheduler's orders -------------------------------------------------------------

    def activate(self, order: ActivateModel) -> None:
        """Activates a model, or only sets its limit if it is active already.

        The order is answered when the model is active or has failed.
        """
        hosted = self._models.hosted.get(order.model.name)
        if hosted is None or hosted.state is ModelState.FAILED:
            limit_bytes = order.kv_limit_bytes
            hosted = HostedModel(
                order.model,
                self._now_s(),
                kv_limit_bytes=limit_bytes,
                peers=order.peers,
                restarts=order.restarts_engine,
                sm_share=order.sm_share,
                prefills=order.prefills,
            )
            self._models.hosted[hosted.name] = hosted
            hosted.actions.append(order.action_id)
            self._activations.begin(hosted)
        elif hosted.state is ModelState.DRAINING:
            self._answer(order.action_id, f"{hosted.name} is being evicted")
        else:
            self._set_limit(hosted, order)

    def evict(self, order: EvictModel) -> None:
        """Evicts a model. The order is answered when the model is not here any more."""
        hosted = self._models.hosted.get(order.model)
        if hosted is None or hosted.state is ModelState.FAILED:
            self._models.hosted.pop(order.model, None)
            self._effects.changed()
            self._answer(order.action_id)
        elif hosted.state is ModelState.ACTIVATING:
            self._answer(order.action_id, f"{hosted.name} is being activated: evict it after that")
        else:
            hosted.actions.append(order.action_id)
            hosted.finish_all = order.finish_all
            if order.move_running and hosted.state is ModelState.ACTIVE:
                self._effects.move_running(hosted, order.targets)
            self._drain(hosted)

    def _set_limit(self, hosted: HostedModel, order: ActivateModel) -> None:
        if order.kv_limit_bytes != hosted.kv_limit_bytes:
            hosted.kv_limit_bytes = order.kv_limit_bytes
            if hosted.state is ModelState.ACTIVE:
                self._effects.send(hosted.engine_id, SetLimit(order.kv_limit_bytes))
        if hosted.state is ModelState.ACTIVE:
            self._answer(order.action_id)
        else:
            hosted.actions.append(order.action_id)

    def _drain(self, hosted: HostedModel) -> None:
        if hosted.state is ModelState.ACTIVE:
            hosted.become(ModelState.DRAINING, self._now_s())
            if engine := self._pool.get(hosted.engine_id):
                engine.state = EngineState.DRAINING
            self._effects.changed()
        self._deactivate_when_idle(hosted)

    def _answer(self, action_id: int, problem: str = "") -> None:
        self._effects.answer(ActionResult(action_id, not problem, problem))

    # --- messages of engines ----------------------------------------------------------------

    def engine_ready(self, engine: EngineProcess) -> None:
        """Handles an engine's hello: it is free."""
        engine.become(EngineState.FREE, self._now_s())
        self._effects.changed()
        self._activations.begin_waiting()

    def activated(self, engine: EngineProcess, message: Activated) -> None:
        hosted = self._models.on_engine(engine.id)
        if hosted is None or hosted.name != message.model:
            log.warning("%s activated %s without an order", engine.id, message.model)
            self._effects.send(engine.id, Deactivate())
            return
        self._activations.succeeded(hosted, engine, message)

    def first_output(self, engine: EngineProcess) -> None:
        """Handles the first output since its model's activation."""
        engine.has_output = True
        self._effects.changed()

    def activation_failed(self, engine: EngineProcess, message: ActivationFailed) -> None:
        """Handles a failed activation.

        After a failed self-check on a used engine, that engine is replaced and the activation is
        tried on a fresh one.
        """
        hosted = self._models.on_engine(engine.id)
        if message.needs_fresh_engine and hosted is not None and not engine.is_fresh:
            hosted.needs_fresh = True
            self.engine_died(engine.id, f"it cannot serve {message.model}: {message.message}")
            return
        engine.become(EngineState.FREE, self._now_s())
        if hosted is not None:
            self._activations.failed(hosted, engine, message)
            self._activations.begin_waiting()

    def deactivated(self, engine: EngineProcess, message: Deactivated) -> None:
        hosted = self._models.on_engine(engine.id)
        if hosted is not None and hosted.state is ModelState.DRAINING:
            del self._models.hosted[hosted.name]
            log.info("%s evicted %s in %.3f s", engine.id, hosted.name, message.seconds)
        engine.become(EngineState.FREE, self._now_s())
        self._effects.changed()
        if hosted is not None:
            self._activations.answer_orders(hosted)
        self._activations.begin_waiting()

    # --- deaths -----------------------------------------------------------------------------

    def engine_died(self, engine_id: str, why: str, by_request: bool = True) -> None:
        """Removes a dead engine, fails its requests and activates its model on another engine.

        A model whose engines died more than `revives_max` times in `revive_window_s` fails instead.
        If one of the requests caused the death, neither this death nor the one that made the
        request a suspect counts. Unknown ids (engines that this agent removed) are ignored.

        Args:
            by_request: whether one of its requests may be the cause.
        """
        engine = self._pool.remove(engine_id)
        if engine is None:
            return
        log.warning("%s (pid %d, %s) died: %s", engine.id, engine.pid, engine.state.value, why)
        self._pool.restarts_total += 1
        self._effects.kill(engine)
        hosted = self._models.on_engine(engine.id)
        made_suspects = by_request and self._effects.engine_load(engine.id) > 0
        explained = self._effects.engine_lost(engine.id, why, by_request)
        if hosted is not None:
            hosted.count_death(
                self._now_s(),
                self._timing.revive_window_s,
                explained=explained,
                made_suspects=made_suspects,
            )
            self._recover(hosted)
        self._effects.changed()

    def _recover(self, hosted: HostedModel) -> None:
        hosted.engine_id = ""
        if hosted.state is ModelState.DRAINING:
            del self._models.hosted[hosted.name]
            self._activations.answer_orders(hosted)
        else:
            self._activations.after_death(hosted)

    def replace(self, engine: EngineProcess, why: str) -> None:
        """Replaces an engine by a fresh one and activates its model again.

        Running requests leave the engine with their output, for `export_s` at most, and resume
        where the model becomes active.
        """
        if engine.replace_reason:
            return
        log.warning("%s (pid %d) is replaced: %s", engine.id, engine.pid, why)
        engine.replace_reason, engine.replace_since_s = why, self._now_s()
        hosted = self._models.on_engine(engine.id)
        self._effects.replaced(engine, hosted.name if hosted else "", why)
        if hosted is not None and hosted.state is ModelState.ACTIVE:
            hosted.become(ModelState.ACTIVATING, self._now_s())
            self._effects.send(engine.id, Export())
            self._effects.changed()
        self._end_replaced()

    def _end_replaced(self) -> None:
        for engine in self._pool:
            overdue = self._now_s() - engine.replace_since_s > self._timing.export_s
            if engine.replace_reason and (overdue or not self._effects.engine_load(engine.id)):
                self.engine_died(engine.id, engine.replace_reason, by_request=False)

    # --- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Checks time limits. Call it every `tick_s`."""
        for engine, silent_s in self._silence.silent():
            self.engine_died(engine.id, f"it has been silent for {silent_s:.1f} s")
        self._end_replaced()
        for hosted in list(self._models.hosted.values()):
            if hosted.state is ModelState.DRAINING:
                self._deactivate_when_idle(hosted)
            elif hosted.state is ModelState.FAILED:
                self._forget_when_old(hosted)
        self._activations.begin_waiting()

    def _deactivate_when_idle(self, hosted: HostedModel) -> None:
        if hosted.deactivating:
            return
        late = self._now_s() - hosted.since_s > self._drain_timeout_s
        overdue = late and not hosted.finish_all
        if overdue or not self._effects.engine_load(hosted.engine_id):
            hosted.deactivating = True
            self._effects.send(hosted.engine_id, Deactivate())

    def _forget_when_old(self, hosted: HostedModel) -> None:
        if self._now_s() - hosted.since_s > self._timing.failed_keep_s:
            del self._models.hosted[hosted.name]
            self._effects.changed()
