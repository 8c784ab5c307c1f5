"""Private devices for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from kvcached import Client, Device

CAPACITY_BYTES = 1 << 40  # of the ledger; the benchmark uses only the memory that it touches


@contextmanager
def bench_device(
    page_bytes: int, name: str = "host:0", capacity_bytes: int = CAPACITY_BYTES
) -> Iterator[Device]:
    """Yields a device of `capacity_bytes`, rounded up to pages. Destroys it afterwards, even with
    open clients.
    """
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
    """Yields a client of a private device, without a thread that could distort measurements."""
    with bench_device(page_bytes) as device, device.client("bench", background=False) as client:
        yield client
