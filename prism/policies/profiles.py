"""Input of a placement search from what a cluster has measured (MuxServe §3.2, AlpaServe §4).

The papers profile models and traces in advance. Here rates and lengths are those of the traffic so
far, of the configuration, or equal for all models, in this order. Step times are measured, or
estimated by the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import structs

from prism.policies.bins import devices_of
from prism.policies.data import ClusterView, Degree, ModelView, Traffic
from prism.policies.latency import LEAST_REQUESTS
from prism.policies.placement import (
    DeviceSpecView,
    Hosted,
    ModelSpecView,
    Placement,
    Problem,
    StepTimes,
    Unit,
)

EQUAL = Traffic(mean_rps=1.0, prompt_tokens=256.0, output_tokens=256.0)
"""Traffic of each model while nothing is known of any."""
PREFILL_BYTES_S = 5e14
"""Size of the weights x prompt tokens that an H100 computes per second: two operations for each
16-bit weight and token, at half of its peak."""
READ_BYTES_S = 2.7e12
"""Bytes that an H100 reads per second, at 80 % of its peak. A decode step reads the weights."""
CONTEXT_TOKENS = 1000
"""Tokens of a request whose KV a decode step is assumed to read."""
SM_EXPONENT = 0.3
"""Decode steps with a part s of the compute take s ** -0.3 times as long: 1.44, 1.32 and 1.23 for
30, 40 and 50 %. MuxServe's published step times have 1.38 to 1.52, 1.28 to 1.30, 1.14 to 1.18."""


def problem(view: ClusterView) -> Problem:
    """Returns the input of a search, without `simulate`. Devices that take no model are left
    out."""
    views, traffic = _by_model(view), loads(view)
    devices = tuple(
        DeviceSpecView(gpu.name, gpu.capacity_bytes, gpu.node, gpu.engines_total)
        for gpu in view.gpus
        if gpu.alive
    )
    models = tuple(_spec(copies[0], traffic[name]) for name, copies in views.items())
    return Problem(
        models,
        devices,
        step_times([copies[0] for copies in views.values()]),
        present=present(view),
    )


def present(view: ClusterView) -> Placement:
    """Returns the placement of the models that serve, or will soon."""
    units: dict[tuple[str, ...], list[Hosted]] = {}
    for model in view.models:
        if model.state in ("activating", "active", "migrating"):
            units.setdefault(model.moving_to or devices_of(model), []).append(Hosted(model.name))
    return Placement(tuple(Unit(devices, tuple(here)) for devices, here in units.items()))


def _spec(model: ModelView, load: Traffic) -> ModelSpecView:
    """Returns the model with the largest of its sizes at the degrees that it may have."""
    degrees = _degrees(model)
    return ModelSpecView(
        name=model.name,
        weight_bytes=max(d.weight_bytes - model.share_bytes * tp for tp, d in degrees.items()),
        share_bytes=model.share_bytes,
        token_bytes=max(d.token_bytes for d in degrees.values()),
        kv_floor_bytes=max(d.kv_floor_bytes for d in degrees.values()),
        rate_rps=load.mean_rps,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        slo_s=model.slo_ttft_s + model.slo_tpot_s * load.output_tokens,
        tp_degrees=tuple(sorted(degrees)),
        tp=model.tp,
        replicas_max=model.replicas_max,
    )


def _degrees(model: ModelView) -> Mapping[int, Degree]:
    own = Degree(model.weight_bytes, model.token_bytes, model.kv_floor_bytes)
    return model.degrees or {model.tp: own}


# --- loads ----------------------------------------------------------------------------------


def loads(view: ClusterView) -> dict[str, Traffic]:
    """Returns the mean rate, and mean and spread of the lengths, of each model."""
    found = {name: _load(copies) for name, copies in _by_model(view).items()}
    if not any(load.mean_rps for load in found.values()):
        return dict.fromkeys(found, EQUAL)
    prompt_tokens = _mean((load.prompt_tokens for load in found.values()), EQUAL.prompt_tokens)
    output_tokens = _mean((load.output_tokens for load in found.values()), EQUAL.output_tokens)
    return {
        name: structs.replace(
            load,
            prompt_tokens=load.prompt_tokens or prompt_tokens,
            output_tokens=load.output_tokens or output_tokens,
        )
        for name, load in found.items()
    }


def _by_model(view: ClusterView) -> dict[str, list[ModelView]]:
    """Returns the views of each model's copies."""
    views: dict[str, list[ModelView]] = {}
    for model in view.models:
        views.setdefault(model.name, []).append(model)
    return views


def _load(copies: Sequence[ModelView]) -> Traffic:
    first = copies[0]
    if first.traffic.requests < LEAST_REQUESTS and first.expected.mean_rps:
        return first.expected
    return Traffic(
        mean_rps=sum(copy.traffic.mean_rps for copy in copies),
        prompt_tokens=first.traffic.prompt_tokens,
        prompt_std_tokens=first.traffic.prompt_std_tokens,
        output_tokens=first.traffic.output_tokens,
        output_std_tokens=first.traffic.output_std_tokens,
    )


def _mean(values: Iterable[float], otherwise: float) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else otherwise


# --- step times -----------------------------------------------------------------------------


def step_times(models: Sequence[ModelView]) -> StepTimes:
    """Returns the measured step times. Those of a model that has not been measured are in the same
    relation to an H100's as those of the measured models."""
    computed = {m.name: {tp: _nominal(d, tp) for tp, d in _degrees(m).items()} for m in models}
    measured = {m.name: _degrees(m) for m in models}

    def factor(of: Callable[[Degree], float]) -> float:
        logs = [
            math.log(of(degree) / of(computed[name][tp]))
            for name, degrees in measured.items()
            for tp, degree in degrees.items()
            if of(degree) > 0
        ]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    prefill, step = factor(_prefill_speed), factor(_step)

    def prefill_s(model: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        speed = measured[model][tp].prefill_tokens_per_s
        return batch * tokens / (speed or computed[model][tp].prefill_tokens_per_s * prefill)

    def decode_s(model: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        known, estimate = measured[model][tp], computed[model][tp]
        if known.step_s:
            seconds = known.step_s + batch * known.request_s
        else:
            seconds = (estimate.step_s + batch * estimate.request_s) * step
        return seconds * float(sm_share**-SM_EXPONENT)

    return StepTimes(prefill_s, decode_s)


def _prefill_speed(degree: Degree) -> float:
    return degree.prefill_tokens_per_s


def _step(degree: Degree) -> float:
    return degree.step_s


def _nominal(degree: Degree, tp: int) -> Degree:
    """Returns the speed on H100s by the size of the weights."""
    weight_bytes = max(1, degree.weight_bytes)
    return Degree(
        degree.weight_bytes,
        degree.token_bytes,
        degree.kv_floor_bytes,
        prefill_tokens_per_s=tp * PREFILL_BYTES_S / weight_bytes,
        step_s=weight_bytes / (tp * READ_BYTES_S),
        request_s=degree.token_bytes * CONTEXT_TOKENS / (tp * READ_BYTES_S),
    )
