"""Activations of models on the device's engines: stages, fingerprints, and repeated tries."""

from __future__ import annotations

import logging
import math

from msgspec import structs

from prism.agent.engines.lifecycle_effects import Effects
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EngineProcess, EngineState
from prism.messages.agent import ActionResult
from prism.messages.engine import Activated, ActivateEngine, ActivationFailed, SetLimit

log = logging.getLogger(__name__)


def stages_of(hosted: HostedModel, activated: Activated, now_s: float) -> dict[str, float]:
    """Returns the duration of each stage, those of the engine between those of the agent.

    The agent's are "engine" (until an engine was free), "shrink" (until other engines had freed
    memory, failed tries included) and "ready" (messages between agent and engine).
    """
    inside_s = {name: s for name, s in activated.stages_s.items() if name != "total"}
    engine_s = activated.stages_s.get("total", 0.0)
    shrink_s = hosted.sent_s - hosted.asked_s + inside_s.pop("shrink", 0.0)
    return {
        "engine": hosted.asked_s - hosted.since_s,
        "shrink": shrink_s,
        **inside_s,
        "ready": max(0.0, now_s - hosted.sent_s - engine_s),
        "total": now_s - hosted.since_s,
    }


class Fingerprints:
    """Warm-up output of each model and number of ranks on a fresh engine, one that had served no
    model before. Ranks sum in another order, so that outputs may differ."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def expected(self, model: HostedModel, is_fresh: bool) -> tuple[int, ...]:
        """Returns the output that an engine must reproduce; () for a fresh one, the reference."""
        return () if is_fresh else self._known.get((model.name, model.ranks), ())

    def learn(self, model: HostedModel, fingerprint: tuple[int, ...], is_fresh: bool) -> None:
        key = model.name, model.ranks
        if fingerprint and (is_fresh or key not in self._known):
            self._known[key] = fingerprint


class Activations:
    """Activations of hosted models: each begins on a free engine and succeeds or fails.

    Args:
        max_running: requests that an engine may run at once.
    """

    def __init__(self, state: DeviceState, effects: Effects, max_running: int) -> None:
        self._state = state
        self._pool = state.pool
        self._timing = state.timing
        self._now_s = state.now_s
        self._effects = effects
        self._max_running = max_running
        self._fingerprints = Fingerprints()

    # --- engines for models -----------------------------------------------------------------

    def begin_waiting(self) -> None:
        """Begins the activations that wait for an engine, as far as engines are free."""
        for hosted in list(self._state.models.hosted.values()):
            if not hosted.needs_engine:
                continue
            if self._now_s() - hosted.since_s > self._timing.activation_s:
                self._fail(hosted, "no engine became free in time")
            elif self._now_s() >= hosted.not_before_s:
                self.begin(hosted)

    def begin(self, hosted: HostedModel) -> None:
        """Starts the activation on a free engine, or lets the model wait for one that starts."""
        kind, share = self._state.kind_for(hosted), hosted.sm_share
        is_fresh = hosted.needs_fresh or hosted.restarts
        since_s = hosted.since_s if hosted.restarts else -math.inf
        engine = self._pool.free(kind, is_fresh, share, since_s)
        if engine is None:
            self._wait_or_fail(hosted)
            return
        hosted.engine_id, hosted.sent_limit_bytes = engine.id, hosted.kv_limit_bytes
        hosted.sent_s = self._now_s()
        hosted.asked_s = hosted.asked_s or hosted.sent_s
        engine.become(EngineState.ACTIVATING, hosted.sent_s, hosted.name)
        self._state.models.totals(hosted.name).begin(engine.id, engine.counters, ranks=hosted.ranks)
        log.info("%s activates %s", engine.id, hosted.name)
        expected = self._fingerprints.expected(hosted, engine.is_fresh)
        self._effects.send(
            engine.id,
            ActivateEngine(
                hosted.spec,
                hosted.kv_limit_bytes,
                1 if hosted.prefills else self._max_running,
                expected,
                controlled=self._state.controlled or hosted.prefills,
            ),
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

    # --- results ----------------------------------------------------------------------------

    def succeeded(self, hosted: HostedModel, engine: EngineProcess, message: Activated) -> None:
        now_s = self._now_s()
        hosted.activation_s = now_s - engine.since_s
        hosted.state, hosted.error, hosted.memory_tries = ModelState.ACTIVE, "", 0
        self._record(hosted, engine, message)
        engine.become(EngineState.ACTIVE, now_s, hosted.name)
        engine.activated = message
        if hosted.kv_limit_bytes != hosted.sent_limit_bytes:
            self._effects.send(engine.id, SetLimit(hosted.kv_limit_bytes))
        log.info("%s serves %s after %.3f s", engine.id, hosted.name, hosted.activation_s)
        self._effects.changed()
        self.answer_orders(hosted)

    def _record(self, hosted: HostedModel, engine: EngineProcess, message: Activated) -> None:
        hosted.stages_s = stages_of(hosted, message, self._now_s())
        totals = self._state.models.totals(hosted.name)
        totals.activations += 1
        totals.stages_s.update(hosted.stages_s)
        self._fingerprints.learn(hosted, message.fingerprint, engine.is_fresh)
        engine.is_fresh = hosted.needs_fresh = hosted.restarts = False
        self._effects.record(engine.id, structs.replace(message, stages_s=hosted.stages_s))

    def failed(self, hosted: HostedModel, engine: EngineProcess, message: ActivationFailed) -> None:
        """Lets the model wait for its next try after a lack of memory, or else fails it.

        For the next try, idle memory is reclaimed from other engines.
        """
        hosted.engine_id = ""
        log.warning("%s could not activate %s: %s", engine.id, hosted.name, message.message)
        if message.missing_bytes > 0 and hosted.memory_tries < self._timing.memory_tries:
            hosted.memory_tries += 1
            hosted.not_before_s = self._now_s() + self._timing.memory_retry_s
            self._effects.reclaim(message.missing_bytes, engine.id)
        else:
            hosted.broken = message.missing_bytes == 0
            self._fail(hosted, message.message)

    def after_death(self, hosted: HostedModel) -> None:
        """Activates a model again whose engine died, or fails it after too many deaths."""
        if len(hosted.deaths_s) > self._timing.revives_max:
            self._fail(hosted, f"its engines died {len(hosted.deaths_s)} times in a row")
            return
        hosted.become(ModelState.ACTIVATING, self._now_s())
        hosted.asked_s = 0.0
        self.begin(hosted)

    def _fail(self, hosted: HostedModel, message: str) -> None:
        hosted.become(ModelState.FAILED, self._now_s())
        hosted.error, hosted.engine_id = message, ""
        self._effects.changed()
        self.answer_orders(hosted, message)

    def answer_orders(self, hosted: HostedModel, problem: str = "") -> None:
        """Answers the scheduler's orders that wait for the end of the model's state."""
        actions, hosted.actions = hosted.actions, []
        seconds = self._now_s() - hosted.since_s
        for action_id in actions:
            lasting = bool(problem) and hosted.broken
            self._effects.answer(ActionResult(action_id, not problem, problem, lasting, seconds))
