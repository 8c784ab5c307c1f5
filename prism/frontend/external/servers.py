"""External servers as this frontend sees them: open requests, failures, and the names that they
give their models."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.config.schema.access import server_headers
from prism.errors import ConfigError
from prism.frontend.dispatch.request_log import kept_for_others, share_of
from prism.frontend.external.entrances import Entrances
from prism.frontend.http.access_control import may_use
from prism.frontend.http.error_bodies import OverloadedError, UnavailableError
from prism.frontend.live_config import LiveConfig
from prism.messages.external import ExternalModel, ModelCard, ServerLoad, first_card
from prism.queueing.request_queue import RequestQueue

if TYPE_CHECKING:
    import httpx

# A server that failed is the last choice for this long.
_FAILED_S = 2.0
_CONNECT_S = 5.0
_NAME_S = 5.0
# Bytes of a body for each token of its prompt, about those of English.
_TOKEN_BYTES = 4


@dataclass(slots=True)
class Server:
    """One server of a model."""

    url: str
    requests: int = 0
    tokens: int = 0
    failed_s: float = float("-inf")
    card: ModelCard | None = None  # of its model; None: not asked yet

    def fail(self) -> None:
        self.failed_s, self.card = time.monotonic(), None


class ExternalServers:
    """Servers of all external models, and the client that sends to them. For one event loop."""

    def __init__(self, live: LiveConfig, queue: RequestQueue, frontend_id: str) -> None:
        self._live = live
        self.entrances = Entrances(live, queue, frontend_id)
        self._servers: dict[str, Server] = {}
        self._open: Counter[str] = Counter()  # requests by model
        self._opened: httpx.AsyncClient | None = None

    @property
    def _client(self) -> httpx.AsyncClient:
        """Client of all servers. A frontend without external models does not need httpx."""
        if self._opened is None:
            import httpx

            # A kept connection may be closed by the server as a request is sent on it.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._opened = httpx.AsyncClient(limits=limits, trust_env=False)
        return self._opened

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

    def prompt_tokens(self, model: ExternalModel, body_bytes: int) -> int:
        """Returns an estimate of a prompt's tokens, at most the context of the model if a server
        has told it."""
        cards = [server.card for server in self.in_order(model) if server.card]
        contexts = [card.max_model_len for card in cards if card.max_model_len]
        return min([body_bytes // _TOKEN_BYTES, *contexts])

    @contextmanager
    def admitted(self, model: ExternalModel) -> Iterator[None]:
        """Counts a request within the block. Raises OverloadedError if too many are open: half of
        `frontend.max_open_requests` is for all models, the other half in equal parts for each."""
        most, models = self._live.config.frontend.max_open_requests, self._live.config.external
        share, total = share_of(most, len(models)), self._open.total()
        kept = kept_for_others(share, len(models), self._open, [model.name])
        if total + 1 + kept > most:
            raise OverloadedError(
                f"{total} requests for external models are open, {self._open[model.name]} of them"
                f" for {model.name}; {most} may be (frontend.max_open_requests)"
            )
        self._open[model.name] += 1
        try:
            yield
        finally:
            self._open[model.name] -= 1

    def stream(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Posts a request and yields its answer as it arrives."""
        read_s = self._live.config.frontend.progress_timeout_s
        timeout = (_CONNECT_S, read_s, _CONNECT_S, None)  # connect, read, write, pool
        return self._client.stream("POST", url, content=body, headers=headers, timeout=timeout)

    def loads(self) -> dict[str, ServerLoad]:
        """Returns the load of each server with open requests, by its URL."""
        busy = (server for server in self._servers.values() if server.requests)
        return {server.url: ServerLoad(server.requests, server.tokens) for server in busy}

    def headers(self, model: ExternalModel) -> dict[str, str]:
        """Returns the header with the servers' key. Raises UnavailableError if a reload named a
        variable that this process does not have."""
        try:
            return server_headers(model.key_variable)
        except ConfigError as error:
            raise UnavailableError(str(error)) from error

    async def card(self, server: Server, model: ExternalModel) -> ModelCard:
        """Returns the server's description of its model. Raises httpx.HTTPError, or
        UnavailableError if the server has none."""
        if server.card is None:
            url = f"{server.url}/v1/models"
            answer = await self._client.get(url, headers=self.headers(model), timeout=_NAME_S)
            server.card = first_card(answer.content)
            if server.card is None:
                status = answer.status_code
                message = f"/v1/models answered with status {status} and no model"
                raise UnavailableError(message, "model_unavailable")
        return server.card

    async def close(self) -> None:
        await self.entrances.close()
        if self._opened is not None:
            await self._opened.aclose()


class SentRequest:
    """One request that a server has, in the server's load."""

    def __init__(self, server: Server, prompt_tokens: int) -> None:
        self._server, self._tokens = server, prompt_tokens
        server.requests += 1
        server.tokens += prompt_tokens

    def limit(self, most: int | None) -> None:
        """Corrects the prompt's tokens to what the model's context can hold."""
        if most is not None and self._tokens > most:
            self.add(most - self._tokens)

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        self._server.tokens += tokens

    def close(self) -> None:
        self._server.requests -= 1
        self._server.tokens -= self._tokens
