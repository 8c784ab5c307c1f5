"""Latency of an alloc_kv that needs another slab: mapped ahead by the client's thread, against not.

    python bench/kv_refill.py [--layers 32] [--pairs 100] [--pause-ms 2]

One request after another takes a slab's blocks from each of two caches, as decoding does when a
slab is full. Between two of them the engine does other work, while the thread maps the next slab.
Times are wall-clock times, because the latency of a step is measured. The result is the median of
the pairs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from devices import bench_device
from numpy.typing import NDArray
from pairs import Pairs

from kvcached import KVCache, Layout

PAGE_BYTES = 2 << 20


def timed_alloc(kv: KVCache, blocks: int) -> tuple[float, NDArray[np.int64]]:
    begin_s = time.perf_counter()
    ids = kv.alloc_kv(blocks)
    taken_s = time.perf_counter() - begin_s
    if ids is None:
        raise SystemExit("the device is too small")
    return taken_s, ids


def wait_until_full(kv: KVCache, blocks: int) -> None:
    deadline_s = time.perf_counter() + 30
    while kv.free_mapped_blocks() < blocks:
        if time.perf_counter() > deadline_s:
            raise SystemExit("the thread maps nothing")
        time.sleep(0.001)


def run(ahead: KVCache, bare: KVCache, blocks: int, options: argparse.Namespace) -> Pairs:
    pairs = Pairs([], [])
    live: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for _ in range(options.pairs):
        wait_until_full(ahead, blocks)
        time.sleep(options.pause_ms / 1e3)
        first_s, first = timed_alloc(ahead, blocks)
        second_s, second = timed_alloc(bare, blocks)
        pairs.first_s.append(first_s)
        pairs.second_s.append(second_s)
        live.append((first, second))
        if len(live) == options.live:
            for kv, ids in zip((ahead, bare), live.pop(0), strict=True):
                kv.free_kv(ids)
    return pairs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=100, help="timings of each")
    parser.add_argument("--live", type=int, default=8, help="slabs that are in use at a time")
    parser.add_argument("--pause-ms", type=float, default=2, help="between two allocations")
    options = parser.parse_args(arguments)
    layout = Layout(options.layers, 8, 128, dtype="float16", block_tokens=16)
    tokens = 4 * options.live * layout.slab_tokens(PAGE_BYTES)
    slab_blocks = layout.slab_tokens(PAGE_BYTES) // layout.block_tokens
    slab_pages = layout.quantum_bytes(PAGE_BYTES) // PAGE_BYTES
    with bench_device(PAGE_BYTES) as device, device.client("bench") as client:
        ahead, bare = (client.alloc_kvcache(layout, tokens, reserved_blocks=0) for _ in range(2))
        ahead.set_premapped_pages(2 * slab_pages, 4 * slab_pages)
        pairs = run(ahead, bare, slab_blocks, options)
    name = f"{slab_pages} pages mapped ahead, against mapped now"
    print(pairs.line(name, "no target", "us per alloc", 1e-6, 1e-6))


if __name__ == "__main__":
    main()
