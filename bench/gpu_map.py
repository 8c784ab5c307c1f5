"""Cost of mapping and unmapping per page on a GPU: cached handles, batches, streams, guard pages.

    python bench/gpu_map.py [--device cuda:0] [--page-bytes 2097152] [--buffers 64] [--slabs 4]

`slabs` pages in each of `buffers` buffers (2 x layers) are mapped and unmapped, in pairs of two
variants:

- one alloc_kv and free_kv with cached handles, against one call per page with cached handles;
- the same with handles created and released each time, against cached handles;
- with a stream's fence, and with the guard page mapped into holes, against without.

Times are wall-clock times, because the driver may wait in a call. The benchmark needs an idle GPU
with room for five times buffers x slabs pages, because each variant keeps its own. It also runs on
the test libcuda (KVCACHED_LIBCUDA), where its times are meaningless. Figures of a GPU belong in
docs/gpu-results.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from uuid import uuid4

from pairs import measure

from kvcached import Client, Device, KVCache, Layout, MLALayout

Call = Callable[[], None]


class Subjects:
    """The same pages for every variant, each with a separate client, so that nothing is shared."""

    def __init__(self, device: Device, options: argparse.Namespace) -> None:
        self.device, self.slabs = device, options.slabs
        self.layout = Layout(
            num_layers=options.buffers // 2, num_kv_heads=8, head_dim=128, block_tokens=16
        )
        self.pages = self.layout.num_buffers * self.slabs
        self.clients: list[Client] = []

    def client(self, name: str) -> Client:
        # kvcached's thread would map and unmap ahead, which would leave nothing to time.
        self.clients.append(self.device.client(name, background=False))
        return self.clients[-1]

    def cache(self, client: Client, *, cached: bool) -> KVCache:
        tokens = self.slabs * self.layout.slab_tokens(self.device.page_bytes)
        kv = client.alloc_kvcache(self.layout, tokens, reserved_blocks=0)
        if cached:
            kv.set_spare_pages(self.pages, self.pages)
        return kv

    def batched(self, kv: KVCache) -> Call:
        def call() -> None:
            ids = kv.alloc_kv(kv.num_blocks)
            if ids is None:
                raise SystemExit("the device does not have room for the pages")
            kv.free_kv(ids)

        return call

    def page_by_page(self, client: Client) -> Call:
        """Returns calls on a cache whose slabs are single pages, so each page is one call."""
        layout = MLALayout(num_layers=1, kv_lora_rank=448, rope_dim=64, block_tokens=16)
        slab_tokens = layout.slab_tokens(self.device.page_bytes)
        if layout.quantum_bytes(self.device.page_bytes) != self.device.page_bytes:
            raise SystemExit("give a page size that is a power of two from 64 KiB on")
        kv = client.alloc_kvcache(layout, self.pages * slab_tokens, reserved_blocks=0)
        kv.set_spare_pages(self.pages, self.pages)
        blocks = slab_tokens // layout.block_tokens

        def call() -> None:
            taken = [kv.alloc_kv(blocks) for _ in range(self.pages)]
            for ids in taken:
                if ids is None:
                    raise SystemExit("the device does not have room for the pages")
                kv.free_kv(ids)

        return call

    def close(self) -> None:
        for client in self.clients:
            client.close()


def ways(subjects: Subjects) -> dict[str, tuple[Call, Call]]:
    plain = subjects.client("plain")
    streamed, guarded = subjects.client("streamed"), subjects.client("guarded")
    streamed.set_streams([0])
    guarded.guard_holes()
    cached = subjects.batched(subjects.cache(plain, cached=True))
    made = subjects.batched(subjects.cache(plain, cached=False))
    fenced = subjects.batched(subjects.cache(streamed, cached=True))
    covered = subjects.batched(subjects.cache(guarded, cached=True))
    return {
        "batched, against page by page": (cached, subjects.page_by_page(plain)),
        "handles made anew, against cached": (made, cached),
        "after a fence, against without": (fenced, cached),
        "guarded holes, against faulting ones": (covered, cached),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--page-bytes", type=int, default=2 << 20)
    parser.add_argument("--buffers", type=int, default=64, help="2 x layers")
    parser.add_argument("--slabs", type=int, default=4, help="pages of each buffer")
    parser.add_argument("--pairs", type=int, default=15, help="timings of each")
    options = parser.parse_args(arguments)
    namespace = f"bench{uuid4().hex[:8]}"
    pages = 8 * (options.buffers + 2) * options.slabs + 64  # of the ledger
    device = Device.open(
        options.device,
        capacity_bytes=pages * options.page_bytes,
        page_bytes=options.page_bytes,
        namespace=namespace,
    )
    subjects = Subjects(device, options)
    library = os.environ.get("KVCACHED_LIBCUDA", "the driver's libcuda")
    print(f"{options.device} through {library}, {subjects.pages} pages of {options.page_bytes} B")
    try:
        per_page = subjects.pages / 1e6
        for name, (first, second) in ways(subjects).items():
            taken = measure(first, second, options.pairs, clock=time.perf_counter)
            line = taken.line(name, "no target", "us per page, map + unmap", per_page, per_page)
            print(line)
    finally:
        subjects.close()
        Device.unlink(namespace, options.device, force=True)


if __name__ == "__main__":
    main()
