"""Simulation of placements for the searches of a live cluster (AlpaServe §4.2, SeaLLM §4.1).

Memory and degrees are those of the cluster's view, step times those that agents have measured, and
requests are drawn from the traffic.
"""

from __future__ import annotations

from dataclasses import replace

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.model_spec import ModelSpec
from prism.policies import profiles, registry
from prism.policies.data import ClusterView
from prism.policies.knobs import tuned
from prism.policies.placement import (
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
    Simulate,
    StepTimes,
)
from prism_sim.cluster.world import World
from prism_sim.core.profile import loads
from prism_sim.core.setup import ClusterSetup, ModelSetup
from prism_sim.costs.model import CostModel
from prism_sim.costs.table import FAR_TOKENS, StepTable, TableCost
from prism_sim.live.drawn_requests import drawn
from prism_sim.live.live_setup import (
    HostCost,
    cluster_setup,
    cores_of,
    degree_setup,
    device_setup,
    is_on_host,
    model_setup,
)
from prism_sim.placement.independent import PartwiseSimulation
from prism_sim.placement.search import outcome


def simulator(config: ClusterConfig, view: ClusterView) -> Simulate:
    """Returns `Problem.simulate` for the view's models and devices.

    The same `ClusterSetup.search_requests` requests are simulated on each placement.
    """
    setup = view_setup(config, profiles.problem(view))
    work = drawn(setup.models, profiles.loads(view), setup.search_requests)
    profiled = loads(setup, work)

    policy = tuned(registry.get(setup.policy), setup.knobs)

    def simulate(placement: Placement) -> PlacementOutcome:
        return outcome(World(setup, work, policy, placement).run(), profiled)

    return PartwiseSimulation(setup, policy, simulate)


def view_setup(config: ClusterConfig, problem: Problem) -> ClusterSetup:
    """Returns the setup of a search's models and devices."""
    assert problem.times is not None
    configured = {device.name: device_setup(device) for device in config.devices}
    devices = [
        replace(configured[device.name], capacity_bytes=device.capacity_bytes)
        for device in problem.devices
    ]
    specs = {spec.name: spec for spec in config.models}
    models = [
        _model(index, specs[model.name], model, problem.times, config)
        for index, model in enumerate(problem.models)
    ]
    return cluster_setup(config, devices, models)


def _model(
    index: int, spec: ModelSpec, model: ModelSpecView, times: StepTimes, config: ClusterConfig
) -> ModelSetup:
    page_bytes = max(device.page_bytes for device in config.devices)
    parts = {
        tp: degree_setup(spec, tp, _cost(model.name, tp, times, config), page_bytes)
        for tp in model.tp_degrees
    }
    return replace(
        model_setup(index, spec, parts, config),
        tp=model.tp,
        weight_bytes=model.weight_bytes,
        share_bytes=model.share_bytes,
        token_bytes=model.token_bytes,
        kv_floor_bytes=model.kv_floor_bytes,
    )


def _cost(model: str, tp: int, times: StepTimes, config: ClusterConfig) -> CostModel:
    cost = TableCost(measured_steps(model, tp, times, config.engine.max_running))
    return HostCost(cost, cores_of(config)) if is_on_host(config) else cost


def measured_steps(model: str, tp: int, times: StepTimes, batch_max: int) -> StepTable:
    """Returns the table of step times that are linear in prompt tokens and in the batch."""
    prefill_s = times.prefill_s(model, tp, 1, FAR_TOKENS, 1.0)
    batches = (1, max(2, batch_max))
    return StepTable(
        gpu="",
        model=model,
        tp=tp,
        source="measured",
        dense_tokens=(1.0,),
        dense_s=(0.0,),
        pair_s=0.0,
        prefill_tokens=(0.0, FAR_TOKENS),
        prefill_context=(1.0,),
        prefill_s=((0.0,), (prefill_s,)),
        decode_batch=tuple(map(float, batches)),
        decode_context=(1.0,),
        decode_s=tuple((times.decode_s(model, tp, batch, 1.0, 1.0),) for batch in batches),
    )
