"""Frontends under `prism-serve`: what a dead one leaves, and how they are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from prism.engines.fake import expected_tokens
from prism.serve.processes.children import ChildSpec
from prism.serve.processes.frontends import AgentNotifier, Frontend
from tests.serve.conftest import Cluster, serving, until

COUNT = 100
SLOW = json.dumps({"decode_step_ms": 40})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a cluster of two frontends, with engines that take 40 ms for a step."""
    folder = tmp_path_factory.mktemp("cluster")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(folder, Path(temporary), SLOW, frontend={"port": 0, "processes": 2}) as made,
    ):
        yield made


def has_no_requests(cluster: Cluster) -> bool:
    agents = json.loads(cluster.operate("status", "--json").stdout)["agents"]
    models = [model for agent in agents for model in agent["models"]]
    return not any(model.get("running") or model.get("waiting") for model in models)


def agent_log(cluster: Cluster) -> str:
    return (cluster.log.parent / "logs" / "agent-host0.log").read_text()


def frontends(cluster: Cluster) -> set[str]:
    return {path.name for path in cluster.run_dir.glob("frontend-*")}


def requests_ended(cluster: Cluster) -> dict[str, float]:
    """Returns the number of successful requests of each frontend."""
    text = httpx.get(f"{cluster.url}/metrics").text
    pattern = r'^prism_requests_total{frontend="(.*)",model="a",outcome="ok"} (.*)$'
    return {name: float(count) for name, count in re.findall(pattern, text, re.MULTILINE)}


def running(cluster: Cluster) -> float:
    """Returns the number of requests in the engine.

    The command line would take a second or more.
    """
    text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    found = re.findall(r"^prism_model_running_requests\{.*\} (.*)$", text, re.MULTILINE)
    return sum(map(float, found))


def test_all_processes_serve_the_port_and_are_in_the_metrics(cluster: Cluster) -> None:
    """Sends each request on a new connection."""
    count = 0
    while len(requests_ended(cluster)) < 2:
        assert cluster.post().status_code == 200
        count += 1
    assert sum(requests_ended(cluster).values()) == count


async def stream(client: httpx.AsyncClient, began: asyncio.Event) -> bool:
    """Returns whether the whole stream arrived."""
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": COUNT, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    ids: list[int] = []
    with suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json=body) as got:
            async for line in got.aiter_lines():
                began.set()
                if line.startswith("data: {"):
                    ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    assert ids == expected_tokens([9, 8, 7], len(ids))
    return len(ids) == COUNT


async def kill_under_load(cluster: Cluster) -> list[bool]:
    """Kills a frontend under twelve streams, eight of which may run at a time."""
    began = [asyncio.Event() for _ in range(12)]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        streams = [asyncio.create_task(stream(client, each)) for each in began]
        for each in began[:4]:
            await each.wait()
        os.kill(cluster.child("--frontend-id\0f0."), signal.SIGKILL)
        return await asyncio.gather(*streams)


async def keep_asking(cluster: Cluster, over: asyncio.Event, tokens: int, **limits: int) -> int:
    """Sends request after request, each of which must be answered whole. Returns their number."""
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    pool = httpx.Limits(**limits)
    count = 0
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=pool) as client:
        while not over.is_set():
            ids: list[int] = []
            async with client.stream("POST", "/v1/completions", json=body) as got:
                assert got.status_code == 200
                async for line in got.aiter_lines():
                    if line.startswith("data: {"):
                        ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
            assert ids == expected_tokens([9, 8, 7], tokens)
            count += 1
    return count


async def replace_under_load(cluster: Cluster) -> list[int]:
    """Replaces frontends under clients that keep their connection, and clients that reconnect."""
    over, before = asyncio.Event(), frontends(cluster)
    kinds = [{}, {"max_keepalive_connections": 0}]
    jobs = [
        asyncio.create_task(keep_asking(cluster, over, tokens, **limits))
        for limits in kinds
        for tokens in (2, 2, 40)
    ]
    try:
        done = await asyncio.to_thread(cluster.operate, "replace-frontends")
        assert done.returncode == 0, done.stderr
        await asyncio.to_thread(until, lambda: len(frontends(cluster) - before) == 2, "new ones")
        await asyncio.to_thread(until, lambda: not frontends(cluster) & before, "the old ones' end")
    finally:
        over.set()
    return list(await asyncio.gather(*jobs))


def test_replaced_frontends_drop_nothing(cluster: Cluster) -> None:
    assert all(asyncio.run(replace_under_load(cluster)))
    assert cluster.post().status_code == 200
    assert " ended (" not in cluster.output()


def test_orphans_of_a_dead_frontend_leave_the_engines_at_once(cluster: Cluster) -> None:
    """Detects the end without the heartbeat. The other frontend's streams are complete."""
    asyncio.run(kill_under_load(cluster))
    until(lambda: "frontend f0.2 has ended" in agent_log(cluster), "the launcher's word")
    until(lambda: has_no_requests(cluster), "no orphans")
    assert "does not have a heartbeat: its requests are cancelled" not in agent_log(cluster)
    assert cluster.post().status_code == 200
    until(lambda: frontends(cluster) == {"frontend-f0.3", "frontend-f1.2"}, "sockets")


async def kill_all_and_ask_again(cluster: Cluster) -> list[httpx.Response]:
    """Kills all frontends while a keyed request is open, and sends it again at once, twice."""
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": COUNT, "ignore_eos": True}
    ask: dict[str, Any] = {
        "json": body | {"return_token_ids": True},
        "headers": {"Idempotency-Key": "k"},
    }
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        broken = asyncio.create_task(client.post("/v1/completions", **ask))
        await asyncio.to_thread(until, lambda: running(cluster) > 0, "it runs")
        for slot in ("f0", "f1"):
            os.kill(cluster.child(f"--frontend-id\0{slot}."), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await broken
        again = (client.post("/v1/completions", **ask) for _ in range(2))
        return list(await asyncio.gather(*again))


def test_who_asks_again_gets_one_answer_and_no_connection_is_refused(cluster: Cluster) -> None:
    """Lets connections wait while no frontend runs, and drops the dead one's claim of the key."""
    first, second = asyncio.run(kill_all_and_ask_again(cluster))
    assert first.json()["choices"][0]["token_ids"] == expected_tokens([9, 8, 7], COUNT)
    assert second.json() == first.json()


def test_a_frontend_that_waits_for_its_restart_is_not_replaced(tmp_path: Path) -> None:
    """Prevents a successor that the restart would forget and that would run unsupervised."""
    spec = ChildSpec("", "time", (), 1.0)
    line = Mock(spec=AgentNotifier)
    line.new_id_suffix.return_value = ""
    frontend = Frontend("f0", spec, tmp_path, {}, line)
    frontend.start()
    until(lambda: frontend.exit_code() is not None, "its end")
    frontend.replace()
    assert frontend.frontend_id == "f0.1"
    assert not frontend.running()
