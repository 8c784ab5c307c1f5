"""Known failures of elastic KV memory that no other file of the tests covers.

docs/guarantees.md lists all of them with their tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcached import Client, Device, KVCache, KvcachedError
from kvcached.errors import DoubleFreeError

from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY, Spawn
from .libcuda import LibCuda

ROOT = Path(__file__).parent.parent.parent
BLOCKS_PER_SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)
SLABS = CAPACITY // QUANTUM
ROUNDS = 50  # the test libcuda fills 64 MiB of fresh pages in each


def whole_device(client: Client) -> KVCache:
    return client.alloc_kvcache(TINY, 2 * SLABS * TINY.slab_tokens(PAGE), reserved_blocks=0)


@EVERY_DEVICE
def test_room_that_was_shown_to_two_engines_is_given_to_one(device: Device, spawn: Spawn) -> None:
    """Shows the whole device as free to both, which then take it at once, again and again."""
    engines = [spawn("grab", name, ROUNDS) for name in ("a", "b")]
    for engine in engines:
        assert engine.stdout is not None
        assert engine.stdout.readline().split() == ["sees", str(SLABS * BLOCKS_PER_SLAB)]
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
    said = [engine.communicate(timeout=60)[0].split() for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0]
    assert all(int(granted) + int(refused) == ROUNDS for granted, refused in said)
    assert sum(int(granted) for granted, _ in said) > 0
    assert device.usage().free_bytes == CAPACITY


@pytest.mark.parametrize("device_name", ["cuda:0"])
def test_after_failed_unmaps_everything_comes_back(device: Device, libcuda: LibCuda) -> None:
    """Keeps the pages charged and usable while the driver refuses every call. Nothing waits."""
    with device.client("test", background=False) as client:
        kv = whole_device(client)
        ids = kv.alloc_kv(4 * BLOCKS_PER_SLAB)
        libcuda.fail_at(1, times=1 << 30)
        kv.free_kv(ids)
        with pytest.raises(KvcachedError, match="CUDA_ERROR_INVALID_VALUE"):
            kv.trim()
        assert client.usage().committed_bytes == 4 * QUANTUM
        again = kv.alloc_kv(4 * BLOCKS_PER_SLAB)
        assert sorted(again) == sorted(ids)
        libcuda.pass_all()
        kv.free_kv(again)
        kv.trim()
        assert (client.usage().committed_bytes, device.usage().free_bytes) == (0, CAPACITY)
        kv.check_integrity()


@EVERY_DEVICE
def test_two_pools_of_one_process_have_records_of_their_own(device: Device) -> None:
    two_quanta = {"limit_bytes": 2 * QUANTUM, "background": False}
    with device.client("one", background=False) as one, device.client("two", **two_quanta) as two:
        first, second = whole_device(one), whole_device(two)
        ids = first.alloc_kv(3 * BLOCKS_PER_SLAB)
        assert second.alloc_kv(2 * BLOCKS_PER_SLAB) is not None
        assert second.alloc_kv(1) is None
        held = {client.name: client.committed_bytes for client in device.usage().clients}
        assert held == {"one": 3 * QUANTUM, "two": 2 * QUANTUM}
        first.free_kv(ids)
        two.close()
        assert [(c.name, c.committed_bytes) for c in device.usage().clients] == [("one", 0)]
        assert first.alloc_kv(SLABS * BLOCKS_PER_SLAB) is not None


@EVERY_DEVICE
def test_a_lowered_limit_is_seen_and_rises_again(device: Device) -> None:
    """Maps nothing ahead of need: every allocation asks the ledger."""
    with device.client("test", background=False) as client:
        kv = whole_device(client)
        ids = kv.alloc_kv(4 * BLOCKS_PER_SLAB)
        device.set_limit("test", 2 * QUANTUM)
        assert kv.alloc_kv(1) is None
        kv.free_kv(ids[2 * BLOCKS_PER_SLAB :])
        assert kv.alloc_kv(2 * BLOCKS_PER_SLAB) is None
        device.set_limit("test", 6 * QUANTUM)
        assert kv.alloc_kv(4 * BLOCKS_PER_SLAB) is not None
        assert kv.alloc_kv(1) is None
        device.set_limit("test", None)
        assert kv.alloc_kv(kv.available_blocks()) is not None
        assert device.usage().free_bytes == 0


def test_checks_are_there_where_assertions_are_not(namespace: str) -> None:
    """Runs Python without assertions, on the extension as it is released (with NDEBUG)."""
    code = f"""
import numpy, kvcached
assert False, "assertions are on"
device = kvcached.Device.open(
    "host:0", capacity_bytes={CAPACITY}, page_bytes={PAGE}, namespace={namespace!r})
with device.client("test") as client:
    layout = kvcached.Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32")
    kv = client.alloc_kvcache(layout, 1000)
    ids = kv.alloc_kv(2)
    kv.free_kv(ids)
    try:
        kv.free_kv(ids)
    except kvcached.KvcachedError as error:
        print(type(error).__name__)
    kv.check_integrity()
device.destroy()
"""
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [DoubleFreeError.__name__], done.stderr


def test_no_check_of_the_library_is_an_assertion() -> None:
    sources = [*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc").glob("*.h")]
    with_asserts = [
        path.name for path in sources if re.search(r"\b(assert|abort|exit)\(", path.read_text())
    ]
    assert not with_asserts
    python = (ROOT / "kvcached").rglob("*.py")
    assert not [p.name for p in python if re.search(r"^\s*assert ", p.read_text(), re.MULTILINE)]
