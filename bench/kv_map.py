"""Cost of mapping runs of pages over all layers in one call, on the host backend.

    python bench/kv_map.py [--layers 32] [--pages 32] [--pairs 15] [--aging 10000]

A slab row of `pages` pages in each of 2 x layers buffers is mapped and unmapped: by kvcached in one
alloc_kv and free_kv; by one call per page and buffer on a virtual tensor; and by raw mmap calls of
the same runs (map over PROT_NONE, then PROT_NONE over the map) from C++, without bookkeeping. No
variant touches the pages. It is measured on a fresh cache, and again after random allocations and
frees. Spare pages are kept, so no page is created or returned to the OS, which raw mmap does not do
either.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from devices import bench_client
from numpy.typing import NDArray
from pairs import measure

from kvcached import Client, KVCache, Layout

PAGE_BYTES = 64 << 10


class RawRuns:
    """mmap of one run per buffer in C++, without other work."""

    def __init__(self, folder: Path, buffers: int, pages: int) -> None:
        library = load_raw_runs(folder)
        self.call = library.round_trip
        self.buffers, self.run_bytes = buffers, pages * PAGE_BYTES
        self.stride = 4 * self.run_bytes
        self.fd = os.memfd_create("bench")
        os.ftruncate(self.fd, buffers * self.run_bytes)
        self.start = library.reserve(buffers * self.stride)

    def round_trip(self) -> None:
        if not self.call(self.fd, self.start, self.stride, self.run_bytes, self.buffers):
            raise SystemExit("mmap failed")


def load_raw_runs(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("this benchmark takes a C++ compiler; install one")
    path = folder / "raw_runs.so"
    source = Path(__file__).parent / "raw_runs.cpp"
    subprocess.run([compiler, "-O3", "-shared", "-fPIC", str(source), "-o", path], check=True)
    library = ctypes.CDLL(str(path))
    library.reserve.argtypes, library.reserve.restype = [ctypes.c_uint64], ctypes.c_uint64
    library.round_trip.argtypes = [ctypes.c_int, *[ctypes.c_uint64] * 3, ctypes.c_int]
    return library


def in_one_call(kv: KVCache, blocks: int) -> Callable[[], None]:
    def round_trip() -> None:
        ids = kv.alloc_kv(blocks)
        if ids is None:
            raise SystemExit("the device is too small")
        kv.free_kv(ids)

    return round_trip


def page_by_page(client: Client, buffers: int, pages: int) -> Callable[[], None]:
    tensor = client.alloc_virtual_tensor(buffers * 2 * pages * PAGE_BYTES)
    offsets = [(2 * n * pages + i) * PAGE_BYTES for n in range(buffers) for i in range(pages)]

    def round_trip() -> None:
        for offset in offsets:
            tensor.map(offset, PAGE_BYTES)
        for offset in offsets:
            tensor.unmap(offset, PAGE_BYTES)

    return round_trip


def age(kv: KVCache, steps: int, slab_blocks: int) -> None:
    """Makes random allocations and frees. Ends without live blocks."""
    draw = random.Random(1)
    live: list[NDArray[np.int64]] = []
    for _ in range(steps):
        if live and draw.random() < 0.5:
            kv.free_kv(live.pop(draw.randrange(len(live))))
            continue
        ids = kv.alloc_kv(draw.randint(1, 2 * slab_blocks))
        if ids is not None:
            live.append(ids)
        if len(live) > 32:
            kv.free_kv(np.concatenate([live.pop(draw.randrange(len(live))) for _ in range(16)]))
    for ids in live:
        kv.free_kv(ids)


def report(client: Client, folder: Path, options: argparse.Namespace) -> None:
    layout = Layout(num_layers=options.layers, num_kv_heads=8, head_dim=128, block_tokens=16)
    buffers, per_call = layout.num_buffers, layout.num_buffers * options.pages
    slab_blocks = layout.slab_tokens(PAGE_BYTES) // layout.block_tokens
    slabs = options.pages // layout.slab_pages(PAGE_BYTES)[0]
    tokens = 32 * slabs * slab_blocks * layout.block_tokens
    kv = client.alloc_kvcache(layout, tokens, reserved_blocks=0)
    kv.set_spare_pages(2 * per_call, 2 * per_call)
    batched = in_one_call(kv, slabs * slab_blocks)
    raw = RawRuns(folder, buffers, options.pages)
    single = page_by_page(client, buffers, options.pages)
    for state in ("fresh", f"after {options.aging} random calls"):
        if state != "fresh":
            age(kv, options.aging, slab_blocks)
        for other, name, target in (
            (single, "one call per page", "target 0.1"),
            (raw.round_trip, "raw mmap of the runs", "target 1.5"),
        ):
            pairs = measure(batched, other, options.pairs)
            us = per_call / 1e6
            print(pairs.line(f"{state}, against {name}", target, "us per page", us, us))
    kv.check_integrity()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pages", type=int, default=32, help="pages of a run")
    parser.add_argument("--pairs", type=int, default=15, help="timings of each")
    parser.add_argument("--aging", type=int, default=10_000, help="random calls in between")
    options = parser.parse_args(arguments)
    with bench_client(PAGE_BYTES) as client, tempfile.TemporaryDirectory() as folder:
        report(client, Path(folder), options)


if __name__ == "__main__":
    main()
