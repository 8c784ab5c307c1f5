"""Measurement of base SLOs: each model of a YAML alone on its devices (Prism §7.2)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from prism.config.resolve import load
from prism.errors import PrismError
from prism_replay import transforms
from prism_replay.base_slos import BaseLatencies, BaseSlos
from prism_replay.live import variants
from prism_replay.live.client import Endpoint, Sender, connect, served_models
from prism_replay.live.prompts import PromptSource
from prism_replay.live.runner import Observer, Replay, check_served
from prism_replay.metrics import INTERRUPTED
from prism_replay.results import GroupSummary, RequestRecord, RunConfig
from prism_replay.trace import Trace, models_of

LEFT_OUT_OF_MODEL = ("replicas", "static_share")


class MeasurementError(PrismError):
    """A model cannot be measured: the message names it, and the request that failed."""


@dataclass(frozen=True, slots=True)
class Measurement:
    config: Path
    """YAML of prism-serve."""
    trace: Trace
    options: RunConfig
    """Options of the replays. `url` is not used."""
    executions: int
    """Number of requests of each model that run one at a time."""
    settle_s: float
    """Time that an engine is idle after a first request, in which it captures CUDA graphs."""
    logs: Path
    """Folder of the servers' logs, one folder per model."""
    observer: Callable[[str, int], AbstractContextManager[Observer]]
    """Makes the observer of a replay from the model and its number of requests."""


def measure(given: Measurement) -> BaseSlos:
    """Starts a prism-serve for each model of the trace in turn and measures its latencies there.

    Raises ConfigError, ServeFailedError or MeasurementError.
    """
    data = variants.read(given.config, given.trace)
    load(given.config)  # checks it
    found = {name: _measure_model(given, data, name) for name in models_of(given.trace)}
    return BaseSlos(given.config.name, given.options.trace, found)


def _measure_model(given: Measurement, data: dict[str, Any], model: str) -> BaseLatencies:
    own = transforms.only_models(given.trace, [model])
    own = transforms.window(own, own[0].arrival_s)
    logs = given.logs / model.replace("/", "_")
    with (
        variants.served(given.config, alone(data, model), logs, "base-slos") as server,
        given.observer(model, len(own)) as observer,
    ):
        options = msgspec.structs.replace(given.options, url=server.url, requests=len(own))
        return asyncio.run(measure_server(given, own, options, observer))


def alone(data: dict[str, Any], model: str) -> dict[str, Any]:
    """Returns the YAML with one model, which has all memory of its devices and is not moved.

    The policy is "static" as that of the whole YAML may move, evict or copy the model, and
    "dedicated" takes only models on one device.
    """
    (own,) = (each for each in data["models"] if each["name"] == model)
    return variants.variant(data, "static", [variants.without(own, LEFT_OUT_OF_MODEL)])


async def measure_server(
    given: Measurement, trace: Trace, options: RunConfig, observer: Observer
) -> BaseLatencies:
    """Measures the model of `trace`, the only one of a server.

    The first request is sent twice, as the first one loads kernels. Raises ConfigError as
    `run_replay`, and MeasurementError if a request fails.
    """
    async with connect(Endpoint(options.url)) as http:
        check_served(trace, await served_models(http))
        some = trace[:: max(1, len(trace) // given.executions)][: given.executions]
        await _one_at_a_time(http, some[:1], options, options.seed + 1)
        await asyncio.sleep(given.settle_s)
        alone = await _one_at_a_time(http, some, options, options.seed + 2)
        results = await Replay(http, options, observer).run(trace)
    if results.config.interrupted:
        raise KeyboardInterrupt
    for record in results.records:
        _check(record)
    times_ms = [record.e2e_ms for record in alone if record.e2e_ms is not None]
    return _latencies(results.summary.total, times_ms)


async def _one_at_a_time(
    http: httpx.AsyncClient, trace: Trace, options: RunConfig, seed: int
) -> list[RequestRecord]:
    """Sends each request after the last token of the one before it.

    Prompts have the lengths of the trace and the tokens of another seed, so that the engine's
    prefix cache has neither them nor, later, those of the replay.
    """
    low, high = options.token_ids
    source = PromptSource(seed, low, high, options.block_tokens)
    sender = Sender(http, options.timeout_s)
    records = []
    for index, request in enumerate(trace):
        now_ms = 1000 * (time.monotonic() - sender.start_s)
        sent = msgspec.structs.replace(request, timestamp=now_ms, prompt=None, hash_ids=())
        records.append(await sender.send(index, sent, source.prompt(sent, index)))
        _check(records[-1])
    return records


def _check(record: RequestRecord) -> None:
    if record.error == INTERRUPTED:
        raise KeyboardInterrupt
    if not record.ok:
        raise MeasurementError(
            f"{record.model}: request {record.index} ended with {record.error!r}"
            f" ({record.message}); a base SLO needs all of them"
        )


def _latencies(found: GroupSummary, times_ms: list[float]) -> BaseLatencies:
    ttft_ms, e2e_ms = found.ttft_ms.p95, found.e2e_ms.p95
    assert ttft_ms is not None
    assert e2e_ms is not None
    return BaseLatencies(
        requests=found.requests,
        ttft_ms=ttft_ms,
        tpot_ms=found.tpot_ms.p95,
        e2e_ms=e2e_ms,
        execution_ms=statistics.fmean(times_ms),
        executions=len(times_ms),
    )
