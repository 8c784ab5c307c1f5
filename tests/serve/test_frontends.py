"""Frontends under `prism-serve`: what is left of one that dies, and how they are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.serve.conftest import Cluster, serving, until

SLOW = json.dumps({"decode_step_ms": 40})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Engines that take 40 ms for a step."""
    folder = tmp_path_factory.mktemp("cluster")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(folder, Path(temporary), SLOW) as made,
    ):
        yield made


def has_no_requests(cluster: Cluster) -> bool:
    agents = json.loads(cluster.operate("status", "--json").stdout)["agents"]
    models = [model for agent in agents for model in agent["models"]]
    return not any(model.get("running") or model.get("waiting") for model in models)


def agent_log(cluster: Cluster) -> str:
    return (cluster.log.parent / "logs" / "agent-host0.log").read_text()


async def broken_stream(client: httpx.AsyncClient, began: asyncio.Event) -> None:
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": 240, "ignore_eos": True}
    with suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as got:
            async for _ in got.aiter_lines():
                began.set()


async def kill_under_load(cluster: Cluster) -> None:
    """Twelve streams; eight of them may run at a time."""
    began = asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        streams = [asyncio.create_task(broken_stream(client, began)) for _ in range(12)]
        await began.wait()
        os.kill(cluster.child("prism.frontend"), signal.SIGKILL)
        await asyncio.gather(*streams)


def test_orphans_of_a_dead_frontend_leave_the_engines_at_once(cluster: Cluster) -> None:
    """Not by its heartbeat: that log line never comes."""
    asyncio.run(kill_under_load(cluster))
    until(lambda: "frontend f0.1 has ended" in agent_log(cluster), "the launcher's word")
    until(lambda: has_no_requests(cluster), "no orphans")
    assert "is gone: its requests are cancelled" not in agent_log(cluster)
    assert cluster.post().status_code == 200
    assert [path.name for path in cluster.run_dir.glob("frontend-*")] == ["frontend-f0.2"]
