"""Placement by KV pressure ratio, Algorithm 1 (Prism §6.2; bound: Appendix A.1; TP: A.1.2).

The paper's algorithm ignores whether a model fits. Here a device is a candidate only if weights and
KV floor fit and an engine is free. The paper's algorithm also ignores compute. Here a device on
which fewer requests would be late (`Bin.late_with`) comes before one with less KVPR; where none
would be late the rule is the paper's. Pure functions.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from prism.policies.bins import (
    Bin,
    Bins,
    devices_of,
    empty_bins,
    need_bytes,
    part,
    shortfall,
    weight_of,
)
from prism.policies.data import GpuView, ModelView
from prism.policies.latency import busy_share

Rank = Callable[[Bin], tuple[float | str, ...]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of models to devices."""

    # Model -> its devices, rank 0 first.
    devices: Mapping[str, tuple[str, ...]]
    # Model -> why it fits on no device.
    refused: Mapping[str, str]
    # Device -> its KVPR.
    kvpr: Mapping[str, float]


def _mobility(model: ModelView) -> int:
    """Returns 0 if the model is on its pinned device, 1 if it is pinned to another, else 2.

    Models with fewer choices are placed first.
    """
    if model.pinned_device is None:
        return 2
    return 0 if model.device == model.pinned_device else 1


def by_pressure(model: ModelView) -> tuple[int, float, int]:
    """Returns Algorithm 1's sort key: pinned models, then largest w, largest size.

    Ties stay in the order of the configuration, since names must not affect a placement.
    """
    return (_mobility(model), -weight_of(model), -need_bytes(model))


def by_size(model: ModelView) -> tuple[int, int]:
    return (_mobility(model), -need_bytes(model))


def gain(before: float, after: float) -> float:
    """Returns the fraction of a pressure that a change removes; 0 without pressure."""
    if before <= 0:
        return 0.0
    return 1.0 if math.isinf(before) and not math.isinf(after) else (before - after) / before


def place(
    models: Sequence[ModelView],
    gpus: Sequence[GpuView],
    tau: float,
    start: Callable[[], Bins] | None = None,
) -> Assignment:
    """Runs Algorithm 1: assigns devices to all models, greedily by pressure.

    If some models do not fit, models on no device are packed again by decreasing size. Models that
    still do not fit are refused with the missing bytes. The parts of a tensor-parallel model are on
    distinct devices of one node, all or none. Deterministic; never exceeds a device's capacity.

    For tau = 0, tp 1 and if all models fit, max KVPR <= optimum x (1 + C / (S - m)) (Appendix A.1).
    Takes O((models + devices) log devices) if most devices that are examined fit; each
    tensor-parallel model takes O(devices).

    Args:
        start: Makes bins with models that stay on their device. These are not in `models`, and
            `gpus` is not read.
    """
    parts = [part(model) for model in models]
    origin = start or partial(empty_bins, models, gpus)
    first = _greedy(parts, origin(), tau)
    bins = first
    if len(first.devices) < len(parts):
        packed = _packed(parts, origin(), first)
        bins = packed if len(packed.devices) > len(first.devices) else first
    refused = {m.name: shortfall(m, bins.bins) for m in parts if m.name not in bins.devices}
    return Assignment(bins.devices, refused, {name: b.kvpr for name, b in bins.bins.items()})


# --- one model at a time -------------------------------------------------------------------


class _Trial:
    """Bins being filled (owned), with a heap by rank, and one by room once a model did not fit.

    Outdated entries are dropped when they reach the top, as are bins without a free engine.
    """

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self.devices: dict[str, tuple[str, ...]] = {}
        self._by_rank = [b.rank for b in bins.values() if b.gpu.alive]
        self._by_room: list[tuple[int, str]] | None = None
        heapq.heapify(self._by_rank)

    def put(self, model: ModelView, home: Sequence[Bin]) -> None:
        heap = self._by_rank
        for b in home:
            before = b.rank
            b.put(model)
            if heap and heap[0] is before:
                heapq.heapreplace(heap, b.rank)
            else:
                heapq.heappush(heap, b.rank)
            if self._by_room is not None:
                heapq.heappush(self._by_room, (-b.room_bytes, b.gpu.name))
        self.devices[model.name] = tuple([b.gpu.name for b in home])

    def most_room_bytes(self) -> int:
        """Returns the largest room of the bins with a free engine; 0 if there are none."""
        if self._by_room is None:
            alive = (b for b in self.bins.values() if b.gpu.alive)
            self._by_room = [(-b.room_bytes, b.gpu.name) for b in alive]
            heapq.heapify(self._by_room)
        heap = self._by_room
        while heap:
            b = self.bins[heap[0][1]]
            if heap[0][0] == -b.room_bytes and len(b.models) < b.engines:
                return b.room_bytes
            heapq.heappop(heap)
        return 0

    def least_pressed(self, model: ModelView) -> Bin | None:
        """Returns the bin with the least KVPR that fits, or None. Examines as few as possible."""
        if model.pinned_device is not None:
            pinned = self.bins.get(model.pinned_device)
            return pinned if pinned is not None and pinned.fits(model) else None
        heap = self._by_rank
        passed: list[tuple[float, int, str]] = []
        found = None
        while heap:
            top = heap[0]
            b = self.bins[top[2]]
            if top is not b.rank or len(b.models) >= b.engines:
                heapq.heappop(heap)
            elif b.fits(model):
                found = b
                break
            elif not passed and need_bytes(model) > self.most_room_bytes():
                break
            else:
                passed.append(heapq.heappop(heap))
        for rank in passed:
            heapq.heappush(heap, rank)
        if found is not None and found.late_with(model) > 0:
            fitting = [b for b in self.bins.values() if b.fits(model)]
            return min(fitting, key=_pressure(model, fitting))
        return found


def _greedy(parts: Sequence[ModelView], origin: Bins, tau: float) -> _Trial:
    trial = _Trial(origin)
    for model in sorted(parts, key=by_pressure):
        home = _choose(model, trial, tau)
        if home is not None:
            trial.put(model, home)
    return trial


def _choose(model: ModelView, trial: _Trial, tau: float) -> Sequence[Bin] | None:
    """Returns the least pressed device (Algorithm 1, lines 5-8).

    Returns the model's current device if a move would gain at most `tau` of its KVPR.
    """
    if model.tp > 1:
        return choose_devices(model, trial.bins, tau)
    best = trial.least_pressed(model)
    current = trial.bins.get(model.device) if model.device else None
    if best is None:
        return None
    return (_stay(model, best, current, tau) if current and current.fits(model) else best,)


def _stay(model: ModelView, best: Bin, current: Bin, tau: float) -> Bin:
    relieved = gain(current.late_with(model), best.late_with(model)) > tau
    return best if relieved or best.kvpr < current.kvpr * (1 - tau) else current


def _packed(parts: Sequence[ModelView], origin: Bins, first: _Trial) -> _Trial:
    """Packs models on no device by best fit, decreasing size. The others stay as in `first`."""
    trial = _Trial(origin)
    for model in parts:
        if model.device and model.name in first.devices:
            trial.put(model, [trial.bins[name] for name in first.devices[model.name]])
    rooms = sorted((b.room_bytes, b.name) for b in trial.bins.values())
    for model in sorted((m for m in parts if m.device is None), key=by_size):
        home = _tightest(model, trial.bins, rooms)
        if home is not None:
            for b in home:
                del rooms[bisect_left(rooms, (b.room_bytes, b.name))]
            trial.put(model, home)
            for b in home:
                insort(rooms, (b.room_bytes, b.name))
    return trial


def _tightest(
    model: ModelView, bins: Bins, rooms: Sequence[tuple[int, str]]
) -> tuple[Bin, ...] | None:
    """Returns the bins with the least room that fit. `rooms` has all bins, sorted by room."""
    if model.tp > 1:
        return choose_devices(model, bins, 0.0, _by_room)
    for _, name in islice(rooms, bisect_left(rooms, (need_bytes(model), "")), None):
        if bins[name].fits(model):
            return (bins[name],)
    return None


# --- tensor parallelism --------------------------------------------------------------------


def _pressure(model: ModelView, bins: Iterable[Bin]) -> Rank:
    """Returns the sort key of these bins, least pressed with `model` first."""
    if not busy_share(model):
        return _own_rank
    keys = {b.name: (b.late_with(model), *b.rank) for b in bins}
    return lambda b: keys[b.name]


def _own_rank(b: Bin) -> tuple[float, int, str]:
    return b.rank


def _by_room(b: Bin) -> tuple[int, str]:
    return (b.room_bytes, b.name)


def choose_devices(
    model: ModelView, bins: Bins, tau: float = 0.0, rank: Rank | None = None
) -> tuple[Bin, ...] | None:
    """Returns the devices for all parts of a model, rank 0 first; None if no node has enough.

    Each part gets the first bin by `rank`, or else the least pressed one, that has no part of the
    model (Appendix A.1.2). A current device is kept unless the other's pressure is lower by
    more than tau of it. Examines all bins.
    REQUIRES: `model` is a part, and no bin holds it.
    """
    fitting = [b for b in bins.values() if b.fits(model)]
    if model.tp > 1:
        per_node = Counter(b.gpu.node for b in fitting)
        fitting = [b for b in fitting if per_node[b.gpu.node] >= model.tp]
    now, order = devices_of(model), rank or _pressure(model, fitting)
    chosen: list[Bin] = []
    while fitting and len(chosen) < model.tp:
        best = min(fitting, key=order)
        here = [b for b in fitting if b.name in now]
        if here and best not in here:
            best = _stay(model, best, min(here, key=order), tau)
        chosen.append(best)
        node = best.gpu.node
        fitting = [b for b in fitting if b is not best and b.gpu.node == node]
    return tuple(_in_ranks(chosen, now)) if len(chosen) == model.tp else None


def _in_ranks(chosen: Sequence[Bin], now: Sequence[str]) -> list[Bin]:
    """Returns `chosen` by rank. Current devices keep their rank; new ones fill the others."""
    by_name = {b.name: b for b in chosen}
    new = iter([b for b in chosen if b.name not in now])
    kept = [by_name.get(name) for name in now] or [None] * len(chosen)
    return [b if b is not None else next(new) for b in kept]
