"""An engine's share of memory is on each of its GPUs, at whatever degree a placement runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.policies.baselines.dedicated import least_degree
from prism.policies.baselines.groups import Group
from prism.policies.baselines.mux_placement import Mesh, kv_bytes
from prism.policies.baselines.mux_throughput import Candidate
from prism.policies.bins import part
from prism.policies.placement import Hosted, ModelSpecView, Placement, Unit
from prism.policies.planning.target import part_bytes
from prism_sim.cluster.world import World
from prism_sim.scenario.scenario import load

GIB = 1 << 30
SCENARIO = """
gpus: {type: h100, count: 4}
models:
  - {name: a, shape: Llama-3.2-1B, weights: 2GiB, tp: %d}
generate: {seconds: 1, rate: 2}
policy: muxserve++
"""
SPEC = ModelSpecView("a", 8 * GIB, 1, GIB, 1.0, 1, 1, tp_degrees=(1, 2, 4), share_bytes=GIB)


def world(tmp_path: Path, given: int, tp: int) -> World:
    path = tmp_path / "a.yaml"
    path.write_text(SCENARIO % given)
    scenario = load(path)
    unit = Unit(tuple(f"gpu:{i}" for i in range(tp)), (Hosted("a"),))
    made = World(scenario.setup, scenario.work, target=Placement((unit,)))
    made.run()
    return made


@pytest.mark.parametrize("given", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_holds_its_part_and_an_engine(tmp_path: Path, given: int, tp: int) -> None:
    made = world(tmp_path, given, tp)
    for device in made.devices[:tp]:
        (account,) = device.ledger.accounts.values()
        assert account.static_bytes == 2 * GIB // tp + GIB
    (view,) = made.controller.view().models
    assert (view.tp, view.weight_bytes) == (tp, 2 * GIB + tp * GIB)
    assert part(view).weight_bytes == 2 * GIB // tp + GIB
    for wide in (1, 2, 4):  # as a new placement assumes
        floor_bytes = view.kv_floor_bytes // wide
        assert part_bytes(view, wide) == pytest.approx(2 * GIB // wide + GIB + floor_bytes, abs=1)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_searches_reckon_with_an_engine_on_each_gpu(tp: int) -> None:
    mesh = Mesh(tuple("abcd"[:tp]), 10 * GIB)
    candidate = Candidate(SPEC, tp, 1.0, 1)
    assert kv_bytes(mesh, [candidate]) == tp * (10 - 1) * GIB - 8 * GIB
    tight = Mesh(mesh.devices, (8 + 1) * GIB // tp + GIB)
    assert Group(tight).can_allocate(SPEC, 1)
    assert not Group(Mesh(mesh.devices, tight.capacity_bytes - 1)).can_allocate(SPEC, 1)
    assert least_degree(SPEC, tight.capacity_bytes) == tp
    assert least_degree(SPEC, tight.capacity_bytes - 1) == {1: 2, 2: 4, 4: None}[tp]
