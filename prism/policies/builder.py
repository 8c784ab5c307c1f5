"""A plan of the prism policy in the making, and what a device is short of (Prism §6.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from prism.policies.bins import Bin, Bins, devices_of
from prism.policies.data import Action, ClusterView, GpuView, ModelView, Refuse, Settings


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making; `bins` already show what `actions` will change."""

    view: ClusterView
    settings: Settings
    bins: Bins
    actions: list[Action] = field(default_factory=list)

    def copied_bins(self) -> Bins:
        return {name: b.copy() for name, b in self.bins.items()}

    def changes(self) -> bool:
        """Whether it does anything: a refusal leaves the cluster as it is."""
        return not all(isinstance(action, Refuse) for action in self.actions)


def settled(view: ClusterView) -> tuple[list[ModelView], list[GpuView]]:
    """The cluster as it will be once models on their way out are gone: their engine and memory
    count as free, since an activation waits for evictions on its device."""
    leaving = [d for m in view.models if m.state == "draining" for d in devices_of(m)]
    if not leaving:
        return list(view.models), list(view.gpus)
    gpus = [
        structs.replace(g, engines_free=g.engines_free + leaving.count(g.name)) for g in view.gpus
    ]
    return [m for m in view.models if m.state != "draining"], gpus


def starved(b: Bin, settings: Settings) -> bool:
    """Its memory is short, and a model there has a backlog. A request that has only just arrived
    waits as well; a backlog is as long as what runs."""
    short = b.gpu.free_bytes < settings.short_fraction * b.gpu.capacity_bytes
    return short and any(m.waiting >= m.running > 0 for m in b.models.values())
