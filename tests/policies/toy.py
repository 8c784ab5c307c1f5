"""A toy simulator of placements: requests one after another on each group, first come, first
served, to the least loaded group that holds their model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from prism.policies.placement import ModelSpecView, Placement, PlacementOutcome, Problem
from tests.policies.loads import devices, times


def execution_s(model: ModelSpecView, tp: int) -> float:
    return model.weight_bytes / 14e9 * 0.4 / tp**0.8


def requests(
    models: Sequence[ModelSpecView], length_s: float, seed: int = 0
) -> list[tuple[float, str]]:
    random = Random(seed)
    found: list[tuple[float, str]] = []
    for model in models:
        now_s = random.expovariate(model.rate_rps)
        while now_s < length_s:
            found.append((now_s, model.name))
            now_s += random.expovariate(model.rate_rps)
    return sorted(found)


def simulator(
    models: Sequence[ModelSpecView], trace: Sequence[tuple[float, str]], slo_scale: float = 5.0
) -> Callable[[Placement], PlacementOutcome]:
    """Counts a latency over slo_scale x execution time on one GPU as unserved."""
    by_name = {m.name: m for m in models}

    def play(placement: Placement) -> PlacementOutcome:
        free_s = [0.0] * len(placement.units)
        count = dict.fromkeys(by_name, 0)
        unserved = dict.fromkeys(by_name, 0)
        normalized: dict[str, list[float]] = {name: [] for name in by_name}
        for arrival_s, name in trace:
            count[name] += 1
            homes = [i for i, u in enumerate(placement.units) if u in placement.homes(name)]
            if not homes:
                unserved[name] += 1
                continue
            home = min(homes, key=lambda i: (free_s[i], i))
            start_s = max(arrival_s, free_s[home])
            free_s[home] = start_s + execution_s(by_name[name], placement.units[home].tp)
            ratio = (free_s[home] - arrival_s) / execution_s(by_name[name], 1)
            unserved[name] += ratio > slo_scale
            normalized[name].append(ratio)
        mean = {n: sum(r) / len(r) if r else 0.0 for n, r in normalized.items()}
        return PlacementOutcome(count, unserved, mean)

    return play


def toy_problem(models: list[ModelSpecView], gpus: int, length_s: float = 60.0) -> Problem:
    frozen = tuple(models)
    play = simulator(frozen, requests(frozen, length_s))
    return Problem(frozen, devices(gpus), times(frozen), play)


def small(problem: Problem) -> Problem:
    """Removes the KV floor, so that memory leaves choices."""
    return replace(problem, models=tuple(replace(m, kv_floor_bytes=0) for m in problem.models))
