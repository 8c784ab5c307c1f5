"""Dedicated GPUs: every model is alone on its devices; no model is evicted or moved.

Prism §1, table 1; MuxServe §4.1 ("spatial partitioning"); SeaLLM §6.1 ("vLLM").
"""

from __future__ import annotations

from collections.abc import Sequence

from prism.policies.baselines.mux_placement import computation
from prism.policies.bins import asked_for, devices_of, need_bytes, size_text
from prism.policies.data import Action, Activate, ClusterView, GpuView, ModelView, Refuse, Settings
from prism.policies.placement import (
    DeviceSpecView,
    Hosted,
    ModelSpecView,
    Placement,
    Problem,
    Unit,
    by_node,
)
from prism.policies.planning import target
from prism.policies.policy import ADMISSION_ORDER, Policy, always_balanced


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Follows the searched placement, if there is one, else gives each model a free device.

    Models with waiting requests are first, then the largest. Each is placed on the smallest device
    that holds it.
    """
    if view.target is not None:
        return target.plan(view, settings)
    taken = {device for m in view.models for device in devices_of(m)}
    free = [g for g in view.gpus if g.name not in taken and g.alive and g.engines_free > 0]
    first = sorted(asked_for(view), key=lambda m: (m.waiting == 0, -need_bytes(m)))
    return tuple(_place(model, free) for model in first)


def _place(model: ModelView, free: list[GpuView]) -> Action:
    """Returns the model's activation or refusal. Removes its device from `free`."""
    fitting = [g for g in free if _fits(model, g)]
    if not fitting:
        need = size_text(need_bytes(model))
        return Refuse(model.name, f"no free device has {need} for it alone; add devices")
    device = min(fitting, key=lambda g: (g.capacity_bytes - g.fixed_bytes, g.name))
    free.remove(device)
    return Activate(model.name, device.name, "a dedicated device")


def _fits(model: ModelView, gpu: GpuView) -> bool:
    if model.pinned_device not in (None, gpu.name) or gpu.name in model.barred or model.tp > 1:
        return False
    return need_bytes(model) <= gpu.capacity_bytes - gpu.fixed_bytes


# --- search --------------------------------------------------------------------------------


def search(problem: Problem) -> Placement:
    """Gives each model the fewest devices that hold it, then doubles degrees with the rest.

    The model with the most computation per device is doubled first. This happens with equal loads,
    too, as in SeaLLM's evaluation. Models with the least computation are refused if no devices are
    left.
    """
    capacity = min((d.capacity_bytes for d in problem.devices), default=0)
    sizes: dict[str, int] = {}
    refused: dict[str, str] = {}
    popular = sorted(problem.models, key=computation, reverse=True)
    for model in popular:
        least = least_degree(model, capacity)
        if least is None:
            refused[model.name] = "its weights fit at none of its TP degrees"
        elif pack({**sizes, model.name: least}, problem.devices) is None:
            refused[model.name] = f"no {least} devices are left for it alone; add devices"
        else:
            sizes[model.name] = least
    _grow(sizes, popular, problem.devices)
    packed = pack(sizes, problem.devices)
    assert packed is not None
    units = tuple(Unit(packed[m.name], (Hosted(m.name),)) for m in popular if m.name in packed)
    return Placement(units, refused)


def least_degree(model: ModelSpecView, capacity_bytes: int) -> int | None:
    """Returns the fewest devices that hold the model; None if no supported degree is enough."""
    floor_bytes = model.kv_floor_bytes
    fitting = (tp for tp in model.tp_degrees if model.part_bytes(tp, floor_bytes) <= capacity_bytes)
    return min(fitting, default=None)


def _grow(
    sizes: dict[str, int], models: Sequence[ModelSpecView], devices: Sequence[DeviceSpecView]
) -> None:
    open_ = {m.name: m for m in models if m.name in sizes}
    while open_:
        name = max(open_, key=lambda n: computation(open_[n]) / sizes[n])
        wider = 2 * sizes[name]
        allowed = wider in open_[name].tp_degrees
        if allowed and pack({**sizes, name: wider}, devices) is not None:
            sizes[name] = wider
        else:
            del open_[name]


def pack(
    sizes: dict[str, int], devices: Sequence[DeviceSpecView]
) -> dict[str, tuple[str, ...]] | None:
    """Assigns devices of one node to each model, widest first; None if they do not all fit."""
    free = [[device.name for device in node] for node in by_node(devices)]
    packed: dict[str, tuple[str, ...]] = {}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        node = next((names for names in free if len(names) >= size), None)
        if node is None:
            return None
        packed[name] = tuple(node[:size])
        del node[:size]
    return packed


POLICY = Policy(
    "dedicated",
    plan,
    frozenset({ADMISSION_ORDER}),
    evicts=False,
    is_balanced=always_balanced,
    search=search,
)
