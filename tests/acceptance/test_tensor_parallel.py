"""A model on two devices, and another on one of the two, served by real engines."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.acceptance.harness import Cluster, cluster_yaml, complete_all, model_yaml, serving
from tests.acceptance.reference import judge, prompts

pytestmark = pytest.mark.sglang

WIDE, NARROW = "tiny-llama", "tiny-qwen3"
TOKENS = 24


@pytest.fixture(scope="module")
def two_devices(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    assert set(tiny_models) == {WIDE, NARROW}
    config = cluster_yaml(
        [model_yaml(WIDE, tp=2), model_yaml(NARROW)],
        [
            {"name": f"host:{i}", "capacity": "128MiB", "page": "64KiB", "engines": 2}
            for i in range(2)
        ],
    )
    with serving(config, tmp_path_factory.mktemp("wide")) as cluster:
        yield cluster


def test_two_ranks_answer_as_one_beside_a_neighbour(two_devices: Cluster) -> None:
    report = two_devices.model_report(WIDE)
    assert report is not None
    assert (report["state"], len(report["peers"])) == ("active", 1)
    jobs = [(name, p, TOKENS) for name in (WIDE, NARROW) for p in prompts(name, 4)]
    answers = complete_all(two_devices, jobs)
    assert not judge(jobs, answers)
    reserved = {a["device"]: a["reserved_bytes"] for a in two_devices.agents()}
    assert min(reserved.values()) >= report["static_bytes"] + report["kv_reserve_bytes"]


def test_it_leaves_both_devices_and_comes_back(two_devices: Cluster) -> None:
    assert two_devices.operate("evict", WIDE).returncode == 0
    assert two_devices.operate("evict", NARROW).returncode == 0
    assert [a["reserved_bytes"] for a in two_devices.agents()] == [0, 0]
    [prompt] = prompts(WIDE, 1)
    jobs = [(WIDE, prompt, TOKENS)]
    assert not judge(jobs, complete_all(two_devices, jobs))


def test_a_late_model_goes_to_two_devices(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chooses them by its traffic, and answers the same on one and on two."""
    late = {"ttft": "100us", "tpot": "100us"}
    config = cluster_yaml(
        [model_yaml(WIDE, tp="auto", slo=late, replicas={"max": 1})],
        [
            {"name": f"host:{i}", "capacity": "128MiB", "page": "64KiB", "engines": 1}
            for i in range(3)
        ],
        scheduler={"interval": "1s", "migrate_running": "move"},
    )
    jobs = [(WIDE, p, TOKENS) for p in prompts(WIDE, 4)]
    with serving(config, tmp_path_factory.mktemp("auto")) as cluster:
        assert degree(cluster) == 1
        end_s = time.monotonic() + 120
        while degree(cluster) == 1 and time.monotonic() < end_s:
            assert not judge(jobs, complete_all(cluster, jobs))
            time.sleep(0.5)
        cluster.wait_until(lambda: degree(cluster) == 2, "two devices")
        assert not judge(jobs, complete_all(cluster, jobs))
        cluster.wait_until(lambda: step_s(cluster) > 0, "a report with the time of a step")


def step_s(cluster: Cluster) -> float:
    report = cluster.model_report(WIDE)
    return float(report["step_s"]) if report else 0.0


def degree(cluster: Cluster) -> int:
    report = cluster.model_report(WIDE)
    return 1 + len(report["peers"]) if report else 0
