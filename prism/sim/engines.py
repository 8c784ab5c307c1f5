"""The engine that a policy's copies get: its KV space, what sharing a pool of blocks costs, and
whether its steps are controlled."""

from __future__ import annotations

from dataclasses import dataclass

from prism.policies.kv_blocks import KvBlocks, Pool, pool
from prism.policies.placement import Placement
from prism.policies.registry import Policy
from prism.prefill_speed import Speed
from prism.sim.compute import Compute
from prism.sim.controlled import ControlledEngine
from prism.sim.engine import Engine
from prism.sim.kv import KvSpace
from prism.sim.prefix import HASH_TOKENS, PrefixCache
from prism.sim.profile import Load
from prism.sim.request import Listener
from prism.sim.resident import Resident
from prism.sim.setup import ClusterSetup

POOLED = (KvBlocks.HEADWISE, KvBlocks.MERGED)


@dataclass(frozen=True, slots=True)
class Terms:
    """What an engine is made with. target: the placement that it belongs to."""

    setup: ClusterSetup
    policy: Policy
    load: Load
    target: Placement | None


def make_engine(resident: Resident, compute: Compute, terms: Terms, listener: Listener) -> Engine:
    """REQUIRES: the copy's accounts are open."""
    model, tp = resident.model, resident.tp
    part = model.parts[tp]
    block_tokens, quantum_blocks = model.block_tokens, part.quantum_blocks
    quantum_bytes, slower = part.quantum_bytes, 1.0
    shared = _pool(resident, terms)
    if shared is not None:
        block_tokens, quantum_blocks = shared.grain_tokens, 1
        quantum_bytes, slower = shared.grain_bytes, 1.0 + shared.step_overhead
    sites = [device.site for device in resident.devices]
    space = KvSpace(sites, resident.accounts, block_tokens, quantum_blocks, quantum_bytes)
    if terms.setup.engine.prefix_reuse and terms.policy.steps is None:
        space.cache = PrefixCache(HASH_TOKENS // block_tokens)
        for site in sites:
            site.reuses = True
    kind = ControlledEngine if terms.policy.steps is not None else Engine
    engine = kind(
        compute,
        [device.gpu for device in resident.devices],
        cost=part.cost,
        kv=space,
        settings=terms.setup.engine,
        listener=listener,
    )
    engine.slower = slower
    engine.submit_s = model.submit_s
    engine.speed = resident.home.speeds.setdefault(model.name, Speed())
    engine.prefill_tokens_per_s = resident.home.speed_tokens_per_s(model)
    if isinstance(engine, ControlledEngine):
        engine.begin(terms.load, _sm_share(resident, terms.target))
    return engine


def _pool(resident: Resident, terms: Terms) -> Pool | None:
    """None where each model has blocks of its own: by the policy, or because heads differ in size,
    which neither way of pooling can share (the unit's models then keep their own pages)."""
    if terms.policy.kv_blocks not in POOLED:
        return None
    tp = resident.tp
    names = _unit_names(resident, terms.target)
    shapes = [m.parts[tp].shape for m in terms.setup.models if m.name in names and tp in m.parts]
    try:
        return pool(terms.policy.kv_blocks, resident.model.parts[tp].shape, shapes)
    except ValueError:
        return None


def _unit_names(resident: Resident, target: Placement | None) -> set[str]:
    """The models that share the copy's devices."""
    home = resident.home.name
    units = target.units if target is not None else ()
    found = {h.model for u in units if u.devices[0] == home for h in u.models}
    return found | {guest.model.name for guest in resident.home.guests}


def _sm_share(resident: Resident, target: Placement | None) -> float:
    home, name = resident.home.name, resident.model.name
    units = target.units if target is not None else ()
    shares = [
        h.sm_share for u in units if u.devices[0] == home for h in u.models if h.model == name
    ]
    return shares[0] if shares else 1.0
