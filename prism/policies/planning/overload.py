"""Models that the prism policy gives up because the devices cannot serve all of them.

Memory can be shared over time as long as some models are idle. If the models' shares of it exceed
the devices, every model that is activated displaces another. Then the models whose requests cost
most are refused, so that the others are served.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from prism.policies.data import ModelView, Settings
from prism.policies.latency import busy_share
from prism.policies.planning.builder import PlanBuilder

USABLE = 0.85
"""Part of the devices' memory that models can use. They do not fill devices exactly."""
STAYS = 1.5
"""A resident model is given up for absent ones whose requests cost less than 1 / STAYS of its."""

RESUMES = 0.9
"""A model that was given up is served again if all need at most this part of `USABLE`."""


def given_up(builder: PlanBuilder) -> set[str]:
    """Returns the names of the models whose requests should be rejected.

    None if the models' shares of memory, for the part of the time in which they have requests, fit
    the devices. Otherwise those with the fewest requests for their share of memory and compute, but
    never all. Compute alone gives none up: models that share it are late, but take no turns.
    """
    alive = [b.gpu for b in builder.bins.values() if b.gpu.alive]
    memory_bytes = USABLE * sum(gpu.capacity_bytes for gpu in alive)
    copies = Counter(model.name for model in builder.view.models)
    known = [model for model in builder.view.models if model.traffic.requests]
    possible = builder.fitting_alone(model for model in known if model.device is None)
    asked = {model.name: model for model in known if model.device or model.name in possible}
    if not memory_bytes or not asked:
        return set()
    demands = {
        name: Demand.of(model, copies[name], memory_bytes, len(alive))
        for name, model in asked.items()
    }
    memory = sum(each.memory for each in demands.values())
    found: set[str] = set()
    for name in sorted(demands, key=lambda name: demands[name].value)[:-1]:
        model = asked[name]
        again = model.state == "absent" and model.deferred
        if memory > (RESUMES if again else 1.0) and not model.never_evict:
            memory -= demands[name].memory
            found.add(name)
    return found


class Demand(NamedTuple):
    """Share of all devices that a model's requests take, and their value."""

    # Share of the memory over time.
    memory: float
    # Requests per second for the share of memory and compute.
    value: float

    @classmethod
    def of(cls, model: ModelView, copies: int, memory_bytes: float, devices: int) -> Demand:
        """Makes it of one of the model's copies, which share its requests evenly."""
        traffic = model.traffic
        running = traffic.rate_rps * copies * traffic.output_tokens * model.slo_tpot_s
        tokens = running * (traffic.prompt_tokens + traffic.output_tokens / 2)
        held = model.weight_bytes + max(model.kv_floor_bytes, tokens * model.token_bytes)
        memory = traffic.busy_part * min(1.0, held / memory_bytes)
        compute = min(1.0, busy_share(model)) * copies * model.tp / devices
        resident = STAYS if model.device is not None else 1.0
        return cls(memory, resident * _rate(model) * copies / max(1e-9, memory + compute))


def _rate(model: ModelView) -> float:
    """Returns requests per second: of the last minute or of ten, whichever is more."""
    return max(model.traffic.rate_rps, model.traffic.mean_rps)


def expected_requests(model: ModelView, settings: Settings) -> float:
    """Returns the requests of the next idle threshold, with those that wait.

    The longer a model has been idle, the fewer are expected.
    """
    rate = _rate(model) if model.waiting else min(_rate(model), 1 / max(model.idle_s, 1e-9))
    return model.waiting + settings.idle_threshold_s * rate


def residents(builder: PlanBuilder, names: set[str]) -> list[ModelView]:
    """Returns the active models among `names`, which may be evicted although they have requests."""
    found = {
        model.name: model
        for b in builder.bins.values()
        for model in b.models.values()
        if model.name in names and model.state == "active" and model.owes_s <= 0
    }
    return [model for name, model in found.items() if not builder.is_changing(name)]
