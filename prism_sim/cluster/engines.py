"""Creation of the engine of a copy, as the policy requires: KV space, shared pool, step control."""

from __future__ import annotations

from dataclasses import dataclass

from prism.models.prefill_speed import Speed
from prism.policies.multiplexing.kv_blocks import PoolUse, pool
from prism.policies.placement import Placement
from prism.policies.policy import Policy
from prism_sim.cluster.device import Resident
from prism_sim.core.prefix import HASH_TOKENS, SimPrefixCache
from prism_sim.core.profile import ModelLoad
from prism_sim.core.request import Listener
from prism_sim.core.setup import ClusterSetup, KvNeed
from prism_sim.engine.compute import Compute
from prism_sim.engine.controlled import ControlledEngine
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.kv import KvSpace


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """Inputs of `make_engine` besides the copy."""

    setup: ClusterSetup
    policy: Policy
    load: ModelLoad
    # Placement that the copy belongs to.
    target: Placement | None


def make_engine(
    resident: Resident, compute: Compute, terms: EngineTerms, listener: Listener
) -> SimEngine:
    """Returns the engine of a copy. REQUIRES: the copy's accounts are open."""
    model, tp = resident.model, resident.tp
    part = model.parts[tp]
    need, quantum_blocks = model.need, part.quantum_blocks
    quantum_bytes, slower = part.quantum_bytes, 1.0
    shared = _pool(resident, terms)
    if shared is not None:
        need, quantum_blocks = KvNeed(shared.grain_tokens), 1
        quantum_bytes, slower = shared.grain_bytes, 1.0 + shared.step_overhead
    sites = [device.site for device in resident.devices]
    space = KvSpace(sites, resident.accounts, need, quantum_blocks, quantum_bytes)
    reuses = terms.setup.engine.prefix_reuse and terms.policy.steps is None
    if reuses and not need.state_tokens:
        space.cache = SimPrefixCache(HASH_TOKENS // need.block_tokens)
        for site in sites:
            site.reuses = True
    kind = ControlledEngine if terms.policy.steps is not None else SimEngine
    engine = kind(
        compute,
        [device.gpu for device in resident.devices],
        cost=part.cost,
        kv=space,
        settings=terms.setup.engine,
        listener=listener,
        slower=slower,
    )
    engine.submit_s = model.submit_s
    engine.prompts.speed = resident.home.speeds.setdefault(model.name, Speed())
    engine.prompts.tokens_per_s = resident.home.speed_tokens_per_s(model)
    if isinstance(engine, ControlledEngine):
        target, name = terms.target, resident.model.name
        engine.configure(terms.load, target.sm_share(name, resident.home.name) if target else 1.0)
    return engine


def _pool(resident: Resident, terms: EngineTerms) -> PoolUse | None:
    """Returns the shared pool of KV blocks, or None if each model has separate blocks.

    Blocks are separate if the policy does not pool them. They are also separate if head sizes or
    layers differ, which neither kind of pool supports; the models of the unit then use their own
    pages.
    """
    kind = terms.policy.kv_blocks
    if kind is None:
        return None
    tp = resident.tp
    names = _unit_names(resident, terms.target)
    parts = [m.parts[tp] for m in terms.setup.models if m.name in names and tp in m.parts]
    shapes = [part.shape for part in parts if part.shape is not None]
    own = resident.model.parts[tp].shape
    if own is None or len(shapes) < len(parts):
        return None
    try:
        return pool(kind, own, shapes)
    except ValueError:
        return None


def _unit_names(resident: Resident, target: Placement | None) -> set[str]:
    """Returns the names of the models that share the copy's devices."""
    found = {hosted.model for hosted in target.on(resident.home.name)} if target else set()
    return found | {guest.model.name for guest in resident.home.guests}
