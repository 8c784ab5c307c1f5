"""Stand-in for a stock server on kvcached: holds real KV for requests until they are released.

`python -m tests.serve.stand_in_server PORT NAMESPACE CAPACITY_BYTES` listens on PORT as a client of
host:0. A completion takes blocks for its prompt as soon as they are free and waits for POST
/release; its blocks are then cached prefixes, which other clients may have.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvcached import Client, Device, KVCache, Layout, Shrunk

PAGE_BYTES = 64 << 10
CONTEXT = 256
# With 2 KiB for each token.
LAYOUT = Layout(num_layers=2, num_kv_heads=4, head_dim=64)


class StandIn:
    """Server and its KV, on one thread."""

    def __init__(self, client: Client, kv: KVCache) -> None:
        self._client, self._kv = client, kv
        self._cached: NDArray[np.int64] = np.array([], np.int64)
        self._released = asyncio.Event()

    async def run(self, port: int) -> None:
        async with await asyncio.start_server(self._handle, "127.0.0.1", port):
            while True:
                self._client.answer_requests(self._shrink)
                size_bytes = len(self._cached) * LAYOUT.block_tokens * LAYOUT.token_bytes
                self._client.publish_evictable(size_bytes)
                await asyncio.sleep(0.01)

    def _shrink(self, _size_bytes: int | None) -> Shrunk:
        tokens = len(self._cached) * LAYOUT.block_tokens
        self._kv.free_kv(self._cached)
        self._cached = self._cached[:0]
        before = self._client.usage().committed_bytes
        self._kv.trim()
        return Shrunk(max(0, before - self._client.usage().committed_bytes), tokens, 0)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                _, _, length = head.partition("content-length: ")
                body = await reader.readexactly(int(length.split("\r\n")[0] or 0))
                answer = json.dumps(await self._answer(head.split(" ")[1], body)).encode()
                start = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n"
                writer.write(f"{start}content-type: application/json\r\n\r\n".encode() + answer)
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: bytes) -> object:
        if path == "/v1/models":
            return {"data": [{"id": "stand-in", "max_model_len": CONTEXT}]}
        if path == "/release":
            self._released.set()
            self._released = asyncio.Event()
            return {}
        released, ids = self._released, await self._blocks(len(json.loads(body)["prompt"]))
        await released.wait()
        self._cached = np.concatenate([self._cached, ids])
        return {"choices": [{"text": str(len(ids))}], "usage": {"prompt_tokens": 1}}

    async def _blocks(self, tokens: int) -> NDArray[np.int64]:
        count = -(-tokens // LAYOUT.block_tokens)
        while (ids := self._kv.alloc_kv(count)) is None:
            self._shrink(None)
            await asyncio.sleep(0.01)
        return ids


def main(port: int, namespace: str, capacity_bytes: int) -> None:
    device = Device.open(
        "host:0", namespace=namespace, capacity_bytes=capacity_bytes, page_bytes=PAGE_BYTES
    )
    client = device.client(f"stand-in:{port}")
    client.set_min(LAYOUT.need_bytes(CONTEXT, PAGE_BYTES))
    kv = client.alloc_kvcache(LAYOUT, num_tokens=1 << 16)
    asyncio.run(StandIn(client, kv).run(port))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
