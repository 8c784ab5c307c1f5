"""Engines are replaced: free ones that do not suit a model, and those that must not continue."""

from __future__ import annotations

import msgspec

from prism.agent.state.engine_pool import EngineKind, EngineState
from prism.messages.agent import ActivateModel, EvictModel
from prism.messages.engine import ActivationFailed, Deactivated, Export
from tests.agent.harness import model_spec
from tests.agent.test_lifecycle import TIMING, Bench


def test_a_free_engine_makes_way_for_one_over_two_devices_and_back() -> None:
    bench = Bench(2)
    plain = bench.serve("b")
    spread = ActivateModel(1, model_spec("a"), peers=("host:1",))
    bench.lifecycle.activate(spread)
    assert len(bench.effects.killed) == 1
    assert plain.id not in bench.effects.killed
    assert bench.state.next_kind() == EngineKind("", ("host:1",))
    bench.fill()
    assert bench.engine("a").kind.peers == ("host:1",)
    bench.succeed("a")
    assert bench.state.next_kind() is None
    bench.lifecycle.engine_died(bench.engine("a").id, "test")
    bench.fill()
    assert bench.engine("a").kind.peers == ("host:1",)
    bench.succeed("a")
    bench.lifecycle.evict(EvictModel(2, "a"))
    bench.lifecycle.deactivated(bench.engine("a"), Deactivated("a", 0.1))
    bench.order("c", 3)
    assert len(bench.effects.killed) == 3
    bench.fill()
    assert bench.engine("c").kind.peers == ()
    assert bench.state.pool.restarts_total == 1


def test_a_pool_has_engines_of_each_adapter_and_more_of_one_that_models_wait_for() -> None:
    bench = Bench(3, ("x", "y"))
    assert sorted(engine.kind.adapter for engine in bench.state.pool) == ["x", "x", "y"]
    for number, name in enumerate(("a", "b")):
        spec = msgspec.structs.replace(model_spec(name), adapter="y")
        bench.lifecycle.activate(ActivateModel(number, spec))
    assert bench.engine("a").kind.adapter == "y"
    assert len(bench.effects.killed) == 1  # one of x, for b
    kinds = [bench.state.next_kind(adapter) for adapter in ("x", "y")]
    assert kinds == [None, EngineKind("y")]
    bench.fill()
    assert bench.engine("b").kind.adapter == "y"
    bench.succeed("a")
    bench.lifecycle.engine_died(bench.engine("a").id, "killed")
    kinds = [bench.state.next_kind(adapter) for adapter in ("x", "y")]
    assert kinds == [None, EngineKind("y")]


def test_a_used_engine_makes_way_for_a_fresh_one() -> None:
    """Covers a failed self-check whose fresh engine was taken by another model meanwhile."""
    bench = Bench(1)
    used = bench.serve("a")
    bench.lifecycle.evict(EvictModel(1, "a"))
    bench.lifecycle.deactivated(used, Deactivated("a", 0.1))
    bench.order("b")
    bench.lifecycle.activation_failed(used, ActivationFailed("b", "wrong", needs_fresh_engine=True))
    stray = bench.state.pool.create(bench.time_s)
    stray.is_fresh = False
    bench.lifecycle.engine_ready(stray)
    assert bench.effects.killed == [used.id, stray.id]
    bench.fill()
    assert bench.engine("b").is_fresh


def test_an_order_may_ask_for_an_engine_that_starts_after_it() -> None:
    """Replaces the engine that has served a model. Its successor is taken, not the spare one."""
    bench = Bench(2)
    used = bench.serve("a")
    bench.lifecycle.evict(EvictModel(1, "a"))
    bench.lifecycle.deactivated(used, Deactivated("a", 0.1))
    spare = {engine.id for engine in bench.state.pool} - {used.id}
    bench.time_s += 1
    order = ActivateModel(2, model_spec("b"), restarts_engine=True)
    bench.lifecycle.activate(order)
    assert bench.effects.killed == [used.id]
    bench.fill()
    assert bench.engine("b").id not in {used.id, *spare}
    bench.succeed("b")
    bench.lifecycle.engine_died(bench.engine("b").id, "killed")
    assert {bench.engine("b").id} == spare  # to serve again soon


def test_an_idle_engine_is_replaced_at_once() -> None:
    bench = Bench(2)
    engine = bench.state.pool.free()
    assert engine is not None
    bench.lifecycle.replace(engine, "it holds too much")
    assert bench.effects.killed == [engine.id]
    assert bench.effects.reasons == [f"{engine.id}  it holds too much"]
    assert bench.state.pool.is_short
    assert bench.state.pool.restarts_total == 1


def test_a_models_requests_leave_an_engine_before_it_is_replaced() -> None:
    """Stops the requests where they are; the model is activated elsewhere without an order."""
    bench = Bench(1)
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 2
    bench.lifecycle.replace(engine, "it holds too much")
    assert bench.effects.sent[-1] == (engine.id, Export())
    assert bench.stage("a") == "activating"
    assert bench.state.models.active("a") is None  # nothing more is sent to it
    bench.tick_until(2.0, heard=engine)
    assert not bench.effects.killed
    bench.effects.load[engine.id] = 0
    bench.tick_until(3.0)
    assert bench.effects.killed == [engine.id]
    bench.fill()
    bench.lifecycle.tick()
    bench.succeed("a")
    assert bench.stage("a") == "active"


def test_an_engine_that_does_not_let_go_is_replaced_all_the_same() -> None:
    bench = Bench(1)
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 2
    bench.lifecycle.replace(engine, "it holds too much")
    bench.lifecycle.replace(engine, "again")
    bench.tick_until(4.0, heard=engine)
    assert not bench.effects.killed
    bench.tick_until(7.0, heard=engine)
    assert bench.effects.killed == bench.effects.lost == [engine.id]
    assert len(bench.effects.reasons) == 1


def test_an_order_meanwhile_waits_for_the_fresh_engine() -> None:
    bench = Bench(1)
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 1
    bench.lifecycle.replace(engine, "it holds too much")
    bench.order("a", 7)
    bench.lifecycle.evict(EvictModel(8, "a"))
    assert bench.answered() == [(8, False)]
    bench.effects.load[engine.id] = 0
    bench.tick_until(1.0)
    bench.fill()
    bench.lifecycle.tick()
    bench.succeed("a")
    assert bench.answered() == [(8, False), (7, True)]


def test_an_engine_that_dies_as_it_is_replaced_is_replaced_once() -> None:
    bench = Bench(1)
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 1
    bench.lifecycle.replace(engine, "it holds too much")
    bench.lifecycle.engine_died(engine.id, "it ended with status -9")
    bench.tick_until(20.0)
    assert bench.effects.killed == [engine.id]
    assert bench.state.pool.count(EngineState.ACTIVE) == 0


def test_a_fresh_process_has_the_time_that_imports_take() -> None:
    bench = Bench(1)
    free = bench.state.pool.free()
    assert free is not None
    bench.state.pool.import_s = 100.0
    bench.lifecycle.engine_died(free.id, "test")
    starting = bench.state.pool.create(bench.time_s)
    began_s = bench.time_s
    bench.tick_until(began_s + TIMING.hello_s + 99)
    assert starting.id not in bench.effects.killed
    bench.tick_until(began_s + TIMING.hello_s + 102)
    assert starting.id in bench.effects.killed


def test_what_runs_leaves_for_the_targets_of_its_model() -> None:
    bench = Bench()
    engine = bench.serve("a")
    bench.effects.load[engine.id] = 2
    order = EvictModel(5, "a", move_running=True, targets=("host:1",))
    bench.lifecycle.evict(order)
    assert bench.effects.moved == [("a", ("host:1",))]
