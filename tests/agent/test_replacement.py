"""Free engines that do not suit a model make way for ones that do."""

from __future__ import annotations

from prism.messages import ActivateModel, ActivationFailed, Deactivated, EvictModel
from tests.agent.harness import model_spec
from tests.agent.test_lifecycle import Bench


def test_a_free_engine_makes_way_for_one_over_two_devices_and_back() -> None:
    bench = Bench(2)
    plain = bench.serve("b")
    spread = ActivateModel(1, model_spec("a"), peers=("host:1",))
    bench.lifecycle.activate(spread)
    assert len(bench.effects.killed) == 1
    assert plain.id not in bench.effects.killed
    assert bench.lifecycle.peers_wanted() == ("host:1",)
    bench.fill()
    assert bench.engine("a").peers == ("host:1",)
    bench.succeed("a")
    assert bench.lifecycle.peers_wanted() == ()
    bench.lifecycle.engine_died(bench.engine("a").id, "test")
    bench.fill()
    assert bench.engine("a").peers == ("host:1",)
    bench.succeed("a")
    bench.lifecycle.evict(EvictModel(2, "a"))
    bench.lifecycle.deactivated(bench.engine("a"), Deactivated("a", 0.1))
    bench.order("c", 3)
    assert len(bench.effects.killed) == 3
    bench.fill()
    assert bench.engine("c").peers == ()
    assert bench.state.pool.restarts_total == 1


def test_a_used_engine_makes_way_for_a_fresh_one() -> None:
    """A model failed its self-check, and the fresh engine that came for it was taken meanwhile."""
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
