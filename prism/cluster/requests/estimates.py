"""Estimates of step times and swaps, for decisions about requests that wait for a model."""

from __future__ import annotations

import math

from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.view import build_view
from prism.policies import profiles
from prism.policies.placement import Placement, Problem

SWAP_S = 5.0
"""Time of a swap until one was measured."""
INTERVAL_S = 5.0
"""Time after which estimates are made again."""


class Estimates:
    """Estimates by what the cluster has measured."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._made_for: Placement | None = None
        self._made_s = -math.inf
        self._usual_swap_s = SWAP_S
        self.problem = Problem((), ())
        """Models with their expected loads, and their step times."""

    def renew(self, now_s: float) -> bool:
        """Makes the estimates if they are too old or of another placement. Returns whether it
        did."""
        state = self._state
        if self._made_for is state.target and now_s - self._made_s < INTERVAL_S:
            return False
        self._made_for, self._made_s = state.target, now_s
        self.problem = profiles.problem(build_view(state, now_s))
        measured_s = state.activations.load_s.values()
        self._usual_swap_s = sum(measured_s) / len(measured_s) if measured_s else SWAP_S
        return True

    def swap_s(self, model: str) -> float:
        """Returns the time of the model's last activation, or the mean of all models."""
        return self._state.activations.load_s.get(model, self._usual_swap_s)
