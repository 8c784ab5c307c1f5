"""Token-level switching in a real cluster of fake engines, whose processes are killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import httpx

from tests.chaos.load import Asked, Stream, ask, varied, verdict
from tests.serve.conftest import Cluster, serving

DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in range(3)
]
STREAMS = 60
FAKE = '{"decode_step_ms": 10}'


def engine_pids(cluster: Cluster) -> list[int]:
    agents = httpx.get(f"{cluster.url}/status").json()["agents"]
    return [model["engine_pid"] for agent in agents for model in agent["models"]]


async def killed(cluster: Cluster) -> None:
    """Kills an engine with a model, the scheduler and an agent, one after the other."""
    await asyncio.sleep(0.5)
    for pid in (await asyncio.to_thread(engine_pids, cluster))[-1:]:
        os.kill(pid, signal.SIGKILL)
    for name in ("prism.cluster", "prism.agent"):
        await asyncio.sleep(1.0)
        os.kill(cluster.child(name), signal.SIGKILL)


async def streams_of(cluster: Cluster) -> list[Stream]:
    make: partial[Asked] = partial(varied, 5, ("a", "b"))
    asked = (ask(cluster.url, make(number)) for number in range(STREAMS))
    *found, _ = await asyncio.gather(*asked, killed(cluster))
    return [stream for stream in found if isinstance(stream, Stream)]


def test_streams_are_whole_whatever_is_killed(tmp_path: Path, short_dir: Path) -> None:
    """Sends short and long requests, some of which clients leave."""
    with serving(tmp_path, short_dir, FAKE, policy="aegaeon", devices=DEVICES) as cluster:
        ends = Counter(verdict(stream) for stream in asyncio.run(streams_of(cluster)))
        assert ends.keys() <= {"whole", "left"}, ends
        assert ends["whole"] > STREAMS / 2
        for model in ("a", "b"):
            assert cluster.post(model).status_code == 200
