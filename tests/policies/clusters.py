"""Small clusters for policy tests, by hand and by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec import structs

from prism.policies import prism
from prism.policies.bins import devices_of, need_bytes, part
from prism.policies.data import (
    Activate,
    ClusterView,
    Evict,
    GpuView,
    Migrate,
    ModelView,
    Refuse,
    Settings,
)

SETTINGS = Settings(
    idle_threshold_s=45.0, migration_threshold=0.2, contended_requests=2.0, min_idle_s=1.0
)


def planned(models: list[ModelView], gpus: list[Any], **more: Any) -> list[tuple[str, ...]]:
    return [summary(a) for a in prism.plan(view(models, gpus, **more), SETTINGS)]


def summary(action: Any) -> tuple[str, ...]:
    if isinstance(action, Migrate):
        return ("migrate", action.model, action.source, action.target)
    if isinstance(action, Refuse):
        return ("refuse", action.model)
    return (type(action).__name__.lower(), action.model, action.device)


def model(name: str, weight: int = 10, floor: int = 1, **more: Any) -> ModelView:
    defaults = {"slo_ttft_s": 1.0, "slo_tpot_s": 1.0, "token_bytes": 1}
    return ModelView(name, weight_bytes=weight, kv_floor_bytes=floor, **{**defaults, **more})


def active(name: str, device: str, **more: Any) -> ModelView:
    return model(name, device=device, state="active", **more)


def gpu(name: str, capacity: int = 100, engines_free: int = 8, **more: Any) -> GpuView:
    defaults = {"free_bytes": capacity, "engines_total": engines_free}
    return GpuView(name, capacity_bytes=capacity, engines_free=engines_free, **{**defaults, **more})


def view(models: Sequence[ModelView], gpus: Sequence[GpuView], **more: Any) -> ClusterView:
    return ClusterView(now_s=0.0, models=tuple(models), gpus=tuple(gpus), **more)


@st.composite
def clusters(draw: st.DrawFn, wide: bool = False) -> ClusterView:
    """Draws a consistent cluster: residents fit on their devices, within capacity and engines.

    `wide`: with tensor-parallel models and nodes of two devices.
    """
    most = 4 if wide else 3
    capacities = draw(st.lists(st.integers(0, 60), min_size=1, max_size=most))
    devices = [f"host:{i}" for i in range(len(capacities))]
    room, engines = list(capacities), [draw(st.integers(0, 4)) for _ in capacities]
    models = []
    for i in range(draw(st.integers(0, 6))):
        views, home = _any_model(draw, f"m{i}", devices, room, engines)
        if wide and draw(st.booleans()):
            views = _widened(draw, views, home, room, engines)
        models.append(views)
        for device in devices_of(views):
            room[devices.index(device)] -= need_bytes(part(views))
            engines[devices.index(device)] -= 1
    drained = [draw(st.booleans()) for _ in capacities]
    gpus = [
        gpu(
            name,
            capacities[i],
            engines[i],
            free_bytes=room[i],
            engines_total=8,
            alive=draw(st.booleans()) and not drained[i],
            drained=drained[i],
            node=f"n{i // 2}" if wide else "",
        )
        for i, name in enumerate(devices)
    ]
    return view(models, gpus, rebalance=draw(st.booleans()))


def _any_model(
    draw: st.DrawFn, name: str, devices: list[str], room: list[int], engines: list[int]
) -> tuple[ModelView, int | None]:
    weight, floor = draw(st.integers(1, 30)), draw(st.integers(0, 10))
    homes = [i for i in range(len(devices)) if room[i] >= weight + floor and engines[i] > 0]
    home = draw(st.sampled_from([None, *homes]))
    state = (
        "absent" if home is None else draw(st.sampled_from(["active", "activating", "draining"]))
    )
    made = model(
        name,
        weight,
        floor,
        token_rate=draw(st.sampled_from([0.0, 1.0, 7.5])),
        slo_ttft_s=draw(st.sampled_from([0.5, 2.0])),
        waiting=draw(st.integers(0, 2)),
        running=0 if home is None else draw(st.integers(0, 1)),
        idle_s=draw(st.sampled_from([0.0, 5.0, 50.0, 500.0])),
        device=None if home is None else devices[home],
        state=state,
        never_evict=draw(st.booleans()),
        wanted=draw(st.booleans()),
        barred=tuple(draw(st.sets(st.sampled_from(devices)))),
        pinned_device=draw(st.sampled_from([None, *devices])) if home is None else None,
    )
    return made, home


def _widened(
    draw: st.DrawFn, made: ModelView, home: int | None, room: list[int], engines: list[int]
) -> ModelView:
    """Returns the model with tp 2, if it is absent or the other device of its node has room."""
    two = structs.replace(made, tp=2, pinned_device=None)
    if home is None:
        return two
    other = home ^ 1
    if other >= len(room) or engines[other] <= 0:
        return made
    if room[other] < need_bytes(part(two)):
        return made
    return structs.replace(two, peers=(f"host:{other}",))


def actions_of(kind: type[Any], actions: Sequence[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def check_capacity(view: ClusterView, actions: Sequence[Any]) -> None:
    """Applies the plan in order, and checks that no device exceeds its capacity.

    Draining models count as gone, since activations wait for them.
    """
    by_name = {m.name: m for m in view.models}
    room = {g.name: g.capacity_bytes - g.fixed_bytes for g in view.gpus}
    engines = {g.name: g.engines_free for g in view.gpus}
    for m in view.models:
        for device in devices_of(m):
            if m.state == "draining":
                engines[device] += 1
            else:
                room[device] -= need_bytes(part(m))
    for action in actions:
        model = by_name[action.model]
        need = need_bytes(part(model))
        if isinstance(action, Evict):
            for device in devices_of(model):
                room[device] += need
                engines[device] += 1
        if isinstance(action, Activate | Migrate):
            first = action.device if isinstance(action, Activate) else action.target
            devices = (first, *action.peers)
            assert len(set(devices)) == len(devices) == model.tp, "parts go to distinct devices"
            if isinstance(action, Migrate):
                assert set(devices).isdisjoint(devices_of(model)), "two parts on a device"
            nodes = {g.node for g in view.gpus if g.name in devices}
            assert len(nodes) == 1, "parts stay within a node"
            for device in devices:
                room[device] -= need
                engines[device] -= 1
                assert room[device] >= 0, f"{action} overfills {device}"
                assert engines[device] >= 0, f"{action}: no engine on {device}"
