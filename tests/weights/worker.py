"""Processes that the tests start and kill.

worker.py COMMAND DIRECTORY NAMESPACE [ARGUMENT ...]; the store is in DIRECTORY/store.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import kvcached


def say(*words: object) -> None:
    print(*words, flush=True)


def open_store(directory: Path) -> kvcached.WeightStore:
    return kvcached.WeightStore.open(directory / "store", max_bytes=64 << 20, threads=2)


def make_again(directory: Path, namespace: str) -> None:
    """Stores the checkpoint over and over until it is killed."""
    store = open_store(directory)
    checkpoint = kvcached.Checkpoint.open(directory / "model")
    key = kvcached.WeightKey(store.content_of(checkpoint), "checkpoint", "as-stored")
    say("ready")
    while True:
        store.get_checkpoint(checkpoint).close()
        store.discard(key)


def use(directory: Path, namespace: str, name: str) -> None:
    """Makes an entry of 1 MiB and has it in use until it is killed."""

    def produce(builder: kvcached.WeightBuilder) -> None:
        builder.put("x", np.full(1 << 20, ord(name[0]), np.uint8))

    weights = open_store(directory).get(kvcached.WeightKey(name, "engine-1", "any"), produce)
    say("ready", weights.size_bytes)
    sys.stdin.read()


def make_slowly(directory: Path, namespace: str) -> None:
    """Puts half of an entry, says so, and waits to be killed."""

    def produce(builder: kvcached.WeightBuilder) -> None:
        builder.put("x", np.zeros(1 << 20, np.uint8))
        say("half")
        sys.stdin.read()

    open_store(directory).get(kvcached.WeightKey("slow", "engine-1", "any"), produce)


def load_slowly(directory: Path, namespace: str, rate: str) -> None:
    """Loads the checkpoint into an arena over and over until it is killed."""
    store = open_store(directory)
    device = kvcached.Device.open("host:0", namespace=namespace)
    client = device.client("loader")
    client.reserve_addresses(64 << 20)
    options = kvcached.LoadOptions(threads=2, chunk_bytes=64 << 10, bytes_per_s=int(rate))
    with store.get_checkpoint(directory / "model") as weights:
        say("ready")
        while True:
            arena = client.alloc_weights(weights.layout(), "model")
            arena.load(weights, options)
            arena.free()


def read_io(directory: Path, namespace: str) -> None:
    """Gets the checkpoint from the store; says what the store and the kernel count as read."""
    store = open_store(directory)
    io = Path("/proc/self/io")

    def read_bytes() -> int:
        fields = dict(line.split(": ") for line in io.read_text().splitlines())
        return int(fields["read_bytes"])

    before = read_bytes()
    with store.get_checkpoint(directory / "model") as weights:
        total = sum(weights.path(name).stat().st_size for name in weights.specs)
    say(store.counters().disk_bytes, read_bytes() - before, total)


COMMANDS = {
    command.__name__: command for command in (make_again, use, make_slowly, load_slowly, read_io)
}

if __name__ == "__main__":
    name, directory, *arguments = sys.argv[1:]
    COMMANDS[name](Path(directory), *arguments)
