"""The state machine of models and engines, message by message, on a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prism.agent.engines.lifecycle import Lifecycle
from prism.agent.state.device_state import AgentTiming, DeviceState
from prism.agent.state.engine_pool import EnginePool, EngineProcess, EngineState
from prism.messages.agent import ActivateModel, EvictModel
from prism.messages.engine import (
    Activated,
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    SetLimit,
)
from tests.agent.effects import Recorder
from tests.agent.harness import model_spec

TIMING, DRAIN_S = AgentTiming(revives_max=2, memory_tries=1), 10.0


class Bench:
    """Lifecycle with `engines` ready engines."""

    def __init__(
        self, engines: int = 2, names: Sequence[str] = ("",), shares: Sequence[int] = ()
    ) -> None:
        self.time_s, self.effects = 0.0, Recorder()
        self.state = DeviceState(
            EnginePool("host:0", engines, shares, names), TIMING, lambda: self.time_s
        )
        self.lifecycle = Lifecycle(self.state, self.effects, 4, DRAIN_S)
        self.fill()

    def fill(self) -> None:
        """Replaces missing engines, as the fork servers do."""
        while (pool := self.state.pool).is_short:
            kind = next(filter(None, map(self.state.next_kind, reversed(pool.adapters))))
            self.lifecycle.engine_ready(pool.create(self.time_s, kind))

    def engine(self, model: str) -> EngineProcess:
        hosted = self.state.models.hosted[model]
        engine = self.state.pool.get(hosted.engine_id)
        assert engine is not None
        return engine

    def order(self, model: str, action_id: int = 1, limit: int | None = None) -> None:
        self.lifecycle.activate(ActivateModel(action_id, model_spec(model), limit))

    def succeed(self, model: str) -> None:
        engine = self.engine(model)
        self.lifecycle.activated(engine, Activated(model, 4096, 16, 0, 0, 0, 16, 4))

    def serve(self, model: str) -> EngineProcess:
        self.order(model)
        self.succeed(model)
        self.effects.answers.clear()
        return self.engine(model)

    def tick_until(self, time_s: float, heard: EngineProcess | None = None) -> None:
        """Ticks each second; `heard` sends messages all the while."""
        while self.time_s < time_s:
            self.time_s += 1.0
            if heard is not None:
                heard.seen_s = self.time_s
            self.lifecycle.tick()

    def stage(self, model: str) -> str:
        hosted = self.state.models.hosted.get(model)
        return hosted.state.value if hosted else "absent"

    def answered(self) -> list[tuple[int, bool]]:
        return [(answer.action_id, answer.ok) for answer in self.effects.answers]


def test_activation_is_answered_when_the_model_is_active() -> None:
    bench = Bench()
    bench.order("a", 7, limit=123)
    engine = bench.engine("a")
    assert bench.effects.sent == [(engine.id, ActivateEngine(model_spec("a"), 123, 4))]
    assert (bench.stage("a"), bench.answered()) == ("activating", [])
    bench.time_s = 1.5
    bench.succeed("a")
    assert (bench.stage("a"), bench.answered()) == ("active", [(7, True)])
    assert bench.effects.answers[0].seconds == 1.5


def test_a_model_gets_the_engine_with_the_nearest_part_of_the_sms() -> None:
    bench = Bench(engines=4, shares=(100, 60, 40, 30))
    for model, share, percent in (
        ("a", 0.35, 40),
        ("b", 0.35, 30),
        ("c", 1.0, 100),
        ("d", 0.1, 60),
    ):
        bench.lifecycle.activate(ActivateModel(1, model_spec(model), sm_share=share))
        assert bench.engine(model).sm_percent == percent


def test_a_failure_is_reported_for_a_while_and_then_forgotten() -> None:
    bench = Bench(engines=1)
    bench.order("a")
    bench.lifecycle.activation_failed(bench.engine("a"), ActivationFailed("a", "bad file"))
    assert bench.stage("a") == "failed"
    bench.tick_until(TIMING.failed_keep_s - 1)
    assert bench.stage("a") == "failed"
    bench.tick_until(TIMING.failed_keep_s + 2)
    assert bench.stage("a") == "absent"


def test_two_orders_for_one_model_get_one_engine_and_two_answers() -> None:
    bench = Bench()
    bench.order("a", 1)
    bench.order("a", 2, limit=99)
    bench.succeed("a")
    assert bench.answered() == [(1, True), (2, True)]
    assert bench.state.pool.count(EngineState.FREE) == 1
    assert bench.effects.sent[-1] == (bench.engine("a").id, SetLimit(99))


def test_without_a_free_engine_the_order_fails_at_once() -> None:
    bench = Bench(1)
    bench.serve("a")
    bench.order("b")
    assert bench.answered() == [(1, False)]
    assert bench.effects.answers[0].message == "no engine is free (a)"
    assert bench.stage("b") == "failed"


def test_while_an_engine_starts_the_order_waits_for_it() -> None:
    bench = Bench(1)
    bench.serve("a")
    dead = bench.engine("a")
    bench.lifecycle.engine_died(dead.id, "killed")
    bench.order("b")
    assert bench.answered() == []
    assert bench.stage("b") == "activating"
    bench.fill()
    # "a" waited first.
    assert bench.engine("a").state is EngineState.ACTIVATING
    assert bench.state.models.hosted["b"].engine_id == ""


def test_waiting_for_an_engine_is_bounded() -> None:
    bench = Bench(1)
    bench.lifecycle.engine_died(bench.state.pool.free().id, "killed")  # type: ignore[union-attr]
    bench.order("a")
    bench.time_s = TIMING.activation_s + 1
    bench.lifecycle.tick()
    assert (bench.stage("a"), bench.answered()) == ("failed", [(1, False)])


def test_lack_of_memory_is_tried_again_after_others_gave_theirs() -> None:
    bench = Bench()
    bench.order("a")
    engine = bench.engine("a")
    bench.lifecycle.activation_failed(engine, ActivationFailed("a", "no room", 500))
    assert bench.effects.reclaimed == [(500, engine.id)]
    bench.lifecycle.tick()
    assert bench.state.models.hosted["a"].engine_id == ""
    bench.time_s += TIMING.memory_retry_s
    bench.lifecycle.tick()
    again = bench.engine("a")
    bench.lifecycle.activation_failed(again, ActivationFailed("a", "no room", 500))
    assert bench.answered() == [(1, False)]
    assert (bench.stage("a"), bench.effects.answers[0].message) == ("failed", "no room")


def test_a_failed_model_can_be_activated_again_and_evicted() -> None:
    bench = Bench()
    bench.order("a")
    bench.lifecycle.activation_failed(bench.engine("a"), ActivationFailed("a", "bad file"))
    bench.order("a", 2)
    bench.succeed("a")
    assert bench.answered() == [(1, False), (2, True)]
    bench.order("b", 3)
    bench.lifecycle.activation_failed(bench.engine("b"), ActivationFailed("b", "bad file"))
    bench.lifecycle.evict(EvictModel(4, "b"))
    assert bench.answered()[-1] == (4, True)
    assert bench.stage("b") == "absent"


def test_eviction_waits_for_the_running_ones() -> None:
    bench = Bench()
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 2
    bench.lifecycle.evict(EvictModel(5, "a"))
    bench.order("a", 6)  # not now
    bench.lifecycle.tick()
    assert Deactivate() not in [message for _, message in bench.effects.sent]
    assert bench.answered() == [(6, False)]
    bench.effects.load.clear()
    bench.lifecycle.tick()
    bench.lifecycle.tick()
    assert [m for _, m in bench.effects.sent].count(Deactivate()) == 1
    bench.lifecycle.deactivated(engine, Deactivated("a", 0.1))
    assert (bench.stage("a"), bench.answered()[-1]) == ("absent", (5, True))
    assert engine.state is EngineState.FREE


def test_eviction_waits_only_so_long() -> None:
    bench = Bench()
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 2
    bench.lifecycle.evict(EvictModel(5, "a"))
    bench.time_s = DRAIN_S + 0.1
    engine.seen_s = bench.time_s
    bench.lifecycle.tick()
    assert bench.effects.sent[-1] == (engine.id, Deactivate())


def test_an_eviction_may_have_to_wait_for_all_running_requests() -> None:
    bench = Bench()
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 2
    bench.lifecycle.evict(EvictModel(5, "a", finish_all=True))
    bench.tick_until(10 * DRAIN_S, heard=engine)
    assert Deactivate() not in [message for _, message in bench.effects.sent]
    bench.effects.load[engine.id] = 0
    bench.lifecycle.tick()
    assert bench.effects.sent[-1] == (engine.id, Deactivate())


def test_eviction_during_activation_is_refused() -> None:
    bench = Bench()
    bench.order("a", 1)
    bench.lifecycle.evict(EvictModel(2, "a"))
    assert bench.answered() == [(2, False)]
    bench.succeed("a")
    assert bench.answered()[-1] == (1, True)


def test_an_engines_model_is_revived_on_another_one() -> None:
    bench = Bench()
    first = bench.serve("a")
    bench.lifecycle.engine_died(first.id, "killed")
    assert (bench.effects.killed, bench.effects.lost) == ([first.id], [first.id])
    assert bench.stage("a") == "activating"
    second = bench.engine("a")
    assert second.id != first.id
    bench.succeed("a")
    bench.lifecycle.engine_died(first.id, "reported twice")
    assert bench.state.pool.restarts_total == 1


def test_revivals_are_bounded() -> None:
    bench = Bench()
    bench.order("a", 3)
    for _ in range(TIMING.revives_max + 1):
        assert bench.stage("a") == "activating"
        bench.lifecycle.engine_died(bench.engine("a").id, "killed")
        bench.fill()
    assert (bench.stage("a"), bench.answered()) == ("failed", [(3, False)])


def test_deaths_long_ago_do_not_count() -> None:
    bench = Bench()
    bench.serve("a")
    for _ in range(TIMING.revives_max + 3):
        bench.time_s += TIMING.revive_window_s
        bench.lifecycle.engine_died(bench.engine("a").id, "killed")
        bench.fill()
        bench.succeed("a")
    assert bench.stage("a") == "active"


def test_death_while_draining_ends_the_eviction() -> None:
    bench = Bench()
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 1
    bench.lifecycle.evict(EvictModel(5, "a"))
    bench.lifecycle.engine_died(engine.id, "killed")
    assert (bench.stage("a"), bench.answered()) == ("absent", [(5, True)])


def test_silent_engines_are_killed_after_the_timeout_of_their_state() -> None:
    bench = Bench(3)
    active = bench.serve("a")
    bench.order("b")
    loading = bench.engine("b")
    bench.tick_until(TIMING.silent_s + 1, heard=active)
    assert len(bench.effects.killed) == 1  # the free one
    assert {active.id, loading.id}.isdisjoint(bench.effects.killed)
    bench.tick_until(TIMING.activation_s + 1, heard=active)
    assert loading.id in bench.effects.killed
    assert active.id not in bench.effects.killed


def test_an_agent_that_was_stopped_itself_counts_no_silence_of_that_time() -> None:
    bench = Bench(2)
    engine = bench.serve("a")
    bench.time_s = 1000.0
    engine.seen_s = bench.time_s  # its messages of that time are read before the first tick
    bench.lifecycle.tick()
    assert bench.effects.killed == []
    bench.tick_until(1000.0 + TIMING.silent_s + 1)
    assert engine.id in bench.effects.killed


def test_a_model_that_nobody_ordered_is_taken_down() -> None:
    bench = Bench()
    engine = bench.state.pool.free()
    assert engine is not None
    bench.lifecycle.activated(engine, Activated("ghost", 1, 1, 0, 0, 0, 1, 1))
    assert bench.effects.sent == [(engine.id, Deactivate())]


def fail_self_check(bench: Bench, model: str) -> None:
    failed = ActivationFailed(model, "another answer", needs_fresh_engine=True)
    bench.lifecycle.activation_failed(bench.engine(model), failed)


def test_a_model_that_fails_its_self_check_waits_for_a_fresh_engine() -> None:
    bench = Bench()
    bench.serve("b")
    bench.serve("c")
    for model in ("b", "c"):
        bench.lifecycle.evict(EvictModel(1, model))
        bench.lifecycle.deactivated(bench.engine(model), Deactivated(model, 0.0))
    bench.order("a", 7)
    reused = bench.engine("a")
    fail_self_check(bench, "a")
    assert bench.effects.killed == [reused.id]
    assert (bench.stage("a"), bench.state.models.hosted["a"].engine_id) == ("activating", "")
    bench.fill()
    assert bench.engine("a").is_fresh
    bench.succeed("a")
    assert bench.answered()[-1] == (7, True)


def test_a_self_check_that_fails_on_a_fresh_engine_is_final() -> None:
    bench = Bench()
    bench.order("a", 7)
    fail_self_check(bench, "a")
    assert (bench.stage("a"), bench.answered()) == ("failed", [(7, False)])
    assert bench.effects.killed == []


def test_a_reused_engine_must_answer_as_a_fresh_one_did() -> None:
    bench = Bench(engines=1)
    for turn, (model, answer, expected) in enumerate(
        [("a", (1, 2), ()), ("b", (3,), ()), ("a", (1, 2), (1, 2)), ("b", (3,), (3,))]
    ):
        bench.order(model, turn)
        engine = bench.engine(model)
        _, order = bench.effects.sent[-1]
        assert isinstance(order, ActivateEngine)
        assert order.fingerprint == expected
        message = Activated(model, 4096, 16, 0, 0, 0, 16, 4, fingerprint=answer)
        bench.lifecycle.activated(engine, message)
        bench.lifecycle.evict(EvictModel(9, model))
        bench.lifecycle.deactivated(engine, Deactivated(model, 0.0))


def test_the_stages_of_an_activation_are_recorded() -> None:
    """Takes 0.5 s for an engine, 1 s for memory, 2 s inside the engine, some of it for memory."""
    bench = Bench(engines=1)
    bench.state.pool.remove(bench.serve("b").id)
    bench.state.models.hosted.clear()
    bench.order("a")
    bench.time_s = 0.5
    bench.fill()
    first = bench.engine("a")
    bench.lifecycle.activation_failed(first, ActivationFailed("a", "full", missing_bytes=1))
    bench.time_s = 1.5
    bench.lifecycle.tick()
    bench.time_s = 3.6
    inside = {"shrink": 0.2, "reserve": 0.2, "weights": 1.6, "total": 2.0}
    message = Activated("a", 4096, 16, 0, 0, 0, 16, 4, stages_s=inside)
    bench.lifecycle.activated(bench.engine("a"), message)
    stages = bench.effects.records[-1].stages_s
    assert list(stages) == ["engine", "shrink", "reserve", "weights", "ready", "total"]
    assert list(stages.values()) == pytest.approx([0.5, 1.2, 0.2, 1.6, 0.1, 3.6])
    assert bench.state.models.totals("a").activations == 1
