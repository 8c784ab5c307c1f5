"""Models with pools for windows and states hold what the live engine's plan says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from prism.config.checks.adapters import adapter_named
from prism.config.checks.memory_needs import shard_of
from prism.engines.model_memory import plan
from prism.errors import ConfigError
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from prism.policies.data import request_kv_tokens
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import EngineSettings, KvNeed
from prism_sim.costs.checkpoint import read_shape
from prism_sim.scenario.config import SimEngineYaml
from prism_sim.scenario.models import kv_need
from prism_sim.scenario.scenario import load
from tests.frontend.tiny_model import VOCAB_SIZE, make_model
from tests.sim.clusters import MIB, cluster, model, parts, request, work
from tests.sim.test_moving import moved

CONTEXT, CHUNK, PAGE = 1000, 512, 2 << 20
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCAB_SIZE,
    "dtype": "bfloat16",
}
GEMMA = {**SIZES, "model_type": "gemma3_text", "sliding_window": 64}
QWEN = {**SIZES, "model_type": "qwen3_5_text"}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024, "mamba_d_state": 64}
FALCON = {**SIZES, **MAMBA, "model_type": "falcon_h1"}
HYBRIDS = {"windows": GEMMA, "states in some layers": QWEN, "states in all layers": FALCON}
# A window of 96 tokens of twice the size, and a state of 40 tokens.
NEED = KvNeed(16, window_tokens=96, window_share=2.0, state_tokens=40)


def live(folder: Path, config: dict[str, Any]) -> ModelSpec:
    pools = adapter_named("sglang").traits().window_pools
    files = inspect_model(make_model(folder, **config), "key", pools)
    shape = files.shape("bfloat16", None)
    return ModelSpec(name="m", path="", slo_ttft_s=1, slo_tpot_s=1, **shape)


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("config", HYBRIDS.values(), ids=HYBRIDS)
def test_a_simulated_hybrid_holds_what_the_engines_plan_says(
    tmp_path: Path, config: dict[str, Any], tp: int
) -> None:
    """Compares them on each of `tp` devices. Of 4 KV heads, 8 devices have one each."""
    spec = shard_of(live(tmp_path / "m", config), tp)
    planned = plan(
        ActivateEngine(spec),
        capacity_bytes=1 << 33,
        page_bytes=PAGE,
        static_bytes=0,
        chunk_tokens=CHUNK,
    )
    file = tmp_path / "sim.yaml"
    engine = {"prefill_chunk_tokens": CHUNK}
    models = [{"name": "m", "shape": "m/config.json", "kv_reserve_tokens": CONTEXT, "tp": tp}]
    data = {"models": models, "engine": engine, "generate": {"seconds": 9, "rate": 1}}
    file.write_text(json.dumps({**data, "gpus": {"count": tp}}))
    setup = load(file).setup.models[0]
    need = setup.need
    assert not need.is_plain
    assert setup.token_bytes / tp == spec.token_bytes == planned.layout.token_bytes
    assert setup.kv_floor_bytes / tp == planned.reserve_bytes
    part = setup.parts[tp]
    simulated = {
        "quantum_bytes": part.quantum_bytes,
        "quantum_tokens": part.quantum_blocks * need.block_tokens,
        "window_tokens": need.window_tokens,
        "window_share": need.window_share,
        "state_tokens": need.state_tokens,
    }
    assert simulated == {**dict.fromkeys(simulated, 0), **planned.kv_need()}
    assert request_kv_tokens(need, CONTEXT) * setup.token_bytes <= setup.kv_floor_bytes


def test_windows_without_a_separate_pool_keep_all_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "model_type": "gemma2"}))
    shape = read_shape(tmp_path)
    assert shape.is_uniform
    assert shape.kv_token_bytes() == 12 * 2 * 4 * 128 * 2
    assert kv_need(shape, SimEngineYaml()).is_plain
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    assert read_shape(tmp_path).kv_token_bytes() == 2 * 2 * 4 * 128 * 2  # each sixth layer


def test_layers_that_share_kv_keep_it_once(tmp_path: Path) -> None:
    shared = {"model_type": "gemma3n_text", "num_kv_shared_layers": 4, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **shared}))
    shape = read_shape(tmp_path)
    assert (shape.kv_layers, shape.layers) == (1, 12)  # of 8 with own KV, each fifth is full
    read = shape.read_token_bytes()
    assert sum(read.values()) == 12 * 2 * 4 * 128 * 2  # attention reads it in every layer
    assert shape.kv_token_bytes() == 2 * 4 * 128 * 2


def test_gpus_share_the_heads_of_states_evenly(tmp_path: Path) -> None:
    make_model(tmp_path / "m", **QWEN, linear_num_key_heads=2, linear_num_value_heads=4)
    file = tmp_path / "sim.yaml"
    models = [{"name": "m", "shape": "m/config.json", "tp": 4}]
    trace = {"seconds": 9, "rate": 1}
    file.write_text(json.dumps({"models": models, "gpus": {"count": 4}, "generate": trace}))
    with pytest.raises(ConfigError, match="2 heads of states cannot be shared by 4 ranks"):
        load(file)


def served(*requests: tuple[float, int, int], kv_mib: int, **engine: Any) -> tuple[Records, int]:
    """Serves the requests. Returns the records, and the peak of KV blocks."""
    part = dataclasses.replace(parts()[1], quantum_blocks=1, quantum_bytes=16 * 1024)
    sizes = {"weight_bytes": (64 - kv_mib) * MIB, "kv_floor_bytes": 0, "parts": {1: part}}
    one = model(0, "a", need=NEED, **sizes)
    setup = cluster([one], engine=EngineSettings(max_running=99, **engine))
    trace = [request(at_s, "a", prompt, output) for at_s, prompt, output in requests]
    world = World(setup, work(setup, trace))
    records = world.run()
    assert not records.errors
    (device,) = world.devices
    assert device.site.spaces[0].live_blocks == 0  # all is freed
    return records, (device.ledger.peak_bytes - (64 - kv_mib) * MIB) // part.quantum_bytes


MANY = [(0.01 * i, 30 + 7 * (i % 11), 20 + 9 * (i % 13)) for i in range(60)]


@pytest.mark.parametrize("kv_mib", [1, 4, 40])
def test_a_run_of_steps_holds_as_much_as_single_steps(kv_mib: int) -> None:
    """Grows windows in the middle of runs, and retracts requests where memory is short."""
    (runs, most), (steps, also) = (
        served(*MANY, kv_mib=kv_mib, **engine) for engine in ({}, {"run_steps": 1})
    )
    assert list(runs.end_s) == pytest.approx(list(steps.end_s))
    assert (runs.counts, most) == (steps.counts, also)
    assert ("retractions" in runs.counts) == (kv_mib < 40)


def test_requests_hold_a_window_and_a_state_however_long_they_are() -> None:
    """Counts blocks of 16 tokens: the main pool's, 12 of a window of 96 tokens of twice the size
    and a state of 40 tokens, rounded up together."""
    for output, blocks in ((4, 4 + 11), (100, 10 + 15), (900, 60 + 15)):
        _, most = served((0.0, 60, output), kv_mib=40)
        assert most == blocks


def test_windows_and_states_are_computed_again_where_requests_move() -> None:
    kept = moved("gpu:1", (0.5, 500, 100))
    again = moved("gpu:1", (0.5, 500, 100), need=NEED)
    assert again.counts["moved"] == 1
    # 545 tokens at 10,000 a second, without the copy of 9 quanta over 10 MiB/s
    copied_s = 9 * 64 * 1024 / (10 * MIB)
    assert again.end_s[0] - kept.end_s[0] == pytest.approx(0.0545 - copied_s, abs=0.011)
