"""KV memory that is always an engine's own: enough for its longest request, or none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from prism.errors import ConfigError
from prism_sim.cluster.world import World
from prism_sim.scenario.scenario import Scenario, load

CONFIG = """
gpus: {{type: h100, count: 1, memory: {memory}, memory_fraction: 1}}
models:
  - {{name: a, shape: Llama-3.1-8B}}
generate: {{seconds: 20, rate: 1, input_max: 512, output_max: 512}}
slo: {{ttft: 5s, tpot: 100ms}}
"""


def scenario(folder: Path, memory: str, **engine: object) -> Scenario:
    path = folder / "cluster.yaml"
    path.write_text(CONFIG.format(memory=memory))
    return load(path, {f"engine.{key}": value for key, value in engine.items()})


def test_the_longest_request_always_has_its_kv(tmp_path: Path) -> None:
    with_reserve = scenario(tmp_path, "40GiB")
    (model,), trace = with_reserve.setup.models, with_reserve.work
    longest = max(i + o for i, o in zip(trace.prompt_tokens, trace.output_tokens, strict=True))
    floor_tokens = model.kv_floor_bytes / model.token_bytes
    assert longest <= floor_tokens < 2 * longest + 64
    (without,) = scenario(tmp_path, "40GiB", memory_reserve=False).setup.models
    assert without.kv_floor_bytes == 0


def test_an_engine_without_a_reserve_starts_where_one_with_it_does_not(tmp_path: Path) -> None:
    """Weights of 8B take 15 GiB, the engine 1; 1,024 tokens of KV 128 MiB."""
    weights_mib = math.ceil(scenario(tmp_path, "40GiB").setup.models[0].weight_bytes / 2**20)
    memory = f"{weights_mib + 1024 + 32}MiB"
    with pytest.raises(ConfigError, match=r"a: weights, engine and one request of \d+ tokens"):
        scenario(tmp_path, memory)
    bare = scenario(tmp_path, memory, memory_reserve=False)
    records = World(bare.setup, bare.work).run()
    assert any(d.kind == "activate" for d in records.decisions)
    assert records.ended == len(bare.work)
