"""Behaviour of two stock servers on one device, of any engines."""

from __future__ import annotations

import http.client
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

from kvcached import ClientUsage, Device
from tests.acceptance.harness import memfd_resident_bytes
from tests.engines.stock import Server, until
from tests.sglang.models import TIE, greedy, largest_gap, prompts, spec_of

SAMPLE_S = 0.02
PAGE = 64 << 10


class Pair:
    """Two servers on one device, keyed by model, and the device as another process opens it."""

    def __init__(
        self,
        classes: Mapping[str, Callable[..., Server]],
        folder: Path,
        capacity_bytes: int,
        name: str = "host:0",
    ) -> None:
        self.namespace = f"t{uuid4().hex[:10]}"
        self.capacity_bytes, self.name = capacity_bytes, name
        self.servers: dict[str, Server] = {}
        self.names: dict[str, str] = {}
        try:
            for model, engine in classes.items():
                self.servers[model] = engine(model, folder, **self.said())
            for model, server in self.servers.items():
                server.await_ready()
                self.names[model] = server.name
            self.device = Device.open(name, namespace=self.namespace)
            # An empty cache keeps the slab of the padding block.
            self.floors_bytes = {
                model: max(self.of(model).committed_bytes, 128 * token_bytes(model))
                for model in classes
            }
        except BaseException:
            self.close()
            raise

    def said(self, **others: str) -> dict[str, str]:
        """Returns the variables of every server, without their prefix."""
        said = {"DEVICE": self.name, "CAPACITY": str(self.capacity_bytes), "PAGE": str(PAGE)}
        return said | {"NAMESPACE": self.namespace} | others

    def of(self, model: str) -> ClientUsage:
        (found,) = [c for c in self.device.usage().clients if c.name == self.names[model]]
        return found

    def clients(self) -> list[str]:
        return [client.name for client in self.device.usage().clients]

    def flush(self) -> None:
        for server in self.servers.values():
            server.flush()
        floors = self.floors_bytes.items()
        until(lambda: all(self.of(m).committed_bytes <= size for m, size in floors))

    def fill_with_prefixes(self, model: str) -> None:
        """Fills the model's prefix cache until little of the shared memory is free."""
        seed = 100
        while self.device.usage().free_bytes > 2 * self.floors_bytes[model]:
            self.servers[model].answers(prompts(model, 4, (400, 450), seed), 2)
            seed += 1

    def half_bytes(self) -> int:
        """Returns the KV of one server if the device were split in half."""
        return (self.capacity_bytes - sum(self.of(m).static_bytes for m in self.servers)) // 2

    def resident_bytes(self) -> int:
        """Returns the bytes of both on the device, as the OS or the GPU's driver counts them."""
        if self.name != "host:0":
            memory = self.device.driver_memory()
            assert memory is not None
            return memory.used_bytes
        pids = [server.engine().pid for server in self.servers.values()]
        static_bytes = sum(self.of(model).static_bytes for model in self.servers)
        return memfd_resident_bytes(pids) + static_bytes

    def close(self) -> None:
        for server in self.servers.values():
            server.end()
        Device.unlink(self.namespace, self.name, force=True)


@contextmanager
def opened_pair(
    classes: Mapping[str, Callable[..., Server]], capacity_bytes: int
) -> Iterator[Pair]:
    """Yields a pair whose servers write into a temporary folder, and closes it."""
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as folder,
        closing(Pair(classes, Path(folder), capacity_bytes)) as pair,
    ):
        yield pair


def token_bytes(model: str) -> int:
    return spec_of(model).token_bytes


class Peaks:
    """The largest that was seen, in bytes."""

    resident_bytes = 0
    """Pages as the OS or the driver counts them, including those that are not KV."""
    promised_bytes = 0
    samples = 0


@contextmanager
def sampled(pair: Pair) -> Iterator[Peaks]:
    """Looks at both engines every 20 ms."""
    peaks = Peaks()

    def look() -> None:
        peaks.resident_bytes = max(peaks.resident_bytes, pair.resident_bytes())
        promised_bytes = pair.device.usage().reserved_bytes
        peaks.promised_bytes = max(peaks.promised_bytes, promised_bytes)
        peaks.samples += 1

    with _every_20_ms(look):
        yield peaks


@contextmanager
def largest_held(pair: Pair, model: str) -> Iterator[list[int]]:
    """Yields a list that has the most bytes that the model's server held, afterwards."""
    held = [0]

    def look() -> None:
        held[0] = max(held[0], pair.of(model).committed_bytes)

    with _every_20_ms(look):
        yield held


@contextmanager
def _every_20_ms(look: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check_peaks(pair: Pair, peaks: Peaks) -> None:
    """Checks that use exceeded one half and never exceeded the capacity."""
    assert peaks.samples > 10
    assert pair.half_bytes() < peaks.resident_bytes <= pair.capacity_bytes
    assert peaks.promised_bytes <= pair.capacity_bytes


def right(model: str, asked: list[list[int]], answers: list[list[int]]) -> None:
    """Checks that the answers are transformers' answers, up to rounding."""
    assert len(asked) == len(answers)
    for prompt, answer in zip(asked, answers, strict=True):
        assert largest_gap(model, prompt, answer) <= TIE


def both_answer(pair: Pair, count: int, tokens: int) -> None:
    """Sends `count` requests to each server, all at the same time."""
    asked = {model: prompts(model, count, (20, 120), seed=2) for model in pair.servers}
    with ThreadPoolExecutor(len(asked)) as pool:
        jobs = {m: pool.submit(pair.servers[m].answers, asked[m], tokens) for m in asked}
    for model, job in jobs.items():
        right(model, asked[model], job.result())
    model = next(iter(asked))
    assert jobs[model].result()[0] == greedy(model, asked[model][0], tokens)


def burst(pair: Pair, idle: str, busy: str, count: int = 12, tokens: int = 220) -> None:
    """Grows `busy` over its half with memory of `idle`'s cached prefixes, then asks for those
    again. `tokens` of an answer are so many that all `count` requests run at one time.

    REQUIRES: `idle` has filled the device with prefixes.
    """
    held, asked = pair.of(idle), prompts(busy, count, (200, 230), seed=5)
    with sampled(pair) as peaks:
        right(busy, asked, pair.servers[busy].answers(asked, tokens))
    after = pair.of(idle)
    assert after.given_bytes > held.given_bytes
    assert after.evicted_tokens > held.evicted_tokens
    assert after.committed_bytes < held.committed_bytes
    assert pair.of(busy).committed_bytes > pair.half_bytes()
    check_peaks(pair, peaks)
    again = prompts(idle, 2 * count // 3, (400, 450), seed=100)  # some is computed anew
    right(idle, again, pair.servers[idle].answers(again, 8))
    assert pair.of(idle).committed_bytes > after.committed_bytes


def limit(pair: Pair, model: str, limit_bytes: int) -> None:
    """Limits an idle server from outside: it shrinks, and serves within the limit and without
    it."""
    pair.flush()
    pair.fill_with_prefixes(model)
    pair.device.set_limit(pair.names[model], limit_bytes)
    until(lambda: pair.of(model).committed_bytes <= limit_bytes)
    asked = prompts(model, 5, (100, 300), seed=6)
    right(model, asked, pair.servers[model].answers(asked, 40))
    assert pair.of(model).committed_bytes <= limit_bytes
    pair.device.set_limit(pair.names[model], None)
    right(model, asked, pair.servers[model].answers(asked, 40))
    assert pair.of(model).committed_bytes > limit_bytes


def overload(pair: Pair, lengths: tuple[int, int], tokens: int) -> None:
    """Sends both servers more than there is room for, at the same time."""
    asked = {model: prompts(model, 16, lengths, seed=7) for model in pair.servers}
    with sampled(pair) as peaks, ThreadPoolExecutor(2) as pool:
        jobs = {m: pool.submit(pair.servers[m].answers, asked[m], tokens) for m in pair.servers}
    for model, job in jobs.items():
        right(model, asked[model], job.result())
    check_peaks(pair, peaks)


def kill_in_mid_load(
    pair: Pair, victim: str, other: str, count: int = 12, tokens: int = 200
) -> str:
    """Kills `victim`'s engine while it has more than its half and `other` needs more.

    Returns after how many seconds there is room, and after how many `other` has more than was left
    to it: its model's steps take that time.
    """
    half = pair.half_bytes()
    with ThreadPoolExecutor(24) as pool:
        doomed = [
            pool.submit(pair.servers[victim].generate, prompt, 200)
            for prompt in prompts(victim, count, (280, 300), seed=21)
        ]
        until(lambda: pair.of(victim).committed_bytes > half, 300)  # slow steps on a test GPU
        asked = prompts(other, count, (280, 300), seed=22)
        jobs = [pool.submit(pair.servers[other].generate, prompt, tokens) for prompt in asked]
        until(lambda: pair.device.usage().free_bytes < half // 4, 300)
        usage, free_bytes = pair.of(other), pair.device.usage().free_bytes
        left_bytes = max(usage.committed_bytes, usage.min_bytes) + free_bytes
        begin_s = time.monotonic()
        pair.servers[victim].engine().kill()
        until(lambda: pair.names[victim] not in pair.clients())
        freed_s = time.monotonic() - begin_s
        until(lambda: pair.of(other).committed_bytes > left_bytes, 300)
        taken_s = time.monotonic() - begin_s
        right(other, asked, [job.result() for job in jobs])
    assert any(job.exception() for job in doomed)
    return f"room after {freed_s:.3f} s, which the other had taken after {taken_s:.3f} s"


def leaves_nothing(pair: Pair, other: str) -> None:
    """Checks that `other` is the only client left, and its memory the only memory in use."""
    until(lambda: pair.clients() == [pair.names[other]])
    usage = pair.of(other)
    reserved_bytes = usage.static_bytes + max(usage.reserved_bytes, usage.min_bytes)
    assert pair.device.usage().reserved_bytes == reserved_bytes


def cannot_come_up(pair: Pair, server: Server, message: str) -> None:
    """Checks that a third server ends with `message` in its log, and that both still answer."""
    try:
        until(server.ended, 600)
    finally:
        server.end()
    assert re.search(message, server.log()), server.log()
    # A server may end before the engine that it has killed.
    until(lambda: sorted(pair.clients()) == sorted(pair.names.values()))
    both_answer(pair, 2, 8)


def cancel(server: Server, path: str, body: dict[str, object], count: int) -> None:
    """Sends `count` requests and disconnects each one after its first token."""

    def ask_and_leave() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
        connection.getresponse().read(32)
        connection.close()

    with ThreadPoolExecutor(count) as pool:
        for job in [pool.submit(ask_and_leave) for _ in range(count)]:
            job.result()
