"""No page is unmapped while work on the engine's streams may touch it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from kvcached import Client, Device, KVCache, errors
from kvcached.testing import HostStream

from .compiling import ROOT
from .conftest import EVERY_DEVICE, PAGE, TINY
from .libcuda import CudaStream, LibCuda

pytestmark = EVERY_DEVICE

SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)


class Stream(Protocol):
    @property
    def handle(self) -> int: ...
    def submit(self, address: int = 0, size_bytes: int = 1) -> None: ...
    def complete(self) -> None: ...
    def close(self) -> None: ...


class OnHost:
    """HostStream. Its work touches no address in particular."""

    def __init__(self) -> None:
        self.fake = HostStream()
        self.handle = self.fake.handle

    def submit(self, address: int = 0, size_bytes: int = 1) -> None:
        self.fake.submit()

    def complete(self) -> None:
        self.fake.complete()

    def close(self) -> None:
        self.fake.complete_all()


NewStream = Callable[[], Stream]


@pytest.fixture
def new_stream(device_name: str, libcuda: LibCuda) -> Iterator[NewStream]:
    made: list[Stream] = []

    def make() -> Stream:
        made.append(CudaStream(libcuda) if device_name == "cuda:0" else OnHost())
        return made[-1]

    before = libcuda.violations()
    yield make
    for stream in made:
        stream.close()
    assert libcuda.violations() == before


@pytest.fixture
def stream(new_stream: NewStream) -> Stream:
    return new_stream()


@pytest.fixture
def client(device: Device, stream: Stream) -> Iterator[Client]:
    with device.client("test", background=False) as opened:
        opened.set_streams([stream.handle], max_wait_s=0.02)
        yield opened
        opened.set_streams([])


@pytest.fixture
def kv(client: Client) -> KVCache:
    """Returns a cache with two slabs in addition to the padding's, without allocated blocks."""
    return client.alloc_kvcache(TINY, 3 * TINY.slab_tokens(PAGE))


def use(kv: KVCache, stream: Stream, blocks: int) -> Callable[[], None]:
    """Allocates blocks and submits work on the last page of their buffers. Returns their free."""
    ids = kv.alloc_kv(blocks)
    assert ids is not None
    view = kv.v_buffer(TINY.num_layers - 1)
    block_bytes = TINY.block_tokens * TINY.num_kv_heads * TINY.head_dim * 4
    stream.submit(view.address + int(ids.max()) * block_bytes, block_bytes)
    return lambda: kv.free_kv(ids)


def test_pages_stay_until_the_work_before_the_free_is_done(
    device: Device, kv: KVCache, stream: Stream
) -> None:
    free = use(kv, stream, 2 * SLAB - 1)
    free()
    assert kv.live_blocks() == 0
    assert kv.quarantined_bytes() == QUANTUM
    assert kv.mapped_bytes() == device.usage().reserved_bytes == 2 * QUANTUM
    kv.settle()
    assert kv.quarantined_bytes() == QUANTUM
    stream.complete()
    kv.settle()
    assert kv.quarantined_bytes() == 0
    assert kv.mapped_bytes() == device.usage().reserved_bytes == QUANTUM


def test_later_work_does_not_matter(kv: KVCache, stream: Stream, client: Client) -> None:
    other = client.alloc_kvcache(TINY, 2 * TINY.slab_tokens(PAGE))
    free = use(kv, stream, 2 * SLAB - 1)
    free()
    use(other, stream, 1)
    stream.complete()
    kv.settle()
    assert kv.quarantined_bytes() == 0
    stream.complete()


def test_idle_streams_delay_nothing(kv: KVCache, stream: Stream) -> None:
    free = use(kv, stream, 2 * SLAB - 1)
    stream.complete()
    free()
    assert (kv.quarantined_bytes(), kv.mapped_bytes()) == (0, QUANTUM)


def test_blocks_in_quarantine_are_taken_again_without_the_driver(
    kv: KVCache, stream: Stream
) -> None:
    free = use(kv, stream, 2 * SLAB - 1)
    free()
    calls = kv.counters()
    assert kv.free_mapped_blocks() == 2 * SLAB - 1
    assert kv.can_alloc(2 * SLAB - 1)
    again = use(kv, stream, 2 * SLAB - 1)
    assert kv.counters() == calls
    assert kv.quarantined_bytes() == 0
    # The first fence does not cover the second use.
    again()
    stream.complete()
    kv.settle()
    assert kv.quarantined_bytes() == QUANTUM
    stream.complete()
    kv.check_integrity()


def test_only_what_is_needed_is_taken_back(kv: KVCache, stream: Stream) -> None:
    free = use(kv, stream, 3 * SLAB - 1)
    free()
    assert kv.quarantined_bytes() == 2 * QUANTUM
    assert kv.alloc_kv(SLAB) is not None
    assert kv.quarantined_bytes() == QUANTUM
    stream.complete()
    kv.settle()
    assert kv.mapped_bytes() == 2 * QUANTUM
    kv.check_integrity()


def test_the_next_free_looks_at_the_quarantine(kv: KVCache, stream: Stream) -> None:
    small = kv.alloc_kv(1)
    assert small is not None
    free = use(kv, stream, 2 * SLAB - 2)
    free()
    stream.complete()
    kv.free_kv(small)
    assert kv.quarantined_bytes() == 0


def test_trim_waits_and_gives_up(kv: KVCache, stream: Stream, client: Client) -> None:
    free = use(kv, stream, 2 * SLAB - 1)
    kv.set_premapped_pages(64, 64)
    free()
    assert (kv.quarantined_bytes(), kv.mapped_bytes()) == (0, 2 * QUANTUM)
    assert kv.trim() == 0
    assert kv.quarantined_bytes() == QUANTUM
    client.set_streams([stream.handle], max_wait_s=60)
    done = threading.Timer(0.02, stream.complete)
    done.start()
    assert kv.trim() == QUANTUM // PAGE
    done.join()
    assert kv.mapped_bytes() == QUANTUM


def test_another_cache_gets_the_room_once_the_work_is_done(
    device: Device, kv: KVCache, stream: Stream, client: Client
) -> None:
    other = client.alloc_kvcache(TINY, 2 * TINY.slab_tokens(PAGE))
    client.set_limit(3 * QUANTUM)
    free = use(kv, stream, 2 * SLAB - 1)
    free()
    assert other.alloc_kv(SLAB) is None
    stream.complete()
    assert other.alloc_kv(SLAB) is not None
    assert kv.quarantined_bytes() == 0
    assert device.usage().reserved_bytes == 3 * QUANTUM


def test_pages_wait_for_every_stream(client: Client, kv: KVCache, new_stream: NewStream) -> None:
    first, second = new_stream(), new_stream()
    client.set_streams([first.handle, second.handle], max_wait_s=0.02)
    free = use(kv, first, 2 * SLAB - 1)
    second.submit(kv.k_buffer(0).address)
    free()
    first.complete()
    kv.settle()
    assert kv.quarantined_bytes() == QUANTUM
    second.complete()
    kv.settle()
    assert kv.quarantined_bytes() == 0


def test_a_cache_is_not_freed_under_its_work(
    device: Device, kv: KVCache, stream: Stream, client: Client
) -> None:
    use(kv, stream, 2 * SLAB - 1)
    for close in (lambda: client.free_kvcache(kv), client.close):
        with pytest.raises(errors.PagesInUseError, match="synchronise"):
            close()
    assert kv.mapped_bytes() == device.usage().reserved_bytes == 2 * QUANTUM
    stream.complete()
    client.free_kvcache(kv)
    assert device.usage().reserved_bytes == 0


def test_a_tensor_is_not_unmapped_under_its_work(client: Client, stream: Stream) -> None:
    tensor = client.alloc_virtual_tensor(4 * PAGE)
    tensor.map(0, 2 * PAGE)
    stream.submit(tensor.view([1], "uint8").address)
    with pytest.raises(errors.PagesInUseError):
        tensor.unmap(0, PAGE)
    with pytest.raises(errors.NotMappedError):
        tensor.unmap(2 * PAGE, PAGE)
    assert tensor.mapped_bytes == 2 * PAGE
    stream.complete()
    tensor.unmap(0, PAGE)
    client.free_virtual_tensor(tensor)


DROPPED = """
import gc, sys
from kvcached import Device, Layout
from tests.kvcached.conftest import TINY
from tests.kvcached.compiling import build_libcuda
from tests.kvcached.libcuda import CudaStream, LibCuda
from tests.kvcached.test_streams import OnHost, use

name, namespace = sys.argv[1:]
stream = CudaStream(LibCuda(build_libcuda())) if name == "cuda:0" else OnHost()
device = Device.open(name, namespace=namespace)
client = device.client("dropped")
client.set_streams([stream.handle], max_wait_s=0)
kv = client.alloc_kvcache(TINY, 1)
use(kv, stream, 1)
del kv, client
gc.collect()
print(device.usage().reserved_bytes)
"""


def test_a_dropped_client_leaves_memory_in_use_to_the_end_of_the_process(
    device: Device, device_name: str, namespace: str
) -> None:
    arguments = [sys.executable, "-c", DROPPED, device_name, namespace]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == (f"{QUANTUM}\n", "")
    assert device.usage().reserved_bytes == 0


def test_streams_that_are_not_there(client: Client, device_name: str, stream: Stream) -> None:
    refused = errors.InvalidArgumentError if device_name == "host:0" else errors.SystemCallError
    with pytest.raises(refused):
        client.set_streams([stream.handle, 424242])
    with pytest.raises(errors.InvalidArgumentError, match="max_wait_s"):
        client.set_streams([stream.handle], max_wait_s=-1)
    client.set_streams([0])  # the default stream is always there


def test_waiting_is_bounded(kv: KVCache, stream: Stream) -> None:
    free = use(kv, stream, 2 * SLAB - 1)
    free()
    begin_s = time.monotonic()
    kv.trim()
    assert time.monotonic() - begin_s < 30  # max_wait_s is 0.02
    stream.complete()
