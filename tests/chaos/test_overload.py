"""Overload twenty times over capacity, slow clients, a flood of requests for one model, a model
that the policy gives up for overload, and models that take turns.

PRISM_CHAOS_OVERLOAD_S is the duration of each phase: five minutes by default. PRISM_CHAOS_STREAMS
is the number of streams, 10,000 by default, of the test with a model that is given up.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.chaos.campaign import MODELS, SEED, Campaign, chaos_cluster, reported
from tests.chaos.faults import parts
from tests.chaos.load import END_S, Asked, Load, Stream, ask, brief, verdict
from tests.chaos.memory import MIB, MemoryWatch
from tests.frontend.tiny_model import make_model
from tests.serve.conftest import Cluster, until

OVERLOAD_S = float(os.environ.get("PRISM_CHAOS_OVERLOAD_S", "300"))
STREAMS = int(os.environ.get("PRISM_CHAOS_STREAMS", "10000"))
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(4 * OVERLOAD_S + 900)]

# Each of three engines runs 4 requests of 20 steps at 200 ms: 3 requests per second in all. More
# would be a test of HTTP on this machine: beyond some hundred per second, connections wait in the
# listener, whatever they ask for.
SLOW = '{"decode_step_ms": 200}'
ENGINE = {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s", "max_running": 4}
TOKENS = 20
SERVED_PER_S = 3.0
OPEN_MAX = 1024
# Of 1,024 at three per second the last would wait longer than their clients do (END_S).
FRONTEND = {"port": 0, "max_open_requests": OPEN_MAX, "progress_timeout": "3m"}
QUIET_PER_S = 0.3
SLO_S = 2.0
NAMES = {"frontend_full", "timeout"}
# Bounds of one process. 1,024 open requests are less than a tenth of that.
GROWTH_MAX_BYTES = 128 * MIB
FILES_MAX = 3 * OPEN_MAX
LOG_MAX_BYTES_PER_HOUR = 512 * MIB


def twenty(seed: int, model: str, number: int) -> Asked:
    rng = Random(f"{seed}/{model}/{number}")
    return Asked(model, tuple(rng.randrange(1, 300) for _ in range(8)), TOKENS)


async def arrivals(
    url: str,
    per_s: float,
    seconds: float,
    make: Callable[[int], Asked],
    patience_s: float = 5 * SLO_S,
) -> list[Stream]:
    """Sends requests in an open loop, whatever the outcome of earlier ones. Clients whose request
    is open `patience_s` after the end disconnect."""
    began_s = time.monotonic()
    tasks: list[asyncio.Task[Stream]] = []
    for number in range(round(per_s * seconds)):
        await asyncio.sleep(began_s + number / per_s - time.monotonic())
        tasks.append(asyncio.create_task(ask(url, make(number))))
    await asyncio.wait(tasks, timeout=patience_s)
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    return [stream for stream in done if isinstance(stream, Stream)]


async def dawdle(url: str, begin: bytes, one_byte: bool = False) -> None:
    """Sends only `begin` over a connection and reads slowly or never; reconnects when it is
    closed."""
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
    """Returns the size of all logs. `rotate_full` keeps the text of emptied logs, so it counts,
    too."""
    return sum(path.stat().st_size for path in campaign.striker.logs().iterdir())


def test_twenty_times_too_much(tmp_path: Path) -> None:
    with chaos_cluster(tmp_path, fake=SLOW, engine=ENGINE, frontend=FRONTEND) as cluster:
        campaign = Campaign(cluster, Load(cluster.url, 0, partial(brief, SEED, MODELS)))
        with reported(campaign):
            check_overload(campaign)


def check_overload(campaign: Campaign) -> None:
    memory = MemoryWatch(campaign.striker, 1.0)
    logs, redis_before = log_bytes(campaign), redis_bytes(campaign)
    streams, files = asyncio.run(overload(campaign, memory))
    per_hour = (log_bytes(campaign) - logs) / OVERLOAD_S * 3600
    grown = memory.peak_growth_bytes()
    said, named = Counter(map(verdict, streams)), Counter(s.error or s.broke for s in streams)
    print(f"\n{len(streams)} streams ended: {dict(said)}, {dict(named)}")
    print({part: f"{size / MIB:.1f} MiB more" for part, size in grown.items()})
    print(f"open files at most {files}; logs {per_hour / MIB:.1f} MiB per hour")
    assert said.keys() <= {"whole", "named"}, campaign.cluster.output()
    assert said["whole"] > 0.5 * SERVED_PER_S * OVERLOAD_S
    assert named.keys() - {""} <= NAMES
    assert max(grown.values()) < GROWTH_MAX_BYTES
    assert max(files.values()) < FILES_MAX
    assert per_hour < LOG_MAX_BYTES_PER_HOUR
    campaign.check_peace()
    until(lambda: redis_bytes(campaign) < redis_before + 2 * MIB, "Redis's memory back", 60)


def redis_bytes(campaign: Campaign) -> int:
    with campaign.striker.redis() as client:
        return int(client.info("memory")["used_memory"])


def first_token_s(streams: list[Stream]) -> list[float]:
    """Returns the times from sending to the first token; infinite without a first token."""
    return [s.first_s - s.began_s if s.first_s is not None else math.inf for s in streams]


def attained(streams: list[Stream]) -> float:
    """Returns the percentage of requests whose first token came within the SLO."""
    return 100 * fmean(time_s <= SLO_S for time_s in first_token_s(streams))


async def beside_a_flood(url: str, flood_per_s: float) -> float:
    """Returns the SLO attainment of the models b and c during a flood of requests for model a."""
    asked = {model: partial(twenty, SEED, model) for model in MODELS}
    quiet = [arrivals(url, QUIET_PER_S, OVERLOAD_S, asked[model]) for model in MODELS[1:]]
    flood = arrivals(url, flood_per_s, OVERLOAD_S, asked[MODELS[0]])
    found, *groups = await asyncio.gather(flood, *quiet)
    others = [stream for group in groups for stream in group]
    assert {verdict(stream) for stream in (*found, *others)} <= {"whole", "named"}
    slowest = sorted(first_token_s(others))[-10:]
    print(f"\nslowest first tokens: {[f'{time_s:.1f}' for time_s in slowest]} s")
    return attained(others)


def test_a_flood_of_one_model_leaves_the_others_theirs(tmp_path: Path) -> None:
    with chaos_cluster(tmp_path, fake=SLOW, engine=ENGINE, frontend=FRONTEND) as cluster:
        for model in MODELS:
            assert cluster.post(model).status_code == 200
        alone = asyncio.run(beside_a_flood(cluster.url, QUIET_PER_S))
        flooded = asyncio.run(beside_a_flood(cluster.url, 100 * QUIET_PER_S))
        print(
            f"\nSLO attainment of the others: {alone:.1f} % alone, {flooded:.1f} % beside a flood"
        )
        assert flooded >= alone - 5


# Two devices have room for the five small models, or for the large one and some of them. They get
# requests all the time, the large one half as many.
SMALL, LARGE = ("a", "b", "c", "d", "e"), "large"
ORDER = (*SMALL, *SMALL, LARGE)
OVERLOAD = f"{LARGE} cannot be placed now: overload: it has fewer requests for its "
STREAMS_S = 150.0
SEEN_S = 1.0


@contextmanager
def crowded_cluster(folder: Path, **more: Any) -> Iterator[Cluster]:
    make_model(folder / LARGE, num_hidden_layers=24)
    for model in SMALL:
        make_model(folder / model)
    changes = {
        "models": [{"name": name, "path": name} for name in (*SMALL, LARGE)],
        "devices": [
            {"name": f"host:{number}", "capacity": "4608KiB", "page": "64KiB", "engines": 3}
            for number in range(2)
        ],
        "fake": '{"decode_step_ms": 20}',
        "engine": {**ENGINE, "drain_timeout": "100ms", "max_running": 32},
        "scheduler": {"interval": "1s", "idle_threshold": "5s"},
        "frontend": {"port": 0, "processes": 2, "max_open_requests": STREAMS},
        **more,
    }
    with chaos_cluster(folder, **changes) as cluster:
        yield cluster


Seen = list[tuple[float, dict[str, Any]]]
"""Statuses of the cluster, and when they were asked for, on the streams' clock."""


async def statuses(url: str, seen: Seen) -> None:
    """Appends the cluster's status to `seen` each second, until cancelled."""
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            seen.append((time.monotonic(), (await client.get(f"{url}/status")).json()))
            await asyncio.sleep(SEEN_S)


async def ten_thousand(url: str, seen: Seen) -> list[Stream]:
    """Sends STREAMS requests at a constant rate, and returns all streams."""

    def make(number: int) -> Asked:
        return twenty(SEED, ORDER[number % len(ORDER)], number)

    watching = asyncio.create_task(statuses(url, seen))
    streams = await arrivals(url, STREAMS / STREAMS_S, STREAMS_S, make, 2 * END_S)
    assert not watching.done(), watching.exception()
    watching.cancel()
    return streams


def given_up_since_s(seen: Seen) -> float:
    """Returns when the large model was given up and all others were placed.

    Checks that no other model was ever given up, and that all stays so.
    """
    overload = [status["overload"] for _, status in seen]
    first = overload.index([LARGE])
    assert overload == [[]] * first + [[LARGE]] * (len(seen) - first)
    placed = [{*status["placement"]} for _, status in seen]
    served = placed.index({*SMALL}, first)
    assert placed[served:] == [{*SMALL}] * (len(seen) - served)
    print(f"given up at status {first} of {len(seen)}, all others served at {served}")
    after = [status for _, status in seen[served:]]
    begun = {status["actions_total"]["activate"] for status in after}
    assert len(begun) == 1, begun
    return seen[served][0]


def check_refused(cluster: Cluster) -> None:
    reason = f"{LARGE}: requests are rejected: overload"
    assert reason in " ".join(cluster.operate("status").stdout.split())
    metrics = httpx.get(f"{cluster.url}/metrics").text
    assert f'prism_overload{{model="{LARGE}"}} 1.0' in metrics


def check_rejection(stream: Stream, since_s: float) -> None:
    """Checks that the client is told which model, why, and when to try again.

    The response of a stream that waited when its model was given up has begun before.
    """
    assert stream.error == "model_unavailable"
    assert stream.message.startswith(OVERLOAD)
    assert not stream.ids
    if stream.status == 200:
        assert stream.began_s < since_s
    else:
        assert stream.status == 503
        assert stream.retry_after_s > 0


def test_every_stream_ends_whole_or_with_the_name_of_a_refused_model(tmp_path: Path) -> None:
    """Gives up the model with the fewest requests for its memory, by the policy's own choice.

    No request for another model is refused, and it is served again when others are idle.
    """
    with crowded_cluster(tmp_path) as cluster:
        seen: Seen = []
        streams = asyncio.run(ten_thousand(cluster.url, seen))
        ends = Counter((stream.asked.model, verdict(stream)) for stream in streams)
        codes = Counter(stream.status for stream in streams if stream.error)
        print(f"\n{len(streams)} streams ended: {dict(ends)}, rejected with {dict(codes)}")
        assert len(streams) == STREAMS
        assert ends.keys() == {
            *((model, "whole") for model in SMALL),
            (LARGE, "whole"),
            (LARGE, "named"),
        }
        since_s = given_up_since_s(seen)
        for stream in filter(lambda stream: stream.error, streams):
            check_rejection(stream, since_s)
        check_refused(cluster)

        def served_again() -> bool:
            assert cluster.post(SMALL[0]).status_code == 200
            return cluster.post(LARGE).status_code == 200

        until(served_again, "the large model is served again", 60)
        assert httpx.get(f"{cluster.url}/status").json()["overload"] == []


@pytest.mark.parametrize("policy", ["muxserve++", "muxserve", "seallm", "alpaserve"])
def test_a_search_that_leaves_a_model_out_serves_all_others(tmp_path: Path, policy: str) -> None:
    """Refuses models by name that the placement leaves out: under MuxServe always the large one.

    Searches again all the time, by what is measured. Steps of a device take turns under the others.
    """
    frontend = {"port": 0, "processes": 2, "max_open_requests": STREAMS, "refused_timeout": "1s"}
    scheduler = {"interval": "1s", "search_interval": "5s"}
    changes = {"policy": policy, "frontend": frontend, "scheduler": scheduler}
    if policy in ("seallm", "alpaserve"):
        changes["fake"] = '{"decode_step_ms": 5}'
    with crowded_cluster(tmp_path, **changes) as cluster:
        streams = asyncio.run(ten_thousand(cluster.url, []))
        ends = Counter((stream.asked.model, verdict(stream)) for stream in streams)
        print(f"\n{len(streams)} streams ended: {dict(ends)}")
        assert len(streams) == STREAMS
        assert {end for _, end in ends} == {"whole", "named"}
        if policy.startswith("muxserve"):
            assert ends.keys() == {*((model, "whole") for model in SMALL), (LARGE, "named")}
            messages = {stream.message for stream in streams if stream.error}
            assert all("left after the models placed before it" in message for message in messages)


@pytest.mark.parametrize("policy", ["qlm", "aegaeon"])
def test_models_that_take_turns_serve_all(tmp_path: Path, policy: str) -> None:
    """Loses none of the requests that wait, with one model on a device at a time.

    Under aegaeon one of the devices prefills all prompts, one by one, so that steps are shorter.
    """
    frontend = {"port": 0, "processes": 2, "max_open_requests": STREAMS}
    fake = '{"decode_step_ms": 5}' if policy == "aegaeon" else '{"decode_step_ms": 20}'
    with crowded_cluster(tmp_path, policy=policy, frontend=frontend, fake=fake) as cluster:
        seen: Seen = []
        streams = asyncio.run(ten_thousand(cluster.url, seen))
        ends = Counter((stream.asked.model, verdict(stream)) for stream in streams)
        deepest = max(sum(status["unplaced"].values()) for _, status in seen)
        print(f"\n{len(streams)} streams ended: {dict(ends)}; {deepest} waited at once")
        print(f"{attained(streams):.1f} % in time; actions {seen[-1][1]['actions_total']}")
        assert len(streams) == STREAMS
        assert ends.keys() == {(model, "whole") for model in (*SMALL, LARGE)}
