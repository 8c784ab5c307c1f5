"""A device of one benchmark's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from kvcached import Client, Device

CAPACITY_BYTES = 1 << 40  # of the ledger alone: memory is what the benchmark touches


@contextmanager
def bench_device(
    page_bytes: int, name: str = "host:0", capacity_bytes: int = CAPACITY_BYTES
) -> Iterator[Device]:
    """It holds `capacity_bytes`, rounded up to pages. Gone afterwards, whoever still holds memory
    of it."""
    device = Device.open(
        name,
        capacity_bytes=-(-capacity_bytes // page_bytes) * page_bytes,
        page_bytes=page_bytes,
        namespace=f"bench-{uuid4().hex[:8]}",
    )
    try:
        yield device
    finally:
        device.destroy(force=True)


@contextmanager
def bench_client(page_bytes: int) -> Iterator[Client]:
    """A client of such a device, with no thread that could blur what a call costs."""
    with bench_device(page_bytes) as device, device.client("bench", background=False) as client:
        yield client
