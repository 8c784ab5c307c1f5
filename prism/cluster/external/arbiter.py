"""Loop that divides the memory of external servers by demand and SLO, while there is too little.

Nothing is limited while a device has room: a server may then use all of it. Minimums and limits of
the servers' operators hold as before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import httpx
from msgspec.structs import replace

from prism.cluster.external.ledgers import (
    NOT_HERE,
    NOT_ON_KVCACHED,
    DeviceKey,
    Found,
    Ledgers,
    apply,
    share_of,
)
from prism.cluster.external.sleeper import Sleeper
from prism.cluster.state.scheduler_state import SchedulerState
from prism.config.schema.access import server_headers
from prism.config.schema.units import format_size
from prism.errors import ConfigError, QueueUnavailableError
from prism.messages.external import (
    ClientShare,
    ExternalModel,
    ExternalServer,
    ServerLoad,
    first_card,
)
from prism.policies.planning.memory_shares import MemoryShare, ServerDemand, memory_shares
from prism.queueing.request_queue import RequestQueue

INTERVAL_S = 0.5
_HEALTH_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
# Memory stays divided for this long after there was too little.
_KEPT_S = 5.0
# Room for what open requests will yet write, and for blocks that are not full.
_AHEAD = 1.25

log = logging.getLogger("prism.cluster")


class ExternalArbiter:
    """Loop over the external servers. It alone changes `state.external`."""

    def __init__(self, state: SchedulerState, queue: RequestQueue, sleeper: Sleeper) -> None:
        self._state = state
        self._queue = queue
        self._sleeper = sleeper
        self._ledgers = Ledgers()
        # Ledgers may be locked, and names resolve slowly. One thread: `Ledgers` needs it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="external")
        self._problems: dict[str, str] = {}  # URL -> why the server does not answer
        self._contexts: dict[str, int] = {}  # URL -> tokens of its model's context
        self._short_until_s: dict[DeviceKey, float] = {}
        self._taken_over = True  # the servers' state is an earlier scheduler's

    async def run(self) -> None:
        """Divides until cancelled; then the servers have their operators' limits again."""
        try:
            while True:
                before = self._state.external
                if before is not None and (self._state.config.external or before):
                    with suppress(QueueUnavailableError):
                        await self._step(before, await self._loads())
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._thread.submit(self._release, self._state.external or []).result()
            self._thread.shutdown()

    async def _loads(self) -> dict[str, ServerLoad]:
        loads: dict[str, ServerLoad] = {}
        for frontend in (await self._queue.frontends()).values():
            for url, load in frontend.external.items():
                sofar = loads.get(url, ServerLoad())
                loads[url] = ServerLoad(sofar.requests + load.requests, sofar.tokens + load.tokens)
        return loads

    async def _step(
        self, before: Sequence[ExternalServer], loads: Mapping[str, ServerLoad]
    ) -> None:
        models = self._state.config.external
        work = partial(self._round, models, {s.url: s for s in before}, loads)
        self._state.external = await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _round(
        self,
        models: Sequence[ExternalModel],
        before: Mapping[str, ExternalServer],
        loads: Mapping[str, ServerLoad],
    ) -> list[ExternalServer]:
        """Reads the ledgers and divides. Returns the servers. Called in the thread."""
        urls = {url for model in models for url in model.servers}
        self._release([server for url, server in before.items() if url not in urls])
        found = self._ledgers.find(urls)
        servers = [
            self._read(model, url, found, before.get(url), loads.get(url, ServerLoad()))
            for model in models
            for url in model.servers
        ]
        self._taken_over = False
        return self._divide(servers, {m.name: m.slo_tpot_s for m in models}, found)

    def _read(
        self,
        model: ExternalModel,
        url: str,
        found: Found,
        before: ExternalServer | None,
        load: ServerLoad,
    ) -> ExternalServer:
        earlier = before.clients if before else []
        known = {(c.namespace, c.device, c.number): c for c in earlier}
        clients = [
            share_of(key, found, known.get(key), taken_over=self._taken_over)
            for key in found.clients[url]
        ]
        return ExternalServer(
            model=model.name,
            url=url,
            problem=self._problems.get(url, "") or self._sleeper.problem(url),
            load=load,
            # A scheduler on the server's machine may lead again, and must know its own limits.
            clients=clients if clients or url in found.here else earlier,
            unmanaged="" if clients else NOT_ON_KVCACHED if url in found.here else NOT_HERE,
            asleep=self._sleeper.is_asleep(url),
            no_sleep=self._sleeper.no_sleep(url) if model.sleep_after_s else "",
        )

    # --- memory -----------------------------------------------------------------------------

    def _divide(
        self, servers: Sequence[ExternalServer], slos_s: Mapping[str, float], found: Found
    ) -> list[ExternalServer]:
        """Sets minimums and limits. Returns the servers with them."""
        managed = [server for server in servers if not server.unmanaged]
        divided = {server.url: replace(server, clients=[]) for server in managed}
        for key in found.ledgers:
            here = [(s, c) for s in managed for c in s.clients if (c.namespace, c.device) == key]
            shares = self._shares(key, here, slos_s, found)
            for (server, client), (share, reason) in zip(here, shares, strict=True):
                row = divided[server.url]
                clients = [*row.clients, apply(client, share, found)]
                divided[server.url] = replace(row, clients=clients, reason=reason or row.reason)
        return [divided.get(server.url, server) for server in servers]

    def _shares(
        self,
        key: DeviceKey,
        here: Sequence[tuple[ExternalServer, ClientShare]],
        slos_s: Mapping[str, float],
        found: Found,
    ) -> list[tuple[MemoryShare | None, str]]:
        """Returns the share of each client of one device and its reason. None: nothing is
        divided."""
        if not self._is_short(key, here, found):
            return [(None, "") for _ in here]
        demands = [
            ServerDemand(
                client.own_min_bytes,
                self._wanted_bytes(server, client),
                slos_s[server.model],
                client.held_bytes,
                client.own_limit_bytes,
            )
            for server, client in here
        ]
        shares = memory_shares(_room_bytes(key, here, found), demands)
        rows = zip(here, demands, shares, strict=True)
        return [(share, _reason(server, demand, share)) for (server, _), demand, share in rows]

    def _is_short(
        self, key: DeviceKey, here: Sequence[tuple[ExternalServer, ClientShare]], found: Found
    ) -> bool:
        """Returns whether the device has had less free than one request of a busy server needs, or
        a busy server has reached its limit."""
        now_s, usage = time.monotonic(), found.ledgers[key].usage
        busy = [client for server, client in here if self._wanted_bytes(server, client)]
        least_bytes = max((client.own_min_bytes for client in busy), default=0)
        at_limit = any(
            client.limit_bytes is not None
            and client.limit_bytes != client.own_limit_bytes
            and client.held_bytes + usage.page_bytes > client.limit_bytes
            for client in busy
        )
        if busy and (usage.free_bytes < least_bytes or at_limit):
            if now_s > self._short_until_s.get(key, 0.0):
                log.info("%s/%s is short of memory for its external servers", *key)
            self._short_until_s[key] = now_s + _KEPT_S
        return bool(busy) and now_s < self._short_until_s.get(key, 0.0)

    def _wanted_bytes(self, server: ExternalServer, client: ClientShare) -> int:
        """Returns what a server wants on one of its devices: the KV of its open requests' tokens,
        of which `own_min_bytes` is as much as the context has. Requests that did not pass a
        frontend show in the pages alone."""
        used_bytes = client.held_bytes - client.evictable_bytes
        requests, tokens = server.load.requests, server.load.tokens
        if not requests and used_bytes <= client.own_min_bytes:
            return 0
        context = self._contexts.get(server.url)
        contexts = min(tokens / context, requests) if context else requests
        return int(_AHEAD * max(client.own_min_bytes * contexts, used_bytes, 1))

    def _release(self, servers: Sequence[ExternalServer]) -> None:
        """Gives servers their own minimums and limits."""
        if not any(server.clients for server in servers):
            return
        found = self._ledgers.find(server.url for server in servers)
        for server in servers:
            for client in server.clients:
                key = (client.namespace, client.device, client.number)
                if key in found.clients[server.url]:
                    apply(share_of(key, found, client), None, found)

    # --- health -----------------------------------------------------------------------------

    async def watch_health(self) -> None:
        """Asks all servers for their models every _HEALTH_S, until cancelled."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                models = self._state.config.external
                await asyncio.gather(*(self._look(client, m, u) for m in models for u in m.servers))
                await asyncio.sleep(_HEALTH_S)

    async def _look(self, client: httpx.AsyncClient, model: ExternalModel, url: str) -> None:
        card = None
        try:
            headers = server_headers(model.key_variable)
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                answer = await client.get(f"{url}/v1/models", headers=headers)
            card = first_card(answer.content)
            problem = f"/v1/models answered with status {answer.status_code}"
        except (httpx.HTTPError, TimeoutError, ConfigError) as error:
            problem = str(error) or type(error).__name__
        if card is None:
            if not self._problems.get(url):
                log.warning("%s of %s does not answer: %s", url, model.name, problem)
            self._problems[url] = problem
            return
        if self._problems.pop(url, ""):
            log.info("%s of %s answers again", url, model.name)
        if card.max_model_len:
            self._contexts[url] = card.max_model_len


def _room_bytes(
    key: DeviceKey, here: Sequence[tuple[ExternalServer, ClientShare]], found: Found
) -> int:
    """Returns the bytes of the device's pages that these clients may have together."""
    usage, own = found.ledgers[key].usage, {client.number for _, client in here}
    others = sum(max(c.reserved_bytes, c.min_bytes) for c in usage.clients if c.number not in own)
    return usage.capacity_bytes - usage.static_bytes - others


def _reason(server: ExternalServer, demand: ServerDemand, share: MemoryShare) -> str:
    if not demand.wanted_bytes:
        kept = format_size(share.limit_bytes)
        return f"idle; keeps {kept} while others need memory"
    return (
        f"its {server.load.requests} open requests want {format_size(demand.wanted_bytes)} with a"
        f" TPOT SLO of {demand.slo_tpot_s * 1000:g} ms, and get up to"
        f" {format_size(share.limit_bytes)}"
    )
