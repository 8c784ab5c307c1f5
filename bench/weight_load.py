"""Weight bytes per second from the store into an arena, against a plain copy into equal pages.

    python bench/weight_load.py [--megabytes 512] [--tensors 64] [--threads 2] [--pairs 9]

The plain copy is `--threads` threads of memcpy, from mapped and warm memory into a fresh shared
mapping. It includes the page faults and the zeroing of its target, as a load does, and nothing
else. A load leases, maps, opens and reads files. The last lines copy into existing pages. Times are
wall-clock times, because several threads work, and CPU times of all threads, because the machine
may be busy.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from uuid import uuid4

import numpy as np
from pairs import measure

import kvcached

MB = 1 << 20
CHUNK_BYTES = 8 * MB
memcpy = ctypes.CDLL(None).memcpy  # ctypes releases the interpreter's lock
memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def plain_copy(source: int, size_bytes: int, threads: int) -> Callable[[int], None]:
    """Copies `source` to an address with all threads."""

    def call(target: int) -> None:
        def copy(at: int) -> None:
            memcpy(target + at, source + at, min(CHUNK_BYTES, size_bytes - at))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(copy, range(0, size_bytes, CHUNK_BYTES)))

    return call


class FreshPages:
    """Shared mapping whose pages do not exist yet, like those of a host device."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("bench")
        os.ftruncate(self.fd, size_bytes)
        self.map = mmap.mmap(self.fd, size_bytes)
        self.bytes = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self.bytes)

    def close(self) -> None:
        del self.bytes
        self.map.close()
        os.close(self.fd)


def fill(builder: kvcached.WeightBuilder, count: int, size_bytes: int) -> None:
    rng = np.random.default_rng(0)
    for index in range(count):
        builder.put(f"t{index}", rng.integers(0, 256, size_bytes // count, np.uint8))


class Bench:
    """The store's entry, a client, and the plain copy of as many bytes."""

    def __init__(
        self, client: kvcached.Client, weights: kvcached.StoredWeights, options: argparse.Namespace
    ) -> None:
        self.client, self.weights, self.pairs = client, weights, options.pairs
        self.size_bytes = weights.size_bytes
        self.options = kvcached.LoadOptions(threads=options.threads, chunk_bytes=CHUNK_BYTES)
        self.source = np.ones(self.size_bytes, np.uint8)
        self.arena: kvcached.WeightArena | None = None
        self.target: FreshPages | None = None
        self.copy = plain_copy(self.source.ctypes.data, self.size_bytes, options.threads)

    def load(self) -> None:
        if self.arena is None:
            self.arena = self.client.alloc_weights(self.weights.layout(), "bench")
        self.arena.load(self.weights, self.options)

    def plain(self) -> None:
        if self.target is None:
            self.target = FreshPages(self.size_bytes)
        self.copy(self.target.address)

    def forget_pages(self) -> None:
        if self.arena is not None:
            self.arena.free()
        if self.target is not None:
            self.target.close()
        self.arena = self.target = None

    def report(self, name: str, clean: Callable[[], None]) -> None:
        for kind, clock in (("wall", time.perf_counter), ("CPU", time.process_time)):
            pairs = measure(self.load, self.plain, self.pairs, clock=clock, clean=clean)
            first, second = (
                self.size_bytes / 1e9 / median(s) for s in (pairs.first_s, pairs.second_s)
            )
            print(
                f"{name}, {kind} time: load {first:.2f} GB/s against memcpy {second:.2f} GB/s: "
                f"ratio {1 / pairs.ratio:.2f} (target 0.8)"
            )


def run(options: argparse.Namespace, directory: str, device: kvcached.Device) -> None:
    size_bytes = options.megabytes * MB
    store = kvcached.WeightStore.open(f"{directory}/store", max_bytes=2 * size_bytes + 64 * MB)
    key = kvcached.WeightKey("bench", "bench", "uint8")
    with (
        store.get(key, lambda builder: fill(builder, options.tensors, size_bytes)) as weights,
        device.client("bench") as client,
    ):
        bench = Bench(client, weights, options)
        bench.report("cold pages", bench.forget_pages)
        bench.report("warm pages", lambda: None)
        bench.forget_pages()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args(arguments)
    device = kvcached.Device.open(
        "host:0",
        capacity_bytes=2 * options.megabytes * MB,
        namespace=f"bench-{uuid4().hex[:8]}",
    )
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            run(options, directory, device)
    finally:
        device.destroy(force=True)


if __name__ == "__main__":
    main()
