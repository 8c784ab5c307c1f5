"""Control loop of the cluster scheduler (Prism §6.2): observe, plan, act.

The live system and the simulator run the same loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from prism.policies.data import Action, ClusterView, Settings
from prism.policies.planning import evacuation
from prism.policies.planning.model_copies import saturated
from prism.policies.policy import Policy
from prism.scheduler.ports import ClusterPort

_ROUNDING_S = 1e-6


class ClusterScheduler:
    """Step-driven: owns no thread, socket or clock. Not thread-safe.

    Each step takes one view from the port, lets the policy plan on it and starts every action in
    the plan's order. The outcome of an action shows in a later view. Arrivals and evictions are
    planned at every step, moves at most every `interval_s`.
    """

    def __init__(
        self, port: ClusterPort, policy: Policy, settings: Settings, interval_s: float
    ) -> None:
        self._port = port
        self._policy = policy
        self._settings = settings
        self._interval_s = interval_s
        self._rebalance_at_s = float("-inf")
        # Model -> token rate of one copy when the model was last saturated.
        self._saturated_rates: dict[str, float] = {}
        self.next_step_in_s = math.inf
        """Seconds until the next step is due if nothing changes."""
        self.observe: Callable[[ClusterView, tuple[Action, ...]], None] | None = None
        """Called with each view and the actions planned on it."""

    def tune(self, settings: Settings, interval_s: float) -> None:
        """Sets the parameters of the following steps."""
        self._settings, self._interval_s = settings, interval_s

    def due(self, now_s: float) -> bool:
        """Returns whether a step at `now_s` would plan moves. Tolerates rounding of the time."""
        return now_s >= self._rebalance_at_s - _ROUNDING_S

    def step(self, now_s: float) -> tuple[Action, ...]:
        """Plans once, starts the planned actions and returns them, for logs and tests."""
        due = self.due(now_s)
        if due:
            self._rebalance_at_s = now_s + self._interval_s
        view = self._with_rates(replace(self._port.view(), now_s=now_s, rebalance=due))
        actions = self._policy.plan(view, self._settings)
        if self._policy.evicts and not self._policy.drains:
            actions = (*actions, *evacuation.evictions(view, actions))
        if self._policy.next_plan_in_s is not None:
            self.next_step_in_s = self._policy.next_plan_in_s(view, self._settings)
        if self.observe is not None:
            self.observe(view, actions)
        for action in actions:
            self._port.apply(action)
        return actions

    def _with_rates(self, view: ClusterView) -> ClusterView:
        """Returns the view with the rates that one copy of each model can serve, where known."""
        rates = self._saturated_rates
        # The token rate is also divided by copies that do not serve yet, so it is too low then.
        unsettled = {m.name for m in view.models if m.replicas_max > 1 and m.state != "active"}
        for model in view.models:
            may_copy = model.replicas_max > 1 and model.name not in unsettled
            if model.waiting and may_copy and saturated(model, self._settings):
                rates[model.name] = model.token_rate
        if not rates:
            return view
        models = tuple(
            structs.replace(m, saturated_rate=rates[m.name]) if m.name in rates else m
            for m in view.models
        )
        return replace(view, models=models)
