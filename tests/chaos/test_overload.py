"""Twenty times more than the cluster can serve, clients that dawdle, a model that floods the rest.

PRISM_CHAOS_OVERLOAD_S is how long each phase takes: five minutes by default.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import pytest

from tests.chaos.campaign import MODELS, SEED, Campaign, chaos_cluster
from tests.chaos.faults import parts
from tests.chaos.load import Asked, Load, Stream, ask, brief, verdict
from tests.chaos.memory import MIB, MemoryWatch
from tests.serve.conftest import Cluster, until

OVERLOAD_S = float(os.environ.get("PRISM_CHAOS_OVERLOAD_S", "300"))
pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * OVERLOAD_S + 900)]

# Each of three engines runs 4 requests of 20 steps at 50 ms: 12 requests per second in all.
SLOW = '{"decode_step_ms": 50}'
ENGINE = {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s", "max_running": 4}
TOKENS = 20
SERVED_PER_S = 12.0
OPEN_MAX = 1024
SLO_S = 2.0
NAMES = {"rate_limit_exceeded", "timeout"}
# Bounds of one process. 1,024 open requests are less than a tenth of that.
GROWTH_MAX_BYTES = 128 * MIB
FILES_MAX = 3 * OPEN_MAX
LOG_MAX_BYTES_PER_HOUR = 512 * MIB


def twenty(seed: int, model: str, number: int) -> Asked:
    rng = Random(f"{seed}/{model}/{number}")
    return Asked(model, tuple(rng.randrange(1, 300) for _ in range(8)), TOKENS)


async def arrivals(
    url: str, per_s: float, seconds: float, make: Callable[[int], Asked]
) -> list[Stream]:
    """An open loop: requests come whatever becomes of the earlier ones. Clients whose request is
    open at the end go away."""
    began_s = time.monotonic()
    tasks: list[asyncio.Task[Stream]] = []
    for number in range(int(per_s * seconds)):
        await asyncio.sleep(began_s + number / per_s - time.monotonic())
        tasks.append(asyncio.create_task(ask(url, make(number))))
    await asyncio.wait(tasks, timeout=5 * SLO_S)
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    return [stream for stream in done if isinstance(stream, Stream)]


async def dawdle(url: str, begin: bytes, one_byte: bool = False) -> None:
    """A connection that says `begin` and no more, and reads slowly or never; made again when it
    is hung up on."""
    address = urlsplit(url)
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=64)
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            try:
                writer.write(begin)
                while await (reader.read(1) if one_byte else reader.read()):
                    await asyncio.sleep(0.05)
            finally:
                writer.close()
        await asyncio.sleep(1)


def request_bytes(asked: Asked) -> bytes:
    body = asked.body()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def open_files(cluster: Cluster) -> dict[str, int]:
    most: Counter[str] = Counter()
    for pid, part in parts(cluster).items():
        with suppress(FileNotFoundError, PermissionError):
            most[part] = max(most[part], len(os.listdir(f"/proc/{pid}/fd")))
    return dict(most)


async def overload(campaign: Campaign, memory: MemoryWatch) -> tuple[list[Stream], dict[str, int]]:
    url = campaign.cluster.url
    slow = request_bytes(twenty(SEED, "a", -1))
    others = [
        *(dawdle(url, b"") for _ in range(500)),
        *(dawdle(url, b"POST /v1/completions HTTP/1.1\r\nHost:") for _ in range(200)),
        *(dawdle(url, slow, one_byte=True) for _ in range(20)),
    ]
    tasks = [asyncio.create_task(each) for each in (memory.run(), *others)]
    await asyncio.sleep(5)

    def make(number: int) -> Asked:
        return twenty(SEED, MODELS[number % len(MODELS)], number)

    arriving = asyncio.create_task(arrivals(url, 20 * SERVED_PER_S, OVERLOAD_S, make))
    await asyncio.sleep(0.9 * OVERLOAD_S)
    files = await asyncio.to_thread(open_files, campaign.cluster)
    streams = await arriving
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return streams, files


def log_bytes(campaign: Campaign) -> int:
    """Emptied logs included: `rotate_full` keeps what they held."""
    return sum(path.stat().st_size for path in campaign.striker.logs().iterdir())


def test_twenty_times_too_much(tmp_path: Path) -> None:
    frontend = {"port": 0, "max_open_requests": OPEN_MAX}
    with chaos_cluster(tmp_path, fake=SLOW, engine=ENGINE, frontend=frontend) as cluster:
        campaign = Campaign(cluster, Load(cluster.url, 0, partial(brief, SEED, MODELS)))
        memory = MemoryWatch(campaign.striker, 1.0)
        logs, redis_before = log_bytes(campaign), redis_bytes(campaign)
        streams, files = asyncio.run(overload(campaign, memory))
        per_hour = (log_bytes(campaign) - logs) / OVERLOAD_S * 3600
        grown = memory.peak_growth_bytes()
        said = Counter(map(verdict, streams)), Counter(s.error for s in streams)
        print(f"\n{len(streams)} streams ended: {said}")
        print({part: f"{size / MIB:.1f} MiB more" for part, size in grown.items()})
        print(f"open files at most {files}; logs {per_hour / MIB:.1f} MiB per hour")
        assert said[0].keys() <= {"whole", "named"}
        assert said[0]["whole"] > 0.5 * SERVED_PER_S * OVERLOAD_S
        assert said[1].keys() - {None} <= NAMES
        assert max(grown.values()) < GROWTH_MAX_BYTES
        assert max(files.values()) < FILES_MAX
        assert per_hour < LOG_MAX_BYTES_PER_HOUR
        campaign.check_peace()
        until(lambda: redis_bytes(campaign) < redis_before + 2 * MIB, "Redis's memory back", 60)


def redis_bytes(campaign: Campaign) -> int:
    with campaign.striker.redis() as client:
        return int(client.info("memory")["used_memory"])


def attained(streams: list[Stream]) -> float:
    """Percent of requests whose first token came within the SLO."""
    met = [s.first_s is not None and s.first_s - s.began_s <= SLO_S for s in streams]
    return 100 * sum(met) / len(met)


async def beside_a_flood(url: str, flood_per_s: float) -> float:
    """SLO attainment of the models b and c."""
    quiet = [arrivals(url, 1.0, OVERLOAD_S, partial(twenty, SEED, model)) for model in MODELS[1:]]
    flood = arrivals(url, flood_per_s, OVERLOAD_S, partial(twenty, SEED, MODELS[0]))
    found, *groups = await asyncio.gather(flood, *quiet)
    others = [stream for group in groups for stream in group]
    assert {verdict(stream) for stream in (*found, *others)} <= {"whole", "named"}
    return attained(others)


def test_a_flood_of_one_model_leaves_the_others_theirs(tmp_path: Path) -> None:
    frontend = {"port": 0, "max_open_requests": OPEN_MAX}
    with chaos_cluster(tmp_path, fake=SLOW, engine=ENGINE, frontend=frontend) as cluster:
        for model in MODELS:
            assert cluster.post(model).status_code == 200
        alone = asyncio.run(beside_a_flood(cluster.url, 1.0))
        flooded = asyncio.run(beside_a_flood(cluster.url, 100.0))
        print(
            f"\nSLO attainment of the others: {alone:.1f} % alone, {flooded:.1f} % beside a flood"
        )
        assert flooded >= alone - 5
