"""Priorities of requests in a live cluster: waiting requests start in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Cluster, serving, until

BODY: dict[str, Any] = {"model": "a", "prompt": [9, 8, 7], "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a cluster that runs one request at a time."""
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path_factory.mktemp("cluster"),
            Path(temporary),
            '{"decode_step_ms": 100}',
            engine={"adapter": "fake", "static": "1MiB", "max_running": 1},
            scheduler={"interval": "500ms"},
            frontend={"port": 0, "priority": {"min": -5, "max": 5}},
            models=[{"name": "a", "path": "a", "slo": {"ttft": "10m"}}],
        ) as made,
    ):
        yield made


def waiting(cluster: Cluster) -> int:
    """Returns the number of requests in the device's queue, as the agent reports it."""
    status = httpx.get(f"{cluster.url}/status").json()
    return sum(model["waiting"] for agent in status["agents"] for model in agent["models"])


def test_those_of_higher_priority_start_first(cluster: Cluster) -> None:
    """Sends them while another request runs."""
    assert asyncio.run(ended(cluster, [-5, -1, 0, 5])) == [5, 0, -1, -5]


async def ended(cluster: Cluster, priorities: list[int]) -> list[int]:
    """Returns the priorities in the order in which their requests end."""
    order: list[int] = []

    async def ask(client: httpx.AsyncClient, priority: int) -> None:
        answer = await client.post("/v1/completions", json=BODY | {"priority": priority})
        assert answer.status_code == 200, answer.text
        order.append(priority)

    long = BODY | {"max_tokens": 200, "stream": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        async with client.stream("POST", "/v1/completions", json=long) as running:
            lines = running.aiter_lines()
            await anext(lines)
            asked = [asyncio.create_task(ask(client, priority)) for priority in priorities]
            await asyncio.to_thread(until, lambda: waiting(cluster) == len(asked), "all wait")
        await asyncio.gather(*asked)
    return order


def test_others_are_refused_by_name(cluster: Cluster) -> None:
    for asked in (-6, 6):
        refused = cluster.post(priority=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "priority"
        text = f"priority: {asked} is not between -5 and 5, the limits of this server"
        assert text in refused.json()["error"]["message"]
    assert cluster.post(priority=5).status_code == cluster.post(priority=None).status_code == 200
