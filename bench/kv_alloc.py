"""Cost of alloc_kv + free_kv per block id without a map of pages, against a plain numpy free list.

    python bench/kv_alloc.py [--batch 256] [--rounds 1000] [--pairs 15]

The free list has no pages, no owners and no other client, so it is a lower bound for bookkeeping.
Cases: slabs that are empty and mapped; slabs of which one block is allocated, so every run of ids
is short; and slabs that are mapped and unmapped, which shows the cost of a page.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from devices import bench_client
from numpy.typing import NDArray
from pairs import measure

from kvcached import Client, KVCache, Layout

LAYOUT = Layout(num_layers=16, num_kv_heads=8, head_dim=64, dtype="bfloat16", block_tokens=16)
PAGE_SIZES = (64 << 10, 256 << 10, 2 << 20)
POOL_BLOCKS = 1 << 14


class FreeList:
    """Stack of ids in one array, the least work that numpy can do."""

    def __init__(self, blocks: int) -> None:
        self.ids = np.arange(blocks, dtype=np.int64)
        self.top = blocks

    def alloc(self, count: int) -> NDArray[np.int64]:
        self.top -= count
        return self.ids[self.top : self.top + count].copy()

    def free(self, ids: NDArray[np.int64]) -> None:
        self.ids[self.top : self.top + len(ids)] = ids
        self.top += len(ids)


def repeat(round_trip: Callable[[], None], rounds: int) -> Callable[[], None]:
    def call() -> None:
        for _ in range(rounds):
            round_trip()

    return call


def cache_round_trip(kv: KVCache, batch: int) -> Callable[[], None]:
    def round_trip() -> None:
        ids = kv.alloc_kv(batch)
        if ids is None:
            raise SystemExit("the device is too small for this batch")
        kv.free_kv(ids)

    return round_trip


def hold_one_of_each(kv: KVCache, per_slab: int, batch: int) -> None:
    """Allocates one block of each slab. Leaves room for two batches in these slabs."""
    held = kv.alloc_kv(min(2 * batch + 64 * per_slab, POOL_BLOCKS // 2))
    if held is None:
        raise SystemExit("the device is too small for this batch")
    kv.free_kv(held[held % per_slab != 0])


def report(client: Client, options: argparse.Namespace) -> None:
    batch, rounds = options.batch, options.rounds
    per_slab = LAYOUT.slab_tokens(client.page_bytes) // LAYOUT.block_tokens
    free_list = FreeList(POOL_BLOCKS)
    base = repeat(lambda: free_list.free(free_list.alloc(batch)), rounds)

    def line(name: str, kv: KVCache, rounds: int, target: str) -> None:
        pairs = measure(repeat(cache_round_trip(kv, batch), rounds), base, options.pairs)
        ids, base_ids = (n * batch / 1e9 for n in (rounds, options.rounds))
        print("  " + pairs.line(name, target, "ns per id", ids, base_ids))
        client.free_kvcache(kv)

    def cache() -> KVCache:
        return client.alloc_kvcache(LAYOUT, POOL_BLOCKS * LAYOUT.block_tokens)

    print(f"{client.page_bytes >> 10} KiB pages, {per_slab} blocks a slab")
    empty, partly, moving = cache(), cache(), cache()
    empty.set_premapped_pages(0, 1 << 20)
    line("empty slabs, mapped ahead", empty, rounds, "target 2")
    hold_one_of_each(partly, per_slab, batch)
    line("slabs with one block held", partly, rounds, "target 2")
    line("slabs that are mapped and unmapped", moving, max(1, rounds // 20), "no target")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256, help="ids in one call")
    parser.add_argument("--rounds", type=int, default=1000, help="calls in one timing")
    parser.add_argument("--pairs", type=int, default=15, help="timings of each")
    options = parser.parse_args(arguments)
    for page_bytes in PAGE_SIZES:
        with bench_client(page_bytes) as client:
            report(client, options)


if __name__ == "__main__":
    main()
