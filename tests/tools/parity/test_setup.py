"""A simulation of a live configuration: memory and times as journals have them, or as reckoned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.parity.setup import (
    LiveMeasurements,
    cost_tables,
    initial,
    measured,
    parity_setup,
    replayed,
)
from prism.config.schema.cluster_config import (
    ClusterConfig,
    DeviceConfig,
    EngineConfig,
    SchedulerConfig,
)
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from prism.models.prefill_speed import PRIOR_TOKENS_PER_S
from prism.scheduler.decision_journal import Ended, Served, Started
from prism_sim.cluster.world import World
from prism_sim.costs.calibrate import save
from prism_sim.costs.model import GpuUsage, PromptChunk
from prism_sim.costs.table import StepTable, TableCost, linear_decode
from prism_sim.live.live_setup import HostCost
from tests.tools.parity.worlds import journals, queued, stepped
from tests.tools.parity.worlds import replayed as results_of

BATCHES, CONTEXTS, DECODE_S = linear_decode(1e-6)
MIB = 1 << 20


def table(model: str) -> StepTable:
    return StepTable(
        gpu="host",
        model=model,
        tp=1,
        source="by hand",
        dense_tokens=(1.0, 101.0),
        dense_s=(0.01, 0.02),
        pair_s=0.0,
        decode_batch=BATCHES,
        decode_context=CONTEXTS,
        decode_s=DECODE_S,
        request_s=0.005,
    )


def spec(name: str, **changes: object) -> ModelSpec:
    plain = {
        "name": name,
        "path": "there",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "kv_dtype": "float32",
        "context_length": 256,
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "weight_bytes": 100_000,
        "token_bytes": 256,
        "slo_ttft_s": 1.0,
        "slo_tpot_s": 0.1,
    }
    return ModelSpec(**{**plain, **changes})  # type: ignore[arg-type]


def config(*models: ModelSpec) -> ClusterConfig:
    return ClusterConfig(
        namespace="",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(f"host:{i}", 16 * MIB, 65536, 2) for i in (0, 1)],
        models=list(models),
        scheduler=SchedulerConfig(
            idle_threshold_s=7.0, min_idle_s=3.0, interval_s=2.0, rate_window_s=9.0
        ),
        engine=EngineConfig(adapter="fake", max_running=3, prefill_chunk_tokens=101),
    )


def served(model: str, seconds: float) -> Served:
    return Served(
        time_s=60.0,
        model=model,
        seconds=seconds,
        static_bytes=3 * MIB,
        reserve_bytes=MIB,
        quantum_bytes=262144,
        quantum_tokens=1024,
        block_tokens=16,
    )


def test_settings_and_devices_are_the_live_ones() -> None:
    setup = parity_setup(config(spec("a")), LiveMeasurements(reach_s=0.002), {"a": table("a")}, 2.0)
    assert [(d.name, d.capacity_bytes, d.engines) for d in setup.devices] == [
        ("host:0", 16 * MIB, 2),
        ("host:1", 16 * MIB, 2),
    ]
    assert {d.processor for d in setup.devices} == {"host"}
    assert setup.settings.min_idle_s == 3
    assert (setup.settings.idle_threshold_s, setup.interval_s, setup.rate_window_s) == (7, 2, 9)
    assert (setup.engine.max_running, setup.limits.prefill_chunk_tokens) == (3, 101)
    assert setup.engine.mixed_chunk
    assert setup.models[0].request_s == 0.002
    assert setup.models[0].submit_s == pytest.approx(0.003)


def test_memory_is_what_the_engine_reserved_or_what_the_start_up_check_reckons() -> None:
    found = measured([journals([], [served("a", 0.5), served("a", 0.7), served("a", 9.0)])])
    setup = parity_setup(config(spec("a"), spec("b")), found, {"a": table("a")}, 2.0)
    a, b = setup.models
    assert (a.static_bytes(1), a.kv_floor_bytes, a.activation_s) == (3 * MIB, MIB, 0.7)
    assert (a.parts[1].quantum_bytes, a.parts[1].quantum_blocks) == (262144, 64)
    assert b.activation_s is None
    assert b.static_bytes(1) >= 100_000 + 16 * MIB
    assert b.kv_floor_bytes % b.parts[1].quantum_bytes == 0


def test_an_activation_with_a_new_engine_lasts_from_the_eviction_before_it() -> None:
    """Counts the engine's start, which the agent's figure leaves out."""

    def begun(kind: str, model: str, time_s: float) -> Started:
        return Started(time_s=time_s, kind=kind, model=model, device="host:0")

    def ended(kind: str, model: str, time_s: float, problem: str = "") -> Ended:
        what = {"kind": kind, "model": model, "device": "host:0"}
        return Ended(time_s=time_s, problem=problem, **what)

    cluster = [
        begun("activate", "a", 10.0),
        ended("activate", "a", 13.0),
        begun("evict", "a", 20.0),
        begun("activate", "b", 20.0),
        ended("evict", "a", 25.0),
        ended("activate", "b", 29.0),
        begun("activate", "a", 40.0),
        ended("activate", "a", 90.0, "no memory"),
    ]
    found = measured([journals(cluster, [served("b", 0.5)])], restarts=True)
    assert found.activation_s == {"a": 3.0, "b": 4.0}


def test_evictions_are_timed_and_failed_ones_left_out() -> None:
    def eviction(start_s: float, seconds: float, problem: str = "") -> list[Started | Ended]:
        what = {"kind": "evict", "model": "a", "device": "host:0"}
        end_s = start_s + seconds
        return [Started(time_s=start_s, **what), Ended(time_s=end_s, problem=problem, **what)]

    cluster = eviction(60, 0.2) + eviction(70, 30.0, "lost") + eviction(110, 0.4)
    made = journals(cluster, [])
    assert measured([made]).unload_s == pytest.approx(0.3)


def test_the_simulation_begins_so_that_the_initial_placement_ends_as_live() -> None:
    """Evicts no model that has been up for less long than it took to load."""
    begin = Started(time_s=97.0, kind="activate", model="a", device="host:0")
    came = [msgspec.structs.replace(served(m, 1.0), time_s=t) for m, t in (("b", 99.0), ("a", 100))]
    made = journals([begin], [*came, msgspec.structs.replace(served("a", 1.0), time_s=103.0)])
    found, lead_s = initial(made, 1002.0, measured([made]))
    assert lead_s == pytest.approx(5.0)
    assert found.first_activation_s == {"a": pytest.approx(3.0), "b": pytest.approx(2.0)}
    setup = parity_setup(config(spec("a"), spec("b")), found, {"a": table("a")}, 2.0)
    world = World(setup, replayed(results_of("a", "b"), setup, lead_s))
    world.run()
    came_s = {d.model: d.time_s for d in world.records.decisions if d.kind == "active"}
    assert came_s == {"a": pytest.approx(3.0), "b": pytest.approx(2.0)}
    assert initial(journals([], []), 1002.0, LiveMeasurements())[1] == pytest.approx(1002.0 - 950.0)
    with pytest.raises(ConfigError, match="begins after the replay"):
        initial(journals([], []), 10.0, LiveMeasurements())


def test_ways_are_those_of_the_queues_and_speeds_begin_as_an_agents_do() -> None:
    """Measures the way from the frontend's stamp to the queue."""
    way = [queued(number, 60.0 + 0.01 * number) for number in (1, 2, 3)]
    came = [msgspec.structs.replace(record, arrival_s=60.0) for record in way]
    found = measured([journals([], [*came, stepped(61.0, 1, 2, 3)])])
    assert found.reach_s == pytest.approx(0.02)
    setup = parity_setup(config(spec("a")), found, {"a": table("a")}, 2.0)
    assert setup.models[0].speed_tokens_per_s == PRIOR_TOKENS_PER_S


def test_engines_of_host_devices_share_cores() -> None:
    cost = HostCost(TableCost(table("a")), 4.0)
    assert cost.usage((PromptChunk(10),), 0, 0) == GpuUsage(0.25, 0.25)
    assert cost.usage((), 0, 0) == GpuUsage(0.0, 0.0)
    assert cost.decode_s(2, 100) == TableCost(table("a")).decode_s(2, 100)


def test_tables_are_found_by_model(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match=r"--costs: .* is missing"):
        cost_tables(path, ["a"])
    save(path, table("a"))
    assert cost_tables(path, ["a"])["a"].request_s == 0.005
    with pytest.raises(ConfigError, match="does not have a table of b; run `prism-sim calibrate"):
        cost_tables(path, ["a", "b"])


def test_the_workload_is_what_was_replayed() -> None:
    setup = parity_setup(config(spec("a"), spec("b")), LiveMeasurements(), {"a": table("a")}, 2.0)
    results = results_of("b", "a")
    work = replayed(results, setup, 2.5)
    assert list(work.arrival_s) == [2.5, 3.5]
    first, second = results.records
    late = [msgspec.structs.replace(first, send_lag_ms=1200.0), second]
    scaled = msgspec.structs.replace(results.config, sent_slo_scale=4.0)
    found = replayed(msgspec.structs.replace(results, records=late, config=scaled), setup, 2.5)
    assert list(found.arrival_s) == [3.7, 3.7]
    assert found.slo_ttft_s[0] == pytest.approx(0.4)
    assert list(work.model) == [1, 0]
    assert work.slo_ttft_s[0] == 0.1
    with pytest.raises(ConfigError, match="--results: other is not among the models of --config"):
        replayed(results_of("other"), setup, 0.0)


@pytest.mark.parametrize("spread", [{"tp": 2}, {"degrees": (1, 2)}])
def test_tensor_parallel_models_are_refused(spread: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a may have tp > 1"):
        parity_setup(config(spec("a", **spread)), LiveMeasurements(), {"a": table("a")}, 2.0)


def test_running_requests_that_move_are_refused() -> None:
    moving = config(spec("a"))
    scheduler = msgspec.structs.replace(moving.scheduler, migrate_running="move")
    with pytest.raises(ConfigError, match="migrate_running: finish"):
        parity_setup(
            msgspec.structs.replace(moving, scheduler=scheduler),
            LiveMeasurements(),
            {"a": table("a")},
            2.0,
        )
