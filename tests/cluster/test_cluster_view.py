"""Views from reports and current actions; unit tests of backoff and sizes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from prism.cluster.agent_monitor import AgentMonitor
from prism.cluster.repairs import DropCopy, Reroute, Route, repairs
from prism.cluster.state.actions import Move
from prism.cluster.state.activation_history import Activations
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.state.speeds import GAIN
from prism.cluster.state.timing import SchedulerTiming
from prism.cluster.status import build_status, degraded
from prism.cluster.view import build_view
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.policies import registry
from prism.policies.data import NO_TRAFFIC, GpuView, ModelView
from prism.scheduler.traffic import bucket
from tests.cluster.conftest import MODEL_BYTES, spec

CAPACITY = 4 * MODEL_BYTES


def make_state(*models: Any, policy: str = "prism", now_s: float = 100.0) -> SchedulerState:
    config = ClusterConfig(
        namespace="n",
        run_dir="/run",
        redis_url="",
        policy=policy,
        devices=[DeviceConfig(f"host:{i}", CAPACITY, 4096, 3) for i in range(2)],
        models=list(models) or [spec("a"), spec("b")],
        engine=EngineConfig(static_bytes=0),
    )
    return SchedulerState(config, registry.get(policy), SchedulerTiming(), lambda: now_s)


def report(device: str, *models: ModelReport, **more: Any) -> AgentReport:
    defaults = {
        "epoch": 1,
        "time_unix_s": 1000.0,
        "capacity_bytes": CAPACITY,
        "page_bytes": 4096,
        "reserved_bytes": 0,
        "committed_bytes": 0,
        "resident_bytes": 0,
        "engines_free": 3 - len(models),
        "engines_starting": 0,
        "engines_total": 3,
    }
    return AgentReport(device=device, models=list(models), **{**defaults, **more})


def seen(state: SchedulerState, *reports: AgentReport, at_s: float = 100.0) -> None:
    for r in reports:
        state.book.take(r, at_s)
        state.sizes.observe(r)
        state.speeds.observe(r)
        state.starts.observe(r, state.config)
        state.traffic.ended(r.device, {m.model: dict(m.output_lengths) for m in r.models}, at_s)


def look(
    state: SchedulerState, now_s: float = 100.0
) -> tuple[dict[str, ModelView], dict[str, GpuView]]:
    view = build_view(state, now_s)
    return {m.name: m for m in view.models}, {g.name: g for g in view.gpus}


def test_a_policy_sees_rates_lengths_and_prefill_speed() -> None:
    state = make_state()
    for arrived, ended in ((4, 4), (24, 14)):
        outputs = [(bucket(50), ended)]
        model = ModelReport("a", "active", prefill_tokens_per_s=900.0, output_lengths=outputs)
        seen(state, report("host:0", model))
        state.traffic.arrived({"f0": {"a": {bucket(100): arrived}}}, 100.0)
    state.routes.placement["a"] = ("host:0",)
    a = look(state, 110.0)[0]["a"]
    assert (a.traffic.requests, a.traffic.peak_rps) == (20, pytest.approx(2.0))
    assert a.traffic.prompt_tokens == pytest.approx(100, rel=0.1)
    assert a.traffic.output_tokens == pytest.approx(50, rel=0.1)
    assert a.degrees[1].prefill_tokens_per_s == 900.0
    assert a.degrees[1].weight_bytes == a.weight_bytes
    assert look(state, 110.0)[0]["b"].traffic == NO_TRAFFIC
    status = build_status(state, build_view(state, 110.0))
    values = json.loads(msgspec.json.encode(status))  # as the console reads it over HTTP
    assert msgspec.convert(values, ClusterStatus).agents[0].models[0].output_lengths


AUTO = spec("a", degrees=(1, 2), num_kv_heads=2, token_bytes=256)


def wide(state: str = "active", **more: Any) -> ModelReport:
    return ModelReport("a", state, peers=("host:1",), **more)


def test_a_policy_sees_each_degree() -> None:
    """Sees its size, and the speed that was measured there, or else an estimate."""
    state = make_state(AUTO)
    seen(state, report("host:0"))
    a = look(state)[0]["a"]
    assert (a.tp, list(a.degrees), a.degrees[1].prefill_tokens_per_s) == (1, [1, 2], 0.0)
    assert a.degrees[2].weight_bytes == a.degrees[1].weight_bytes == a.weight_bytes
    narrow = {"prefill_tokens_per_s": 900.0, "step_s": 0.03, "request_s": 0.003}
    seen(state, report("host:0", ModelReport("a", "active", **narrow)))
    state.routes.placement["a"] = ("host:0",)
    estimate = look(state)[0]["a"].degrees[2]
    assert estimate.prefill_tokens_per_s == pytest.approx(900.0 * GAIN)
    assert estimate.step_s == pytest.approx(0.03 / GAIN)
    assert estimate.request_s == pytest.approx(0.003 / GAIN)
    held = wide(prefill_tokens_per_s=1600.0, static_bytes=30000, kv_reserve_bytes=9000)
    seen(state, report("host:0", held))
    a = look(state)[0]["a"]
    assert (a.tp, a.peers) == (2, ("host:1",))
    assert (
        (a.weight_bytes, a.kv_floor_bytes)
        == (60000, 18000)
        == (
            a.degrees[2].weight_bytes,
            a.degrees[2].kv_floor_bytes,
        )
    )
    assert a.degrees[1].weight_bytes != 60000
    speeds = [degree.prefill_tokens_per_s for degree in a.degrees.values()]
    assert speeds == [900.0, 1600.0]


def test_a_degree_that_brought_little_is_not_exceeded() -> None:
    """Expects of the next degree no more than the present one gained."""
    state, model = make_state(), spec("a", degrees=(1, 2, 4, 8))
    peers = ("host:1", "host:2", "host:3")
    for ranks, tokens_per_s, step_s in ((1, 1000.0, 0.02), (2, 1100.0, 0.016)):
        speeds = {"prefill_tokens_per_s": tokens_per_s, "step_s": step_s}
        seen(
            state, report("host:0", ModelReport("a", "active", peers=peers[: ranks - 1], **speeds))
        )
    assert state.speeds.of(model, 2) == (1100.0, 0.016, 0.0)
    assert state.speeds.of(model, 4) == pytest.approx((1210.0, 0.016 / 1.1, 0.0))
    assert state.speeds.of(model, 8) == pytest.approx((1331.0, 0.016 / 1.21, 0.0))
    slower = ModelReport("a", "active", peers=peers, prefill_tokens_per_s=500.0)
    seen(state, report("host:0", slower))
    assert state.speeds.of(model, 8).prefill_tokens_per_s == 500.0


def test_a_copy_on_its_way_counts_at_its_own_degree() -> None:
    state = make_state(AUTO)
    seen(state, report("host:0"), report("host:1"))
    whole = state.sizes.part_bytes("a", 1)
    half = state.sizes.part_bytes("a", 2)
    assert half < whole
    state.actions.begin(Move("activate", "a", "host:0", peers=("host:1",)), "")
    models, gpus = look(state)
    assert models["a"].tp == 2
    assert gpus["host:0"].free_bytes == CAPACITY - half
    failed = ModelReport("a", "failed", peers=("host:1",))
    seen(state, report("host:0", failed), report("host:1"))
    state.actions.moves.clear()
    state.actions.begin(Move("activate", "a", "host:0"), "")
    models, gpus = look(state)
    assert models["a"].tp == 1
    assert gpus["host:0"].free_bytes == CAPACITY - whole


def test_unused_cached_prefixes_are_free_memory() -> None:
    """Fills a device with caches, which must not keep models from moving there."""
    state = make_state()
    full = {"reserved_bytes": CAPACITY, "engines_free": 0}
    cached = {"kv_mapped_bytes": 9000, "kv_reserve_bytes": 2000, "kv_cached_bytes": 8000}
    for mapped, free in ((9000, 7000), (9900, 7900), (12000, 8000), (1000, 0)):
        cached["kv_mapped_bytes"] = mapped
        seen(state, report("host:0", ModelReport("a", "active", **cached), **full))
        assert look(state)[1]["host:0"].free_bytes == free


def test_two_copies_that_leave_together_are_not_a_degree() -> None:
    state = make_state(spec("a"))
    seen(state, report("host:0"), report("host:1"))
    state.actions.begin(Move("evict", "a", "host:0", peers=("host:1",)), "")
    assert look(state)[0]["a"].tp == 1


def test_a_device_without_report_is_not_alive() -> None:
    state = make_state()
    seen(state, report("host:0", engines_starting=1, engines_free=2))
    _, gpus = look(state)
    assert (gpus["host:0"].alive, gpus["host:0"].engines_free) == (True, 3)
    seen(
        state, report("host:0", ModelReport("a", "activating"), engines_starting=3, engines_free=0)
    )
    assert look(state)[1]["host:0"].engines_free == 2
    assert (gpus["host:1"].alive, gpus["host:1"].engines_free) == (False, 0)
    assert gpus["host:1"].capacity_bytes == CAPACITY


def test_a_queue_is_older_than_its_last_report_said() -> None:
    state = make_state()
    queue = ModelReport("a", "active", waiting=2, oldest_wait_s=3.0)
    seen(state, report("host:0", queue, ModelReport("b", "active")))
    state.routes.placement = {"a": ("host:0",), "b": ("host:0",)}
    models, _ = look(state, now_s=100.4)
    assert models["a"].oldest_wait_s == pytest.approx(3.4)
    assert models["b"].oldest_wait_s == 0.0


def test_an_activation_on_its_way_takes_memory_and_an_engine_once() -> None:
    state = make_state()
    seen(state, report("host:0"), report("host:1"))
    state.actions.moves["a"] = Move("activate", "a", "host:0")
    models, gpus = look(state)
    assert (models["a"].device, models["a"].state) == ("host:0", "activating")
    assert (gpus["host:0"].engines_free, gpus["host:0"].free_bytes) == (2, CAPACITY - MODEL_BYTES)
    half = ModelReport("a", "activating", static_bytes=40960)
    seen(state, report("host:0", half, reserved_bytes=40960))
    _, gpus = look(state)
    assert (gpus["host:0"].engines_free, gpus["host:0"].free_bytes) == (2, CAPACITY - MODEL_BYTES)
    assert gpus["host:0"].fixed_bytes == 0


@pytest.mark.parametrize("there", [(), (ModelReport("a", "activating"),)])
def test_a_migration_counts_on_both_devices(there: tuple[ModelReport, ...]) -> None:
    state = make_state()
    seen(state, report("host:0", ModelReport("a", "active")), report("host:1", *there))
    state.actions.moves["a"] = Move("migrate", "a", "host:1", "host:0")
    models, gpus = look(state)
    assert (models["a"].device, models["a"].state) == ("host:0", "migrating")
    assert models["a"].moving_to == ("host:1",)
    assert gpus["host:1"].fixed_bytes == MODEL_BYTES
    assert gpus["host:1"].engines_free == 2
    assert (gpus["host:0"].fixed_bytes, gpus["host:0"].engines_free) == (0, 2)


def test_a_model_over_two_devices_is_on_both() -> None:
    """Checks the model while activating, active and draining, with half its bytes on each."""
    part_bytes = 40960 + 16384
    state = make_state(spec("w", tp=2, num_kv_heads=2, weight_bytes=81920, token_bytes=256))
    seen(state, report("host:0"), report("host:1"))
    state.actions.moves["w"] = Move("activate", "w", "host:0", peers=("host:1",))

    def check(stage: str) -> tuple[GpuView, GpuView]:
        models, gpus = look(state)
        wide = models["w"]
        assert (wide.device, wide.peers, wide.tp) == ("host:0", ("host:1",), 2)
        assert (wide.state, wide.weight_bytes, wide.kv_floor_bytes) == (stage, 81920, 32768)
        assert {g.node for g in gpus.values()} == {"host 4096"}
        assert [g.engines_free for g in gpus.values()] == [2, 2]
        assert [g.fixed_bytes for g in gpus.values()] == [0, 0]
        return gpus["host:0"], gpus["host:1"]

    for gpu in check("activating"):
        assert gpu.free_bytes == CAPACITY - part_bytes
    there = ModelReport(
        "w", "active", static_bytes=40960, kv_reserve_bytes=16384, peers=("host:1",)
    )
    seen(
        state,
        report("host:0", there, reserved_bytes=part_bytes),
        report("host:1", reserved_bytes=part_bytes),
    )
    for gpu in check("activating"):
        assert gpu.free_bytes == CAPACITY - part_bytes
    del state.actions.moves["w"]
    check("active")
    state.actions.moves["w"] = Move("evict", "w", "host:0", peers=("host:1",))
    check("draining")


def test_a_failed_model_is_absent_and_its_requests_count() -> None:
    state = make_state()
    seen(state, report("host:0", ModelReport("a", "failed", waiting=2)))
    state.routes.unplaced["a"] = 3
    models, _ = look(state)
    assert (models["a"].device, models["a"].state, models["a"].waiting) == (None, "absent", 5)


def test_the_copy_that_is_routed_is_the_one_shown() -> None:
    state = make_state()
    seen(state, *(report(d, ModelReport("a", "active")) for d in ("host:0", "host:1")))
    state.routes.placement["a"] = ("host:1",)
    models, gpus = look(state)
    assert models["a"].device == "host:1"
    assert gpus["host:0"].fixed_bytes == MODEL_BYTES


def test_each_copy_has_a_view_with_its_share() -> None:
    """Divides the rate evenly. Requests count on their device, unplaced ones on each copy."""
    state = make_state()
    first = ModelReport("a", "active", waiting=5, running=3, oldest_wait_s=2.0)
    seen(state, report("host:0", first), report("host:1", ModelReport("a", "active", running=1)))
    state.routes.placement["a"], state.routes.unplaced["a"] = ("host:1", "host:0"), 2
    state.activations.loaded("a", 1.5, 0.0)
    views = [m for m in build_view(state, 100.0).models if m.name == "a"]
    assert [(m.device, m.state, m.waiting, m.running) for m in views] == [
        ("host:1", "active", 2, 1),
        ("host:0", "active", 7, 3),
    ]
    assert [(m.oldest_wait_s, m.load_s) for m in views] == [(0.0, 1.5), (2.0, 1.5)]
    assert [gpu.fixed_bytes for gpu in build_view(state, 100.0).gpus] == [0, 0]


def test_copies_show_beside_one_that_comes_or_goes() -> None:
    state = make_state()
    seen(state, report("host:0", ModelReport("a", "active")), report("host:1"))
    state.routes.placement["a"] = ("host:0",)
    state.actions.moves["a"] = Move("activate", "a", "host:1")
    views = [m for m in build_view(state, 100.0).models if m.name == "a"]
    assert [(m.device, m.state) for m in views] == [
        ("host:0", "active"),
        ("host:1", "activating"),
    ]
    state.routes.placement["a"] = ("host:0", "host:1")
    state.actions.moves["a"] = Move("evict", "a", "host:0")
    seen(state, report("host:1", ModelReport("a", "active")))
    views = [m for m in build_view(state, 100.0).models if m.name == "a"]
    assert [(m.device, m.state) for m in views] == [("host:1", "active"), ("host:0", "draining")]


def both_active(model: Any) -> SchedulerState:
    state = make_state(model)
    seen(state, *(report(d, ModelReport("a", "active")) for d in ("host:0", "host:1")))
    state.routes.placement["a"] = ("host:0", "host:1")
    return state


@pytest.mark.parametrize("stage", ["activating", "failed"])
def test_a_copy_that_does_not_serve_is_routed_no_more(stage: str) -> None:
    state = both_active(spec("a"))
    assert repairs(state, 100.0) == []
    seen(state, report("host:1", ModelReport("a", stage)))
    assert repairs(state, 100.0) == [Route("a", ("host:0",), "it was routed to host:0, host:1")]


def test_a_copy_that_comes_back_joins_and_shows_meanwhile() -> None:
    """Prevents that another action of the model is planned."""
    state = both_active(spec("a", replicas_max=2))
    state.routes.placement["a"], state.routes.reviving["a"] = ("host:0",), frozenset({"host:1"})
    seen(state, report("host:1", ModelReport("a", "activating")))
    assert repairs(state, 100.0) == []
    assert [(m.device, m.state) for m in build_view(state, 100.0).models] == [
        ("host:0", "active"),
        ("host:1", "activating"),
    ]
    seen(state, report("host:1", ModelReport("a", "active")))
    assert repairs(state, 100.0) == [Route("a", ("host:0", "host:1"), "it was routed to host:0")]


def test_a_placement_that_redis_lost_is_where_copies_are_active() -> None:
    state = both_active(spec("a", replicas_max=2))
    del state.routes.placement["a"]
    assert repairs(state, 100.0) == [
        Route("a", ("host:0", "host:1"), "it was routed to no device"),
    ]
    state.actions.moves["a"] = Move("activate", "a", "host:2")
    assert repairs(state, 100.0) == [Reroute("a", (), ("host:0", "host:1"))]


def test_the_rate_of_a_model_is_that_of_all_its_copies() -> None:
    state = both_active(spec("a", replicas_min=2))
    for at_s in (90.0, 100.0):
        for device in ("host:0", "host:1"):
            state.rates.observe(device, 1, {"a": int(at_s) * 10}, at_s)
    view = build_view(state, 100.0)
    (rate,) = build_status(state, view).token_rates.values()
    assert rate > 0
    assert rate == pytest.approx(sum(m.token_rate for m in view.models))


def test_too_few_copies_are_in_the_status() -> None:
    state = both_active(spec("a", replicas_min=2))
    state.startup.complete = True
    assert "a" not in degraded(state)
    seen(state, report("host:1", ModelReport("a", "activating")))
    assert degraded(state)["a"] == "1 of at least 2 copies (replicas.min) are up"


def test_idle_time_is_on_the_agents_clock_and_starts_with_the_activation() -> None:
    state = make_state()
    last = ModelReport("a", "active", last_request_unix_s=970.0)
    seen(state, report("host:0", last, ModelReport("b", "active")), at_s=140.0)
    models, _ = look(state, now_s=142.0)
    assert models["a"].idle_s == pytest.approx(32.0)
    assert models["b"].idle_s == pytest.approx(42.0)
    state.activations.ended("a", 139.0)
    assert look(state, now_s=142.0)[0]["a"].idle_s == pytest.approx(3.0)


def test_a_model_owes_the_time_that_its_load_took() -> None:
    state = make_state()
    seen(state, report("host:0", ModelReport("a", "active")))
    state.activations.restarted("a", 5.0, 140.0)
    owed = [look(state, now_s)[0]["a"].owes_s for now_s in (142.0, 145.0, 200.0)]
    assert owed == [3.0, 0.0, 0.0]


def test_a_model_that_its_agent_brought_up_again_owes_the_time_of_that() -> None:
    state = make_state()
    nothing: Any = None
    monitor = AgentMonitor(state, nothing, nothing)
    for stage, activation_s in (("active", 2.0), ("activating", 2.0), ("active", 7.0)):
        assert look(state)[0]["a"].owes_s == 0.0
        monitor.on_report(report("host:0", ModelReport("a", stage, activation_s=activation_s)))
    assert look(state)[0]["a"].owes_s == 7.0


def test_an_operators_demand_counts_like_a_request_and_names_the_device() -> None:
    state = make_state()
    state.demands.activations["a"] = "host:1"
    models, _ = look(state)
    assert (models["a"].waiting, models["a"].pinned_device) == (1, "host:1")
    assert (models["b"].waiting, models["b"].pinned_device) == (0, None)


@pytest.mark.parametrize(("policy", "weight"), [("prism", 50000), ("static", 40960)])
def test_sizes_are_measured_unless_placement_must_stay_fixed(policy: str, weight: int) -> None:
    state = make_state(policy=policy)
    assert look(state)[0]["a"].weight_bytes == 40960
    measured = ModelReport("a", "active", static_bytes=50000, kv_reserve_bytes=20480)
    seen(state, report("host:0", measured))
    assert look(state)[0]["a"].weight_bytes == weight


# --- repairs -------------------------------------------------------------------------------


def test_nothing_to_repair_when_redis_and_agents_agree() -> None:
    state = make_state()
    seen(state, report("host:0", ModelReport("a", "active")), report("host:1"))
    state.routes.placement = {"a": ("host:0",)}
    state.routes.unplaced = {"b": 4}
    assert repairs(state, 100.0) == []


def test_devices_that_may_still_come_are_left_alone() -> None:
    state = make_state()
    seen(state, report("host:0"))
    state.routes.placement = {"a": ("host:1",), "b": ("host:0",)}
    assert [r.model for r in repairs(state, 101.0)] == ["b"]
    (_, late) = sorted(repairs(state, 131.0), key=lambda r: r.model, reverse=True)
    assert late == Route("a", (), "it was routed to host:1")


def test_a_model_with_an_action_under_way_is_left_to_it() -> None:
    state = make_state()
    seen(state, report("host:0"), report("host:1"))
    state.routes.placement = {"a": ("host:0",)}
    state.actions.moves["a"] = Move("activate", "a", "host:0")
    assert repairs(state, 100.0) == []
    state.routes.placement = {"a": ("host:0", "host:1")}
    assert repairs(state, 100.0) == [Reroute("a", ("host:1",), ())], "not of the action's devices"


def test_requests_stranded_in_unplaced_and_second_copies() -> None:
    state = make_state()
    seen(state, *(report(d, ModelReport("a", "active")) for d in ("host:0", "host:1")))
    state.routes.placement, state.routes.unplaced = {"a": ("host:1",), "zzz": ("host:0",)}, {"a": 1}
    assert repairs(state, 100.0) == [
        Route("zzz", (), "not in the configuration"),
        Route("a", ("host:1",), "requests waited although it is placed"),
        DropCopy("a", "host:0", "host:1"),
    ]


# --- backoff ----------------------------------------------------------------------------------


def test_pauses_double_up_to_a_bound_and_start_over_after_a_quiet_time() -> None:
    backoff = Activations(SchedulerTiming(retry_s=1.0, retry_max_s=5.0, forget_s=60.0), 0.0)
    ends, now_s = [], 0.0
    for _ in range(5):
        backoff.failed("a", "g", f"at {now_s:g}", now_s)
        pause_s = next(p / 2 for p in range(1, 40) if not backoff.barred("a", now_s + p / 2))
        ends.append(pause_s)
        now_s += pause_s
    assert ends == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.failures("a") == 5
    backoff.failed("a", "g", "much later", now_s + 100)
    assert backoff.message("a", now_s + 100) == "much later"
    assert not backoff.barred("a", now_s + 101)


def test_pauses_of_a_model_that_cannot_be_loaded_become_longer() -> None:
    timing = SchedulerTiming(retry_s=1.0, retry_max_s=5.0, retry_lasting_max_s=40.0, forget_s=10.0)
    backoff = Activations(timing, 0.0)
    ends, now_s = [], 0.0
    for _ in range(8):
        backoff.failed("a", "g", "no such tensor", now_s, lasting=True)
        pause_s = next(float(p) for p in range(1, 99) if not backoff.barred("a", now_s + p))
        ends.append(pause_s)
        now_s += pause_s
    assert ends == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 40.0]
    assert backoff.cannot_load("a")
    backoff.failed("a", "h", "no room", now_s)
    assert not backoff.cannot_load("a")
    assert not backoff.cannot_load("b")
    backoff.loaded("a", 1.0, now_s)
    assert backoff.barred("a", now_s) == ("h",)


def test_a_lost_model_may_come_back_at_once_the_first_time() -> None:
    backoff = Activations(SchedulerTiming(retry_s=1.0), 0.0)
    backoff.died("a", "g", "killed", 0.0)
    assert backoff.barred("a", 0.0) == ()
    backoff.died("a", "g", "killed", 5.0)
    assert backoff.barred("a", 5.5) == ("g",)
    assert backoff.barred("b", 5.5) == ()
    backoff.clear("a")
    assert (backoff.barred("a", 5.5), backoff.failures("a")) == ((), 0)


# --- start-up times ------------------------------------------------------------------------


def started(model: str, seconds: float, number: int = 1) -> ModelReport:
    """Returns the report of a model that waited 50 s, and then loaded in `seconds`."""
    stages = {"engine": 20.0, "shrink": 30.0, "weights": seconds, "total": 50.0 + seconds}
    return ModelReport(model, "active", stages_s=stages, activations_total=number)


def startups(state: SchedulerState, model: str) -> dict[str, float]:
    return dict(look(state)[0][model].startup_s)


def two_machines(policy: str = "serverlessllm", store: str = "/dev/shm/s") -> SchedulerState:
    state = make_state(spec("a"), spec("big", weight_bytes=2 * 40960), policy=policy)
    devices = [DeviceConfig(f"host:{i}@{node}", CAPACITY, 4096, 3) for node in "xy" for i in (0, 1)]
    engine = EngineConfig(static_bytes=0, weight_store=store)
    config = msgspec.structs.replace(state.config, devices=devices, engine=engine)
    return SchedulerState(config, state.policy, state.timing, state.now_s)


def test_starts_are_estimated_by_what_each_machine_loads_from() -> None:
    state = two_machines()
    assert startups(state, "a") == {}, "nothing was measured"
    seen(state, report("host:0@x", started("a", 4.0)))
    places = ("host:0@x", "host:1@x", "host:0@y", "host:1@y")
    assert startups(state, "a") == dict.fromkeys(places, 4.0), "all from files"
    assert startups(state, "big") == dict.fromkeys(places, 8.0)
    seen(state, report("host:0@x", started("a", 4.0)))
    assert startups(state, "a") == dict.fromkeys(places, 4.0), "the same activation again"
    seen(state, report("host:0@x", started("a", 1.0, number=2)))
    assert startups(state, "a") == dict(zip(places, (1.0, 1.0, 4.0, 4.0), strict=True))
    assert startups(state, "big") == dict.fromkeys(places, 8.0), "big is in no store"
    state.starts.stored("host:0@y", "big")
    assert startups(state, "big") == dict(zip(places, (8.0, 8.0, 2.0, 2.0), strict=True))


def test_without_a_weight_store_each_start_reads_files() -> None:
    state = two_machines(store="")
    seen(state, report("host:0@x", started("a", 4.0)))
    seen(state, report("host:0@x", started("a", 3.0, number=2)))
    assert startups(state, "a")["host:1@x"] == startups(state, "a")["host:0@y"] == 3.0


def test_start_times_are_for_policies_that_ask() -> None:
    state = two_machines(policy="prism")
    seen(state, report("host:0@x", started("a", 4.0)))
    assert startups(state, "a") == {}
