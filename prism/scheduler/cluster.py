"""The cluster scheduler's control loop (Prism §6.2): look, plan, act. Live and simulated alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from prism.policies import drain
from prism.policies.data import Action, ClusterView, Settings
from prism.policies.policy import Policy
from prism.policies.replicas import saturated
from prism.scheduler.ports import ClusterPort

_ROUNDING_S = 1e-6


class ClusterScheduler:
    """Step-driven: owns no thread, socket or clock. Not thread-safe.

    Each step takes one view from the port, lets the policy plan on it and starts every action in
    the plan's order. Whether an action succeeds shows in a later view. Moves are planned at most
    every `interval_s`; arrivals and evictions at every step. `observe`: called with each view and
    what was planned on it.
    """

    def __init__(
        self, port: ClusterPort, policy: Policy, settings: Settings, interval_s: float
    ) -> None:
        self._port = port
        self._policy = policy
        self._settings = settings
        self._interval_s = interval_s
        self._rebalance_at_s = float("-inf")
        # model -> a copy's token rate when one was saturated last
        self._saturated_rates: dict[str, float] = {}
        # Until the next step is due, if nothing changes until then.
        self.patience_s = math.inf
        self.observe: Callable[[ClusterView, tuple[Action, ...]], None] | None = None

    def tune(self, settings: Settings, interval_s: float) -> None:
        """From the next step on."""
        self._settings, self._interval_s = settings, interval_s

    def due(self, now_s: float) -> bool:
        """Whether a step now would plan moves: also at that moment, however it was rounded."""
        return now_s >= self._rebalance_at_s - _ROUNDING_S

    def step(self, now_s: float) -> tuple[Action, ...]:
        """Plan once and start what was planned; returns it for logs and tests."""
        due = self.due(now_s)
        if due:
            self._rebalance_at_s = now_s + self._interval_s
        view = self._with_rates(replace(self._port.view(), now_s=now_s, rebalance=due))
        actions = self._policy.plan(view, self._settings)
        if self._policy.evicts and not self._policy.drains:
            actions = (*actions, *drain.evictions(view, actions))
        if self._policy.patience_s is not None:
            self.patience_s = self._policy.patience_s(view, self._settings)
        if self.observe is not None:
            self.observe(view, actions)
        for action in actions:
            self._port.apply(action)
        return actions

    def _with_rates(self, view: ClusterView) -> ClusterView:
        """With what copies can serve, as far as it was seen."""
        rates = self._saturated_rates
        # A copy that does not serve yet has its share of the rate, too.
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
