"""A model over two devices in a real cluster of fake engines: a rank that dies, an agent that dies,
and an end that leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

import kvcached
from prism.messages.agent import ModelReport
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.node.run_dir import find
from tests.serve.conftest import Cluster, alive, serving, until

DEVICES = [
    {"name": name, "capacity": "16MiB", "page": "64KiB", "engines": 2}
    for name in ("host:0", "host:1")
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = [{"name": "a", "path": "a", "tp": 2}, {"name": "b", "path": "b"}]
    folder = tmp_path_factory.mktemp("tp")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(folder, Path(temporary), devices=DEVICES, models=models) as made,
    ):
        yield made


def wide(cluster: Cluster) -> tuple[str, ModelReport]:
    """Returns the device of rank 0 and the report on the model."""
    result = operator.ask(find(cluster.run_dir), OperatorCommand("status"), 60.0)
    agents = msgspec.json.decode(result.message, type=ClusterStatus).agents
    [found] = [(a.device, m) for a in agents for m in a.models if m.model == "a"]
    return found


def rank_pid(cluster: Cluster, report: ModelReport) -> int:
    """Returns the pid of rank 1, from its device's ledger."""
    namespace = find(cluster.run_dir).namespace
    clients = kvcached.Device.open(report.peers[0], namespace=namespace).usage().clients
    return next(c.pid for c in clients if c.name == f"{report.engine_id}.1")


def answers(cluster: Cluster) -> bool:
    responses = [cluster.post(model) for model in ("a", "b")]
    return [r.status_code for r in responses] == [200, 200]


def test_it_is_served_beside_another(cluster: Cluster) -> None:
    device, report = wide(cluster)
    assert {device, *report.peers} == {"host:0", "host:1"}
    assert answers(cluster)
    shown = cluster.operate("status").stdout
    assert ", ".join((device, *report.peers)) in shown


def test_a_dead_rank_is_replaced(cluster: Cluster) -> None:
    _, before = wide(cluster)
    os.kill(rank_pid(cluster, before), signal.SIGKILL)
    until(lambda: not alive(before.engine_pid), "rank 0 ends with it")
    assert answers(cluster)
    assert wide(cluster)[1].engine_id != before.engine_id


def test_the_other_devices_agent_may_die(cluster: Cluster) -> None:
    """Keeps the rank there, which belongs to another agent's engine."""
    _, report = wide(cluster)
    [peer] = report.peers
    os.kill(
        cluster.child(
            f"prism.agent\0--config\0{cluster.run_dir / 'cluster.json'}\0--device\0{peer}"
        ),
        signal.SIGKILL,
    )
    assert cluster.post("a").status_code == 200
    until(lambda: answers(cluster), "all are served again", 60)
    assert wide(cluster)[1].engine_id == report.engine_id


def test_nothing_is_left(cluster: Cluster) -> None:
    namespace = find(cluster.run_dir).namespace
    assert cluster.stop() == 0
    assert not any(alive(pid) for pid in cluster.pids)
    for device in ("host:0", "host:1"):
        assert not kvcached.segment_path(device, namespace).exists()
