"""Offline placement: what a search reads and the frozen plan it returns (AlpaServe §4, MuxServe
§3.2, SeaLLM §4.1).

A *unit* is a set of models that share the same GPUs: MuxServe's LLM unit, SeaLLM's sharing group,
AlpaServe's device group. Every model of a unit runs with tensor parallelism over all its devices.
A model may be in several units; each is a replica of it. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceSpecView:
    """One GPU. capacity_bytes: what models may use of it. Devices of one `node` have fast links.
    models_max: how many models it can hold at a time."""

    name: str
    capacity_bytes: int
    node: str = ""
    models_max: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class ModelSpecView:
    """A model and its expected load. weight_bytes, token_bytes and kv_floor_bytes are of the whole
    model; with tensor parallelism each device holds one part in `tp`. share_bytes: what its engine
    holds besides on each device, at whatever degree. prompt_tokens and output_tokens are means;
    tp_degrees: those it can run at; tp: the one that its operator gave it, which a search may
    overrule. max_context_tokens: the longest sequence that may be asked of it."""

    name: str
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    rate_rps: float
    prompt_tokens: float
    output_tokens: float
    slo_s: float = float("inf")
    tp_degrees: tuple[int, ...] = (1,)
    max_context_tokens: int = 0
    tp: int = 1
    share_bytes: int = 0

    def held_bytes(self, tp: int) -> int:
        """Weights and engines' shares on `tp` devices together."""
        return self.weight_bytes + self.share_bytes * tp

    def part_bytes(self, tp: int, kv_bytes: int = 0) -> int:
        """Weights, engine and its part of `kv_bytes` on one of `tp` devices."""
        return -(-(self.weight_bytes + kv_bytes) // tp) + self.share_bytes


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model in a unit.

    sm_share: the part of the devices' compute that its decoding jobs may take (MuxServe §3.4).
    batch: the requests decoded together that its load needs (MuxServe eq. 3); 0: not computed.
    kv_limit_bytes: its part of the KV memory of one device; None: shared freely.
    """

    model: str
    sm_share: float = 1.0
    batch: int = 0
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
    """refused: model -> why no unit holds it. score: what the search maximised (its own scale)."""

    units: tuple[Unit, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    score: float = 0.0

    def homes(self, model: str) -> tuple[Unit, ...]:
        """The units that hold `model`, in the order of `units`."""
        return tuple(u for u in self.units if any(h.model == model for h in u.models))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation of a placement on the recent requests says, per model.

    requests: how many there were; unserved: those that missed their SLO or had no home;
    normalized_latency: mean of latency / mean execution time on one GPU, of the served ones
    (SeaLLM eq. 1), 0 where none was served.
    """

    requests: Mapping[str, int]
    unserved: Mapping[str, int]
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
    simulate: Callable[[Placement], Outcome] | None = None


Search = Callable[[Problem], Placement]
