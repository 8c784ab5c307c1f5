"""KV of a running request from one process into another: page to page, against through a file.

    python bench/kv_move.py --tokens 1024 --pages 64KiB

The source is another process, on a host device of its own. Each way begins where an engine has the
request's block ids, and ends when the KV lies in the blocks of the target: an offer and its fetch;
or the gathered rows in a file of /dev/shm, mapped and scattered, as `prism.engines.kv_file` does
it. Wall time, since both processes work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import numpy as np
from pairs import measure

from kvcached import Device, KVCache, Layout
from prism.engines import kv_file

BLOCK_TOKENS = 16


def main() -> None:
    options = parse()
    if options.source:
        serve(options)
        return
    names = ("host:0", "host:1")
    options.namespace = f"bench-{uuid4().hex[:8]}"
    try:
        with TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
            compare(options, folder)
    finally:
        for name in names:
            Device.unlink(options.namespace, name, force=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--pages", default="64KiB", choices=["64KiB", "2MiB"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--namespace", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace, folder: str) -> None:
    source = start_source(options)
    kv, blocks = fill(options, "host:1", "target", 0.0)

    def ask(command: str) -> str:
        source.stdin.write(command + "\n")
        source.stdin.flush()
        return str(source.stdout.readline().strip())

    def direct() -> None:
        kv.fetch_kv(ask("offer"), blocks)

    def through_a_file() -> None:
        take(kv, blocks, ask(f"file {folder}"))

    for way in (direct, through_a_file):
        way()
        check(kv, blocks)
    pairs = measure(direct, through_a_file, options.pairs, clock=time.perf_counter)
    size_mb = kv.layout.token_bytes * options.tokens / 1e6
    print(f"{options.tokens} tokens, {size_mb:.1f} MB, pages of {options.pages}")
    print(pairs.line("direct against file", "below 1", "ms", 1e-3, 1e-3))
    source.stdin.close()
    source.wait()


def start_source(options: argparse.Namespace) -> Any:
    command = [sys.executable, str(Path(__file__)), "--source", "--namespace", options.namespace]
    command += ["--tokens", str(options.tokens), "--layers", str(options.layers)]
    command += ["--pages", options.pages]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def serve(options: argparse.Namespace) -> None:
    kv, blocks = fill(options, "host:0", "source", 5.0)
    for line in sys.stdin:
        command, *folder = line.split()
        answer = kv.offer_kv(blocks).address if command == "offer" else save(kv, blocks, *folder)
        print(answer, flush=True)


def fill(
    options: argparse.Namespace, name: str, role: str, value: float
) -> tuple[KVCache, np.ndarray]:
    """A cache with the request's blocks, in no order, all written."""
    layout = Layout(
        num_layers=options.layers,
        num_kv_heads=3,
        head_dim=64,
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
    )
    page_bytes = (64 << 10) if options.pages == "64KiB" else (2 << 20)
    needed = layout.need_bytes(options.tokens * 2, page_bytes)
    device = Device.open(
        name, capacity_bytes=needed * 2, page_bytes=page_bytes, namespace=options.namespace
    )
    kv = device.client(role).alloc_kvcache(layout, options.tokens * 4)
    ids = kv.alloc_kv(options.tokens // BLOCK_TOKENS)
    assert ids is not None
    ids = np.random.default_rng(1).permutation(ids)
    for buffer in buffers(kv):
        buffer[slots_of(ids)] = value
    return kv, ids


def buffers(kv: KVCache) -> list[np.ndarray]:
    return [np.from_dlpack(kv.buffer(part.layer, part.name)) for part in kv.layout.parts]


def slots_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


def save(kv: KVCache, ids: np.ndarray, folder: str) -> str:
    slots, views = slots_of(ids), buffers(kv)
    return kv_file.save(folder, (view[slots] for view in views), len(views))


def take(kv: KVCache, ids: np.ndarray, path: str) -> None:
    slots, views = slots_of(ids), buffers(kv)
    shape = views[0].shape[1:]
    token_bytes = int(np.prod(shape)) * views[0].itemsize
    rows = kv_file.take(path, len(views), len(slots), token_bytes)
    assert rows is not None
    for view, row in zip(views, rows, strict=True):
        view[slots] = row.view(view.dtype).reshape(-1, *shape)


def check(kv: KVCache, ids: np.ndarray) -> None:
    for buffer in buffers(kv):
        rows = buffer[slots_of(ids)]
        if not (rows == 5.0).all():
            raise SystemExit("the KV that came is not the KV that left")
        buffer[slots_of(ids)] = 0.0


if __name__ == "__main__":
    main()
