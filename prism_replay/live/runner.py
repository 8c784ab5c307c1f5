"""Open-loop replay of a trace against a live server."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Protocol

import httpx
import msgspec

from prism.errors import ConfigError
from prism.tasks import cancel_all
from prism_replay.live.client import (
    Endpoint,
    ModelCard,
    Sender,
    cluster_status,
    connect,
    connect_status,
    read_status,
    served_models,
)
from prism_replay.live.prompts import PromptSource
from prism_replay.live.sampling import StatusTracker, sample_status
from prism_replay.metrics import summarize
from prism_replay.results import Counters, ReplayResults, RequestRecord, RunConfig, StatusSample
from prism_replay.trace import Trace, TraceRequest, models_of

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Observer of a replay. Its methods are called on the event loop and must not block."""

    def sent(self, request: TraceRequest) -> None: ...

    def done(self, record: RequestRecord) -> None: ...


async def run_replay(
    trace: Trace, config: RunConfig, observer: Observer, endpoint: Endpoint | None = None
) -> ReplayResults:
    """Replays `trace` (already scaled) and waits for all responses.

    SIGINT stops sending and cancels requests in flight; the partial results are marked
    `interrupted`. Raises ConfigError if the server is unreachable or does not serve a model.

    Args:
        endpoint: The server. Default: `config.url` without a key.
    """
    endpoint, where = endpoint or Endpoint(config.url), config.status_url
    async with (
        connect(endpoint) as http,
        connect_status(endpoint, where) if where else nullcontext(http) as status_http,
    ):
        cards = await served_models(http)
        check_served(trace, cards)
        if not is_prism(cards):
            config = msgspec.structs.replace(config, sent_slo_scale=0.0)
        return await Replay(http, config, observer, status_http).run(trace)


def is_prism(cards: Mapping[str, ModelCard]) -> bool:
    return any(card.owned_by == "prism" for card in cards.values())


def check_served(trace: Trace, cards: dict[str, ModelCard]) -> None:
    """Raises ConfigError for models that the server does not have and for too long requests."""
    missing = [name for name in models_of(trace) if name not in cards]
    if missing:
        raise ConfigError(
            f"the trace's models {', '.join(missing)} are not served; the server has "
            f"{', '.join(sorted(cards)) or 'none'} (`prism-replay convert` renames models)"
        )
    for name in models_of(trace):
        context = cards[name].max_model_len
        longest = max(r.input_length + r.output_length for r in trace if r.model == name)
        if context is not None and longest > context:
            raise ConfigError(
                f"{name}: the trace's longest request has {longest} tokens, the model's context "
                f"{context}; shorten requests with `prism-replay convert --context {context}`"
            )


class Replay:
    """One run of a replay. Used on one event loop only.

    Args:
        status_http: Client of /status. Default: `http`.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        config: RunConfig,
        observer: Observer,
        status_http: httpx.AsyncClient | None = None,
    ) -> None:
        self.http, self.config, self.observer = http, config, observer
        self.status_http = status_http or http
        low, high = config.token_ids
        self.source = PromptSource(config.seed, low, high, config.block_tokens)
        self.records: list[RequestRecord] = []
        self.samples: list[StatusSample] = []
        self.tracker = StatusTracker()
        self.stop = asyncio.Event()

    async def run(self, trace: Trace) -> ReplayResults:
        await self._first_status()
        started_unix_s = time.time()
        sender = Sender(self.http, self.config.timeout_s, slo_scale=self.config.sent_slo_scale)
        sampler = asyncio.create_task(
            sample_status(self.status_http, sender.start_s, self.samples, self.tracker)
        )
        with interruptible(self.stop):
            await self._send_all(trace, sender)
        duration_s = time.monotonic() - sender.start_s
        await cancel_all([sampler])
        counters = await self._last_status(duration_s)
        return self._results(duration_s, started_unix_s, counters)

    async def _send_all(self, trace: Trace, sender: Sender) -> None:
        """Sends each request at its time without waiting for responses (open loop)."""
        tasks: list[asyncio.Task[None]] = []
        for index, request in enumerate(trace):
            await self._pause_until(sender.start_s + request.arrival_s)
            if self.stop.is_set():
                break
            tasks.append(asyncio.create_task(self._send(sender, index, request)))
        await self._wait_for(tasks)

    async def _wait_for(self, tasks: list[asyncio.Task[None]]) -> None:
        watcher = asyncio.create_task(self._cancel_on_stop(tasks))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        watcher.cancel()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _cancel_on_stop(self, tasks: list[asyncio.Task[None]]) -> None:
        await self.stop.wait()
        for task in tasks:
            task.cancel()

    async def _send(self, sender: Sender, index: int, request: TraceRequest) -> None:
        self.observer.sent(request)
        record = await sender.send(index, request, self.source.prompt(request, index))
        self.records.append(record)
        self.observer.done(record)

    async def _pause_until(self, moment_s: float) -> None:
        try:
            await asyncio.wait_for(self.stop.wait(), max(0.0, moment_s - time.monotonic()))
        except TimeoutError:
            return

    async def _first_status(self) -> None:
        """Reads the counters before the first request, as their zero. Warns if a given address does
        not have them."""
        status = await read_status(self.status_http)
        if not isinstance(status, str):
            self.tracker.counters(status)
        elif self.config.status_url:
            _log.warning("warning: --status-url %s: %s", self.config.status_url, status)

    async def _last_status(self, t_s: float) -> Counters | None:
        status = await cluster_status(self.status_http)
        if status is not None:
            self.samples.append(self.tracker.sample(status, t_s))
        return self.samples[-1].counters if self.samples else None

    def _results(
        self, duration_s: float, started_unix_s: float, counters: Counters | None
    ) -> ReplayResults:
        config = msgspec.structs.replace(
            self.config, started_unix_s=started_unix_s, interrupted=self.stop.is_set()
        )
        records = sorted(self.records, key=lambda record: record.index)
        summary = summarize(records, config.slo_scales, duration_s, counters, config.execution_ms)
        changes = self.tracker.changes(started_unix_s)
        return ReplayResults(config, records, self.samples, counters, summary, changes)


@contextmanager
def interruptible(stop: asyncio.Event) -> Iterator[None]:
    """Sets `stop` at the first SIGINT. A second SIGINT has its usual effect."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
