"""External servers as this frontend sees them: open requests, failures, and the names that they
give their models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import msgspec

from prism.config.api_keys import server_headers
from prism.frontend.http.access_control import may_use
from prism.frontend.http.error_bodies import OverloadedError, UnavailableError
from prism.frontend.live_config import LiveConfig
from prism.messages.external import ExternalModel, ServerLoad

# A server that failed is the last choice for this long.
_FAILED_S = 2.0
_CONNECT_S = 5.0


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(slots=True)
class Server:
    """One server of a model."""

    url: str
    requests: int = 0
    tokens: int = 0
    failed_s: float = float("-inf")
    served_name: str = ""  # the model's name there; empty: not asked yet


class ExternalServers:
    """Servers of all external models, and the client that sends to them. For one event loop."""

    def __init__(self, live: LiveConfig) -> None:
        self._live = live
        self._servers: dict[str, Server] = {}
        frontend = live.config.frontend
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(_CONNECT_S, read=frontend.progress_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    def models(self) -> list[tuple[str, ExternalModel]]:
        """Returns (name, model) for each name that the current request may use."""
        external = self._live.config.external
        return [(name, m) for m in external for name in m.names if may_use(m.name)]

    def find(self, name: str) -> ExternalModel | None:
        """Returns the model that `name` refers to, or None, also if the current key may not use
        it."""
        return next((model for known, model in self.models() if known == name), None)

    def in_order(self, model: ExternalModel) -> list[Server]:
        """Returns the model's servers: those that work first, by open requests."""
        now_s = time.monotonic()
        servers = [self._servers.setdefault(url, Server(url)) for url in model.servers]
        return sorted(servers, key=lambda s: (now_s - s.failed_s < _FAILED_S, s.requests))

    @contextmanager
    def open(self, server: Server, prompt_tokens: int) -> Iterator[OpenRequest]:
        """Counts a request to `server` within the block."""
        opened = OpenRequest(server, prompt_tokens)
        try:
            yield opened
        finally:
            opened.close()

    def check_room(self) -> None:
        """Raises OverloadedError if as many requests are open as the frontend may have."""
        most = self._live.config.frontend.max_open_requests
        if sum(server.requests for server in self._servers.values()) >= most:
            raise OverloadedError(f"{most} requests are open (frontend.max_open_requests)")

    def loads(self) -> dict[str, ServerLoad]:
        """Returns the load of each server with open requests, by its URL."""
        busy = (server for server in self._servers.values() if server.requests)
        return {server.url: ServerLoad(server.requests, server.tokens) for server in busy}

    async def served_name(self, server: Server, model: ExternalModel) -> str:
        """Returns the name of the model on the server. Raises httpx.TransportError, or
        UnavailableError if the server does not say it."""
        if not server.served_name:
            answer = await self.client.get(f"{server.url}/v1/models", headers=server_headers(model))
            try:
                server.served_name = msgspec.json.decode(answer.content, type=_Cards).data[0].id
            except (msgspec.DecodeError, IndexError) as error:
                raise UnavailableError(
                    f"/v1/models answered with status {answer.status_code} and no model",
                    "model_unavailable",
                ) from error
        return server.served_name

    async def close(self) -> None:
        await self.client.aclose()


class OpenRequest:
    """One request that a server has, in the server's load."""

    def __init__(self, server: Server, prompt_tokens: int) -> None:
        self._server, self._tokens = server, prompt_tokens
        server.requests += 1
        server.tokens += prompt_tokens

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        self._server.tokens += tokens

    def close(self) -> None:
        self._server.requests -= 1
        self._server.tokens -= self._tokens
