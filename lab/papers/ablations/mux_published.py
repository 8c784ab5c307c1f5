"""Placements of MuxServe's testbed on ChatLMSYS (Figure 7), from its repository (Apache-2.0)."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

from prism.policies.baselines.adbs import AdbsSettings
from prism.policies.baselines.dedicated import pack
from prism.policies.placement import Hosted, Placement, Problem, Search, Unit

FILE = Path(__file__).parents[1] / "muxserve" / "chatlmsys_placements.csv"
DAY_S = 43200.0
"""Length of the trace, half a day, before it was condensed."""
REQUESTS = 4089
Groups = dict[str, tuple[int, list[tuple[str, float, float]]]]
"""Group -> (number of GPUs, (model, SM share of decode, part of a GPU's memory for KV))."""


def as_run(settings: AdbsSettings) -> AdbsSettings:
    """Returns the settings of the testbed: a prefill had 80 to 100 % of the SMs, and jobs together
    at most 120 % of them (`overload_threshold: 2`, in tenths)."""
    return replace(settings, prefill_sm_min=0.9, overcommit=0.2)


def search(system: str) -> Search:
    """Returns a search that finds the placement of `system`: muxserve, spatial or temporal.

    It is that of the published rate that is nearest to the models' rates. The testbed left four of
    the 32 GPUs empty with three of MuxServe's five placements.
    """

    def found(problem: Problem) -> Placement:
        rate_rps = sum(model.rate_rps for model in problem.models)
        placements = read(system)
        nearest = min(placements, key=lambda c: abs(REQUESTS * c / DAY_S - rate_rps))
        groups = placements[nearest]
        packed = pack({group: gpus for group, (gpus, _) in groups.items()}, problem.devices)
        if packed is None:
            return Placement(
                (), {m.name: "the published groups do not fit" for m in problem.models}
            )
        capacity = min(device.capacity_bytes for device in problem.devices)
        return Placement(
            tuple(
                Unit(
                    packed[group],
                    tuple(
                        Hosted(name, share, kv_limit_bytes=int(part * capacity))
                        for name, share, part in models
                    ),
                )
                for group, (_, models) in groups.items()
            )
        )

    return found


@cache
def read(system: str) -> dict[int, Groups]:
    """Returns condensation of the trace -> groups of the placement."""
    found: dict[int, Groups] = {}
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["system"] == system:
                groups = found.setdefault(int(row["condense"]), {})
                _, models = groups.setdefault(row["group"], (int(row["gpus"]), []))
                share, part = int(row["decode_sm_percent"]) / 100, float(row["kv_memory_part"])
                models.append((row["llm"], share, part))
    return found
