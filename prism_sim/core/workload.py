"""Compact columns of a trace, with the fields that the simulator reads."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.errors import TraceError
from prism_replay.trace import TOKENS_MAX, Trace, TraceRequest
from prism_sim.core.prefix import HASH_TOKENS

NO_SLO = float("inf")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    models: tuple[str, ...]
    arrival_s: array[float]
    # Index in `models`.
    model: array[int]
    prompt_tokens: array[int]
    output_tokens: array[int]
    # SLOs are NO_SLO if the request has none; scheduling then uses the TTFT SLO of its model.
    slo_ttft_s: array[float]
    slo_tpot_s: array[float]
    slo_e2e_s: array[float]
    # Requests with a higher priority start first.
    priority: array[int]
    # Ids of the whole blocks of each prompt (`prefix.HASH_TOKENS`); empty if the trace has none.
    hashes: Sequence[tuple[int, ...]] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def end_s(self) -> float:
        """Time of the last arrival."""
        return self.arrival_s[-1]

    def request_tokens(self) -> list[NDArray[np.int64]]:
        """Returns for each model the tokens of its requests, each a prompt and its output."""
        tokens = np.array(self.prompt_tokens, dtype=np.int64) + np.array(self.output_tokens)
        model = np.array(self.model)
        order = np.argsort(model, kind="stable")
        counts = np.bincount(model, minlength=len(self.models))
        return np.split(tokens[order], np.cumsum(counts)[:-1])


def window(work: Workload, first: int, until: int) -> Workload:
    """Returns the requests [first, until), shifted to start at time 0."""
    columns = {name: getattr(work, name)[first:until] for name in Workload.__slots__[1:]}
    start_s = work.arrival_s[first]
    columns["arrival_s"] = array("d", (time_s - start_s for time_s in columns["arrival_s"]))
    return Workload(work.models, **columns)


def workload(trace: Trace, models: Mapping[str, int], slo_scale: float, where: str) -> Workload:
    """Returns the columns of `trace`. Raises TraceError that names the request (counted from 1) and
    the key.

    Args:
        trace: Requests in order of arrival.
        models: Name -> index of the simulated models.
        slo_scale: Factor on the SLOs of the requests.
        where: Name of the trace in errors.
    """
    if not trace:
        raise TraceError(f"{where}: the trace is empty")
    found = Workload(
        tuple(sorted(models, key=lambda name: models[name])),
        array("d"),
        array("i"),
        array("i"),
        array("i"),
        array("d"),
        array("d"),
        array("d"),
        array("i"),
        [_whole_blocks(r) for r in trace] if any(r.hash_ids for r in trace) else (),
    )
    last_s = 0.0
    for number, request in enumerate(trace, 1):
        if request.input_length > TOKENS_MAX or request.output_length > TOKENS_MAX:
            raise _too_long(request, f"{where}: request {number}")
        if request.arrival_s < last_s:
            raise TraceError(
                f"{where}: request {number}: timestamp: {request.timestamp:g} is before the "
                "request above; sort the trace by timestamp"
            )
        if request.model not in models:
            raise TraceError(
                f"{where}: request {number}: model: {request.model!r} is not in models: of the"
                " configuration; add it there"
            )
        last_s = request.arrival_s
        found.arrival_s.append(last_s)
        found.model.append(models[request.model])
        found.prompt_tokens.append(request.input_length)
        found.output_tokens.append(request.output_length)
        found.slo_ttft_s.append(slo_s(request.slo_ttft_ms, slo_scale))
        found.slo_tpot_s.append(slo_s(request.slo_tpot_ms, slo_scale))
        found.slo_e2e_s.append(slo_s(request.slo_e2e_ms, slo_scale))
        found.priority.append(request.priority)
    return found


def _too_long(request: TraceRequest, where: str) -> TraceError:
    key = "input_length" if request.input_length > TOKENS_MAX else "output_length"
    return TraceError(f"{where}: {key}: {getattr(request, key)} must be <= {TOKENS_MAX}")


def _whole_blocks(request: TraceRequest) -> tuple[int, ...]:
    return request.hash_ids[: request.input_length // HASH_TOKENS]


def slo_s(slo_ms: float | None, scale: float = 1.0) -> float:
    return NO_SLO if slo_ms is None else slo_ms * scale / 1000.0
