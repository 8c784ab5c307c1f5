"""Weight bytes per second onto a GPU: naive copy, pinned buffer, kvcached's pipeline, and bus.

    python bench/gpu_weights.py [--device cuda:0] [--gigabytes 1,3,8] [--tensor-mb 64] [--threads 8]
        [--pairs 5] [--links 1]

For each size, from the machine's weight store (files in /dev/shm), alternately:

- naive: each tensor is read into ordinary memory, then copied synchronously;
- pinned: each tensor is read into one pinned buffer in pieces, and the copy of each is awaited;
- pipeline: `WeightArena.load` over `WeightLinks` that stay open, which also creates the pages;
- node (with --links N above 1): the same over the links of N GPUs, this one and those after it;
- bus: one full pinned buffer is copied again and again, which is the peak of the link.

With --links it also prints the memory that this takes on another GPU, for `engine.link_memory`.

Times are medians of wall-clock time. Targets: 0.9 of the bus, 4.8 times naive (Prism §5.2). The
benchmark needs an idle GPU with twice the largest size free. It also runs on the test libcuda
(KVCACHED_LIBCUDA), where its times are meaningless. Figures of a GPU belong in docs/gpu-results.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from uuid import uuid4

import numpy as np

import kvcached

STAGING_BYTES = 32 << 20
GB = 10**9
FREE_BYTES = """
import ctypes, sys
cuda = ctypes.CDLL({library!r})
device, context = ctypes.c_int(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[1])),
         cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
         cuda.cuCtxPushCurrent_v2(context),
         cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))]
assert not any(codes), codes
print(free.value)
"""


class Driver:
    """Calls of the driver that the other variants need. A failed call raises RuntimeError."""

    def __init__(self, index: int) -> None:
        self._cuda = ctypes.CDLL(os.environ.get("KVCACHED_LIBCUDA", "libcuda.so.1"))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        self._stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self._stream), 1)  # non-blocking

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name} failed with {code}")

    def allocate(self, size_bytes: int) -> int:
        """Allocates memory of the GPU."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned(self, size_bytes: int) -> int:
        address = ctypes.c_void_p()
        self.call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        assert address.value is not None
        return address.value

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copies synchronously from any host memory."""
        to, size = ctypes.c_uint64(target), ctypes.c_size_t(size_bytes)
        self.call("cuMemcpyHtoD_v2", to, ctypes.c_void_p(source), size)

    def copy_pinned(self, target: int, source: int, size_bytes: int) -> None:
        """Copies on a stream, after earlier work on the stream."""
        to, size = ctypes.c_uint64(target), ctypes.c_size_t(size_bytes)
        start = ctypes.c_void_p(source)
        self.call("cuMemcpyHtoDAsync_v2", to, start, size, self._stream)

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self._stream)


class Ways:
    """The same stored weights loaded by every variant, into memory of the same GPU."""

    def __init__(
        self,
        client: kvcached.Client,
        helpers: list[kvcached.Client],
        weights: kvcached.StoredWeights,
        index: int,
        threads: int,
    ) -> None:
        self.driver = Driver(index)
        self._client, self._weights = client, weights
        self._files = [Path(weights.path(name)) for name in weights.specs]
        self._target_bytes = max(path.stat().st_size for path in self._files)
        self._target = self.driver.allocate(self._target_bytes)
        self._buffer = self.driver.pinned(STAGING_BYTES)
        self._staging = (ctypes.c_char * STAGING_BYTES).from_address(self._buffer)
        self._links = client.open_weight_links(threads=threads)
        self.has_helpers = bool(helpers)
        self._node = client.open_weight_links(helpers, threads=threads) if helpers else self._links

    def naive(self) -> None:
        for path in self._files:
            content = np.fromfile(path, np.uint8)
            self.driver.copy(self._target, content.ctypes.data, content.nbytes)

    def pinned(self) -> None:
        view = memoryview(self._staging).cast("B")
        for path in self._files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(view):
                    self.driver.copy_pinned(self._target, self._buffer, count)
                    self.driver.wait()

    def pipeline(self) -> None:
        self._load(self._links)

    def node(self) -> None:
        self._load(self._node)

    def _load(self, links: kvcached.WeightLinks) -> None:
        with self._client.alloc_weights(self._weights.layout(), "bench") as arena:
            arena.load(self._weights, links=links)

    def bus(self) -> None:
        """Copies as many bytes without reading any."""
        left_bytes = sum(path.stat().st_size for path in self._files)
        while left_bytes > 0:
            count = min(left_bytes, STAGING_BYTES, self._target_bytes)
            self.driver.copy_pinned(self._target, self._buffer, count)
            left_bytes -= count
        self.driver.wait()

    def close(self) -> None:
        self._links.close()
        self._node.close()
        self.driver.free(self._target)
        self.driver.call("cuMemFreeHost", ctypes.c_void_p(self._buffer))


def seconds_of(call: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def report(ways: Ways, size_bytes: int, pairs: int) -> None:
    calls = {
        "naive": ways.naive,
        "pinned": ways.pinned,
        "pipeline": ways.pipeline,
        **({"node": ways.node} if ways.has_helpers else {}),
        "bus": ways.bus,
    }
    taken_s: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(pairs + 1):
        for name, call in calls.items():
            taken_s[name].append(seconds_of(call))
    rates = {name: size_bytes / GB / median(s[1:]) for name, s in taken_s.items()}
    text = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    print(
        f"{size_bytes / GB:.3g} GB: {text} GB/s; pipeline / bus: ratio"
        f" {rates['pipeline'] / rates['bus']:.2f} (target 0.9), pipeline / naive: ratio"
        f" {rates['pipeline'] / rates['naive']:.2f} (target 4.8)"
    )
    if "node" in rates:
        print(f"    node / pipeline: ratio {rates['node'] / rates['pipeline']:.2f}")


def fill(builder: kvcached.WeightBuilder, size_bytes: int, tensor_bytes: int) -> None:
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, size_bytes, tensor_bytes)):
        count = min(tensor_bytes, size_bytes - start)
        builder.put(f"t{number}", rng.integers(0, 256, count, np.uint8))


class Node:
    """GPUs of this machine, with ledgers that are removed with the stack."""

    def __init__(self, stack: ExitStack, page_bytes: int) -> None:
        self._stack = stack
        self._page_bytes = page_bytes
        self._namespace = f"bench{uuid4().hex[:8]}"

    def device(self, index: int, capacity_bytes: int) -> kvcached.Device:
        device = kvcached.Device.open(
            f"cuda:{index}",
            capacity_bytes=capacity_bytes,
            page_bytes=self._page_bytes,
            namespace=self._namespace,
        )
        self._stack.callback(device.destroy, force=True)
        return device

    def helper(self, index: int) -> kvcached.Client:
        """Returns a client on another GPU. Prints the driver's size of its context there."""
        device = self.device(index, 8 * STAGING_BYTES)
        before_bytes = free_bytes(index)
        begin_s = time.perf_counter()
        client = self._stack.enter_context(device.client("bench"))
        open_ms = (time.perf_counter() - begin_s) * 1000
        context_mib = (before_bytes - free_bytes(index)) >> 20
        print(
            f"cuda:{index}: {context_mib} MiB for a context, which took {open_ms:.0f} ms, and"
            f" {STAGING_BYTES >> 20} MiB of staging"
        )
        return client


def free_bytes(index: int) -> int:
    """Returns free memory of a GPU, read in another process because the query needs a context."""
    program = FREE_BYTES.format(library=os.environ.get("KVCACHED_LIBCUDA", "libcuda.so.1"))
    done = subprocess.run(
        [sys.executable, "-c", program, str(index)], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gigabytes", default="1,3,8")
    parser.add_argument("--tensor-mb", type=float, default=64)
    parser.add_argument("--page-bytes", type=int, default=2 << 20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--links", type=int, default=1)
    options = parser.parse_args(arguments)
    sizes = [int(float(text) * GB) for text in options.gigabytes.split(",")]
    tensor_bytes = int(options.tensor_mb * (1 << 20))
    with ExitStack() as stack:
        node = Node(stack, options.page_bytes)
        index = int(options.device.partition(":")[2])
        helpers = [node.helper(index + n) for n in range(1, options.links)]
        pages = 2 * max(sizes) // options.page_bytes + 64
        device = node.device(index, pages * options.page_bytes)
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        for size_bytes in sizes:
            path = f"{directory}/{size_bytes}"
            store = kvcached.WeightStore.open(path, max_bytes=2 * size_bytes + (64 << 20))
            key = kvcached.WeightKey(f"bench{size_bytes}", "bench", "uint8")
            size = size_bytes
            with (
                store.get(key, lambda b, size=size: fill(b, size, tensor_bytes)) as weights,
                device.client("bench") as client,
            ):
                ways = Ways(client, helpers, weights, index, options.threads)
                report(ways, size_bytes, options.pairs)
                ways.close()
            store.discard(key)


if __name__ == "__main__":
    main()
