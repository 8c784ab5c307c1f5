"""Offline placement: input and result of a search (AlpaServe §4, MuxServe §3.2, SeaLLM §4.1).

A *unit* is a set of models that share the same GPUs: MuxServe's LLM unit, SeaLLM's sharing group,
AlpaServe's device group. Every model of a unit runs with tensor parallelism over all its devices.
A model in several units has a replica in each. Times in seconds, sizes in bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class DeviceSpecView:
    """GPU as a placement search sees it."""

    name: str
    # Memory available to models.
    capacity_bytes: int
    # Devices of one node have fast links.
    node: str = ""
    # Largest number of models at a time.
    models_max: int = sys.maxsize


def by_node(devices: Iterable[DeviceSpecView]) -> list[list[DeviceSpecView]]:
    """Returns the devices of each node, sorted by node and name."""
    nodes: dict[str, list[DeviceSpecView]] = {}
    for device in sorted(devices, key=lambda d: (d.node, d.name)):
        nodes.setdefault(device.node, []).append(device)
    return list(nodes.values())


@dataclass(frozen=True, slots=True)
class ModelSpecView:
    """Model and its expected load. Sizes are of the whole model, over all its devices."""

    name: str
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    rate_rps: float
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    slo_s: float = float("inf")
    # Supported tensor-parallel degrees.
    tp_degrees: tuple[int, ...] = (1,)
    # Configured degree, which a search may override.
    tp: int = 1
    # Additional memory of its engine on each device, at any degree.
    share_bytes: int = 0
    # Maximum number of copies.
    replicas_max: int = sys.maxsize

    def held_bytes(self, tp: int) -> int:
        """Returns the size of weights and engines' shares, summed over `tp` devices."""
        return self.weight_bytes + self.share_bytes * tp

    def part_bytes(self, tp: int, kv_bytes: int = 0) -> int:
        """Returns the size of weights, engine's share and part of `kv_bytes` on one device."""
        return -(-(self.weight_bytes + kv_bytes) // tp) + self.share_bytes


@dataclass(frozen=True, slots=True)
class Hosted:
    """Model in a unit."""

    model: str
    # Fraction of the devices' compute for its decode steps (MuxServe §3.4).
    sm_share: float = 1.0
    # Decode batch size that its load needs (MuxServe eq. 3); 0: not computed.
    batch: int = 0
    # Its part of the KV memory of one device; None: shared freely.
    kv_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Models that share the same devices."""

    # Distinct GPUs, rank 0 first; their number is the tensor-parallel degree.
    devices: tuple[str, ...]
    models: tuple[Hosted, ...] = ()

    @property
    def tp(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Placement:
    """Result of a search: units of models on devices."""

    units: tuple[Unit, ...]
    # Model -> why no unit holds it.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Value of the search's objective, on its own scale.
    score: float = 0.0

    def homes(self, model: str) -> tuple[Unit, ...]:
        """Returns the units that hold `model`, in the order of `units`."""
        return tuple(u for u in self.units if any(h.model == model for h in u.models))

    def on(self, device: str) -> tuple[Hosted, ...]:
        """Returns the models with rank 0 on this device."""
        return tuple(h for u in self.units if u.devices[0] == device for h in u.models)

    def sm_share(self, model: str, device: str) -> float:
        """Returns the share of the compute of a model with rank 0 on this device; 1 if the
        placement does not have it there."""
        return next((h.sm_share for h in self.on(device) if h.model == model), 1.0)


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    """Simulated result of a placement on the recent requests, by model."""

    # Number of requests.
    requests: Mapping[str, int]
    # Number of requests that missed their SLO or whose model is in no unit.
    unserved: Mapping[str, int]
    # Mean of latency / mean execution time on one GPU, of the served requests (SeaLLM eq. 1); 0
    # if none was served.
    normalized_latency: Mapping[str, float]

    @property
    def attainment(self) -> float:
        """Fraction of all requests that met their SLO; 1 without requests."""
        total = sum(self.requests.values())
        return 1.0 if total == 0 else 1.0 - sum(self.unserved.values()) / total

    @property
    def mean_normalized_latency(self) -> float:
        """Mean normalized latency of all served requests; 0 without any."""
        served = {m: n - self.unserved.get(m, 0) for m, n in self.requests.items()}
        total = sum(served.values())
        weighted = (n * self.normalized_latency.get(m, 0.0) for m, n in served.items())
        return sum(weighted) / total if total else 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Attainment, then the lower normalised latency: larger is better."""
        return self.attainment, -self.mean_normalized_latency


LatencyFn = Callable[[str, int, int, float, float], float]
"""(model, tp, batch, tokens, sm_share) -> seconds of one step.

`tokens` is the mean prompt length of the batch for a prefill step, the mean context length for a
decode step. `sm_share` is in (0, 1].
"""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times for the throughput estimator: pure functions, profiled or computed in advance."""

    prefill_s: LatencyFn
    decode_s: LatencyFn


Simulate = Callable[[Placement], PlacementOutcome]


@dataclass(frozen=True, slots=True)
class Problem:
    """Input of a placement search."""

    models: tuple[ModelSpecView, ...]
    devices: tuple[DeviceSpecView, ...]
    times: StepTimes | None = None
    # Replays the recent requests on a placement with the policy's own scheduling.
    simulate: Simulate | None = None
    # Placement of the models now. A search keeps it unless another one is clearly better, since
    # every move has a cost.
    present: Placement | None = None


KEEPS = 1.05
"""The present placement is kept unless another one places more models, has a higher attainment, or
has more than this many times its throughput or less than this part of its latency."""
REQUESTS_MIN = 20
"""Least number of requests since a search from which the next one of a policy with `next_interval`
follows (SeaLLM §4.3)."""

Search = Callable[[Problem], Placement]


def better(problem: Problem, kept: Placement, found: Placement) -> Placement:
    """Returns `found` if its simulation is better than that of `kept`, else `kept` with its new
    attainment as the score.

    Better is a higher attainment, or the same one and a clearly lower latency, since a move has a
    cost. REQUIRES: `problem.simulate`.
    """
    assert problem.simulate is not None
    before, after = problem.simulate(kept), problem.simulate(found)
    latency = after.mean_normalized_latency * KEEPS
    if (after.attainment, -latency) > before.rank:
        return found
    return replace(kept, score=before.attainment)
