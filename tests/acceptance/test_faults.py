"""Engines killed with -9, clean shutdown, and the errors that users' mistakes get."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism.config.resolved import read_resolved
from tests.acceptance.harness import (
    Answer,
    Cluster,
    async_client,
    cluster_yaml,
    complete,
    descendants,
    model_yaml,
    serving,
    stop,
)
from tests.acceptance.reference import judge, prompts
from tests.serve.conftest import alive

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

TOKENS = 120


def config(models: tuple[str, ...]) -> dict[str, Any]:
    return cluster_yaml(
        [model_yaml(name) for name in models],
        [{"name": "host:0", "capacity": "160MiB", "page": "64KiB", "engines": 2}],
    )


def engine_pid(cluster: Cluster, model: str) -> int:
    report = cluster.model_report(model)
    assert report is not None
    return int(report["engine_pid"])


async def kill_in_flight(cluster: Cluster, model: str) -> list[Answer]:
    """Kills the engine of 8 streams of which some have begun; returns how each ends."""
    async with async_client(cluster) as client:
        jobs = [
            asyncio.create_task(complete(client, model, prompt, TOKENS))
            for prompt in prompts(model, 8)
        ]
        while (cluster.model_report(model) or {}).get("running", 0) < 4:
            await asyncio.sleep(0.05)
        os.kill(engine_pid(cluster, model), signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*jobs), 180)


@pytest.fixture(scope="module")
def cluster(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with serving(config(tiny_models), tmp_path_factory.mktemp("faults")) as made:
        yield made


def test_five_engine_kills_lose_nothing(cluster: Cluster, tiny_models: tuple[str, str]) -> None:
    model = tiny_models[1]
    reserved_before = reserved_bytes(cluster)
    for kill in range(1, 6):
        answers = asyncio.run(kill_in_flight(cluster, model))
        assert not judge([(model, prompt, TOKENS) for prompt in prompts(model, 8)], answers)
        wait_for_restarts(cluster, kill)
    check_one(model, asyncio.run(one(cluster, model)))
    assert cluster.operate("flush").returncode == 0
    cluster.wait_until(
        lambda: reserved_bytes(cluster) == reserved_before, "the dead engines' pages back", 15
    )


def wait_for_restarts(cluster: Cluster, kills: int) -> None:
    def restarted() -> bool:
        return sum(agent["engine_restarts_total"] for agent in cluster.agents()) >= kills

    cluster.wait_until(restarted, "a replacement of the killed engine")


def reserved_bytes(cluster: Cluster) -> int:
    """Returns the bytes that the device's ledger holds for all its clients, living or dead."""
    return sum(int(agent["reserved_bytes"]) for agent in cluster.agents())


def check_one(model: str, answer: Answer) -> None:
    assert not judge([(model, prompts(model, 1)[0], TOKENS)], [answer])


async def one(cluster: Cluster, model: str) -> Answer:
    async with async_client(cluster) as client:
        return await complete(client, model, prompts(model, 1)[0], TOKENS)


def test_sigterm_finishes_what_runs_and_leaves_nothing(
    cluster: Cluster, tiny_models: tuple[str, str]
) -> None:
    """Ends the module's cluster, so it must be last."""
    model = tiny_models[0]
    children = descendants(cluster.process.pid)
    namespace = read_resolved(cluster.run_dir / "cluster.json").namespace
    assert list(Path("/dev/shm").glob(f"prism-kvcached.{namespace}.*"))
    check_one(model, asyncio.run(stop_while_streaming(cluster, model)))
    cluster.process.wait(60)
    assert cluster.process.returncode == 0
    time.sleep(0.5)
    assert not [pid for pid in children if alive(pid)]
    assert not cluster.run_dir.exists()
    assert not list(Path("/dev/shm").glob(f"prism-kvcached.{namespace}.*"))


async def stop_while_streaming(cluster: Cluster, model: str) -> Answer:
    running = asyncio.create_task(one(cluster, model))
    while not (cluster.model_report(model) or {}).get("running"):
        await asyncio.sleep(0.05)
    await asyncio.to_thread(stop, cluster)
    return await running
