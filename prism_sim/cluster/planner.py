"""Times at which the cluster scheduler plans."""

from __future__ import annotations

from collections.abc import Callable

from prism.scheduler.cluster_scheduler import ClusterScheduler
from prism_sim.cluster.controller import SimController
from prism_sim.cluster.parts import ClusterParts
from prism_sim.core.kernel import Alarm


class Planner:
    """Runs the cluster scheduler when its plan may change: after events, and periodically, since
    some inputs such as idle times change without an event.

    Args:
        planned: Called after each plan.
        ended: Returns True if all requests have ended, which ends the periodic plans.
    """

    def __init__(
        self,
        parts: ClusterParts,
        controller: SimController,
        planned: Callable[[], None],
        ended: Callable[[], bool],
    ) -> None:
        self._kernel = parts.kernel
        self._policy = parts.policy
        self._setup = setup = parts.setup
        self._models = parts.models
        self._controller = controller
        self._planned = planned
        self._ended = ended
        self._scheduler = ClusterScheduler(
            controller, parts.policy, setup.settings, setup.interval_s
        )
        self.alarm = Alarm(self._kernel, self._tick)
        self._wake_due = False

    def start(self) -> None:
        """Starts the periodic plans."""
        self.alarm.after(self._pause_s())

    def plan(self) -> None:
        self._controller.end_refusals(self._scheduler.step(self._kernel.time_s))
        self.alarm.after(self._scheduler.next_step_in_s)
        self._planned()

    def wake(self) -> None:
        """Schedules a plan after all events of the present time."""
        if not self._wake_due:
            self._wake_due = True
            self._kernel.after(0.0, self._on_wake)

    def _on_wake(self) -> None:
        self._wake_due = False
        policy, needed = self._policy, self._needs_copy()
        due = policy.search is not None or self._scheduler.due(self._kernel.time_s)
        if needed or due or policy.is_balanced is None:
            self.plan()
        if needed:
            self.start()

    def _tick(self) -> None:
        if not self._is_balanced():
            self.plan()
        if not self._ended():
            self.start()

    def _is_balanced(self) -> bool:
        """Returns True if the policy would plan nothing. Avoids views of the whole cluster."""
        is_balanced = self._policy.is_balanced
        if is_balanced is None or self._needs_copy() or any(m.deferred for m in self._models):
            return False
        return is_balanced(self._controller.loads(), self._setup.settings)

    def _needs_copy(self) -> bool:
        """Returns whether some model should be activated."""
        return any(model.needs_copy for model in self._models)

    def _pause_s(self) -> float:
        """Returns the time to the next plan. It is shorter if requests wait for a copy, or if the
        policy adds copies for a backlog."""
        soon = self._policy.asks_startup or any(model.unplaced for model in self._models)
        return self._setup.retry_s if soon else self._setup.interval_s
