"""What two stock servers on one device must do, whichever engines they are of."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from kvcached import ClientUsage, Device
from tests.acceptance.harness import memfd_resident_bytes
from tests.engines.stock import Server, until
from tests.sglang.models import TIE, largest_gap, prompts

SAMPLE_S = 0.02


class ServerPair(Protocol):
    """Two servers by the names of their models."""

    servers: dict[str, Server]
    device: Device

    def of(self, model: str) -> ClientUsage: ...


class Peaks:
    """The largest that was seen, in bytes."""

    resident_bytes = 0
    """Of pages, as the OS counts them, and of the weights that are leased."""
    promised_bytes = 0
    samples = 0


@contextmanager
def sampled(pair: ServerPair) -> Iterator[Peaks]:
    """Looks at both engines every 20 ms."""
    pids = [server.engine().pid for server in pair.servers.values()]
    static_bytes = sum(pair.of(model).static_bytes for model in pair.servers)
    peaks, over = Peaks(), threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            resident_bytes = memfd_resident_bytes(pids) + static_bytes
            peaks.resident_bytes = max(peaks.resident_bytes, resident_bytes)
            promised_bytes = pair.device.usage().reserved_bytes
            peaks.promised_bytes = max(peaks.promised_bytes, promised_bytes)
            peaks.samples += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def check_peaks(pair: ServerPair, peaks: Peaks, capacity_bytes: int) -> None:
    """More was used than either's half, and never more than there is."""
    assert peaks.samples > 10
    assert half_bytes(pair, capacity_bytes) < peaks.resident_bytes <= capacity_bytes
    assert peaks.promised_bytes <= capacity_bytes


def half_bytes(pair: ServerPair, capacity_bytes: int) -> int:
    """The KV of one of them, were the device split."""
    static_bytes = sum(pair.of(model).static_bytes for model in pair.servers)
    return (capacity_bytes - static_bytes) // 2


def right(model: str, asked: list[list[int]], answers: list[list[int]]) -> None:
    """What transformers answer, up to rounding."""
    assert len(asked) == len(answers)
    for prompt, answer in zip(asked, answers, strict=True):
        assert largest_gap(model, prompt, answer) <= TIE


def burst(pair: ServerPair, idle: str, busy: str, capacity_bytes: int) -> None:
    """`busy` takes more than its half, out of `idle`'s cached prefixes, which come again later.
    REQUIRES: `idle` has filled the device with prefixes."""
    held, asked = pair.of(idle), prompts(busy, 12, (200, 230), seed=5)
    with sampled(pair) as peaks:
        # So long that all run at one time.
        right(busy, asked, pair.servers[busy].answers(asked, 220))
    after = pair.of(idle)
    assert after.given_bytes > held.given_bytes
    assert after.evicted_tokens > held.evicted_tokens
    assert after.committed_bytes < held.committed_bytes
    assert pair.of(busy).committed_bytes > half_bytes(pair, capacity_bytes)
    check_peaks(pair, peaks, capacity_bytes)
    again = prompts(idle, 8, (400, 450), seed=100)  # some of it has to be computed anew
    right(idle, again, pair.servers[idle].answers(again, 8))
    assert pair.of(idle).committed_bytes > after.committed_bytes


def overload(pair: ServerPair, lengths: tuple[int, int], tokens: int, capacity_bytes: int) -> None:
    """Both are asked for more than there is room for, at the same time."""
    asked = {model: prompts(model, 16, lengths, seed=7) for model in pair.servers}
    with sampled(pair) as peaks, ThreadPoolExecutor(2) as pool:
        jobs = {m: pool.submit(pair.servers[m].answers, asked[m], tokens) for m in pair.servers}
    for model, job in jobs.items():
        right(model, asked[model], job.result())
    check_peaks(pair, peaks, capacity_bytes)


def kill_in_mid_load(pair: ServerPair, victim: str, other: str, capacity_bytes: int) -> float:
    """`victim`'s engine is killed while it has more than its half and the other one wants more.
    Returns after how many seconds that one has more than was left to it."""
    half = half_bytes(pair, capacity_bytes)
    with ThreadPoolExecutor(24) as pool:
        doomed = [
            pool.submit(pair.servers[victim].generate, prompt, 200)
            for prompt in prompts(victim, 12, (280, 300), seed=21)
        ]
        until(lambda: pair.of(victim).committed_bytes > half)
        asked = prompts(other, 12, (280, 300), seed=22)
        jobs = [pool.submit(pair.servers[other].generate, prompt, 200) for prompt in asked]
        until(lambda: pair.device.usage().free_bytes < half // 4)
        usage, free_bytes = pair.of(other), pair.device.usage().free_bytes
        left_bytes = max(usage.committed_bytes, usage.min_bytes) + free_bytes
        begin_s = time.monotonic()
        pair.servers[victim].engine().kill()
        until(lambda: pair.of(other).committed_bytes > left_bytes)
        taken_s = time.monotonic() - begin_s
        right(other, asked, [job.result() for job in jobs])
    assert any(job.exception() for job in doomed)
    return taken_s


def cancel(server: Server, path: str, body: dict[str, object], count: int) -> None:
    """So many requests, each gone as soon as its first token is there."""

    def ask_and_leave() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
        connection.getresponse().read(32)
        connection.close()

    with ThreadPoolExecutor(count) as pool:
        for job in [pool.submit(ask_and_leave) for _ in range(count)]:
            job.result()
