"""APIs by which vLLM and SGLang are put to sleep and woken.

All calls raise httpx.HTTPStatusError if the server refuses, httpx.ConnectError if nothing was sent,
and other httpx.TransportErrors if it is not known whether the server has received the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Protocol

import httpx
import msgspec

_LOOK_TIMEOUT_S = 5.0
# Statuses of a proxy in between, which does not know whether the server got the call.
_PROXY_STATUSES = (502, 504)


class SleepingServer:
    """One server. Each call has a new connection, so that one which the server has just closed
    leaves no doubt whether a call has arrived."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            headers=dict(headers),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(f"{self.url}{path}", timeout=_LOOK_TIMEOUT_S)

    async def post(self, path: str, **body: Any) -> None:
        url, timeout = f"{self.url}{path}", httpx.Timeout(self._timeout_s, connect=_LOOK_TIMEOUT_S)
        answer = await self._client.post(url, json=body, timeout=timeout)
        if answer.status_code in _PROXY_STATUSES:
            raise httpx.RemoteProtocolError(f"status {answer.status_code}")
        answer.raise_for_status()

    async def close(self) -> None:
        await self._client.aclose()


class SleepApi(Protocol):
    """API of one kind of server. `pause` and `unpause` are idempotent, and in order with the other
    calls. Only an idle server may be released."""

    name: str

    async def process(self, server: SleepingServer) -> str | None:
        """Returns what differs after a restart of the server. None: it does not have this API."""

    async def is_awake(self, server: SleepingServer, process: str, *, resumed: bool) -> bool:
        """Returns whether the server is awake after it was released. `resumed`: `resume` was
        called."""

    async def pause(self, server: SleepingServer) -> None: ...

    async def release(self, server: SleepingServer) -> None: ...

    async def resume(self, server: SleepingServer) -> None: ...

    async def unpause(self, server: SleepingServer) -> None: ...


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class VllmSleep:
    """Sleep mode of vLLM: level 1, which keeps the weights in the host's memory."""

    name = "vllm"

    async def process(self, server: SleepingServer) -> str | None:
        return "" if (await server.get("/is_sleeping")).status_code == 200 else None

    async def is_awake(self, server: SleepingServer, process: str, *, resumed: bool) -> bool:
        answer = (await server.get("/is_sleeping")).raise_for_status()
        return not msgspec.json.decode(answer.content, type=_Sleeping).is_sleeping

    async def pause(self, server: SleepingServer) -> None:
        pass

    async def release(self, server: SleepingServer) -> None:
        await server.post("/sleep?level=1")

    async def resume(self, server: SleepingServer) -> None:
        await server.post("/wake_up")

    async def unpause(self, server: SleepingServer) -> None:
        """Wakes a server that is asleep after an error."""
        if not await self.is_awake(server, "", resumed=False):
            await self.resume(server)


class _Info(msgspec.Struct):
    startup_time: msgspec.Raw
    random_seed: int | None = None


class SglangSleep:
    """Memory occupation of SGLang.

    SGLang does not tell whether it is asleep, and ends if it is resumed while awake. A paused
    server ends at no request: it retracts what runs, and what arrives waits.
    """

    name = "sglang"

    async def process(self, server: SleepingServer) -> str | None:
        answer = await server.get("/server_info")
        try:
            info = msgspec.json.decode(answer.content, type=_Info)
        except msgspec.DecodeError:
            return None
        told = f"{bytes(info.startup_time)!r} {info.random_seed}"
        return sha256(told.encode()).hexdigest()[:16] if answer.status_code == 200 else None

    async def is_awake(self, server: SleepingServer, process: str, *, resumed: bool) -> bool:
        """Waits for earlier calls, since its scheduler answers in order."""
        now = await self.process(server)
        return now is not None and (resumed or now != process)

    async def pause(self, server: SleepingServer) -> None:
        await server.post("/pause_generation", mode="retract")

    async def release(self, server: SleepingServer) -> None:
        await server.post("/release_memory_occupation")

    async def resume(self, server: SleepingServer) -> None:
        await server.post("/resume_memory_occupation")

    async def unpause(self, server: SleepingServer) -> None:
        await server.post("/continue_generation")


APIS: Mapping[str, SleepApi] = {"vllm": VllmSleep(), "sglang": SglangSleep()}


async def find_api(server: SleepingServer) -> tuple[SleepApi, str] | None:
    """Returns the server's API and its process, or None if it has neither API."""
    for api in APIS.values():
        if (process := await api.process(server)) is not None:
            return api, process
    return None
