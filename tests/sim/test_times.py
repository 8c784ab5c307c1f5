"""Times of activations and moves (Prism §5.2, §7.4), alone and in a whole simulation, and the times
of the timeline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from prism.policies.data import Migrate
from prism_sim.cluster.activation import activation_s, migration_s
from prism_sim.cluster.world import World
from prism_sim.core.setup import ActivationSettings, ClusterSetup, DeviceSetup
from prism_sim.output.timeline import write_timeline
from tests.sim.clusters import MIB, cluster, model, request, work

SETTINGS = ActivationSettings(
    layout_s=1.0,
    load_bytes_s=10.0,
    node_load_bytes_s=30.0,
    plain_load_bytes_s=2.0,
    peer_bytes_s=100.0,
    network_bytes_s=20.0,
    restart_s=50.0,
)
MODEL = model(0, "a", weight_bytes=600)


def devices(node: str, count: int) -> list[DeviceSetup]:
    return [DeviceSetup(f"{node}:{i}", node, 64 * MIB, 32 * 1024, 4) for i in range(count)]


def test_a_load_is_bounded_by_the_gpus_links_and_by_the_host() -> None:
    def taken(ranks: int, restarts: bool = False) -> float:
        return activation_s(
            MODEL, devices("n", ranks), SETTINGS, restarts=restarts, weights_node="n"
        )

    assert taken(1) == pytest.approx(1.0 + 60.0)
    assert taken(4) == pytest.approx(1.0 + 20.0)  # the host feeds 30 bytes/s
    assert taken(4, restarts=True) == pytest.approx(50.0 + 75.0)


def test_weights_that_lie_on_another_node_come_over_the_network() -> None:
    there = dataclasses.replace(SETTINGS, weights_everywhere=False)
    (home,), (other,) = devices("n", 1), devices("m", 1)
    times_s = [
        activation_s(MODEL, [device], there, restarts=False, weights_node="n")
        for device in (home, other)
    ]
    assert times_s == [pytest.approx(61.0), pytest.approx(61.0)]
    fast = dataclasses.replace(there, load_bytes_s=1e9, node_load_bytes_s=1e9)
    far_s = activation_s(MODEL, [other], fast, restarts=False, weights_node="n")
    assert far_s == pytest.approx(1.0 + 30.0)


def test_a_move_takes_the_nodes_links_or_the_network_or_the_host() -> None:
    here, there = devices("n", 2), devices("m", 2)
    assert migration_s(MODEL, here, here, SETTINGS, 999.0) == pytest.approx(1.0 + 3.0)
    assert migration_s(MODEL, here, there, SETTINGS, 999.0) == pytest.approx(1.0 + 30.0)
    assert migration_s(MODEL, here, there, SETTINGS, 5.0) == pytest.approx(5.0)


@pytest.mark.parametrize(("target", "load_s"), [("gpu:1", 0.16), ("gpu:2", 1.6)])
def test_a_copy_that_moves_serves_where_it_was_until_it_is_there(
    target: str, load_s: float
) -> None:
    """Devices 0 and 1 are of one node, 2 is not; 16 MiB go over links of 100 and 10 MiB/s."""
    speeds = {"peer_bytes_s": 100.0 * MIB, "network_bytes_s": 10.0 * MIB, "load_bytes_s": 1.0 * MIB}
    activation = ActivationSettings(layout_s=0.0, **speeds)
    setup = cluster([model(0, "a", pinned_device="gpu:0")], 3, activation=activation, warm=True)
    requests = [request(0.25 * i, "a", 100, 3) for i in range(20)]
    world = World(setup, work(setup, requests))
    world.kernel.at(1.01, world.controller.apply, Migrate("a", "gpu:0", target, "test"))
    records = world.run()
    assert not records.errors
    number = int(target[-1])
    moved_s = 1.01 + load_s
    expected = [0 if one.arrival_s < moved_s else number for one in requests]
    assert list(records.device) == expected


def test_the_timeline_is_in_microseconds_and_names_their_owner(tmp_path: Path) -> None:
    setup: ClusterSetup = cluster([model(0, "a")], 2)
    records = World(setup, work(setup, [request(0.5, "a", 100, 5)])).run()
    path = tmp_path / "timeline.json"
    write_timeline(path, setup, records)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    begun = {e["name"]: e for e in events if e["ph"] == "b"}
    ended = {e["name"]: e for e in events if e["ph"] == "e"}
    assert begun["wait"]["ts"] == pytest.approx(0.5e6)
    assert begun["prefill"]["ts"] == pytest.approx(1e6 * records.started_s[0], abs=0.01)
    assert begun["decode"]["ts"] == pytest.approx(1e6 * records.first_s[0], abs=0.01)
    assert ended["decode"]["ts"] == pytest.approx(1e6 * records.end_s[0], abs=0.01)
    assert names[begun["decode"]["pid"]] == setup.devices[records.device[0]].name
    decided = next(e for e in events if e["ph"] == "i")
    assert decided["name"] == "activate a"
    assert names[decided["pid"]] == setup.devices[records.device[0]].name
    assert decided["ts"] == pytest.approx(1e6 * records.decisions[0].time_s, abs=0.01)
