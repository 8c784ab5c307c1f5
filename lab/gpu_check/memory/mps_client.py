"""Client of the step "mps", which computes over kvcached's pages and answers in lines of JSON.

    python -m lab.gpu_check.memory.mps_client PIPE NAMESPACE NAME PAGES

PIPE names the folder of the MPS daemon. A folder that does not exist turns MPS off. The first line
is "ready". Each question is a method of Worker and its arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from lab.gpu_check.kv import CUDA, map_if_room
from lab.gpu_check.sizes import PAGE_BYTES, Sizes

if TYPE_CHECKING:
    from kvcached import Client

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
BATCH = 50
GRANT_S = 10.0


class Worker:
    """Products of small matrices over kvcached's pages. They leave most of a GPU idle."""

    def __init__(self, torch: Any, client: Client, pages: int, *, is_large: bool) -> None:
        self._torch = torch
        rows, self._depth = (512, 8192) if is_large else (16, 64)
        half_bytes = -(-2 * rows * self._depth // PAGE_BYTES) * PAGE_BYTES
        self._operands = client.alloc_virtual_tensor(2 * half_bytes)
        self._operands.map(0, 2 * half_bytes)
        left = self._operands.view([rows, self._depth], "bfloat16")
        right = self._operands.view([self._depth, rows], "bfloat16", half_bytes)
        self._left, self._right = torch.from_dlpack(left), torch.from_dlpack(right)
        numbers = torch.arange(rows, device=CUDA) % 2 + 1
        self._left.copy_(numbers[:, None].expand(rows, self._depth).to(torch.bfloat16))
        self._right.fill_(1)
        self._expected = (numbers * self._depth)[:, None].expand(rows, rows).to(torch.bfloat16)
        self._room = client.alloc_virtual_tensor(pages * PAGE_BYTES)
        self._batch()

    def compute(self, seconds: str) -> dict[str, Any]:
        return self._work(float(seconds))

    def holes(self) -> dict[str, Any]:
        """Returns [read by a copy, read by a kernel] of a page and of a hole."""
        torch, size_bytes = self._torch, 2 * PAGE_BYTES
        self._room.map(0, size_bytes)
        content = torch.from_dlpack(self._room.view([size_bytes], "uint8"))
        content.fill_(9)
        torch.cuda.synchronize()
        self._room.unmap(PAGE_BYTES, PAGE_BYTES)
        halves = content.view(2, PAGE_BYTES)
        page, hole = ([int(h.cpu().max()), int(h.amax())] for h in halves)
        torch.cuda.synchronize()
        self._room.unmap(0, PAGE_BYTES)
        return {"page": page, "hole": hole}

    def hold(self, pages: str) -> dict[str, Any]:
        self._room.map(0, int(pages) * PAGE_BYTES)
        return {}

    def busy(self) -> dict[str, Any]:
        """Answers, and then computes until the process is killed."""
        print("{}", flush=True)
        while True:
            self._batch()

    def take(self, seconds: str, pages: str) -> dict[str, Any]:
        """Computes for some seconds, and until so many pages are granted."""
        return self._work(float(seconds), int(pages) * PAGE_BYTES)

    def _work(self, seconds: float, want_bytes: int = 0) -> dict[str, Any]:
        began_s, steps, right, granted_s = time.monotonic(), 0, True, None
        room = self._room if want_bytes else None
        while (passed_s := time.monotonic() - began_s) < seconds or (
            room is not None and passed_s < seconds + GRANT_S
        ):
            right = self._batch() and right
            steps += BATCH
            if room is not None and map_if_room(room, want_bytes):
                room, granted_s = None, time.monotonic()
        seconds = time.monotonic() - began_s
        return {"steps": steps, "seconds": seconds, "right": right, "granted_s": granted_s}

    def _batch(self) -> bool:
        """Computes some products. Returns whether the last one is right."""
        for _ in range(BATCH):
            product = self._left @ self._right
        return bool(self._torch.equal(product, self._expected))


def main(pipe: str, namespace: str, name: str, pages: str) -> None:
    """Answers questions until standard input ends. CUDA reads PIPE when it is initialised."""
    os.environ[PIPE] = pipe
    import torch

    from kvcached import Device

    is_large = Sizes.of(torch.cuda.mem_get_info()[0]).is_large
    device = Device.open(CUDA, namespace=namespace)
    with device.client(name, background=False, guard_holes=True) as opened:
        worker = Worker(torch, opened, int(pages), is_large=is_large)
        print("ready", flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            print(json.dumps(getattr(worker, command)(*numbers)), flush=True)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
