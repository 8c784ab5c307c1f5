"""Models come and go, engines start and die: the state machine behind the scheduler's orders.

Step-driven: messages and `tick` move it; it owns no task, and its effects are `Effects`.
"""

from __future__ import annotations

import logging
from typing import Protocol

from prism.agent.activations import ActivationRecord, Fingerprints, stages_of
from prism.agent.models import ModelState, Served
from prism.agent.pool import Engine, EngineState
from prism.agent.state import State
from prism.messages import (
    ActionResult,
    Activate,
    Activated,
    ActivateModel,
    ActivationFailed,
    Deactivate,
    Deactivated,
    EvictModel,
    Export,
    SetLimit,
    ToEngine,
)

log = logging.getLogger(__name__)


class Effects(Protocol):
    """What the state machine does to the world. None of it blocks."""

    def send(self, engine_id: str, message: ToEngine) -> bool: ...

    def kill(self, engine: Engine) -> None:
        """SIGKILL its process, and free what the ledger holds for dead ones."""

    def engine_lost(self, engine_id: str, why: str) -> None:
        """Its requests fail."""

    def engine_load(self, engine_id: str) -> int:
        """Requests that run on it."""

    def reclaim(self, need_bytes: int, for_engine: str) -> None: ...

    def answer(self, result: ActionResult) -> None: ...

    def record(self, activation: ActivationRecord) -> None:
        """A model became active."""

    def changed(self) -> None:
        """A model's or an engine's state is another one."""


class Lifecycle:
    """Not thread-safe. max_running: requests an engine may run at once."""

    def __init__(
        self,
        state: State,
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

    # --- the scheduler's orders -------------------------------------------------------------

    def activate(self, order: ActivateModel) -> None:
        """Answered when it is active or has failed. Active already: only its limit is set."""
        served = self._models.served.get(order.model.name)
        if served is None or served.state is ModelState.FAILED:
            limit_bytes = order.kv_limit_bytes
            served = Served(
                order.model, self._now_s(), kv_limit_bytes=limit_bytes, peers=order.peers
            )
            self._models.served[served.name] = served
            served.actions.append(order.action_id)
            self._place(served)
        elif served.state is ModelState.DRAINING:
            self._answer(order.action_id, f"{served.name} is being evicted")
        else:
            self._set_limit(served, order)

    def evict(self, order: EvictModel) -> None:
        """Answered when the model is gone. A model that is not here is gone already."""
        served = self._models.served.get(order.model)
        if served is None or served.state is ModelState.FAILED:
            self._models.served.pop(order.model, None)
            self._effects.changed()
            self._answer(order.action_id)
        elif served.state is ModelState.ACTIVATING:
            self._answer(order.action_id, f"{served.name} is being activated: evict it afterwards")
        else:
            served.actions.append(order.action_id)
            if order.move_running and served.state is ModelState.ACTIVE:
                self._effects.send(served.engine_id, Export(order.targets))
            self._drain(served)

    def _set_limit(self, served: Served, order: ActivateModel) -> None:
        if order.kv_limit_bytes != served.kv_limit_bytes:
            served.kv_limit_bytes = order.kv_limit_bytes
            if served.state is ModelState.ACTIVE:
                self._effects.send(served.engine_id, SetLimit(order.kv_limit_bytes))
        if served.state is ModelState.ACTIVE:
            self._answer(order.action_id)
        else:
            served.actions.append(order.action_id)

    def _drain(self, served: Served) -> None:
        if served.state is ModelState.ACTIVE:
            served.state, served.since_s = ModelState.DRAINING, self._now_s()
            if engine := self._pool.get(served.engine_id):
                engine.state = EngineState.DRAINING
            self._effects.changed()
        self._deactivate_when_idle(served)

    # --- what engines say -------------------------------------------------------------------

    def engine_ready(self, engine: Engine) -> None:
        """It said hello: it can serve any model."""
        engine.become(EngineState.FREE, self._now_s())
        self._effects.changed()
        self._place_those_waiting()

    def activated(self, engine: Engine, message: Activated) -> None:
        served = self._models.on_engine(engine.id)
        if served is None or served.name != message.model:
            log.warning("%s activated %s, which nobody asked for", engine.id, message.model)
            self._effects.send(engine.id, Deactivate())
            return
        now_s = self._now_s()
        served.activation_s = now_s - engine.since_s
        served.state, served.error, served.memory_tries = ModelState.ACTIVE, "", 0
        self._note_activation(served, engine, message)
        engine.become(EngineState.ACTIVE, now_s, served.name)
        engine.activated = message
        if served.kv_limit_bytes != served.sent_limit_bytes:
            self._effects.send(engine.id, SetLimit(served.kv_limit_bytes))
        log.info("%s serves %s after %.3f s", engine.id, served.name, served.activation_s)
        self._effects.changed()
        self._settle(served)

    def _note_activation(self, served: Served, engine: Engine, message: Activated) -> None:
        served.stages_s = stages_of(served, message, self._now_s())
        self._models.totals(served.name).activations += 1
        self._fingerprints.learn(served.name, message.fingerprint, engine.is_fresh)
        engine.is_fresh = served.needs_fresh = False
        self._effects.record(ActivationRecord(served.name, engine.id, served.stages_s, message))

    def activation_failed(self, engine: Engine, message: ActivationFailed) -> None:
        """For lack of memory: others give their idle memory back, and it is tried again. For a
        failed self-check on a reused engine: that one is replaced, and a fresh one is tried."""
        served = self._models.on_engine(engine.id)
        if message.needs_fresh_engine and served is not None and not engine.is_fresh:
            served.needs_fresh = True
            self.engine_died(engine.id, f"it cannot serve {message.model}: {message.message}")
            return
        engine.become(EngineState.FREE, self._now_s())
        if served is None:
            return
        served.engine_id = ""
        log.warning("%s could not activate %s: %s", engine.id, served.name, message.message)
        if message.missing_bytes > 0 and served.memory_tries < self._timing.memory_tries:
            served.memory_tries += 1
            served.not_before_s = self._now_s() + self._timing.memory_retry_s
            self._effects.reclaim(message.missing_bytes, engine.id)
        else:
            self._fail(served, message.message)
        self._place_those_waiting()

    def deactivated(self, engine: Engine, message: Deactivated) -> None:
        served = self._models.on_engine(engine.id)
        if served is not None and served.state is ModelState.DRAINING:
            del self._models.served[served.name]
            log.info("%s gave %s up in %.3f s", engine.id, served.name, message.seconds)
        engine.become(EngineState.FREE, self._now_s())
        self._effects.changed()
        if served is not None:
            self._settle(served)
        self._place_those_waiting()

    # --- deaths -----------------------------------------------------------------------------

    def engine_died(self, engine_id: str, why: str) -> None:
        """Its requests fail, its model goes to another engine, at most `revives_max` times in
        `revive_window_s`. Unknown ids (killed by us before) are ignored."""
        engine = self._pool.remove(engine_id)
        if engine is None:
            return
        log.warning("%s (pid %d, %s) died: %s", engine.id, engine.pid, engine.state.value, why)
        self._pool.restarts_total += 1
        self._effects.kill(engine)
        served = self._models.on_engine(engine.id)
        if served is not None:
            self._leave_dead(served)
        self._effects.engine_lost(engine.id, why)
        self._effects.changed()

    def _leave_dead(self, served: Served) -> None:
        served.engine_id = ""
        now_s = self._now_s()
        if served.state is ModelState.DRAINING:
            del self._models.served[served.name]
            self._settle(served)
            return
        recently_s = now_s - self._timing.revive_window_s
        served.deaths_s = [*(t for t in served.deaths_s if t > recently_s), now_s]
        if len(served.deaths_s) > self._timing.revives_max:
            self._fail(served, f"its engines died {len(served.deaths_s)} times in a row")
            return
        served.state, served.since_s, served.asked_s = ModelState.ACTIVATING, now_s, 0.0
        self._place(served)

    # --- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Looks at time limits; call it every `tick_s`."""
        self._forgive_own_absence()
        self._kill_silent_engines()
        for served in list(self._models.served.values()):
            if served.state is ModelState.DRAINING:
                self._deactivate_when_idle(served)
        self._place_those_waiting()

    def _forgive_own_absence(self) -> None:
        """An agent that was stopped itself (a suspended machine, SIGSTOP) has heard nobody."""
        now_s = self._now_s()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._timing.away_s:
            for engine in self._pool:
                engine.seen_s = min(now_s, engine.seen_s + away_s)

    def _kill_silent_engines(self) -> None:
        limits_s = {
            EngineState.STARTING: self._timing.hello_s,
            EngineState.ACTIVATING: self._timing.activation_s,
        }
        for engine in self._pool:
            limit_s = limits_s.get(engine.state, self._timing.silent_s)
            silent_s = self._now_s() - engine.seen_s
            if silent_s > limit_s:
                self.engine_died(engine.id, f"it has been silent for {silent_s:.1f} s")

    def _deactivate_when_idle(self, served: Served) -> None:
        if served.deactivating:
            return
        overdue = self._now_s() - served.since_s > self._drain_timeout_s
        if overdue or not self._effects.engine_load(served.engine_id):
            served.deactivating = True
            self._effects.send(served.engine_id, Deactivate())

    # --- engines for models -----------------------------------------------------------------

    def _place_those_waiting(self) -> None:
        for served in list(self._models.served.values()):
            if not served.needs_engine:
                continue
            if self._now_s() - served.since_s > self._timing.activation_s:
                self._fail(served, "no engine became free in time")
            elif self._now_s() >= served.not_before_s:
                self._place(served)

    def _place(self, served: Served) -> None:
        """On a free engine; without one, as soon as one that starts is ready."""
        engine = self._pool.free(served.peers, served.needs_fresh)
        if engine is None:
            self._wait_or_fail(served)
            return
        served.engine_id, served.sent_limit_bytes = engine.id, served.kv_limit_bytes
        served.sent_s = self._now_s()
        served.asked_s = served.asked_s or served.sent_s
        engine.become(EngineState.ACTIVATING, served.sent_s, served.name)
        self._models.totals(served.name).begin(engine.id, engine.counters)
        log.info("%s shall serve %s", engine.id, served.name)
        expected = self._fingerprints.expected(served.name, engine.is_fresh)
        self._effects.send(
            engine.id, Activate(served.spec, served.kv_limit_bytes, self._max_running, expected)
        )
        self._effects.changed()

    def _wait_or_fail(self, served: Served) -> None:
        # Fewer engines than configured: one has died and another one is about to start.
        if self._pool.count(EngineState.STARTING) or self._pool.is_short:
            return
        if unsuitable := self._pool.unsuitable():
            self._replace(unsuitable, served)
            return
        busy = ", ".join(sorted(f"{e.model or e.state.value}" for e in self._pool))
        self._fail(served, f"no engine is free ({busy})")

    def _replace(self, engine: Engine, served: Served) -> None:
        """A free engine goes: its successor is forked as `served` needs it."""
        log.info("%s makes way for an engine that suits %s", engine.id, served.name)
        self._pool.remove(engine.id)
        self._effects.kill(engine)
        self._effects.changed()

    def peers_wanted(self) -> tuple[str, ...]:
        """Those of the next engine to fork: what a model waits for that none on its way suits."""
        coming = [e.peers for e in self._pool if e.state is EngineState.STARTING]
        for served in self._models.served.values():
            if not served.needs_engine:
                continue
            if served.peers not in coming:
                return served.peers
            coming.remove(served.peers)
        return ()

    # --- answers ----------------------------------------------------------------------------

    def _fail(self, served: Served, message: str) -> None:
        served.state, served.error, served.since_s = ModelState.FAILED, message, self._now_s()
        served.engine_id = ""
        self._effects.changed()
        self._settle(served, message)

    def _settle(self, served: Served, problem: str = "") -> None:
        actions, served.actions = served.actions, []
        for action_id in actions:
            self._answer(action_id, problem, self._now_s() - served.since_s)

    def _answer(self, action_id: int, problem: str = "", seconds: float = 0.0) -> None:
        self._effects.answer(ActionResult(action_id, not problem, problem, seconds))
