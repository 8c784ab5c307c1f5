"""MuxServe's placement (MuxServe §3.2, Algorithm 1).

Enumerates mesh groups, and places models on meshes greedily by estimated gain in throughput.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prism.policies.baselines.mux_throughput import (
    Candidate,
    Estimate,
    candidates,
    estimate,
    request_tokens,
)
from prism.policies.bins import size_text
from prism.policies.placement import (
    KEEPS,
    DeviceSpecView,
    Hosted,
    ModelSpecView,
    Placement,
    Problem,
    StepTimes,
    Unit,
    by_node,
)

T = TypeVar("T")
Key = Callable[[ModelSpecView], float]

GROUPS_MAX = 512
"""Largest number of mesh groups to try. More are sampled evenly (§3.2 prunes as well)."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices of one node that serve the same models together."""

    devices: tuple[str, ...]
    capacity_bytes: int
    node: str = ""
    models_max: int = sys.maxsize

    @property
    def size(self) -> int:
        return len(self.devices)


@dataclass(slots=True)
class MeshUnit:
    mesh: Mesh
    models: tuple[Candidate, ...] = ()
    estimate: Estimate = field(default_factory=Estimate)


def search(problem: Problem) -> Placement:
    """Returns the best placement of Algorithm 1 over all mesh groups. REQUIRES: `problem.times`.

    The paper assumes that every model fits. Here groups with more placed models are better. If the
    paper's order leaves a model out in every group, the order by size is tried as well. Equal
    throughput, as under light load, is decided by least strain; the pseudocode takes the first.
    """
    assert problem.times is not None, "MuxServe's estimator needs step times"
    planner = Planner(problem.models, problem.devices, problem.times)
    groups = list(mesh_groups(problem.devices, planner.degrees()))
    best = best_of(planner, groups, computation)
    if _placed(best) < len(problem.models):
        best = max(best, best_of(planner, groups, lambda m: float(m.weight_bytes)), key=_placed)
    return planner.placement(_kept(planner, problem, best))


def _kept(planner: Planner, problem: Problem, best: list[MeshUnit]) -> list[MeshUnit]:
    """Returns the present placement with the models that it lacks, or `best` if that is clearly
    better."""
    if problem.present is None or not problem.present.units:
        return best
    now = planner.extended(problem.present, problem.devices)
    (placed, throughput_rps, _), (most, best_rps, _) = _rank(now), _rank(best)
    return now if placed >= most and best_rps <= KEEPS * throughput_rps else best


def best_of(planner: Planner, groups: Sequence[Sequence[Mesh]], key: Key) -> list[MeshUnit]:
    """Returns the units of the best mesh group, with models placed by decreasing `key`."""
    return max((planner.place(group, key) for group in groups), key=_rank)


def _placed(units: Sequence[MeshUnit]) -> int:
    return sum(len(u.models) for u in units)


def _rank(units: Sequence[MeshUnit]) -> tuple[int, float, float]:
    """Returns the rank: most models, most throughput, least strain. Ignores rounding errors."""
    throughput = sum(u.estimate.throughput_rps for u in units)
    strain = max((u.estimate.strain for u in units), default=0.0)
    return (_placed(units), round(throughput, 9), -round(strain, 9))


class Planner:
    """Algorithm 1 on one mesh group after another, with cached estimates of equal units."""

    def __init__(
        self,
        models: Sequence[ModelSpecView],
        devices: Sequence[DeviceSpecView],
        times: StepTimes,
    ) -> None:
        self._times = times
        self._models = models
        smallest = min((d.capacity_bytes for d in devices), default=0)
        self.candidates = {m.name: self._candidates_of(m, smallest) for m in models}
        self._known: dict[tuple[int, int, frozenset[str]], Estimate] = {}

    def _candidates_of(self, model: ModelSpecView, capacity_bytes: int) -> dict[int, Candidate]:
        left = {tp: tp * capacity_bytes - model.held_bytes(tp) for tp in model.tp_degrees}
        fitting = {tp: kv for tp, kv in left.items() if kv >= max(1, model.kv_floor_bytes)}
        return candidates(model, self._times, fitting)

    def degrees(self) -> tuple[int, ...]:
        """Returns the mesh sizes that some model can use."""
        return tuple(sorted({tp for found in self.candidates.values() for tp in found}))

    def place(self, group: Sequence[Mesh], key: Key) -> list[MeshUnit]:
        """Places each model, largest `key` first, on the mesh where its gain is largest.

        These are the inner loops of Algorithm 1.
        """
        return self._place([MeshUnit(mesh) for mesh in group], self._models, key)

    def _place(
        self, units: list[MeshUnit], models: Iterable[ModelSpecView], key: Key
    ) -> list[MeshUnit]:
        for model in sorted(models, key=key, reverse=True):
            best = max(self._options(model, units), key=lambda o: o[0], default=None)
            if best is not None:
                _, index, unit = best
                units[index] = unit
        return units

    def extended(self, placement: Placement, devices: Sequence[DeviceSpecView]) -> list[MeshUnit]:
        """Returns the units of a placement that are still possible. The models that they lack are
        placed on them, or on one of the other devices."""
        units = self._units_of(placement, devices)
        used = {name for unit in units for name in unit.mesh.devices}
        units += [MeshUnit(_mesh([device])) for device in devices if device.name not in used]
        placed = {c.model.name for unit in units for c in unit.models}
        return self._place(units, (m for m in self._models if m.name not in placed), computation)

    def _units_of(self, placement: Placement, devices: Sequence[DeviceSpecView]) -> list[MeshUnit]:
        known, found = {device.name: device for device in devices}, []
        for unit in placement.units:
            here = [known[name] for name in unit.devices if name in known]
            options = [self.candidates.get(h.model, {}).get(unit.tp) for h in unit.models]
            models = tuple(option for option in options if option is not None)
            if len(here) == unit.tp and kv_bytes(mesh := _mesh(here), models) is not None:
                found.append(MeshUnit(mesh, models, self.estimate(mesh, models)))
        return found

    def _options(
        self, model: ModelSpecView, units: Sequence[MeshUnit]
    ) -> Iterator[tuple[tuple[float, float], int, MeshUnit]]:
        seen: set[tuple[int, int, frozenset[str]]] = set()
        for index, unit in enumerate(units):
            candidate = self.candidates[model.name].get(unit.mesh.size)
            key = self._key(unit.mesh, unit.models)
            full = len(unit.models) >= unit.mesh.models_max
            if candidate is None or full or key in seen:
                continue
            seen.add(key)
            grown = (*unit.models, candidate)
            if kv_bytes(unit.mesh, grown) is None:
                continue
            after = self.estimate(unit.mesh, grown)
            gain = round(after.throughput_rps - unit.estimate.throughput_rps, 9)
            yield (gain, -round(after.strain, 9)), index, MeshUnit(unit.mesh, grown, after)

    def estimate(self, mesh: Mesh, models: tuple[Candidate, ...]) -> Estimate:
        """Returns F of a unit. REQUIRES: the models fit."""
        key = self._key(mesh, models)
        if key not in self._known:
            left = kv_bytes(mesh, models)
            assert left is not None
            self._known[key] = estimate(models, left, self._times)
        return self._known[key]

    @staticmethod
    def _key(mesh: Mesh, models: Sequence[Candidate]) -> tuple[int, int, frozenset[str]]:
        return mesh.size, mesh.capacity_bytes, frozenset(c.model.name for c in models)

    def placement(self, units: Sequence[MeshUnit]) -> Placement:
        """Returns the units as a placement. Models in no unit are refused with their need."""
        made = tuple(Unit(u.mesh.devices, _hosted(u)) for u in units)
        placed = {c.model.name for u in units for c in u.models}
        refused = {m.name: self._why(m) for m in self._models if m.name not in placed}
        score = sum(u.estimate.throughput_rps for u in units)
        return Placement(made, refused, score)

    def _why(self, model: ModelSpecView) -> str:
        if not self.candidates[model.name]:
            degrees = ", ".join(map(str, model.tp_degrees))
            return f"{size_text(model.weight_bytes)} of weights do not fit at TP degree {degrees}"
        least = min(self.candidates[model.name])
        need = model.held_bytes(least) + model.kv_floor_bytes
        return f"no mesh has {size_text(need)} left after the models placed before it"


def _hosted(unit: MeshUnit) -> tuple[Hosted, ...]:
    batches = unit.estimate.batches or {}
    return tuple(Hosted(c.model.name, c.sm_share, batches[c.model.name]) for c in unit.models)


def computation(model: ModelSpecView) -> float:
    """Returns FLOP/s up to a constant factor: scale times popularity (§3.2)."""
    return model.weight_bytes * model.rate_rps * request_tokens(model)


def kv_bytes(mesh: Mesh, models: Sequence[Candidate]) -> int | None:
    """Returns the KV memory left on all devices of the mesh; None if the models do not fit."""
    total = mesh.size * mesh.capacity_bytes
    left = total - sum(c.model.held_bytes(mesh.size) for c in models)
    return left if left >= sum(c.model.kv_floor_bytes for c in models) else None


# --- mesh groups ---------------------------------------------------------------------------


def mesh_groups(
    devices: Sequence[DeviceSpecView], sizes: Sequence[int]
) -> Iterator[tuple[Mesh, ...]]:
    """Yields every division of nodes into meshes of the given sizes, at most GROUPS_MAX.

    Divisions that differ only in the order of equal nodes are yielded once. Intra-operator
    parallelism stays within a node (§3.2).
    """
    nodes = by_node(devices)
    for cuts in _cluster_cuts(nodes, tuple(sizes)):
        pairs = zip(nodes, cuts, strict=True)
        yield tuple(mesh for node, cut in pairs for mesh in _meshes(node, cut))


def _cluster_cuts(
    nodes: list[list[DeviceSpecView]], sizes: tuple[int, ...]
) -> list[tuple[tuple[int, ...], ...]]:
    kinds: dict[tuple[int, ...], list[int]] = {}
    for index, node in enumerate(nodes):
        kinds.setdefault(tuple(d.capacity_bytes for d in node), []).append(index)
    per_kind = [_cuts_of(len(kind), len(where), sizes) for kind, where in kinds.items()]
    combined: list[tuple[tuple[int, ...], ...]] = []
    for choice in itertools.product(*per_kind):
        cuts: dict[int, tuple[int, ...]] = {}
        for where, of_kind in zip(kinds.values(), choice, strict=True):
            cuts.update(zip(where, of_kind, strict=True))
        combined.append(tuple(cuts[i] for i in range(len(nodes))))
    return thinned(combined, GROUPS_MAX)


def _cuts_of(gpus: int, nodes: int, sizes: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Returns divisions of `nodes` equal nodes of `gpus` each, one per total of mesh sizes."""
    found: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {(): ()}
    options = list(partitions(gpus, sizes))
    for _ in range(nodes):
        grown: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        for total, cuts in found.items():
            for option in options:
                grown.setdefault(tuple(sorted(total + option)), (*cuts, option))
        found = dict(thinned(list(grown.items()), GROUPS_MAX))
    return list(found.values())


def partitions(gpus: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write `gpus` as a sum of sizes, largest first.

    A remainder that is smaller than all sizes stays unused.
    """
    usable = sorted({s for s in sizes if s <= gpus}, reverse=True)
    if usable:
        yield from _partitions(gpus, tuple(usable))
    else:
        yield ()


def _partitions(gpus: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    size, smaller = sizes[0], sizes[1:]
    if not smaller:
        yield (size,) * (gpus // size)
        return
    for count in range(gpus // size, -1, -1):
        rest = _partitions(gpus - count * size, smaller)
        yield from ((size,) * count + tail for tail in rest)


def thinned(items: list[T], most: int) -> list[T]:
    """Returns an even sample of at most `most` items, including the first and the last."""
    if len(items) <= most:
        return items
    step = (len(items) - 1) / (most - 1)
    return [items[round(i * step)] for i in range(most)]


def _meshes(node: Sequence[DeviceSpecView], cut: Sequence[int]) -> Iterator[Mesh]:
    start = 0
    for size in cut:
        yield _mesh(node[start : start + size])
        start += size


def _mesh(devices: Sequence[DeviceSpecView]) -> Mesh:
    return Mesh(
        tuple(d.name for d in devices),
        min(d.capacity_bytes for d in devices),
        devices[0].node,
        min(d.models_max for d in devices),
    )
