"""Cost of alloc_kv + free_kv per block id, against a plain numpy free list in the same run.

    python bench/kv_alloc.py [--batch 256] [--rounds 2000]

The free list keeps no pages, no owners and no other client: it is what the bookkeeping would cost
with nothing behind it. Three cases: no page moves; a slab is mapped and unmapped every round; the
same with spare pages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvcached import Device, KVCache, Layout

LAYOUT = Layout(num_layers=16, num_kv_heads=8, head_dim=64, dtype="bfloat16", block_tokens=16)
PAGE_SIZES = (64 << 10, 2 << 20)
CAPACITY_BYTES = 64 << 30  # of the ledger alone: the benchmark touches no page
POOL_BLOCKS = 1 << 14


class FreeList:
    """Ids as a stack in one array: the least that numpy can do."""

    def __init__(self, blocks: int) -> None:
        self.ids = np.arange(blocks, dtype=np.int64)
        self.top = blocks

    def alloc(self, count: int) -> NDArray[np.int64]:
        self.top -= count
        return self.ids[self.top : self.top + count].copy()

    def free(self, ids: NDArray[np.int64]) -> None:
        self.ids[self.top : self.top + len(ids)] = ids
        self.top += len(ids)


def ns_per_id(round_trip: Callable[[], None], rounds: int, batch: int) -> float:
    """Best of five repetitions, so that the machine's other work counts little."""
    best_s = float("inf")
    for _ in range(5):
        begin_s = time.perf_counter()
        for _ in range(rounds):
            round_trip()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s / rounds / batch * 1e9


def cache_round_trip(kv: KVCache, batch: int) -> Callable[[], None]:
    def round_trip() -> None:
        ids = kv.alloc_kv(batch)
        if ids is None:
            raise SystemExit("the device is too small for this batch")
        kv.free_kv(ids)

    return round_trip


def measure(device: Device, batch: int, rounds: int) -> dict[str, float]:
    free_list = FreeList(POOL_BLOCKS)
    figures = {
        "numpy free list": ns_per_id(lambda: free_list.free(free_list.alloc(batch)), rounds, batch)
    }
    with device.client("bench") as client:
        kv = client.alloc_kvcache(LAYOUT, POOL_BLOCKS * LAYOUT.block_tokens)
        per_slab = LAYOUT.slab_tokens(device.page_bytes) // LAYOUT.block_tokens
        # One live block in each slab keeps all of them mapped.
        held = kv.alloc_kv(2 * batch + 64 * per_slab)
        if held is None:
            raise SystemExit("the device is too small for this batch")
        kv.free_kv(held[held % per_slab != 0])
        figures["kvcached, no page moves"] = ns_per_id(cache_round_trip(kv, batch), rounds, batch)
        client.free_kvcache(kv)
        kv = client.alloc_kvcache(LAYOUT, POOL_BLOCKS * LAYOUT.block_tokens)
        few = max(1, rounds // 20)
        figures["kvcached, map + unmap"] = ns_per_id(cache_round_trip(kv, batch), few, batch)
        kv.set_spare_pages(1 << 20, 1 << 20)
        figures["kvcached, spare pages"] = ns_per_id(cache_round_trip(kv, batch), few, batch)
    return figures


def measure_with(page_bytes: int, batch: int, rounds: int) -> dict[str, float]:
    device = Device.open(
        "host:0",
        capacity_bytes=CAPACITY_BYTES,
        page_bytes=page_bytes,
        namespace=f"bench-{uuid4().hex[:8]}",
    )
    try:
        return measure(device, batch, rounds)
    finally:
        device.destroy(force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256, help="ids in one call")
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each kind")
    options = parser.parse_args()
    for page_bytes in PAGE_SIZES:
        figures = measure_with(page_bytes, options.batch, options.rounds)
        base = figures["numpy free list"]
        blocks = LAYOUT.slab_tokens(page_bytes) // LAYOUT.block_tokens
        print(f"pages of {page_bytes >> 10} KiB, {blocks} blocks on a slab")
        for name, cost in figures.items():
            print(f"  {name:26} {cost:9.1f} ns per id {cost / base:9.2f} x the free list")


if __name__ == "__main__":
    main()
