"""Numbers that are too large to be right, and the kernel's limit of mappings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached import Client, Device, LoadOptions, WeightStore, errors

from .conftest import EVERY_DEVICE, PAGE, TINY

MOST_MAPPINGS = int(Path("/proc/sys/vm/max_map_count").read_text())


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("test", background=False) as opened:
        yield opened


@EVERY_DEVICE
def test_room_for_more_pages_than_there_are_bytes_is_none(client: Client) -> None:
    """Covers an overflow: 2^48 pages of 64 KiB are 2^64 bytes, which were taken for 0."""
    kv = client.alloc_kvcache(TINY, 1 << 16)
    pages = (1 << 64) // PAGE
    for size in (pages - 1, pages, pages + 1, 2**63 - 1):
        assert not kv.find_room(size)
    for blocks in (kv.num_blocks + 1, 2**63 - TINY.block_tokens, 2**63 - 1):
        assert kv.missing_pages(blocks) is None
        assert not kv.can_alloc(blocks)


def test_more_threads_than_can_be_meant_are_refused(client: Client, tmp_path: Path) -> None:
    """Limits stacks, and on a GPU pinned memory: 2^31 threads filled the machine's."""
    for call in (
        lambda: client.open_weight_links(threads=2**31),
        lambda: LoadOptions(threads=2**31),
        lambda: WeightStore.open(tmp_path / "store", threads=2**31),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="threads is 2147483648; it must be"):
            call()
    client.open_weight_links(threads=64).close()


AT_THE_LIMIT = f"""
import ctypes, mmap, sys
from kvcached import Device, Layout, errors

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
OS_PAGE = mmap.PAGESIZE
size = 2 * {MOST_MAPPINGS} * OS_PAGE
start = libc.mmap(None, ctypes.c_size_t(size), 0, 0x4022, -1, ctypes.c_long(0))

def protect(index, protection):
    where = ctypes.c_void_p(start + (2 * index + 1) * OS_PAGE)
    return libc.mprotect(where, ctypes.c_size_t(OS_PAGE), protection) == 0

device = Device.open("host:0", namespace=sys.argv[1])
with device.client("full", background=False) as client:
    layout = Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
    kv = client.alloc_kvcache(layout, 1 << 16, reserved_blocks=0)
    kv.free_kv(kv.alloc_kv(8))  # all that is imported at first use
    refused, charged, taken = 0, set(), False
    used = 0
    while protect(used, 1):
        used += 1
    while not taken:
        for _ in range(3):
            try:
                ids = kv.alloc_kv(8)
                taken = True
                break
            except (errors.SystemCallError, errors.StrandedPagesError):
                refused += 1
                charged.add(client.usage().committed_bytes)
        used -= 1
        protect(used, 0)
    for index in range(max(0, used - 100), used):
        protect(index, 0)
    kv.free_kv(ids)
    kv.trim()
    kv.check_integrity()
    print(refused > 2, len(charged))
"""


@pytest.mark.skipif(MOST_MAPPINGS > 1 << 21, reason="vm.max_map_count is too high to be reached")
def test_retries_at_the_limit_of_mappings_keep_no_more(device: Device, namespace: str) -> None:
    """Covers an undo that fails for the same reason as the map: it unmapped addresses without a
    mapping, and each retry left its pages charged."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_LIMIT, namespace],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert (done.stdout, done.stderr) == ("True 1\n", "")
