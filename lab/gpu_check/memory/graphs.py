"""Step "graphs": CUDA graphs over KV views whose pages come and go, fences, the keeper's thread.

kvcached relies on three facts. A graph holds addresses, not pages, so that pages can be replaced.
Pages stay until the work that may read them is done. The keeper's thread breaks no capture.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lab.gpu_check.driver import Driver, Location, open_or_skip, u64
from lab.gpu_check.kv import CUDA, ledger, require_kvcached, torch_or_skip
from lab.gpu_check.report import Report, Skip, run_as_step
from lab.gpu_check.sizes import PAGE_BYTES

if TYPE_CHECKING:
    from kvcached import Client, Device, KVCache

LAYERS = 2
HELD_BLOCKS = 8
WAIT_S = 30.0
BUSY_CYCLES = 1_500_000_000  # most of a second at 2 GHz
CAPTURE_S = 0.4  # several turns of the keeper's thread


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("graphs", __doc__, body, arguments)


def body(report: Report) -> None:
    require_kvcached()
    driver = open_or_skip()
    torch = torch_or_skip()
    with report.check("pages_move_under_a_graph"):
        report.fact(moved=pages_move(torch, driver))
    with report.check("fence_under_load"):
        report.fact(fence=fence_under_load(torch))
    with report.check("keeper_during_capture"):
        report.fact(keeper=keeper_during_capture(torch))


def new_cache(client: Client, slabs: int) -> KVCache:
    """Returns a cache of `slabs` slabs that keeps no page without a live block."""
    from kvcached import Layout

    layout = Layout(
        num_layers=LAYERS, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16
    )
    tokens = slabs * layout.slab_tokens(PAGE_BYTES)
    kv = client.alloc_kvcache(layout, tokens, reserved_blocks=0)
    kv.set_premapped_pages(0, 0)
    return kv


@contextmanager
def opened(torch: Any, pages: int, *, keeper: bool = False) -> Iterator[tuple[Device, Client]]:
    """Yields a ledger and its client. keeper: the client has kvcached's own thread."""
    with ledger(pages) as device, device.client("graphs", background=keeper) as client:
        try:
            yield device, client
        finally:
            torch.cuda.synchronize()  # a client whose streams are busy cannot be closed


def other_client(device: Device) -> Client:
    return device.client("waiting", background=False)


class Subject:
    """Step that sums up the blocks of `ids`, captured as a graph."""

    def __init__(self, torch: Any, kv: KVCache) -> None:
        self.torch = torch
        self.views = [torch.from_dlpack(kv.k_blocks(layer)) for layer in range(LAYERS)]
        self.ids = torch.zeros(HELD_BLOCKS, dtype=torch.int64, device=CUDA)
        self.sums = torch.zeros(LAYERS, HELD_BLOCKS, device=CUDA)
        self.graph = torch.cuda.CUDAGraph()

    def step(self) -> None:
        for layer, view in enumerate(self.views):
            self.sums[layer].copy_(view[self.ids].float().sum(dim=(1, 2, 3)))

    def capture(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            self.step()  # libraries initialise themselves at the first call
        self.torch.cuda.current_stream().wait_stream(stream)
        self.torch.cuda.synchronize()
        with self.torch.cuda.graph(self.graph):
            self.step()
            meanwhile()

    def fill(self, ids: Any, first: int) -> None:
        """Writes values that bfloat16 and the sums hold exactly, and chooses the blocks to sum."""
        chosen = self.torch.from_numpy(ids.copy()).to(CUDA)
        for layer, view in enumerate(self.views):
            values = first + layer + self.torch.arange(len(ids), device=CUDA) % 8
            view[chosen] = values.view(-1, 1, 1, 1).expand(-1, *view.shape[1:]).to(view.dtype)
        self.ids.copy_(chosen[:: len(ids) // HELD_BLOCKS][:HELD_BLOCKS])

    def replay(self) -> None:
        """Raises RuntimeError unless the graph finds what a plain step finds."""
        self.sums.zero_()
        self.graph.replay()
        replayed = self.sums.cpu().tolist()
        self.step()
        expected = self.sums.cpu().tolist()
        if replayed != expected or 0.0 in replayed[0]:
            raise RuntimeError(f"a replay gives {replayed}, a plain step {expected}")


def pages_move(torch: Any, driver: Driver) -> dict[str, Any]:
    """Replays one graph while its pages are unmapped, mapped again, and others are mapped."""
    with opened(torch, 64) as (_, client):
        kv, other = new_cache(client, 6), new_cache(client, 6)
        subject = Subject(torch, kv)
        ids = taken(kv, kv.num_blocks // 3)
        subject.fill(ids, 1)
        subject.capture()
        subject.replay()
        address = kv.k_buffer(0).address
        torch.cuda.synchronize()
        kv.free_kv(ids)
        if kv.mapped_bytes() or not is_hole(driver, address):
            raise RuntimeError(f"pages stay mapped after the free: {kv.mapped_bytes()} bytes")
        held = taken(other, other.num_blocks // 3)  # takes pages that the graph read from
        again = taken(kv, kv.num_blocks // 3)
        subject.fill(again, 2)
        subject.replay()
        more = taken(kv, kv.num_blocks // 3)  # at addresses that had no page at the capture
        subject.fill(more, 3)
        subject.replay()
        counters = kv.counters()
        torch.cuda.synchronize()
        del subject
        for cache, blocks in ((kv, again), (kv, more), (other, held)):
            cache.free_kv(blocks)
        return {"replays": 3, "counters": str(counters)}


def is_hole(driver: Driver, address: int) -> bool:
    """Returns whether an address lacks a page. A driver may fail there, or answer "no access"."""
    flags, location = ctypes.c_ulonglong(), Location(1, 0)
    arguments = ctypes.byref(flags), ctypes.byref(location), u64(address)
    return driver.code("cuMemGetAccess", *arguments) != 0 or flags.value == 0


def taken(kv: KVCache, blocks: int) -> Any:
    ids = kv.alloc_kv(blocks)
    if ids is None:
        raise RuntimeError(f"no room for {blocks} blocks: {kv.available_blocks()} are free")
    return ids


def fence_under_load(torch: Any) -> dict[str, Any]:
    """Frees blocks while a kernel that will read them is queued.

    Their pages must not be granted before the kernel is done, and it must read the old content.
    """
    pages = 2 * LAYERS * 2
    with opened(torch, pages) as (device, client), other_client(device) as second:
        stream = torch.cuda.Stream()
        client.set_streams([stream.cuda_stream], max_wait_s=WAIT_S)
        kv, wanted = new_cache(client, 2), new_cache(second, 2)
        ids = taken(kv, kv.num_blocks)
        view = torch.from_dlpack(kv.k_blocks(0))
        chosen = torch.from_numpy(ids.copy()).to(CUDA)
        view[chosen] = 3.0

        def read_behind(cycles: int) -> tuple[Any, Any]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                return view[chosen].float().amax(), view[chosen].float().amin()

        torch.cuda.synchronize()
        read_behind(1)  # kernels are loaded at their first call, which may wait for the GPU
        torch.cuda.synchronize()
        read = read_behind(BUSY_CYCLES)
        kv.free_kv(ids)
        early = wanted.alloc_kv(wanted.num_blocks)
        held_bytes, runs = kv.quarantined_bytes(), not stream.query()
        if not runs:
            raise Skip("the queued work ended before the pages were requested")
        if early is not None or held_bytes == 0:
            raise RuntimeError(f"pages of a queued kernel were granted; {held_bytes} bytes waited")
        stream.synchronize()
        settle_s = settle(kv, kv.quarantined_bytes)
        late = taken(wanted, wanted.num_blocks)
        found = [float(value.cpu()) for value in read]
        wanted.free_kv(late)
    if found != [3.0, 3.0]:
        raise RuntimeError(f"the kernel read {found} where 3.0 was")
    return {"quarantined_bytes": held_bytes, "settled_ms": round(settle_s * 1e3, 2)}


def settle(kv: KVCache, left_bytes: Callable[[], int]) -> float:
    """Settles a cache until no bytes are left. Returns seconds. Raises TimeoutError."""
    began_s = time.monotonic()
    while True:
        kv.settle()
        if not left_bytes():
            return time.monotonic() - began_s
        if time.monotonic() - began_s > WAIT_S:
            raise TimeoutError(f"{left_bytes()} bytes are left after {WAIT_S:.0f} s")
        time.sleep(0.001)


def keeper_during_capture(torch: Any) -> dict[str, Any]:
    """Captures a graph in global mode while the keeper's thread queries fences and maps pages, and
    while the capturing thread allocates and frees blocks."""
    with opened(torch, 256, keeper=True) as (_, client):
        client.set_streams([torch.cuda.default_stream().cuda_stream], max_wait_s=WAIT_S)
        kv = new_cache(client, 24)
        subject = Subject(torch, kv)
        ids, passing = taken(kv, kv.num_blocks // 6), taken(kv, kv.num_blocks // 6)
        subject.fill(ids, 1)
        kv.set_premapped_pages(16, 32)
        before = kv.counters()

        def meanwhile() -> None:
            kv.free_kv(passing)
            held = taken(kv, kv.num_blocks // 3)
            time.sleep(CAPTURE_S)
            kv.free_kv(held)

        subject.capture(meanwhile)
        subject.replay()
        torch.cuda.synchronize()
        kv.set_premapped_pages(0, 0)
        kv.free_kv(ids)
        settle_s = settle(kv, kv.mapped_bytes)
        del subject
        facts = {"before": str(before), "after": str(kv.counters())}
        return facts | {"settled_ms": round(settle_s * 1e3, 2)}


if __name__ == "__main__":
    sys.exit(main())
