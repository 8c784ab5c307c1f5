"""Machines that join Ray later become nodes of the running cluster until they leave."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from prism.serve.on_ray.membership import LEAVE_S
from tests.serve.conftest import until
from tests.serve.machines import Load, await_text
from tests.serve.ray_cluster import RayCluster
from tests.strangers import needs_root

MODELS = [{"name": "a", "path": "a", "replicas": {"min": 2, "max": 2}}]
JOINS, LEAVES = ": found by Ray; joining", "; removed"
PAIR = {"host:0@10-77-0-1", "host:0@10-77-0-2"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """Yields a cluster in which Ray does not run on the machine `c`."""
    with ExitStack() as stack:
        short_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prism-")))
        yield RayCluster("abc", 1, tmp_path, short_dir, stack, later="c")


def status(cluster: RayCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.machines.get("a", "/status"))
    return found


def devices(cluster: RayCluster) -> set[str]:
    return {agent["device"] for agent in status(cluster)["agents"]}


@pytest.mark.long
@needs_root
@pytest.mark.timeout(1500)
def test_machines_come_and_go_under_load(cluster: RayCluster, tmp_path: Path) -> None:
    """Adds and removes a machine, which returns with another address, like a new pod of KubeRay.

    No request fails, and the log reports each change once.
    """
    log = tmp_path / "drive"

    def count(text: str) -> int:
        return log.read_text().count(text)

    with cluster.drive(log, frontends=2, models=MODELS) as driver:
        loads = [Load(cluster.machines, name, 2, seed) for seed, name in enumerate("ab")]
        cluster.start_ray("c")
        await_text(log, "10-77-0-3: ready in ", 1, 180)
        cluster.ask("c")
        assert devices(cluster) == PAIR | {"host:0@10-77-0-3"}
        cluster.machines.kill("c")
        await_text(log, f"10-77-0-3: missing in Ray for {LEAVE_S:g} s{LEAVES}", 1, 360)
        until(lambda: devices(cluster) == PAIR, "it is forgotten", 30)
        assert not status(cluster)["degraded"]
        cluster.machines.move("c", "10.77.0.9")
        cluster.start_ray("c")
        await_text(log, "10-77-0-9: ready in ", 1, 180)
        cluster.ask("c")
        assert (count(JOINS), count(LEAVES)) == (2, 1)
        for name in "ab":
            assert count(f"10-77-0-{'ab'.index(name) + 1}: reloaded: ") == 3
        results = [result for each in loads for result in each.results()]
        print(f"\n{len(results)} requests")
        assert all(result.get("right") for result in results)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(180) == 0
    cluster.await_nothing_left()
