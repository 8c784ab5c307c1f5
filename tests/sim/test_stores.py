"""Sources of weights: the node's host memory, another node's, or the disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prism.errors import ConfigError
from prism.policies import registry
from prism.policies.data import Action, Activate, Evict, Migrate
from prism_sim.cluster.stores import HostStores
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings, ClusterSetup
from prism_sim.scenario.scenario import check, load, read_config
from tests.sim.clusters import MIB, cluster, model, request, work

# 16 MiB a model: 0.5 s from host memory, 4 s from disk, 2 s over the network.
SETTINGS: dict[str, Any] = {
    "layout_s": 0.0,
    "load_bytes_s": 32.0 * MIB,
    "disk_bytes_s": 4.0 * MIB,
    "network_bytes_s": 8.0 * MIB,
    "peer_bytes_s": 160.0 * MIB,
    "host_store_bytes": 32 * MIB,
}


def setup(models: str = "ab", **changes: object) -> ClusterSetup:
    """Devices 0 and 1 are of one node, 2 is not."""
    made = [model(i, name) for i, name in enumerate(models)]
    return cluster(made, 3, activation=ActivationSettings(**{**SETTINGS, **changes}), warm=False)


def up(built: ClusterSetup, *orders: tuple[float, Action]) -> tuple[Records, list[float]]:
    """Returns how long each activation takes, when nothing but `orders` happens."""
    policy = dataclasses.replace(registry.get("prism"), plan=lambda *_: (), is_balanced=None)
    trace = [request(200.0, m.name) for m in built.models]
    world = World(built, work(built, trace), policy)
    for at_s, order in orders:
        world.kernel.at(at_s, world.controller.apply, order)
    records, taken = world.run(), list[float]()
    for at_s, order in orders:
        if not isinstance(order, Evict):
            kind = "migrated" if isinstance(order, Migrate) else "active"
            after = [
                d.time_s - at_s
                for d in records.decisions
                if (d.kind, d.model) == (kind, order.model) and d.time_s >= at_s
            ]
            taken.append(after[0])
    return records, taken


def stores_of(built: ClusterSetup) -> HostStores:
    return HostStores(built, Records(work(built, [request(0.0, "a")])))


def activate(name: str, device: int) -> Activate:
    return Activate(name, f"gpu:{device}", "test")


def evict(name: str, device: int) -> Evict:
    return Evict(name, f"gpu:{device}", "test")


def test_the_first_time_from_disk_then_from_host_memory() -> None:
    _, taken = up(
        setup(),
        (1.0, activate("a", 0)),
        (20.0, evict("a", 0)),
        (30.0, activate("a", 1)),
    )
    assert taken == [pytest.approx(4.5), pytest.approx(0.5)]


@pytest.mark.parametrize(("network", "seconds"), [(8.0, 2.5), (4.0, 4.5), (1.0, 4.5)])
def test_another_nodes_memory_where_that_is_faster(network: float, seconds: float) -> None:
    records, taken = up(
        setup(network_bytes_s=network * MIB),
        (1.0, activate("a", 0)),
        (20.0, evict("a", 0)),
        (30.0, activate("a", 2)),
    )
    assert taken == [pytest.approx(4.5), pytest.approx(seconds)]
    assert records.counts["weights_disk"] >= 1
    assert (records.counts.get("weights_peer", 0) > 0) == (network > 4.0)


def test_a_move_to_another_node_takes_them_as_an_activation_does() -> None:
    _, taken = up(setup(), (1.0, activate("a", 0)), (20.0, Migrate("a", "gpu:0", "gpu:2", "test")))
    assert taken == [pytest.approx(4.5), pytest.approx(2.5)]
    _, taken = up(setup(), (1.0, activate("a", 0)), (20.0, Migrate("a", "gpu:0", "gpu:1", "test")))
    assert taken == [pytest.approx(4.5), pytest.approx(0.1)]  # from GPU to GPU


def test_what_was_used_longest_ago_leaves() -> None:
    built = setup("abc")
    stores = stores_of(built)
    a, b, c = built.models
    assert stores.fetch(a, "node0", 0.0) == 4.0
    assert stores.fetch(b, "node0", 10.0) == 14.0
    assert stores.fetch(a, "node0", 20.0) == 20.0
    assert stores.fetch(c, "node0", 30.0) == 34.0  # b goes
    assert stores.fetch(a, "node0", 40.0) == 40.0
    assert stores.fetch(b, "node1", 50.0) == 54.0  # no peer has it
    assert stores.fetch(b, "node0", 60.0) == 62.0  # node1 has it


def test_what_is_on_its_way_is_waited_for_and_stays() -> None:
    built = setup("abc", host_store_bytes=16 * MIB)
    stores = stores_of(built)
    a, b, _ = built.models
    assert stores.fetch(a, "node0", 0.0) == 4.0
    assert stores.fetch(a, "node0", 1.0) == 4.0
    assert stores.fetch(a, "node1", 1.0) == 5.0  # not whole at node0 yet
    assert stores.fetch(b, "node0", 2.0) == 6.0  # no room while a comes
    assert stores.fetch(b, "node0", 7.0) == 11.0  # so it was not kept


def test_a_model_larger_than_the_memory_is_never_kept() -> None:
    built = setup(host_store_bytes=8 * MIB)
    stores = stores_of(built)
    assert [stores.fetch(built.models[0], "node0", at) - at for at in (0.0, 10.0)] == [4.0, 4.0]


def test_weights_come_while_others_leave(tmp_path: Path) -> None:
    """Overlaps the wait for memory with the disk's time, by the live scheduler's hint."""
    built = setup("abcde")
    plan = [(1.0, activate(name, 0)) for name in "abc"]  # three fit, with the KV that each has
    _, taken = up(
        built, *plan, (20.0, evict("a", 0)), (20.0, activate("d", 0)), (40.0, activate("e", 1))
    )
    assert taken[3:] == [pytest.approx(4.5), pytest.approx(4.5)]


FILE = """
gpus: {count: 2, nodes: 2}
models: [{name: m, shape: Llama-3.2-1B}]
generate: {seconds: 10, rate: 1}
"""


def test_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(FILE)
    plain = load(path).setup.activation
    assert plain.host_store_bytes is None
    changes = {"activation.host_store": "64GiB", "activation.disk_rate": "200MB"}
    bounded = load(path, changes).setup.activation
    assert (bounded.host_store_bytes, bounded.disk_bytes_s) == (64 << 30, 200_000_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activation.weights_everywhere": False},
            "activation.weights_everywhere: false cannot be combined with host_store",
        ),
        ({"activation.disk_rate": "0.4B"}, "activation.disk_rate, gpus.network_rate: must be"),
        (
            {"policy": "serverlessllm"},
            "activation.host_store: cannot be combined with policy 'serverlessllm'",
        ),
        ({"policy": "aegaeon"}, "activation.host_store: cannot be combined with policy 'aegaeon'"),
        ({"policy": "qlm"}, "activation.host_store: cannot be combined with policy 'qlm'"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(FILE)
    config = read_config(path, {"activation.host_store": "64GiB", **change})
    with pytest.raises(ConfigError, match=message):
        check(config, path)
