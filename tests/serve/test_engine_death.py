"""Engines and agents that are killed with SIGKILL under a whole cluster.

Every client gets its answer, or an error code after a correct beginning.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from prism.engines.fake import expected_tokens
from tests.serve.conftest import Cluster, descendants, serving, until

COUNT = 20
SLOW = json.dumps({"decode_step_ms": 2, "prefill_tokens_per_s": 80})


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def engines(cluster: Cluster) -> list[int]:
    """Returns the pids of forked engines: children of a fork server."""
    everyone = descendants(cluster.process.pid)
    servers = [pid for pid in everyone if "prism.engines.processes.forkserver" in command_of(pid)]
    return [pid for pid in servers if not descendants(pid)]


async def stream(client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
    """Returns the ids and the error of one stream."""
    body = {"model": "a", "prompt": prompt, "max_tokens": COUNT, "ignore_eos": True}
    got: dict[str, Any] = {"prompt": prompt, "ids": [], "error": None}
    more = {"stream": True, "return_token_ids": True, "temperature": 0}
    async with client.stream("POST", "/v1/completions", json={**body, **more}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                got["error"] = event.get("error")
                for choice in event.get("choices", []):
                    got["ids"] += choice["token_ids"]
    return got


async def kill_under_load(cluster: Cluster, victims: list[int]) -> list[dict[str, Any]]:
    """Kills the victims under eight requests, some of which have begun to answer."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=90) as client:
        jobs = [asyncio.create_task(stream(client, [20 + i] * 8)) for i in range(8)]
        await asyncio.sleep(0.7)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return list(await asyncio.gather(*jobs))


def check(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["error"] is None
        assert answer["ids"] == expected_tokens(answer["prompt"], COUNT)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tempfile import TemporaryDirectory

    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path_factory.mktemp("death"), Path(temporary), SLOW) as made,
    ):
        yield made


@pytest.mark.parametrize("turn", range(3))
def test_engines_that_die(cluster: Cluster, turn: int) -> None:
    until(lambda: len(engines(cluster)) == 2, "all engines up again")
    check(asyncio.run(kill_under_load(cluster, engines(cluster))))
    assert asyncio.run(one(cluster))["ids"] == expected_tokens([7], COUNT)


def test_an_agent_that_dies(cluster: Cluster) -> None:
    """Hands the queue to a successor that serves all models. Greedy output continues."""
    check(asyncio.run(kill_under_load(cluster, [cluster.child("prism.agent")])))
    assert asyncio.run(one(cluster))["ids"] == expected_tokens([7], COUNT)


def test_a_scheduler_that_dies(cluster: Cluster) -> None:
    check(asyncio.run(kill_under_load(cluster, [cluster.child("prism.cluster")])))


async def one(cluster: Cluster) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=90) as client:
        return await stream(client, [7])


def test_requests_were_sent_again(cluster: Cluster) -> None:
    """Checks that the kills above interrupted requests; otherwise those tests show nothing."""
    metrics = httpx.get(f"{cluster.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] != "#")
    mine = 'frontend="f0.1",model="a"'
    assert float(lines[f"prism_retries_total{{{mine}}}"]) > 0
    outcomes = {key for key in lines if key.startswith(f"prism_requests_total{{{mine}")}
    assert outcomes == {f'prism_requests_total{{{mine},outcome="ok"}}'}
