"""`policy: qlm` in a real cluster of fake engines."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.frontend.tiny_model import make_model
from tests.serve.conftest import Cluster, serving, until

# Each device has room for one of the three models at a time.
DEVICES = [
    {"name": f"host:{i}", "capacity": "4MiB", "page": "64KiB", "engines": 1} for i in range(2)
]
MODELS = [{"name": name, "path": "a"} for name in "abc"]
ENGINE = {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s", "max_running": 4}
FAKE = '{"decode_step_ms": 20}'
CLIENTS = 24


def status(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{cluster.url}/status").json()
    return found


def ask(cluster: Cluster, number: int) -> int:
    return cluster.post("abc"[number % 3], max_tokens=20, ignore_eos=True).status_code


def log(folder: Path, part: str) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob(f"*{part}*"))


def test_models_take_turns_and_nothing_is_lost(tmp_path: Path, short_dir: Path) -> None:
    """Kills the scheduler, an engine and an agent while requests wait and run.

    A swap starts an engine process. What a client gives up leaves the queues.
    """
    with serving(
        tmp_path, short_dir, FAKE, policy="qlm", devices=DEVICES, models=MODELS, engine=ENGINE
    ) as cluster:
        assert len(status(cluster)["placement"]) == 2
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            answers = [pool.submit(ask, cluster, number) for number in range(3 * CLIENTS)]
            until(lambda: status(cluster)["actions_total"].get("evict", 0) > 0, "a swap", 60)
            os.kill(cluster.child("prism.cluster"), 9)
            with suppress(httpx.TimeoutException):
                body = {"model": "c", "prompt": [9], "max_tokens": 2000, "ignore_eos": True}
                httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=0.5)
            until(lambda: sum(a.done() for a in answers) > CLIENTS, "the scheduler is back", 60)
            os.kill(next(pid for a in status(cluster)["agents"] if (pid := engine_of(a))), 9)
            os.kill(cluster.child("prism.agent"), 9)
            assert [answer.result() for answer in answers] == [200] * len(answers)
        until(lambda: status(cluster)["unplaced"] == {}, "no request is left")
    assert "is replaced by an engine that suits" in log(tmp_path, "agent")


def engine_of(agent: dict[str, Any]) -> int:
    return next((int(model["engine_pid"]) for model in agent["models"]), 0)


def test_a_model_that_no_device_holds_is_refused_by_name(tmp_path: Path, short_dir: Path) -> None:
    """Instances hold each other's models, so the smallest device counts."""
    make_model(tmp_path / "large", num_hidden_layers=24)
    with serving(
        tmp_path,
        short_dir,
        policy="qlm-first-idle",
        devices=[DEVICES[0], {**DEVICES[1], "capacity": "8MiB"}],
        models=[*MODELS, {"name": "large", "path": "large"}],
        engine=ENGINE,
        frontend={"port": 0, "refused_timeout": "1s"},
    ) as cluster:
        answer = cluster.post("large")
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert message == "large cannot be placed now: no serving instance can hold it"
        assert [cluster.post(name).status_code for name in "abc"] == [200] * 3
