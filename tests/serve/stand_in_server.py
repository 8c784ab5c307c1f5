"""Stand-in for a stock server on kvcached: holds real KV for requests until they are released.

`python -m tests.serve.stand_in_server PORT NAMESPACE CAPACITY_BYTES [API]` listens on PORT as a
client of host:0. A completion takes blocks for its prompt as soon as they are free and waits for
POST /release; its blocks are then cached prefixes, which other clients may have.

With an API to sleep, "vllm" or "sglang", a completion is released after a moment. The process ends
if it is put to sleep while a request runs, if a request arrives while it sleeps, or, with SGLang's
API, if it is woken while awake. POST /refuse makes the next calls that wake it fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvcached import Client, Device, KVCache, Layout, Shrunk

PAGE_BYTES = 64 << 10
CONTEXT = 256
ANSWER_S = 0.02
SLEEP_S = 0.05
# With 2 KiB for each token.
LAYOUT = Layout(num_layers=2, num_kv_heads=4, head_dim=64)


class Refusal(Exception):
    """Answer with another status than 200."""

    def __init__(self, status: int) -> None:
        self.status = status


class SleepMode:
    """API of vLLM or of SGLang. With another name, the paths of both do not exist."""

    def __init__(self, api: str) -> None:
        self.api, self.requests, self.refusals = api, 0, 0
        self.asleep = self.paused = False
        self.sleeps = 0
        self._started_s = time.time()

    def check(self, *, is_fine: bool, what: str) -> None:
        if not is_fine:
            print(f"stand-in: {what}", flush=True)
            os._exit(1)

    async def answer(self, path: str) -> object:
        if path == "/sleep_state":
            return {"asleep": self.asleep, "paused": self.paused, "sleeps": self.sleeps}
        if self.api == "vllm" and path == "/is_sleeping":
            return {"is_sleeping": self.asleep}
        if self.api.startswith("sglang") and path == "/server_info":
            return {"startup_time": {"scheduler_e2e": self._started_s}, "random_seed": 3}
        if self.api == "sglang" and path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            return {}
        if path in {"vllm": ["/sleep?level=1"], "sglang": ["/release_memory_occupation"]}.get(
            self.api, []
        ):
            return await self._sleep()
        if path in {"vllm": ["/wake_up"], "sglang": ["/resume_memory_occupation"]}.get(
            self.api, []
        ):
            return await self._wake()
        raise Refusal(404)

    async def _sleep(self) -> object:
        self.check(is_fine=not self.requests, what="a request runs while it is put to sleep")
        self.asleep = True
        self.sleeps += 1
        await asyncio.sleep(SLEEP_S)
        return {}

    async def _wake(self) -> object:
        self.check(is_fine=self.asleep or self.api == "vllm", what="woken while awake")
        if self.refusals:
            self.refusals -= 1
            raise Refusal(500)
        await asyncio.sleep(SLEEP_S)
        self.asleep = False
        return {}


class StandIn:
    """Server and its KV, on one thread."""

    def __init__(self, client: Client, kv: KVCache, mode: SleepMode) -> None:
        self._client, self._kv, self._mode = client, kv, mode
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
                status, said = 200, {}
                try:
                    said = await self._answer(head.split(" ")[1], body)
                except Refusal as refusal:
                    status = refusal.status
                answer = json.dumps(said).encode()
                start = f"HTTP/1.1 {status} Said\r\ncontent-length: {len(answer)}\r\n"
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
        if path == "/refuse":
            self._mode.refusals = json.loads(body)
            return {}
        if path != "/v1/completions":
            return await self._mode.answer(path)
        self._mode.requests += 1
        try:
            return await self._complete(len(json.loads(body)["prompt"]))
        finally:
            self._mode.requests -= 1

    async def _complete(self, tokens: int) -> object:
        released = self._released
        self._mode.check(is_fine=not self._mode.asleep, what="a request arrives while it sleeps")
        ids = await self._blocks(tokens)
        await (asyncio.sleep(ANSWER_S) if self._mode.api else released.wait())
        self._mode.check(is_fine=not self._mode.asleep, what="it sleeps while a request runs")
        self._cached = np.concatenate([self._cached, ids])
        return {"choices": [{"text": str(len(ids))}], "usage": {"prompt_tokens": 1}}

    async def _blocks(self, tokens: int) -> NDArray[np.int64]:
        count = -(-tokens // LAYOUT.block_tokens)
        while (ids := self._kv.alloc_kv(count)) is None:
            self._shrink(None)
            await asyncio.sleep(0.01)
        return ids


def main(port: int, namespace: str, capacity_bytes: int, api: str = "") -> None:
    device = Device.open(
        "host:0", namespace=namespace, capacity_bytes=capacity_bytes, page_bytes=PAGE_BYTES
    )
    client = device.client(f"stand-in:{port}")
    client.set_min(LAYOUT.need_bytes(CONTEXT, PAGE_BYTES))
    kv = client.alloc_kvcache(LAYOUT, num_tokens=1 << 16)
    asyncio.run(StandIn(client, kv, SleepMode(api)).run(port))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
