"""Damages the segment of a separate device and makes every call on it.

fuzzing.py SEED ROUNDS

Every error of kvcached is right. Another exception ends the process with a traceback. The mutex's
state is not damaged, since a process waits for ten seconds if the mutex seems to be held.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from typer.testing import CliRunner

from kvcached import Client, Device, VirtualTensor, collect_garbage, segment_path, segments
from kvcached.errors import KvcachedError
from kvcached.prometheus import exposition
from kvcached.tools.commands import app

PAGE = 64 << 10
CAPACITY = 64 * PAGE
MEMORY_BYTES_MAX = 16 << 30  # of address space: an allocation that runs away is refused
MUTEX_STATE = range(88, 92)  # of LedgerSegment
INTERESTING = [0, 1, 2, CAPACITY, CAPACITY + 1, 2**31, 2**63, 2**64 - 2, 2**64 - 1]


def damage(path: Path, chooser: random.Random) -> None:
    """Damages words of the header or of the first records, or bits anywhere."""
    content = bytearray(path.read_bytes())
    for _ in range(chooser.randint(1, 4)):
        end = chooser.choice((200, 1200, len(content)))
        at = chooser.randrange(0, end - 8, 4)
        if at in range(MUTEX_STATE.start - 7, MUTEX_STATE.stop):
            continue
        if chooser.random() < 0.5:
            content[at : at + 8] = struct.pack("<Q", chooser.choice(INTERESTING))
        elif at not in MUTEX_STATE:
            content[at] ^= 1 << chooser.randrange(8)
    with path.open("r+b") as segment:
        for first, last in ((0, MUTEX_STATE.start), (MUTEX_STATE.stop, len(content))):
            segment.seek(first)
            segment.write(content[first:last])


def expect_named(call: Callable[[], object]) -> None:
    with suppress(KvcachedError):
        call()


def kvctl(*arguments: str) -> None:
    done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit | KvcachedError):
        raise done.exception


def use(device: Device, client: Client, tensor: VirtualTensor) -> None:
    """Makes the calls of a process that opened the device before."""
    calls: list[Callable[[], object]] = [
        lambda: tensor.map(PAGE, PAGE),
        lambda: tensor.unmap(PAGE, PAGE),
        lambda: client.reserve_static(5, "x").release(),
        lambda: client.set_limit(8 * PAGE),
        lambda: client.set_min(PAGE),
        client.usage,
        device.usage,
        device.residency,
        device.resident_bytes,
        device.reap,
        lambda: device.set_limit("subject", None),
        lambda: device.set_min(os.getpid(), 0),
    ]
    for call in calls:
        expect_named(call)


def come_late(namespace: str, capacity_bytes: int | None) -> None:
    """Attaches or creates, and joins."""
    with Device.open(
        "host:0", capacity_bytes=capacity_bytes, page_bytes=PAGE, namespace=namespace
    ).client("late", min_bytes=PAGE) as client:
        client.alloc_virtual_tensor(4 * PAGE).map(0, 4 * PAGE)


def look(namespace: str) -> None:
    """Makes the calls of administrators and monitors."""
    expect_named(lambda: segments(namespace))
    expect_named(lambda: exposition(namespace))
    kvctl("list", "--namespace", namespace, "--json")
    kvctl("top", "--namespace", namespace, "--once", "--interval", "0.05")
    kvctl("limit", "subject", "1MiB", "--namespace", namespace)
    kvctl("min", "subject", "0", "--namespace", namespace)
    kvctl("gc", "--namespace", namespace, "--dry-run")
    expect_named(lambda: collect_garbage(False, namespace))


def one_round(seed: int) -> None:
    chooser = random.Random(seed)
    namespace = f"fuzz-{os.getpid()}-{seed}"
    device = Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    client = device.client("subject", min_bytes=2 * PAGE)
    tensor = client.alloc_virtual_tensor(8 * PAGE)
    tensor.map(0, PAGE)
    damage(segment_path("host:0", namespace), chooser)
    if chooser.random() < 0.5:
        use(device, client, tensor)
    if chooser.random() < 0.2:
        look(namespace)
    for capacity_bytes in (None, CAPACITY):
        expect_named(lambda capacity_bytes=capacity_bytes: come_late(namespace, capacity_bytes))
    expect_named(client.close)
    expect_named(lambda: Device.unlink(namespace, "host:0", force=True))
    segment_path("host:0", namespace).unlink(missing_ok=True)


def main() -> None:
    seed, rounds = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    for round_seed in range(seed, seed + rounds):
        print("seed", round_seed, flush=True)
        one_round(round_seed)


if __name__ == "__main__":
    main()
