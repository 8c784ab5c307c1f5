"""Models that the prism policy gives up because the devices cannot serve all of them.

Memory can be shared over time as long as some models are idle. If the models' shares of it, or of
the compute, exceed the devices, every model that is activated displaces another. Then the models
whose requests cost most are refused, so that the others are served.
"""

from __future__ import annotations

from prism.policies.data import ClusterView, ModelView, Settings
from prism.policies.latency import busy_share
from prism.policies.planning.builder import PlanBuilder

USABLE = 0.85
"""Part of the devices' memory that models can use. They do not fill devices exactly."""
STAYS = 1.5
"""A resident model is given up for absent ones whose requests cost less than 1 / STAYS of its."""


def given_up(view: ClusterView) -> set[str]:
    """Returns the names of the models whose requests should be rejected.

    None if the rest of the models' shares of memory and compute, for the part of the time in which
    they have requests, fit the devices. Otherwise those with the fewest requests for their share.
    """
    alive = [gpu for gpu in view.gpus if gpu.alive]
    memory_bytes = USABLE * sum(gpu.capacity_bytes for gpu in alive)
    if not memory_bytes:
        return set()
    asked = {model.name: model for model in view.models if model.traffic.requests}
    shares = {name: _shares(m, memory_bytes, len(alive)) for name, m in asked.items()}
    memory, compute = (
        (sum(each) for each in zip(*shares.values(), strict=True)) if shares else (0.0, 0.0)
    )
    found: set[str] = set()
    for name in sorted(shares, key=lambda name: _value(asked[name], shares[name])):
        if memory <= 1 and compute <= 1:
            break
        if not asked[name].never_evict:
            memory, compute = memory - shares[name][0], compute - shares[name][1]
            found.add(name)
    return found


def _shares(model: ModelView, memory_bytes: float, devices: int) -> tuple[float, float]:
    """Returns the model's share of all memory over time, and of all devices' compute."""
    traffic = model.traffic
    running = traffic.rate_rps * traffic.output_tokens * model.slo_tpot_s
    tokens = running * (traffic.prompt_tokens + traffic.output_tokens / 2)
    held = model.weight_bytes + max(model.kv_floor_bytes, tokens * model.token_bytes)
    return traffic.busy_part * held / memory_bytes, busy_share(model) * model.tp / devices


def _value(model: ModelView, shares: tuple[float, float]) -> float:
    """Returns the requests per share of the devices."""
    resident = STAYS if model.device is not None else 1.0
    return resident * _rate(model) / max(1e-9, sum(shares))


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
