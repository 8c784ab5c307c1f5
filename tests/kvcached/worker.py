"""Processes that the tests start, race and kill.

worker.py COMMAND NAMESPACE DEVICE [ARGUMENT ...]
"""

from __future__ import annotations

import random
import select
import sys
from pathlib import Path

from arrays import as_array
from caches import Cache

from kvcached import Client, Device, Layout, NoRoomError, RankKV, VirtualTensor

LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)


def say(*words: object) -> None:
    print(*words, flush=True)


def hold(device: Device, size_bytes: str) -> None:
    """Maps and touches memory, prints "ready", and keeps the memory until stdin closes."""
    with device.client("holder") as client:
        tensor = client.alloc_virtual_tensor(int(size_bytes))
        tensor.map(0, int(size_bytes))
        as_array(tensor)[:] = 1
        say("ready")
        sys.stdin.read()


def watch(device: Device) -> None:
    """Keeps the device open, without a client, until stdin closes."""
    say("ready", device.name)
    sys.stdin.read()


def take(device: Device, name: str) -> None:
    """Maps and touches as many more pages as each line says, and prints the result."""
    page = device.page_bytes
    with device.client(name) as client:
        tensor = client.alloc_virtual_tensor(device.capacity_bytes)
        memory = as_array(tensor)
        taken = 0
        say("ready")
        for line in sys.stdin:
            wanted = int(line) * page
            try:
                tensor.map(taken, wanted)
            except NoRoomError as error:
                say(f"refused, {error.free_bytes} free")
                continue
            memory[taken : taken + wanted] = 1
            taken += wanted
            say("got", int(line))


def grab(device: Device, name: str, rounds: str) -> None:
    """Prints how many blocks are free, waits for a line, then takes that many and frees them."""
    with device.client(name, background=False) as client:
        kv = client.alloc_kvcache(LAYOUT, 1 << 20, reserved_blocks=0)
        free, granted = kv.available_blocks(), 0
        say("sees", free)
        sys.stdin.readline()
        for _ in range(int(rounds)):
            ids = kv.alloc_kv(free)
            if ids is not None:
                granted += 1
                kv.free_kv(ids)
    say(granted, int(rounds) - granted)


def rank(device: Device, number: str) -> None:
    """Runs one rank of a group that votes by lines: prints its vote and reads the result.

    Allocates as many blocks as each line says, and prints how many it got."""
    import json

    def all_true(ok: bool) -> bool:
        say(json.dumps(ok))
        return bool(json.loads(sys.stdin.readline()))

    with device.client(f"rank-{number}", background=False) as client:
        ranked = RankKV(client.alloc_kvcache(LAYOUT, 1 << 14), all_true)
        say(json.dumps("ready"))
        for line in sys.stdin:
            ids = ranked.alloc_kv(int(line))
            say(json.dumps(None if ids is None else len(ids)))


class Racer:
    """Client that maps and unmaps single pages at random. Eight of them want twice the device."""

    def __init__(self, device: Device, client: Client, seed: int) -> None:
        self.device = device
        self.page = device.page_bytes
        self.pages = device.capacity_bytes // self.page // 3
        self.tensor: VirtualTensor = client.alloc_virtual_tensor(self.pages * self.page)
        self.bytes = as_array(self.tensor)
        self.random = random.Random(seed)
        self.mapped: set[int] = set()
        self.granted = self.refused = 0

    def step(self) -> None:
        page = self.random.randrange(self.pages)
        if page in self.mapped:
            if self.random.random() < 0.75:
                return
            self.tensor.unmap(page * self.page, self.page)
            self.mapped.remove(page)
            return
        try:
            self.tensor.map(page * self.page, self.page)
        except NoRoomError:
            self.refused += 1
            return
        self.bytes[page * self.page : (page + 1) * self.page] = 1
        self.mapped.add(page)
        self.granted += 1


def race(device: Device, seed: str, steps: str) -> None:
    """Waits for a line, races for `steps` steps, and reports the grants and refusals."""
    with device.client(f"racer-{seed}", min_bytes=device.page_bytes) as client:
        racer = Racer(device, client, int(seed))
        say("ready")
        sys.stdin.readline()
        for step in range(int(steps)):
            racer.step()
            if step % 16 == 0:
                usage = device.usage()
                assert usage.reserved_bytes <= usage.capacity_bytes
        say("done")
        sys.stdin.readline()  # holds its share until all have raced
        say(racer.granted, racer.refused)


def churn(device: Device, seed: str) -> None:
    """Allocates and frees KV blocks until it is killed."""
    client = device.client(f"churner-{seed}", min_bytes=device.page_bytes)
    lease = client.reserve_static(12345, "weights")
    kv = client.alloc_kvcache(LAYOUT, 1 << 16)
    say("ready", lease.size_bytes)
    chooser = random.Random(int(seed))
    while True:
        ids = kv.alloc_kv(chooser.randrange(200))
        if ids is not None:
            kv.free_kv(ids)


def shrink(device: Device, name: str, cached: str, used: str = "0", spare: str = "0") -> None:
    """Runs an idle engine that answers requests, and prints each answer, until stdin closes.

    The engine holds the given numbers of blocks of prefix cache, of requests and of spare pages.
    """
    client = device.client(name, background=False)
    kv = client.alloc_kvcache(LAYOUT, 1 << 18, reserved_blocks=0)
    kv.set_premapped_pages(0, 1 << 30)
    held = [kv.alloc_kv(int(count)) for count in (cached, used, spare)]
    cache = Cache(kv, held[0])
    kv.free_kv(held[2])
    client.publish_evictable(kv.evictable_bytes(cache))
    say("ready")
    while True:
        readable, _, _ = select.select([sys.stdin, client], [], [])
        if sys.stdin in readable:
            return
        shrunk = client.answer_requests(lambda size: kv.shrink(size, cache))
        if shrunk is not None:
            client.publish_evictable(kv.evictable_bytes(cache))
            kv.check_integrity()
            say("gave", shrunk.returned_bytes, shrunk.evicted_tokens)


def wait_for_blocks(device: Device, name: str, blocks: str, wait_s: str) -> None:
    """Waits for blocks, prints their number, and keeps them until stdin closes."""
    client = device.client(name, background=False)
    kv = client.alloc_kvcache(LAYOUT, 1 << 18, reserved_blocks=0)
    say("ready")
    ids = kv.alloc_kv(int(blocks), wait_s=float(wait_s))
    say("got", 0 if ids is None else len(ids))
    sys.stdin.read()


def touch_hole(device: Device, when: str) -> None:
    """Reads KV memory that is not there: "never" mapped, "freed", or "closed" with its client."""
    client = device.client("toucher")
    kv = client.alloc_kvcache(LAYOUT, 1 << 12)
    keys = as_array(kv.k_buffer(0))
    say("floor", keys[0, 0, 0])
    if when == "freed":
        client.free_kvcache(kv)
    elif when == "closed":
        client.close()
    say("read", keys[-1 if when == "never" else 0, 0, 0])


def set_limit(device: Device, name: str, limit_bytes: str) -> None:
    device.set_limit(name, int(limit_bytes))


def open_as_nobody(device: Device) -> None:
    """Prints the error that another user gets."""
    import os

    from kvcached.errors import LedgerPermissionError

    os.setuid(65534)
    try:
        Device.open("host:0", namespace=device.namespace)
    except LedgerPermissionError as error:
        say(error)


def look_as_nobody(device: Device) -> None:
    """Prints the error that another user gets for reading a client's memory."""
    import os

    from kvcached.errors import LedgerPermissionError

    os.setuid(65534)
    try:
        device.resident_bytes()
    except LedgerPermissionError as error:
        say(error)


def look_around_as_nobody(device: Device) -> None:
    """Prints the segment of the device as another user sees it, and what that user can remove."""
    import os

    from kvcached import collect_garbage, segments

    namespace = device.namespace
    device.close()
    os.setuid(65534)
    (found,) = segments(namespace)
    say((found.problem or "").split(" on ")[0])
    say("removed", *(found in collect_garbage(dry, namespace) for dry in (True, False)))


def create_in(device: Device, directory: str) -> None:
    """Creates a ledger in a separate directory and prints the error."""
    import kvcached.device
    from kvcached.errors import SharedMemoryFullError

    kvcached.device.SHM_DIR = Path(directory)
    try:
        Device.open("host:0", capacity_bytes=1 << 20, page_bytes=1 << 16)
    except SharedMemoryFullError as error:
        say(error, "left:", *Path(directory).iterdir())


def fork(device: Device) -> None:
    """Forks with an open client: the child can use the device, but not the parent's client."""
    import os

    from kvcached.errors import ForkedClientError

    client = device.client("parent")
    kv = client.alloc_kvcache(LAYOUT, 1 << 12)
    keys = as_array(kv.k_buffer(0))
    keys[0] = 7
    child = os.fork()
    if child == 0:
        refused = 0
        calls = (lambda: kv.alloc_kv(1), client.usage, lambda: client.reserve_static(1, "x"))
        for call in (*calls, lambda: kv.can_alloc(1), kv.available_blocks):
            try:
                call()
            except ForkedClientError:
                refused += 1
        client.close()
        with device.client("child") as own:
            tensor = own.alloc_virtual_tensor(device.page_bytes)
            tensor.map(0, device.page_bytes)
            as_array(tensor)[:] = 9
            names = sorted(entry.name for entry in device.usage().clients)
        say("child", refused, *names)
        os._exit(0)
    os.waitpid(child, 0)
    say("parent", keys[0, 0, 0], kv.alloc_kv(1))
    client.close()


def fork_with_gpu(device: Device) -> None:
    """Forks with an open client of a GPU. CUDA does not work in the child, whose errors say so."""
    import os

    from kvcached.errors import ForkedClientError

    client = device.client("parent")
    kv = client.alloc_kvcache(LAYOUT, 1 << 12)
    keys = as_array(kv.k_buffer(0))
    keys[0] = 7
    child = os.fork()
    if child == 0:
        for call in (lambda: kv.alloc_kv(1), lambda: device.client("child"), client.usage):
            try:
                call()
            except ForkedClientError as error:
                say("child:", error)
        client.close()
        os._exit(0)
    os.waitpid(child, 0)
    say("parent", keys[0, 0, 0], kv.alloc_kv(1))
    client.close()


def fork_then_open(device: Device) -> None:
    """Forks with an open device. The child opens its own client."""
    import os

    child = os.fork()
    if child == 0:
        with device.client("child"):
            say("child", len(device.usage().clients))
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    command, namespace, device_name, *arguments = sys.argv[1:]
    device = Device.open(device_name, namespace=namespace)
    globals()[command](device, *arguments)


if __name__ == "__main__":
    main()
