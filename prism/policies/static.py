"""Static partition, a baseline of the paper (Prism §7.2, "S-Partition").

Every model has a fixed device and a fixed share of its KV memory. No model is evicted or moved. The
partition depends on the models, their expected rates and the devices' capacities only, not on load,
measured rates or live agents, so that it is the same at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, asked_for, empty_bins, part, size_text
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    GpuView,
    ModelView,
    Refuse,
    Settings,
    Traffic,
)
from prism.policies.policy import ADMISSION_ORDER, KV_LIMIT, Policy, always_balanced

KV_PARTS = ("equal", "tokens", "rates")
"""Divisions of KV memory: equal parts, parts of the same number of tokens, or above the KV floors
in proportion to the expected rates."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Devices and KV share of every model."""

    # Model -> its devices, rank 0 first.
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Model -> its KV memory on each device.
    limits_bytes: dict[str, int] = field(default_factory=dict)
    # Model -> why it could not be placed.
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StaticSettings:
    """Parameters of the static policy."""

    # Division of KV memory among models without a `static_share`: one of KV_PARTS.
    kv: str = "equal"


SHIPPED = StaticSettings()


def plan(
    view: ClusterView, settings: Settings, chosen: StaticSettings = SHIPPED
) -> tuple[Action, ...]:
    """Activates every absent model on its devices. `settings` is not used."""
    division = partition(view.models, view.gpus, chosen)
    engines = {g.name: g.engines_free if g.alive else 0 for g in view.gpus}
    return tuple(_action(m, division, engines) for m in sorted(asked_for(view), key=kvpr.by_size))


def _action(model: ModelView, division: Partition, engines: dict[str, int]) -> Action:
    if model.name in division.refused:
        return Refuse(model.name, division.refused[model.name])
    devices, limit_bytes = division.devices[model.name], division.limits_bytes[model.name]
    for device in devices:
        if device in model.barred:
            return Refuse(model.name, f"its activation failed recently on {device}")
        if engines[device] <= 0:
            return Refuse(model.name, f"no engine is free on {device} now")
    for device in devices:
        engines[device] -= 1
    reason = f"static partition: {size_text(limit_bytes)} of KV memory on {devices[0]}"
    return Activate(model.name, devices[0], reason, limit_bytes, devices[1:])


def partition(
    models: Sequence[ModelView], gpus: Sequence[GpuView], chosen: StaticSettings = SHIPPED
) -> Partition:
    """Places all models and divides each device's KV memory among them.

    Models are placed by Algorithm 1 on their expected rates. Without these, the largest model is
    first, on the device with the most memory left. Pinned models are on their device. KV memory is
    divided by `static_share`, and the rest as chosen.
    """
    # A model's current devices and recent failures must not change the partition.
    fresh = [
        structs.replace(m, device=None, peers=(), barred=(), token_rate=_expected_rate(m.expected))
        for m in models
    ]
    whole = [
        structs.replace(g, engines_free=g.engines_total, alive=True, fixed_bytes=0) for g in gpus
    ]
    found = kvpr.place(fresh, whole, 0.0)
    division = Partition(dict(found.devices), refused=dict(found.refused))
    bins = empty_bins((), whole)
    for model in map(part, fresh):
        for device in found.devices.get(model.name, ()):
            bins[device].put(model)
    for b in bins.values():
        _share(b, division, chosen)
    for name in division.refused:
        division.devices.pop(name, None)
    return division


def _expected_rate(expected: Traffic) -> float:
    """Returns tokens per second."""
    return expected.mean_rps * (expected.prompt_tokens + expected.output_tokens)


def _share(b: Bin, division: Partition, chosen: StaticSettings) -> None:
    fixed = {m.name: m.static_share for m in b.models.values() if m.static_share is not None}
    given = sum(fixed.values())
    limits = {name: b.shared_kv_bytes * share for name, share in fixed.items()}
    others = [m for m in b.models.values() if m.static_share is None]
    limits |= _parts(others, b.shared_kv_bytes * max(0.0, 1.0 - given), chosen.kv)
    for model in b.models.values():
        limit_bytes = int(limits[model.name])
        problem = _problem(model, b, given, limit_bytes)
        if problem:
            division.refused[model.name] = problem
        else:
            least = division.limits_bytes.get(model.name, limit_bytes)
            division.limits_bytes[model.name] = min(limit_bytes, least)


def _parts(models: Sequence[ModelView], left_bytes: float, kv: str) -> dict[str, float]:
    """Returns the division of `left_bytes`. Without rates, "rates" divides what floors leave in
    equal parts."""
    rates = [m.token_rate * m.token_bytes for m in models]
    by_rates = kv == "rates"
    floors = [m.kv_floor_bytes if by_rates else 0 for m in models]
    kept = min(1.0, left_bytes / sum(floors)) if sum(floors) else 0.0
    rest_bytes = left_bytes - kept * sum(floors)
    parts: Sequence[float] = [m.token_bytes if kv == "tokens" else 1 for m in models]
    parts = rates if by_rates and any(rates) else parts
    return {
        m.name: kept * floor + rest_bytes * part / sum(parts)
        for m, floor, part in zip(models, floors, parts, strict=True)
    }


def _problem(model: ModelView, b: Bin, given: float, limit_bytes: int) -> str:
    if given > 1.0 + 1e-9:
        return f"the static_share values of the models on {b.name} add up to {given:.2f}, over 1"
    missing = model.kv_floor_bytes - limit_bytes
    if missing > 0:
        return (
            f"its static share on {b.name} is {size_text(limit_bytes)}, {missing} bytes less "
            f"than the KV floor of {size_text(model.kv_floor_bytes)}: raise static_share, the "
            "device's capacity or lower context_length"
        )
    return ""


POLICY = Policy(
    "static",
    plan,
    frozenset({ADMISSION_ORDER, KV_LIMIT}),
    evicts=False,
    is_balanced=always_balanced,
    asks_expected=True,
)
