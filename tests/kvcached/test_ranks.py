"""Tensor parallelism: a map that fails on one rank is undone on all ranks."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from kvcached import Client, Device, KVCache, RankKV
from kvcached.errors import UnknownBlockError

from .conftest import CAPACITY, PAGE, TINY
from .libcuda import LibCuda

BLOCKS_PER_SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)
DEADLINE_S = 60

PAIRS_OF_DEVICES = pytest.mark.parametrize(
    "devices", [("host:0", "host:1"), ("cuda:0", "cuda:1")], ids=["host", "cuda"]
)


class Group:
    """The vote of two ranks that are threads of this process."""

    def __init__(self) -> None:
        self.queues: list[Queue[Any]] = [Queue(), Queue()]

    def swap(self, rank: int, value: object) -> Any:
        """Passes a value to the other rank, and returns the other's."""
        self.queues[1 - rank].put(value)
        return self.queues[rank].get(timeout=DEADLINE_S)

    def rank(self, kv: KVCache, rank: int) -> RankKV:
        def all_true(ok: bool) -> bool:
            return bool(self.swap(rank, ok)) and ok

        return RankKV(kv, all_true)


class Ranks:
    """Two ranks, each with a client and a cache on a separate device."""

    def __init__(self, devices: list[Device], clients: list[Client], pool: ThreadPoolExecutor):
        self.devices, self.clients, self.pool = devices, clients, pool
        self.caches = [client.alloc_kvcache(TINY, 1 << 14) for client in clients]
        group = Group()
        self.ranks = [group.rank(kv, rank) for rank, kv in enumerate(self.caches)]

    def on_both(self, call: Callable[[RankKV], object]) -> list[Any]:
        """Returns the results of both ranks, or the exception of a rank that raised."""
        futures = [self.pool.submit(call, rank) for rank in self.ranks]
        return [future.exception() or future.result() for future in futures]

    def alloc(self, blocks: int) -> list[Any] | None:
        """Returns the ids of each rank, or None if neither got any."""
        got = self.on_both(lambda rank: rank.alloc_kv(blocks))
        if all(ids is None for ids in got):
            return None
        assert [len(ids) for ids in got] == [blocks] * 2
        return got

    def free(self, held: list[Any]) -> None:
        for rank, ids in zip(self.ranks, held, strict=True):
            rank.free_kv(ids)

    def live(self) -> list[int]:
        return [kv.live_blocks() for kv in self.caches]


@pytest.fixture
def ranks(namespace: str, devices: tuple[str, str], libcuda: LibCuda) -> Iterator[Ranks]:
    opened = [
        Device.open(name, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
        for name in devices
    ]
    with (
        ThreadPoolExecutor(2) as pool,
        opened[0].client("rank-0", background=False) as first,
        opened[1].client("rank-1", background=False) as second,
    ):
        made = Ranks(opened, [first, second], pool)
        yield made
        libcuda.pass_all()
        for kv in made.caches:
            kv.check_integrity()
    for device in opened:
        assert device.usage().free_bytes == CAPACITY
        device.destroy()


@PAIRS_OF_DEVICES
def test_all_ranks_get_their_blocks_or_none_does(ranks: Ranks) -> None:
    blocks = 3 * BLOCKS_PER_SLAB
    assert ranks.alloc(blocks) is not None
    held = [device.usage().committed_bytes for device in ranks.devices]
    for poor in (0, 1):
        ranks.devices[poor].set_limit(f"rank-{poor}", 5 * QUANTUM)
        assert ranks.alloc(blocks) is None
        assert [device.usage().committed_bytes for device in ranks.devices] == held
        assert ranks.live() == [blocks] * 2
        ranks.devices[poor].set_limit(f"rank-{poor}", None)
    assert ranks.alloc(blocks) is not None


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1")], ids=["cuda"])
def test_a_rank_whose_driver_fails_raises_and_the_other_gets_none(
    ranks: Ranks, libcuda: LibCuda
) -> None:
    """Covers a failing call of either rank: they map at the same time."""
    assert ranks.alloc(1) is not None
    for call in (1, 2, 5):
        libcuda.fail_at(call)
        outcome = ranks.on_both(lambda rank: rank.alloc_kv(BLOCKS_PER_SLAB))
        libcuda.pass_all()
        assert sorted(type(result).__name__ for result in outcome) == [
            "NoneType",
            "SystemCallError",
        ]
        assert ranks.live() == [1, 1]
    assert ranks.alloc(BLOCKS_PER_SLAB) is not None


@PAIRS_OF_DEVICES
def test_ranks_stay_in_step_however_their_pages_differ(ranks: Ranks) -> None:
    """Takes random steps. Either rank is trimmed or limited while the other is not."""
    chooser = random.Random(3)
    held: list[list[Any]] = []
    refused = 0
    for _ in range(400):
        match chooser.randrange(5):
            case 0 | 1:
                got = ranks.alloc(chooser.randrange(1, 4 * BLOCKS_PER_SLAB))
                refused += got is None
                held += [] if got is None else [got]
            case 2 if held:
                ranks.free(held.pop(chooser.randrange(len(held))))
            case 3:
                limited = chooser.randrange(2)
                limit_bytes = chooser.choice([None, chooser.randrange(1, 40) * QUANTUM])
                ranks.devices[limited].set_limit(f"rank-{limited}", limit_bytes)
            case 4:
                ranks.caches[chooser.randrange(2)].trim()
        assert ranks.live() == [sum(len(got[0]) for got in held)] * 2
    assert refused > 0


@PAIRS_OF_DEVICES
def test_a_vote_that_breaks_gives_back_what_was_taken(ranks: Ranks) -> None:
    def broken(_: bool) -> bool:
        raise ConnectionError("the other rank is gone")

    with pytest.raises(ConnectionError):
        RankKV(ranks.caches[0], broken).alloc_kv(4)
    assert ranks.live() == [0, 0]


@PAIRS_OF_DEVICES
def test_ranks_agree_on_blocks_that_each_has_found_in_another_way(ranks: Ranks) -> None:
    def found(rank: RankKV) -> object:
        return rank.agree(rank.kv.alloc_kv(4, wait_s=1.0))

    assert [len(ids) for ids in ranks.on_both(found)] == [4, 4]
    assert ranks.live() == [4, 4]

    def found_on_one(rank: RankKV) -> object:
        return rank.agree(rank.kv.alloc_kv(4) if rank is ranks.ranks[0] else None)

    assert ranks.on_both(found_on_one) == [None, None]
    assert ranks.live() == [4, 4]

    def wrong_on_one(rank: RankKV) -> object:
        return rank.agree(np.array([1 << 40]) if rank is ranks.ranks[0] else rank.kv.alloc_kv(4))

    wrong, other = ranks.on_both(wrong_on_one)
    assert isinstance(wrong, UnknownBlockError)
    assert other is None
    assert ranks.live() == [4, 4]


@PAIRS_OF_DEVICES
def test_a_rank_counts_the_pages_of_all_its_pools(ranks: Ranks) -> None:
    full = ranks.caches[0]
    window = ranks.clients[0].alloc_kvcache(TINY, 1 << 14)
    prefixes = [kv.alloc_kv(2 * BLOCKS_PER_SLAB) for kv in (full, window)]

    def evict(tokens: int | None) -> int:
        assert tokens == QUANTUM // TINY.token_bytes
        for kv, ids in zip((full, window), prefixes, strict=True):
            assert ids is not None
            kv.free_kv(ids)
        return 2 * BLOCKS_PER_SLAB * TINY.block_tokens

    shrunk = RankKV(full, bool).shrink(QUANTUM, evict)
    assert shrunk.returned_bytes == shrunk.evicted_bytes == 4 * QUANTUM


class Processes:
    """Two ranks in processes. This process passes their lines and counts their votes."""

    def __init__(self, namespace: str, devices: tuple[str, str]) -> None:
        script = str(Path(__file__).parent / "worker.py")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, script, "rank", namespace, device, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, device in enumerate(devices)
        ]

    def heard(self) -> list[Any]:
        """Returns the next line of each rank."""
        return [json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout]

    def send(self, value: object) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(value) + "\n")
            rank.stdin.flush()

    def alloc(self, blocks: int) -> tuple[list[Any], list[bool]]:
        """Returns the blocks that each rank got, and their votes."""
        self.send(blocks)
        votes = self.heard()
        self.send(all(votes))
        return self.heard(), votes

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@PAIRS_OF_DEVICES
def test_two_processes_are_two_ranks(
    namespace: str, devices: tuple[str, str], libcuda: LibCuda
) -> None:
    """Fails a map on the second device, which a neighbour has mostly taken."""
    opened = [
        Device.open(name, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
        for name in devices
    ]
    processes = Processes(namespace, devices)
    try:
        assert processes.heard() == ["ready", "ready"]
        with opened[1].client("neighbour", background=False) as neighbour:
            lease = neighbour.reserve_static(CAPACITY - 4 * QUANTUM, "most of it")
            got, votes = processes.alloc(2 * BLOCKS_PER_SLAB)
            assert (got, votes) == ([2 * BLOCKS_PER_SLAB] * 2, [True, True])
            free_bytes = [device.usage().free_bytes for device in opened]
            got, votes = processes.alloc(4 * BLOCKS_PER_SLAB)
            assert (got, votes) == ([None, None], [True, False])
            assert [device.usage().free_bytes for device in opened] == free_bytes
            lease.release()
            got, votes = processes.alloc(4 * BLOCKS_PER_SLAB)
            assert (got, votes) == ([4 * BLOCKS_PER_SLAB] * 2, [True, True])
    finally:
        processes.close()
        for device in opened:
            assert device.usage().free_bytes == CAPACITY
            device.destroy()
