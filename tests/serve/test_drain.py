"""`prism-serve drain` under load: the device is empty in the end, and every request is answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.agent import ActionResult
from prism.messages.cluster import OperatorCommand
from prism.serve import drain as drains
from prism.serve import operator
from tests.serve.conftest import SERVE, Cluster, serving, until
from tests.serve.test_reload import asked

SLOW = json.dumps({"decode_step_ms": 20})
DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in range(2)
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path, Path(temporary), SLOW, devices=DEVICES) as made,
    ):
        yield made


def places(cluster: Cluster) -> dict[str, set[str]]:
    agents = httpx.get(f"{cluster.url}/status").json()["agents"]
    return {a["device"]: {m["model"] for m in a["models"]} for a in agents}


def test_a_device_is_emptied_while_its_model_serves(cluster: Cluster) -> None:
    """Moves the serving model while its streams continue, even if the scheduler dies meanwhile."""
    (home,) = (device for device, models in places(cluster).items() if "a" in models)
    (other,) = places(cluster).keys() - {home}
    with asked(cluster, clients=3):
        command = [*SERVE, "drain", home, "--run-dir", str(cluster.run_dir)]
        drain = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: drain_of(cluster) == {home}, "the scheduler knows of it")
        os.kill(cluster.child("prism.cluster"), signal.SIGKILL)
        said, problem = drain.communicate(timeout=120)
        assert drain.returncode == 0, problem
        assert said.splitlines()[-1].startswith(f"{home} is empty after")
        # The other device's agent may not have reported to the new scheduler yet.
        until(lambda: places(cluster) == {home: set(), other: {"a", "b"}}, "both models moved")
        shown = cluster.operate("status").stdout
        assert f"{home} (drained)" in shown
        assert f"{home} (drained)" in cluster.operate("top", "--once").stdout
    refused = cluster.operate("migrate", "a", home)
    assert (refused.returncode, "is drained" in refused.stderr) == (1, True)
    assert cluster.operate("drain", "host:9").returncode == 2
    assert cluster.operate("undrain", home).stdout == f"{home} may have models again\n"
    assert cluster.operate("migrate", "a", home).returncode == 0


def test_it_ends_with_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends with an error when the scheduler can no longer report what is on the device."""
    answers = iter([ActionResult(0, True, "")])

    def ask(config: ClusterConfig, command: OperatorCommand, timeout_s: float) -> ActionResult:
        for answer in answers:
            return answer
        raise operator.OperatorError("the scheduler did not answer")

    monkeypatch.setattr(operator, "ask", ask)
    config = ClusterConfig("prism-test", str(tmp_path), "", "prism", devices=[], models=[])
    with pytest.raises(drains.DrainEndedError, match="the cluster has ended"):
        drains.drain(config, ["host:0"], print)


def drain_of(cluster: Cluster) -> set[str]:
    return set(httpx.get(f"{cluster.url}/status").json()["drained"])
