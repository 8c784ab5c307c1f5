"""`prism-serve up` by Ray on two network namespaces, each with its own address and raylet."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prism.serve.on_ray.ray_machines import HOST_DEVICES
from tests.serve.machines import Load, await_text, run
from tests.serve.ray_cluster import ADDRESS, DEVICE, RayCluster
from tests.strangers import needs_root

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
MODELS = [{"name": "a", "path": "a", "replicas": {"min": 2, "max": 2}}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ExitStack() as stack:
        short_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prism-")))
        yield RayCluster("ab", 1, tmp_path_factory.mktemp("ray"), short_dir, stack)


@pytest.mark.long
@needs_root
def test_the_head_starts_again(cluster: RayCluster, tmp_path: Path) -> None:
    """Serves without Ray and reconnects to the new head. Ctrl-C leaves nothing.

    Ray does not persist its state, so the new head knows nothing. The other machine's raylet ends
    and is started again, as by systemd.
    """
    log = tmp_path / "drive"
    with cluster.drive(log, models=MODELS) as driver:
        agents = cluster.agents()
        load = [Load(cluster.machines, name, 2, seed) for seed, name in enumerate(ADDRESSES)]
        began_s = time.monotonic()
        cluster.kill_ray("a")
        await_text(log, "lost Ray", 1, 180)
        lost_s = time.monotonic()
        cluster.restart_ray()
        await_text(log, "reconnected to Ray", 1, 180)
        again_s = time.monotonic()
        results = [result for each in load for result in each.results()]
        print(
            f"\nRay's loss was seen after {lost_s - began_s:.0f} s, its return after"
            f" {again_s - lost_s:.0f} s; {len(results)} requests, the longest"
            f" {max(r['ended_s'] - r['began_s'] for r in results):.1f} s"
        )
        assert all(result.get("right") for result in results)
        assert cluster.agents() == agents
        driver.send_signal(signal.SIGINT)
        assert driver.wait(120) == 0
    assert "shutting down" in log.read_text()
    cluster.await_nothing_left()


@pytest.mark.long
@needs_root
def test_ctrl_c_without_a_head(cluster: RayCluster, tmp_path: Path) -> None:
    with cluster.drive(tmp_path / "drive", models=MODELS) as driver:
        cluster.kill_ray("a")
        cluster.ask("b")
        driver.send_signal(signal.SIGINT)
        assert driver.wait(180) == 0
    cluster.await_nothing_left()
    cluster.restart_ray()


@pytest.mark.long
@needs_root
def test_a_machine_is_lost_and_comes_back_and_the_driver_dies(
    cluster: RayCluster, tmp_path: Path
) -> None:
    log, device = tmp_path / "drive", {**DEVICE, "name": "host:0"}
    nodes = [{"name": n, "address": where, "devices": [device]} for n, where in ADDRESSES.items()]
    with cluster.drive(log, models=MODELS, nodes=nodes, devices=[]) as driver:
        for name in ADDRESSES:
            cluster.ask(name)
        cluster.machines.kill("b")
        await_text(log, "b: Ray lost it", 1, 120)
        cluster.ask("a")
        cluster.start_ray("b")
        await_text(log, "b: ready in ", 2, 240)
        cluster.ask("b")
        cluster.operate("b", "down", "--here")
        await_text(log, "b: ended; restarting", 1, 30)
        await_text(log, "b: ready in ", 3, 120)
        cluster.ask("b")
        driver.kill()
        driver.wait(120)
        cluster.await_nothing_left()


NOWHERE = "10.77.0.1:1"
RESERVE = f"""
import ray
ray.init(address="{ADDRESS}", log_to_driver=False, configure_logging=False)
group = ray.util.placement_group([{{"{HOST_DEVICES}": 1}}])
print(group.wait(60), flush=True)
input()
"""


@pytest.mark.long
@needs_root
def test_what_does_not_fit_is_refused_and_nothing_is_left(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Refuses a mistake that a machine finds, and devices that Ray has promised to others."""
    own = Path("/dev/shm/model")  # of the first machine
    run(*cluster.machines.inside("a"), "cp", "-r", str(cluster.folder / "a"), str(own))
    here_alone = cluster.write_yaml(models=[{"name": "a", "path": str(own)}])
    found = cluster.refusal(here_alone)
    assert found.startswith("error: node 10-77-0-2: ")
    assert str(own) in found
    with cluster.run_ray(RESERVE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert "Ray has reserved devices of 10.77.0." in cluster.refusal(
            cluster.write_yaml(models=MODELS)
        )
        other.communicate("\n")
    nowhere = cluster.write_yaml(models=MODELS, ray=NOWHERE)
    assert f"no Ray cluster answers at {NOWHERE}" in cluster.refusal(nowhere)
    stranger = cluster.refusal(cluster.write_yaml(models=MODELS), RAY_AUTH_TOKEN="0" * 64)
    assert f"no Ray cluster answers at {ADDRESS}: " in stranger
    assert "token" in stranger
