"""The cluster scheduler's control loop (Prism §6.2): look, plan, act. Live and simulated alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prism.policies.data import Action, ClusterView, Settings
from prism.policies.policy import Policy
from prism.scheduler.ports import ClusterPort


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
        self.observe: Callable[[ClusterView, tuple[Action, ...]], None] | None = None

    def due(self, now_s: float) -> bool:
        """Whether a step now would plan moves."""
        return now_s >= self._rebalance_at_s

    def step(self, now_s: float) -> tuple[Action, ...]:
        """Plan once and start what was planned; returns it for logs and tests."""
        due = self.due(now_s)
        if due:
            self._rebalance_at_s = now_s + self._interval_s
        view = replace(self._port.view(), now_s=now_s, rebalance=due)
        actions = self._policy.plan(view, self._settings)
        if self.observe is not None:
            self.observe(view, actions)
        for action in actions:
            self._port.apply(action)
        return actions
