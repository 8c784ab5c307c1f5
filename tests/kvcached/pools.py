"""Process with several KV pools on one device, each with its own client, driven by a socket.

Forked by the machines of test_two_processes; requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import numpy as np

from kvcached import Device, Layout, NoRoomError
from kvcached.client import StaticLease
from kvcached.errors import DoubleFreeError, KvcachedError

from .arrays import as_array
from .libcuda import LibCuda

PAGE = 4096
# A block is half a page in each buffer; a slab of a page holds two.
LAYOUT = Layout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", block_tokens=8)
SLAB = LAYOUT.quantum_bytes(PAGE)
PER_SLAB = LAYOUT.slab_tokens(PAGE) // LAYOUT.block_tokens
BLOCKS = 32


class Pool:
    """Client with a KV cache. Every live block has its tag in all its tokens."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        # No thread: the memory of a pool must depend on its requests alone.
        self.client = device.client(name, background=False)
        self.kv = self.client.alloc_kvcache(LAYOUT, BLOCKS * LAYOUT.block_tokens)
        self.buffers = [as_array(view(0)) for view in (self.kv.k_buffer, self.kv.v_buffer)]
        self.leases: list[StaticLease] = []
        self.tags: dict[int, int] = {}
        self.write(0, -1)

    def rows(self, block: int) -> slice:
        return slice(block * LAYOUT.block_tokens, (block + 1) * LAYOUT.block_tokens)

    def write(self, block: int, tag: int) -> None:
        for buffer in self.buffers:
            buffer[self.rows(block)] = tag

    def alloc(self, count: int, tag: int, wait_s: float = 0.0) -> list[int] | None:
        ids = self.kv.alloc_kv(count, wait_s=wait_s)
        if ids is None:
            return None
        for block in ids.tolist():
            self.write(block, tag)
            self.tags[block] = tag
        return list(ids.tolist())

    def free(self, ids: list[int]) -> None:
        for block in ids:
            tag = self.tags.pop(block)
            assert all((buffer[self.rows(block)] == tag).all() for buffer in self.buffers), block
        self.kv.free_kv(np.array(ids, dtype=np.int64))

    def free_again(self, block: int) -> None:
        try:
            self.kv.free_kv(np.array([*self.tags, block], dtype=np.int64))
        except DoubleFreeError:
            return
        raise AssertionError(f"block {block} was freed twice")

    def lease(self, size_bytes: int) -> bool:
        try:
            self.leases.append(self.client.reserve_static(size_bytes, "weights"))
        except NoRoomError:
            return False
        return True

    def unlease(self) -> int:
        lease = self.leases.pop()
        lease.release()
        return lease.size_bytes

    def minimum(self, size_bytes: int) -> bool:
        try:
            self.client.set_min(size_bytes)
        except NoRoomError:
            return False
        return True

    def limit(self, size_bytes: int | None) -> None:
        self.client.set_limit(size_bytes)

    def spares(self, low: int, high: int) -> None:
        self.kv.set_spare_pages(low, high)

    def premap(self, low: int, high: int) -> None:
        self.kv.set_premapped_pages(low, high)
        self.kv.refill()

    def answer(self) -> bool:
        """Answers a request with all memory that no block uses. Returns whether there was one."""
        return self.client.answer_requests(self.kv.shrink) is not None

    def trim(self) -> None:
        self.kv.trim()

    def state(self) -> dict[str, int]:
        self.kv.check_integrity()
        assert all(
            (buffer[self.rows(block)] == tag).all()
            for block, tag in self.tags.items()
            for buffer in self.buffers
        )
        return {
            "live": self.kv.live_blocks(),
            "available": self.kv.available_blocks(),
            "mapped": self.kv.mapped_bytes(),
        }


def answer(pools: list[Pool], libcuda: LibCuda | None, request: dict[str, Any]) -> Any:
    pool = pools[request.pop("pool")]
    fail_at = request.pop("fail_at", 0)
    if libcuda is not None and fail_at:
        libcuda.fail_at(fail_at)
    try:
        return getattr(pool, request.pop("call"))(**request)
    except KvcachedError as error:
        if not fail_at:
            raise
        return {"error": type(error).__name__}
    finally:
        if libcuda is not None:
            libcuda.pass_all()


def serve(device: Device, names: list[str], libcuda: LibCuda | None, line: socket.socket) -> None:
    """Answers requests until an empty line."""
    pools = [Pool(device, name) for name in names]
    with line.makefile("rw") as stream:
        while request := stream.readline().strip():
            stream.write(json.dumps(answer(pools, libcuda, json.loads(request))) + "\n")
            stream.flush()
    for pool in pools:
        pool.client.close()
