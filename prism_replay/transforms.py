"""Pure transforms of traces: rate, time, window, models, lengths. Same seed, same result."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from prism.errors import ConfigError, TraceError
from prism_replay.trace import REQUESTS_MAX, SECONDS_MAX, Trace, TraceRequest, models_of


def scale_rate(
    trace: Trace, factor: float, seed: int = 0, jitter_s: float = 1.0
) -> list[TraceRequest]:
    """Multiplies the number of requests by `factor`, keeping the traffic's pattern (Prism §7.2).

    Below 1, requests are dropped at random. Above 1, every request appears floor(factor) times,
    and once more with the probability of the fractional part. Copies are shifted by up to
    `jitter_s` seconds. They share prompt prefixes with each other as the originals do, but not
    with the originals: otherwise the prefix cache would serve the added load. Raises TraceError
    if no request is left.
    """
    if not 0 < factor < math.inf:
        raise TraceError(f"rate scale {factor:g}: must be > 0 and finite")
    if len(trace) * factor > REQUESTS_MAX:
        raise TraceError(
            f"rate scale {factor:g}: {len(trace)} requests become more than the maximum of"
            f" {REQUESTS_MAX:,}; lower the scale"
        )
    rng = np.random.default_rng(seed)
    stride = 1 + max((max(r.hash_ids) for r in trace if r.hash_ids), default=0)
    end_ms = max(request.timestamp for request in trace)
    scaled: list[TraceRequest] = []
    for request in trace:
        copies = math.floor(factor) + int(rng.random() < factor % 1)
        shifts_ms = rng.uniform(-jitter_s * 1000, jitter_s * 1000, size=max(0, copies - 1))
        scaled += [request] * min(copies, 1)
        for number, shift_ms in enumerate(shifts_ms, 1):
            moment_ms = round(min(end_ms, max(0.0, request.timestamp + float(shift_ms))))
            ids = tuple(block + number * stride for block in request.hash_ids)
            scaled.append(msgspec.structs.replace(request, timestamp=moment_ms, hash_ids=ids))
    scaled.sort(key=lambda request: request.timestamp)
    return _not_empty(scaled, f"rate scale {factor:g}")


def scale_time(trace: Trace, factor: float) -> list[TraceRequest]:
    """Multiplies every timestamp by `factor`: 0.5 replays twice as fast. SLOs do not change."""
    if not 0 < factor < math.inf:
        raise TraceError(f"time scale {factor:g}: must be > 0 and finite")
    if max((request.arrival_s for request in trace), default=0.0) * factor > SECONDS_MAX:
        raise TraceError(f"time scale {factor:g}: the trace becomes longer than {SECONDS_MAX:g} s")
    return [
        msgspec.structs.replace(request, timestamp=round(request.timestamp * factor, 3))
        for request in trace
    ]


def window(trace: Trace, start_s: float, end_s: float = math.inf) -> list[TraceRequest]:
    """Returns the requests that arrive in [start_s, end_s), with start_s as the new zero."""
    inside = [
        msgspec.structs.replace(request, timestamp=round(request.timestamp - start_s * 1000, 3))
        for request in trace
        if start_s <= request.arrival_s < end_s
    ]
    return _not_empty(inside, f"window {start_s:g}-{end_s:g} s")


def limit(trace: Trace, requests: int) -> list[TraceRequest]:
    """Returns the first `requests` requests."""
    return _not_empty(list(trace[:requests]), f"limit {requests}")


def map_models(trace: Trace, mapping: Mapping[str, str]) -> list[TraceRequest]:
    """Renames models. Raises TraceError if a model of the trace is not in `mapping`."""
    missing = [name for name in models_of(trace) if name not in mapping]
    if missing:
        raise TraceError(f"model map: no target for {', '.join(missing)}")
    return [msgspec.structs.replace(r, model=mapping[r.model]) for r in trace]


def sample_models(trace: Trace, count: int, seed: int = 0) -> list[TraceRequest]:
    """Returns the requests of `count` models of all ranks of popularity.

    The models are split by rank into `count` groups and one model of each is drawn, so that both
    popular and long-tail models are included (Prism §7.2).
    """
    names = models_of(trace)
    if not 1 <= count <= len(names):
        raise TraceError(f"sample of {count} models: the trace has {len(names)}")
    rng = np.random.default_rng(seed)
    edges = [rank * len(names) // count for rank in range(count + 1)]
    chosen = {names[int(rng.integers(low, high))] for low, high in pairwise(edges)}
    return [request for request in trace if request.model in chosen]


def only_models(trace: Trace, names: Collection[str]) -> list[TraceRequest]:
    """Returns the requests of these models. Raises TraceError for a model not in the trace."""
    unknown = sorted(set(names) - set(models_of(trace)))
    if unknown:
        raise TraceError(
            f"model {unknown[0]!r} is not in the trace; models: {', '.join(models_of(trace))}"
        )
    return [request for request in trace if request.model in names]


def round_robin_map(sources: list[str], targets: list[str]) -> dict[str, str]:
    """Maps `sources` onto `targets` round robin, which become about equally popular.

    SeaLLM and AlpaServe do so with the functions of Azure's trace.
    """
    if not targets:
        raise TraceError("model map: name at least one model")
    return {name: targets[rank % len(targets)] for rank, name in enumerate(sources)}


def popularity_map(sources: list[str], targets: list[str]) -> dict[str, str]:
    """Maps `sources` onto `targets`, both most popular first.

    Sources are split by rank into len(targets) groups of equal size: the most popular sources
    share the first target, the least popular ones the last. This keeps the long tail. Targets
    beyond the number of sources get no source.
    """
    if not targets:
        raise TraceError("model map: name at least one model")
    runs = min(len(targets), len(sources))
    return {name: targets[rank * runs // len(sources)] for rank, name in enumerate(sources)}


MAPS = {"popularity": popularity_map, "round-robin": round_robin_map}


def map_onto(trace: Trace, targets: list[str], how: str, where: str) -> list[TraceRequest]:
    """Maps the trace's models onto `targets` by one of MAPS. Raises ConfigError with `where`."""
    if how not in MAPS:
        raise ConfigError(f"{where} {how!r} is not one of {', '.join(MAPS)}")
    return map_models(trace, MAPS[how](models_of(trace), targets))


@dataclass(frozen=True)
class LengthRule:
    """Rule that multiplies lengths by `scale` and clips them to fit `context_tokens`."""

    context_tokens: int
    scale: float = 1.0
    output_max_tokens: int | None = None
    """Longest output; None for half of the context. The input gets the rest."""

    @property
    def output_limit(self) -> int:
        return self.output_max_tokens or max(1, self.context_tokens // 2)


def fit_lengths(trace: Trace, rule: LengthRule) -> list[TraceRequest]:
    """Applies `rule` to every request, leaving at least one input and one output token."""
    if rule.context_tokens <= rule.output_limit or not 0 < rule.scale < math.inf:
        raise TraceError(
            f"context {rule.context_tokens}, output limit {rule.output_limit}, length scale "
            f"{rule.scale:g}: the context must be > the output limit, the scale > 0 and finite"
        )
    return [_fit(request, rule) for request in trace]


def _fit(request: TraceRequest, rule: LengthRule) -> TraceRequest:
    output = min(rule.output_limit, max(1, round(request.output_length * rule.scale)))
    input_limit = rule.context_tokens - output
    return msgspec.structs.replace(
        request,
        input_length=min(input_limit, max(1, round(request.input_length * rule.scale))),
        output_length=output,
    )


def _not_empty(trace: list[TraceRequest], what: str) -> list[TraceRequest]:
    if not trace:
        raise TraceError(f"{what}: no request is left")
    return trace
