"""Offline placement: what a search reads and the frozen plan it returns (AlpaServe §4, MuxServe
§3.2, SeaLLM §4.1).

A *unit* is a set of models that share the same GPUs: MuxServe's LLM unit, SeaLLM's sharing group,
AlpaServe's device group. Every model of a unit runs with tensor parallelism over all its devices.
A model may be in several units; each is a replica of it. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceSpecView:
    """One GPU."""

    name: str
    # What models may use of it.
    capacity_bytes: int
    # Devices of one node have fast links.
    node: str = ""
    # How many models it can hold at a time.
    models_max: int = sys.maxsize


def by_node(devices: Iterable[DeviceSpecView]) -> list[list[DeviceSpecView]]:
    """The devices of each node, in order of their names."""
    nodes: dict[str, list[DeviceSpecView]] = {}
    for device in sorted(devices, key=lambda d: (d.node, d.name)):
        nodes.setdefault(device.node, []).append(device)
    return list(nodes.values())


@dataclass(frozen=True, slots=True)
class ModelSpecView:
    """A model and its expected load. Sizes are of the whole model; with tensor parallelism each
    device holds one part in `tp`."""

    name: str
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    rate_rps: float
    # A mean, as output_tokens is.
    prompt_tokens: float
    output_tokens: float
    slo_s: float = float("inf")
    # Those it can run at.
    tp_degrees: tuple[int, ...] = (1,)
    # The degree that its operator gave it, which a search may overrule.
    tp: int = 1
    # What its engine holds besides on each device, at any degree.
    share_bytes: int = 0

    def held_bytes(self, tp: int) -> int:
        """Weights and engines' shares on `tp` devices together."""
        return self.weight_bytes + self.share_bytes * tp

    def part_bytes(self, tp: int, kv_bytes: int = 0) -> int:
        """Weights, engine and its part of `kv_bytes` on one of `tp` devices."""
        return -(-(self.weight_bytes + kv_bytes) // tp) + self.share_bytes


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model in a unit."""

    model: str
    # The part of the devices' compute that its decoding jobs may take (MuxServe §3.4).
    sm_share: float = 1.0
    # The requests decoded together that its load needs (MuxServe eq. 3); 0: not computed.
    batch: int = 0
    # Its part of the KV memory of one device; None: shared freely.
    kv_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """devices: of distinct GPUs, rank 0 first; the tensor-parallel degree is their number."""

    devices: tuple[str, ...]
    models: tuple[Hosted, ...] = ()

    @property
    def tp(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Placement:
    """Units of models on devices, as a search found them."""

    units: tuple[Unit, ...]
    # Model -> why no unit holds it.
    refused: Mapping[str, str] = field(default_factory=dict)
    # What the search maximised, on its own scale.
    score: float = 0.0

    def homes(self, model: str) -> tuple[Unit, ...]:
        """The units that hold `model`, in the order of `units`."""
        return tuple(u for u in self.units if any(h.model == model for h in u.models))


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    """What a simulation of a placement on the recent requests says, per model."""

    requests: Mapping[str, int]
    # Requests that missed their SLO or had no home.
    unserved: Mapping[str, int]
    # Mean of latency / mean execution time on one GPU, of the served requests (SeaLLM eq. 1); 0
    # where none was served.
    normalized_latency: Mapping[str, float]

    @property
    def attainment(self) -> float:
        """The fraction of all requests that met their SLO; 1 without requests."""
        total = sum(self.requests.values())
        return 1.0 if total == 0 else 1.0 - sum(self.unserved.values()) / total

    @property
    def mean_normalized_latency(self) -> float:
        """Over all served requests; 0 without any."""
        served = {m: n - self.unserved.get(m, 0) for m, n in self.requests.items()}
        total = sum(served.values())
        weighted = (n * self.normalized_latency.get(m, 0.0) for m, n in served.items())
        return sum(weighted) / total if total else 0.0


LatencyFn = Callable[[str, int, int, float, float], float]
"""(model, tp, batch, tokens, sm_share) -> seconds of one step. For a prefill step, `tokens` is the
mean prompt of the batch's requests; for a decode step, their mean context. sm_share in (0, 1]."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The throughput estimator's inputs: pure functions, profiled or computed in advance."""

    prefill_s: LatencyFn
    decode_s: LatencyFn


@dataclass(frozen=True, slots=True)
class Problem:
    """What a placement search is given. `simulate` plays the recent requests on a placement with
    the policy's own scheduling; searches that only estimate do not call it."""

    models: tuple[ModelSpecView, ...]
    devices: tuple[DeviceSpecView, ...]
    times: StepTimes | None = None
    simulate: Callable[[Placement], PlacementOutcome] | None = None


Search = Callable[[Problem], Placement]
