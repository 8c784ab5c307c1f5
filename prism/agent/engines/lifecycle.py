"""State machine of the device's models and engines, which carries out the scheduler's orders.

Step-driven: its inputs are messages and `tick`, its outputs are calls of `Effects`. Owns no task.
"""

from __future__ import annotations

import logging
from typing import Protocol

from prism.agent.engines.activations import ActivationRecord, Fingerprints, stages_of
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EngineKind, EngineProcess, EngineState
from prism.messages.agent import ActionResult, ActivateModel, EvictModel
from prism.messages.engine import (
    Activated,
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    Export,
    SetLimit,
    ToEngine,
)

log = logging.getLogger(__name__)


class Effects(Protocol):
    """Effects of the state machine. None of them blocks."""

    def send(self, engine_id: str, message: ToEngine) -> bool: ...

    def move_running(self, hosted: HostedModel, targets: tuple[str, ...]) -> None:
        """Stops the model's running requests, which resume on one of the target devices."""

    def kill(self, engine: EngineProcess) -> None:
        """Kills the process with SIGKILL and frees the memory of dead processes in the ledger."""

    def engine_lost(self, engine_id: str, why: str, by_request: bool) -> bool:
        """Fails the engine's requests. Returns whether one of them caused its death.

        Args:
            by_request: whether one of the requests may be the cause.
        """

    def engine_load(self, engine_id: str) -> int:
        """Returns the number of requests that run on the engine."""

    def reclaim(self, need_bytes: int, for_engine: str) -> None: ...

    def answer(self, result: ActionResult) -> None: ...

    def record(self, activation: ActivationRecord) -> None:
        """Records that a model became active."""

    def replaced(self, engine: EngineProcess, model: str, why: str) -> None:
        """Records that an engine is being replaced by a fresh one."""

    def changed(self) -> None:
        """Handles a change of a model's or an engine's state."""


class Lifecycle:
    """State machine. Not thread-safe.

    Args:
        max_running: requests that an engine may run at once.
        drain_timeout_s: time for requests to end before their model is evicted.
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
        self._max_running = max_running
        self._drain_timeout_s = drain_timeout_s
        self._fingerprints = Fingerprints()
        self._ticked_s = self._now_s()
        self.import_s = 0.0
        """Duration of the fork servers' imports, which an engine in a new process does again."""

    # --- the scheduler's orders -------------------------------------------------------------

    def activate(self, order: ActivateModel) -> None:
        """Activates a model, or only sets its limit if it is active already.

        The order is answered when the model is active or has failed.
        """
        hosted = self._models.hosted.get(order.model.name)
        if hosted is None or hosted.state is ModelState.FAILED:
            limit_bytes = order.kv_limit_bytes
            hosted = HostedModel(
                order.model, self._now_s(), kv_limit_bytes=limit_bytes, peers=order.peers
            )
            self._models.hosted[hosted.name] = hosted
            hosted.actions.append(order.action_id)
            self._place(hosted)
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
            hosted.state, hosted.since_s = ModelState.DRAINING, self._now_s()
            if engine := self._pool.get(hosted.engine_id):
                engine.state = EngineState.DRAINING
            self._effects.changed()
        self._deactivate_when_idle(hosted)

    # --- messages of engines ----------------------------------------------------------------

    def engine_ready(self, engine: EngineProcess) -> None:
        """Handles an engine's hello: it is free."""
        engine.become(EngineState.FREE, self._now_s())
        self._effects.changed()
        self._place_waiting()

    def activated(self, engine: EngineProcess, message: Activated) -> None:
        hosted = self._models.on_engine(engine.id)
        if hosted is None or hosted.name != message.model:
            log.warning("%s activated %s without an order", engine.id, message.model)
            self._effects.send(engine.id, Deactivate())
            return
        now_s = self._now_s()
        hosted.activation_s = now_s - engine.since_s
        hosted.state, hosted.error, hosted.memory_tries = ModelState.ACTIVE, "", 0
        self._record_activation(hosted, engine, message)
        engine.become(EngineState.ACTIVE, now_s, hosted.name)
        engine.activated = message
        if hosted.kv_limit_bytes != hosted.sent_limit_bytes:
            self._effects.send(engine.id, SetLimit(hosted.kv_limit_bytes))
        log.info("%s serves %s after %.3f s", engine.id, hosted.name, hosted.activation_s)
        self._effects.changed()
        self._answer_actions(hosted)

    def _record_activation(
        self, hosted: HostedModel, engine: EngineProcess, message: Activated
    ) -> None:
        hosted.stages_s = stages_of(hosted, message, self._now_s())
        totals = self._models.totals(hosted.name)
        totals.activations += 1
        totals.stages_s.update(hosted.stages_s)
        self._fingerprints.learn(hosted.name, message.fingerprint, engine.is_fresh)
        engine.is_fresh = hosted.needs_fresh = False
        self._effects.record(ActivationRecord(hosted.name, engine.id, hosted.stages_s, message))

    def activation_failed(self, engine: EngineProcess, message: ActivationFailed) -> None:
        """Handles a failed activation.

        After a lack of memory, idle memory is reclaimed from other engines and the activation is
        tried again. After a failed self-check on a used engine, that engine is replaced and the
        activation is tried on a fresh one.
        """
        hosted = self._models.on_engine(engine.id)
        if message.needs_fresh_engine and hosted is not None and not engine.is_fresh:
            hosted.needs_fresh = True
            self.engine_died(engine.id, f"it cannot serve {message.model}: {message.message}")
            return
        engine.become(EngineState.FREE, self._now_s())
        if hosted is None:
            return
        hosted.engine_id = ""
        log.warning("%s could not activate %s: %s", engine.id, hosted.name, message.message)
        if message.missing_bytes > 0 and hosted.memory_tries < self._timing.memory_tries:
            hosted.memory_tries += 1
            hosted.not_before_s = self._now_s() + self._timing.memory_retry_s
            self._effects.reclaim(message.missing_bytes, engine.id)
        else:
            hosted.broken = message.missing_bytes == 0
            self._fail(hosted, message.message)
        self._place_waiting()

    def deactivated(self, engine: EngineProcess, message: Deactivated) -> None:
        hosted = self._models.on_engine(engine.id)
        if hosted is not None and hosted.state is ModelState.DRAINING:
            del self._models.hosted[hosted.name]
            log.info("%s evicted %s in %.3f s", engine.id, hosted.name, message.seconds)
        engine.become(EngineState.FREE, self._now_s())
        self._effects.changed()
        if hosted is not None:
            self._answer_actions(hosted)
        self._place_waiting()

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
            self._count_death(hosted, explained, made_suspects)
            self._recover_model(hosted)
        self._effects.changed()

    def _count_death(self, hosted: HostedModel, explained: bool, made_suspects: bool) -> None:
        now_s = self._now_s()
        recently_s = now_s - self._timing.revive_window_s
        hosted.deaths_s = [t for t in hosted.deaths_s if t > recently_s]
        if not explained:
            hosted.deaths_s.append(now_s)
            hosted.suspects_s = now_s if made_suspects else hosted.suspects_s
            return
        if hosted.suspects_s in hosted.deaths_s:
            hosted.deaths_s.remove(hosted.suspects_s)
        hosted.suspects_s = None

    def _recover_model(self, hosted: HostedModel) -> None:
        hosted.engine_id = ""
        now_s = self._now_s()
        if hosted.state is ModelState.DRAINING:
            del self._models.hosted[hosted.name]
            self._answer_actions(hosted)
            return
        if len(hosted.deaths_s) > self._timing.revives_max:
            self._fail(hosted, f"its engines died {len(hosted.deaths_s)} times in a row")
            return
        hosted.state, hosted.since_s, hosted.asked_s = ModelState.ACTIVATING, now_s, 0.0
        self._place(hosted)

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
            hosted.state, hosted.since_s = ModelState.ACTIVATING, self._now_s()
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
        self._discount_own_suspension()
        self._kill_silent_engines()
        self._end_replaced()
        for hosted in list(self._models.hosted.values()):
            if hosted.state is ModelState.DRAINING:
                self._deactivate_when_idle(hosted)
            elif hosted.state is ModelState.FAILED:
                self._forget_when_old(hosted)
        self._place_waiting()

    def _discount_own_suspension(self) -> None:
        """Excludes a gap between ticks from the silence of engines.

        A gap means that this process was suspended (SIGSTOP, or the whole machine).
        """
        now_s = self._now_s()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._timing.away_s:
            for engine in self._pool:
                engine.seen_s = min(now_s, engine.seen_s + away_s)

    def _kill_silent_engines(self) -> None:
        limits_s = {
            EngineState.STARTING: self._timing.hello_s + self.import_s,
            EngineState.ACTIVATING: self._timing.activation_s,
        }
        for engine in self._pool:
            limit_s = limits_s.get(engine.state, self._timing.silent_s)
            silent_s = self._now_s() - engine.seen_s
            if silent_s > limit_s:
                self.engine_died(engine.id, f"it has been silent for {silent_s:.1f} s")

    def _deactivate_when_idle(self, hosted: HostedModel) -> None:
        if hosted.deactivating:
            return
        overdue = self._now_s() - hosted.since_s > self._drain_timeout_s
        if overdue or not self._effects.engine_load(hosted.engine_id):
            hosted.deactivating = True
            self._effects.send(hosted.engine_id, Deactivate())

    def _forget_when_old(self, hosted: HostedModel) -> None:
        if self._now_s() - hosted.since_s > self._timing.failed_keep_s:
            del self._models.hosted[hosted.name]
            self._effects.changed()

    # --- engines for models -----------------------------------------------------------------

    def _place_waiting(self) -> None:
        for hosted in list(self._models.hosted.values()):
            if not hosted.needs_engine:
                continue
            if self._now_s() - hosted.since_s > self._timing.activation_s:
                self._fail(hosted, "no engine became free in time")
            elif self._now_s() >= hosted.not_before_s:
                self._place(hosted)

    def _place(self, hosted: HostedModel) -> None:
        """Starts the activation on a free engine, or lets the model wait for one that starts."""
        engine = self._pool.free(self._kind_for(hosted), hosted.needs_fresh)
        if engine is None:
            self._wait_or_fail(hosted)
            return
        hosted.engine_id, hosted.sent_limit_bytes = engine.id, hosted.kv_limit_bytes
        hosted.sent_s = self._now_s()
        hosted.asked_s = hosted.asked_s or hosted.sent_s
        engine.become(EngineState.ACTIVATING, hosted.sent_s, hosted.name)
        self._models.totals(hosted.name).begin(engine.id, engine.counters)
        log.info("%s activates %s", engine.id, hosted.name)
        expected = self._fingerprints.expected(hosted.name, engine.is_fresh)
        self._effects.send(
            engine.id,
            ActivateEngine(hosted.spec, hosted.kv_limit_bytes, self._max_running, expected),
        )
        self._effects.changed()

    def _wait_or_fail(self, hosted: HostedModel) -> None:
        # A pool below its size: an engine died and its successor is about to start.
        if self._pool.count(EngineState.STARTING) or self._pool.is_short:
            return
        if unsuitable := self._pool.unsuitable():
            self._end_unsuitable(unsuitable, hosted)
            return
        busy = ", ".join(sorted(f"{e.model or e.state.value}" for e in self._pool))
        self._fail(hosted, f"no engine is free ({busy})")

    def _end_unsuitable(self, engine: EngineProcess, hosted: HostedModel) -> None:
        """Ends a free engine, so that one of the kind that `hosted` needs is forked."""
        log.info("%s is replaced by an engine that suits %s", engine.id, hosted.name)
        self._pool.remove(engine.id)
        self._effects.kill(engine)
        self._effects.changed()

    def next_kind(self, adapter: str = "") -> EngineKind | None:
        """Returns the kind of the next engine to fork if it is of this adapter, else None.

        Kinds for which a model waits come first, unless an engine of the kind is starting.

        Args:
            adapter: "" means the first one.
        """
        plain = self._pool.kind(adapter)
        missing = self._missing()
        if missing:
            return next((kind for kind in missing if kind.adapter == plain.adapter), None)
        return plain if self._pool.is_short_of(plain.adapter) else None

    def _missing(self) -> list[EngineKind]:
        coming = [e.kind for e in self._pool if e.state is EngineState.STARTING]
        missing = []
        for hosted in self._models.hosted.values():
            if not hosted.needs_engine:
                continue
            if (kind := self._kind_for(hosted)) in coming:
                coming.remove(kind)
            else:
                missing.append(kind)
        return missing

    def _kind_for(self, hosted: HostedModel) -> EngineKind:
        return self._pool.kind(hosted.spec.adapter, hosted.peers)

    # --- answers ----------------------------------------------------------------------------

    def _fail(self, hosted: HostedModel, message: str) -> None:
        hosted.state, hosted.error, hosted.since_s = ModelState.FAILED, message, self._now_s()
        hosted.engine_id = ""
        self._effects.changed()
        self._answer_actions(hosted, message)

    def _answer_actions(self, hosted: HostedModel, problem: str = "") -> None:
        actions, hosted.actions = hosted.actions, []
        for action_id in actions:
            self._answer(action_id, problem, self._now_s() - hosted.since_s)

    def _answer(self, action_id: int, problem: str = "", seconds: float = 0.0) -> None:
        self._effects.answer(ActionResult(action_id, not problem, problem, seconds))
