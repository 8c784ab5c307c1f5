"""Two stock servers of two ranks each, on two host devices, of any engines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from kvcached import ClientUsage, Device
from tests.engines.sharing import PAGE, Pair, leaves_nothing, right, sampled
from tests.engines.stock import Server, until
from tests.sglang.models import LLAMA, QWEN3, prompts, spec_of

MODELS = (LLAMA, QWEN3)
PEER = "host:1"
ELASTIC_BYTES = 9 << 20  # of each device, for both together
# Weights that are not split between ranks are less than a tenth.
STATIC_BYTES = sum(spec_of(name).weight_bytes for name in MODELS) * 6 // 10
CAPACITY = (STATIC_BYTES + ELASTIC_BYTES) // PAGE * PAGE


class RanksServer(Server):
    """Server of two ranks; `engine` is that of rank 0."""

    def engine(self) -> psutil.Process:
        return self.rank(0)

    def rank(self, number: int) -> psutil.Process:
        (found,) = [one for one in self.children() if self.title(number) in one.cmdline()[0]]
        return found

    @abstractmethod
    def title(self, number: int) -> str:
        """Returns a part of the title of the rank's process."""


class RanksPair(Pair):
    def __init__(self, classes: Mapping[str, Callable[..., Server]], folder: Path) -> None:
        super().__init__(classes, folder, CAPACITY)
        self.peer = Device.open(PEER, namespace=self.namespace)

    def server(self, model: str) -> RanksServer:
        server = self.servers[model]
        assert isinstance(server, RanksServer)
        return server

    def on_peer(self, model: str) -> ClientUsage:
        pid = self.server(model).rank(1).pid
        (found,) = [client for client in self.peer.usage().clients if client.pid == pid]
        return found

    def close(self) -> None:
        super().close()
        Device.unlink(self.namespace, PEER, force=True)


def each_holds_half(pair: RanksPair) -> None:
    for model in MODELS:
        spec, own, peer = spec_of(model), pair.of(model), pair.on_peer(model)
        assert own.pid != peer.pid
        assert spec.weight_bytes / 2 <= own.static_bytes == peer.static_bytes
        assert own.static_bytes < spec.weight_bytes * 0.6
        assert own.min_bytes == peer.min_bytes
        assert own.committed_bytes == peer.committed_bytes


def less_on_one(pair: RanksPair, model: str) -> None:
    """Takes the second rank's device but for what is guaranteed: both ranks wait for each other."""
    other = pair.peer.client("other")
    lease = other.reserve_static(pair.peer.usage().free_bytes // PAGE * PAGE, "test")
    asked = prompts(model, 8, (200, 300), seed=9)
    try:
        most_bytes = pair.on_peer(model).min_bytes
        with sampled(pair) as peaks:
            right(model, asked, pair.servers[model].answers(asked, 60))
        assert pair.on_peer(model).committed_bytes <= most_bytes
        guaranteed_bytes = sum(pair.of(each).min_bytes for each in MODELS)
        static_bytes = sum(pair.of(each).static_bytes for each in MODELS)
        # All requests together need more, for which the first rank has room.
        elastic_bytes = peaks.promised_bytes - static_bytes
        assert elastic_bytes < guaranteed_bytes + 4 * pair.floors_bytes[model]
        assert pair.device.usage().free_bytes > most_bytes
    finally:
        lease.release()
        other.close()
    right(model, asked, pair.servers[model].answers(asked, 60))


def asked_on_one(pair: RanksPair, model: str) -> None:
    """Asks an idle server's second rank for memory: both ranks evict the same prefixes."""
    pair.fill_with_prefixes(model)
    held, other = pair.of(model), pair.peer.client("other")
    try:
        wanted_bytes = pair.peer.usage().free_bytes + (1 << 20)
        lease = other.reserve_static(wanted_bytes // PAGE * PAGE, "test", wait_s=60)
        until(lambda: pair.of(model).committed_bytes < held.committed_bytes)
        until(lambda: pair.on_peer(model).evicted_tokens > 0)
        lease.release()
    finally:
        other.close()
    again = prompts(model, 4, (400, 450), seed=100)
    right(model, again, pair.servers[model].answers(again, 8))


def kill_one(pair: RanksPair, victim: str, other: str) -> None:
    """Kills the second rank of a server, which then ends; `other` has both devices."""
    pair.server(victim).rank(1).kill()
    until(lambda: len(pair.peer.usage().clients) == 1)
    leaves_nothing(pair, other)
    assert pair.peer.usage().static_bytes == pair.on_peer(other).static_bytes
    asked = prompts(other, 8, (200, 300), seed=8)
    right(other, asked, pair.servers[other].answers(asked, 20))
