"""Algorithm 1: models to devices by KV pressure ratio (Prism §6.2, bound in Appendix A.1, tensor
parallelism in A.1.2). Pure functions.

The paper's algorithm ignores whether a model fits; here only devices where weights and KV floor
fit, and where an engine is free, are candidates.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

Rank = Callable[[Bin], tuple[float, int, str]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where models go."""

    # Model -> its devices, rank 0 first.
    homes: Mapping[str, tuple[str, ...]]
    # Model -> why it fits nowhere.
    refused: Mapping[str, str]
    # Of each device.
    kvpr: Mapping[str, float]


def _mobility(model: ModelView) -> int:
    """0: stays where it is; 1: goes to one device only; 2: goes anywhere. The freest come last,
    since the others could not make way for them."""
    if model.pinned_device is None:
        return 2
    return 0 if model.device == model.pinned_device else 1


def by_pressure(model: ModelView) -> tuple[int, float, int, str]:
    """Algorithm 1's order: largest w first, then size, then name; pinned models before all."""
    return (_mobility(model), -weight_of(model), -need_bytes(model), model.name)


def by_size(model: ModelView) -> tuple[int, int, str]:
    return (_mobility(model), -need_bytes(model), model.name)


def gain(before: float, after: float) -> float:
    """The part of a pressure that a change removes; 0 where there was none."""
    if before <= 0:
        return 0.0
    return 1.0 if math.isinf(before) and not math.isinf(after) else (before - after) / before


def place(
    models: Sequence[ModelView],
    gpus: Sequence[GpuView],
    tau: float,
    start: Callable[[], Bins] | None = None,
) -> Assignment:
    """Algorithm 1: a device for every model, greedily by pressure.

    start: makes bins with what devices hold already and keep; `models` has none of that, and `gpus`
    is not read. Models that no device has room for are tried again largest first, with those that
    are nowhere yet packed by size; what then still does not fit is refused with the bytes missing.
    The parts of a tensor-parallel model go to distinct devices of one node, all or none.
    Deterministic; no device is ever filled beyond capacity. For tau = 0, without tensor
    parallelism, where all fits, max KVPR <= optimum x (1 + C / (S - m)) (Appendix A.1).
    O((models + devices) log devices) where most devices that are looked at fit; tensor-parallel
    models cost O(devices) each.
    """
    parts = [part(model) for model in models]
    origin = start or partial(empty_bins, models, gpus)
    first = _greedy(parts, origin(), tau)
    bins = first
    if len(first.homes) < len(parts):
        packed = _packed(parts, origin(), first)
        bins = packed if len(packed.homes) > len(first.homes) else first
    refused = {m.name: shortfall(m, bins.bins) for m in parts if m.name not in bins.homes}
    return Assignment(bins.homes, refused, {name: b.kvpr for name, b in bins.bins.items()})


# --- one model at a time -------------------------------------------------------------------


class _Trial:
    """Bins being filled (owned), with a heap of them by rank, and by room once something did not
    fit. Entries that no longer say what a bin has are dropped when they come up; so are bins whose
    engines are all taken."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self.homes: dict[str, tuple[str, ...]] = {}
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
        self.homes[model.name] = tuple([b.gpu.name for b in home])

    def most_room_bytes(self) -> int:
        """Of any bin with a free engine; 0 without one."""
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
        """The candidate with the least KVPR, without looking at all of them."""
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
        return found


def _greedy(parts: Sequence[ModelView], origin: Bins, tau: float) -> _Trial:
    trial = _Trial(origin)
    for model in sorted(parts, key=by_pressure):
        home = _choose(model, trial, tau)
        if home is not None:
            trial.put(model, home)
    return trial


def _choose(model: ModelView, trial: _Trial, tau: float) -> Sequence[Bin] | None:
    """Algorithm 1, lines 5-8: the least pressed device, or the current one when moving the model
    would gain at most `tau` of its KVPR."""
    if model.tp > 1:
        return homes(model, trial.bins, by_rank, tau)
    best = trial.least_pressed(model)
    current = trial.bins.get(model.device) if model.device else None
    if best is None:
        return None
    return (_stay(best, current, tau) if current and current.fits(model) else best,)


def _stay(best: Bin, current: Bin, tau: float) -> Bin:
    return best if best.kvpr < current.kvpr * (1 - tau) else current


def _packed(parts: Sequence[ModelView], origin: Bins, first: _Trial) -> _Trial:
    """Best fit by decreasing size, for models that are nowhere yet; the others stay put."""
    trial = _Trial(origin)
    for model in parts:
        if model.device and model.name in first.homes:
            trial.put(model, [trial.bins[name] for name in first.homes[model.name]])
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
    """The bins with least room that fit; `rooms`: all of them, sorted."""
    if model.tp > 1:
        return homes(model, bins, _by_room, 0.0)
    for _, name in islice(rooms, bisect_left(rooms, (need_bytes(model), "")), None):
        if bins[name].fits(model):
            return (bins[name],)
    return None


# --- tensor parallelism --------------------------------------------------------------------


def by_rank(b: Bin) -> tuple[float, int, str]:
    """Least pressed first."""
    return b.rank


def _by_room(b: Bin) -> tuple[float, int, str]:
    return (b.room_bytes, 0, b.name)


def homes(model: ModelView, bins: Bins, rank: Rank, tau: float) -> tuple[Bin, ...] | None:
    """Devices for all parts of a model, rank 0 first, by looking at all bins: for each part the
    first by `rank`, except where the model has a part already, the next (Appendix A.1.2); but a
    device where it is now is kept unless the other's KVPR is below (1 - tau) of its. None if no
    node has `tp` devices that fit. REQUIRES: `model` is a part, and no bin holds it.
    """
    fitting = [b for b in bins.values() if b.fits(model)]
    if model.tp > 1:
        per_node = Counter(b.gpu.node for b in fitting)
        fitting = [b for b in fitting if per_node[b.gpu.node] >= model.tp]
    now = devices_of(model)
    chosen: list[Bin] = []
    while fitting and len(chosen) < model.tp:
        best = min(fitting, key=rank)
        here = [b for b in fitting if b.name in now]
        if here and best not in here:
            best = _stay(best, min(here, key=rank), tau)
        chosen.append(best)
        node = best.gpu.node
        fitting = [b for b in fitting if b is not best and b.gpu.node == node]
    return tuple(_in_ranks(chosen, now)) if len(chosen) == model.tp else None


def _in_ranks(chosen: Sequence[Bin], now: Sequence[str]) -> list[Bin]:
    """Devices that the model keeps stay at their rank; new ones take the other ranks in order."""
    by_name = {b.name: b for b in chosen}
    new = iter([b for b in chosen if b.name not in now])
    kept = [by_name.get(name) for name in now] or [None] * len(chosen)
    return [b if b is not None else next(new) for b in kept]
