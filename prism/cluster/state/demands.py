"""Models and devices that the cluster's start, faults and operators demand, without requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prism.cluster.state.activation_history import Activations
from prism.cluster.state.agents import AgentBook
from prism.policies.data import ModelView


@dataclass(slots=True)
class Startup:
    """Progress of the cluster's start, and models to activate although no request waits.

    Models are wanted at the cluster's start, after a reload that adds them, and when they are
    lost, until an action on them succeeds or they do not fit.
    """

    book: AgentBook
    activations: Activations
    wanted: set[str] = field(default_factory=set)
    # Models that did not fit when wanted, or were refused for overload.
    deferred: set[str] = field(default_factory=set)
    planned_once: bool = False
    complete: bool = False  # the cluster was ready once, perhaps under an earlier scheduler

    def defer(self, model: str) -> None:
        """Records that a model does not fit: it is not wanted until memory is to spare."""
        self.wanted.discard(model)
        self.deferred.add(model)

    def settle(self, model: str) -> None:
        """Records that an action on the model succeeded: it is not wanted any more."""
        self.wanted.discard(model)
        self.deferred.discard(model)

    def lost(self, models: Iterable[str]) -> None:
        """Wants those of the models that have no other active copy."""
        self.wanted |= {m for m in models if not self.book.where(m, "active")}

    def is_ready(self, models: Iterable[ModelView], now_s: float) -> bool:
        """Returns True if the start is complete and a device has started engines. Sets `complete`.

        The start is complete once every device's engines have been up and each model of the initial
        placement was activated, refused, or failed at least once, unless no model can be loaded. It
        stays complete, also after a restart of the scheduler.
        """
        if not self.complete and self.planned_once and self.book.all_started(now_s):
            states = {m.name: m.state for m in models}
            absent = {name for name, state in states.items() if state in ("absent", "activating")}
            pending = self.wanted & absent - self.activations.refusals.keys()
            tried = not any(self.activations.failures(name) == 0 for name in pending)
            hopeless = states and all(
                name in absent and self.activations.cannot_load(name) for name in states
            )
            self.complete = tried and not hopeless
        return self.complete and self.book.any_started()


@dataclass(slots=True)
class OperatorDemands:
    """Operators' unfinished activations and drained devices."""

    activations: dict[str, str | None] = field(default_factory=dict)  # model -> device; None: any
    drained: set[str] = field(default_factory=set)
    # Drained devices as stored in Redis by the controller, which a restarted one reads. None: not
    # read yet.
    kept_drained: frozenset[str] | None = None
