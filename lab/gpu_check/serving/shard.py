"""Writes a checkpoint's tensors from GPU memory into one safetensors file, over several threads.

Each thread copies pieces into a pinned buffer and writes them to their place in the file. This is
as fast as memory. save_pretrained uses one core, and a second copy in memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

MIB = 1 << 20
PIECE_BYTES = 64 * MIB
THREADS = 8
NAME = "model.safetensors"
_MEMINFO = Path("/proc/meminfo")
_LEFT_BYTES = 2048 * MIB  # for other processes of the machine
_GROWS_S = 3.0  # in which a virtual machine may be given more
_LOOK_S = 0.05


class MemoryShort(Exception):
    """Lack of memory of the machine for the file."""


def save(torch: Any, tensors: Mapping[str, Any], folder: Path) -> int:
    """Writes contiguous CUDA tensors of bfloat16 into a folder. Returns bytes.

    Raises MemoryShort before the machine runs out of memory, OSError where the disk is full.
    """
    header, size_bytes = header_of(tensors)
    torch.cuda.synchronize()
    pieces = list(_pieces(torch, tensors, len(header)))
    is_guarded = size_bytes > _LEFT_BYTES
    threads = min(THREADS, len(pieces))
    largest_bytes = max(stop - start for _, start, stop, _ in pieces)
    slots: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    for _ in range(threads):
        buffer = torch.empty(largest_bytes, dtype=torch.uint8, pin_memory=True)
        slots.put((buffer, torch.cuda.Stream()))
    with (folder / NAME).open("wb") as file, ThreadPoolExecutor(threads) as pool:
        file.write(header)
        file.flush()

        def write(piece: tuple[Any, int, int, int]) -> None:
            if is_guarded:
                await_memory(available_bytes)
            content, start, stop, offset = piece
            buffer, stream = slots.get()
            try:
                with torch.cuda.stream(stream):
                    buffer[: stop - start].copy_(content[start:stop], non_blocking=True)
                stream.synchronize()
                _write_at(file.fileno(), buffer[: stop - start].numpy(), offset)
            finally:
                slots.put((buffer, stream))

        for _ in pool.map(write, pieces):
            pass
    return len(header) + size_bytes


def header_of(tensors: Mapping[str, Any]) -> tuple[bytes, int]:
    """Returns the header of the file, and the bytes of all tensors, which follow in order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _pieces(
    torch: Any, tensors: Mapping[str, Any], begin: int
) -> Iterator[tuple[Any, int, int, int]]:
    """Yields the content of a tensor, start and stop of a piece, and its place in the file."""
    for tensor in tensors.values():
        content = tensor.detach().flatten().view(torch.uint8)
        size_bytes = content.numel()
        for start in range(0, size_bytes, PIECE_BYTES):
            yield content, start, min(start + PIECE_BYTES, size_bytes), begin + start
        begin += size_bytes


def _write_at(fd: int, content: Any, offset: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def available_bytes() -> int:
    """Returns the memory that the kernel can provide without swapping."""
    return meminfo("MemAvailable")


def meminfo(name: str) -> int:
    """Returns a figure of /proc/meminfo in bytes."""
    for line in _MEMINFO.read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    raise KeyError(name)


def await_memory(available: Callable[[], int]) -> None:
    """Waits while little memory is left, since some virtual machines grow while they are used.
    Raises MemoryShort."""
    until_s = time.monotonic() + _GROWS_S
    while (left_bytes := available()) < _LEFT_BYTES:
        if time.monotonic() > until_s:
            raise MemoryShort(f"{left_bytes >> 20} MiB of the machine's memory are left")
        time.sleep(_LOOK_S)
