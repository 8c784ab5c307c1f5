"""Waiting requests of models that are not here."""

from __future__ import annotations

from collections.abc import Collection

from prism.agent.models import ModelState
from prism.agent.state import State


class Strays:
    """Decides when they go back to the unplaced ones, where they ask for an activation anew.

    Requests are often routed here before the order to activate arrives, so they get a while.
    """

    def __init__(self, state: State) -> None:
        self._models = state.models
        self._timing = state.timing
        self._now_s = state.now_s
        self._since_s: dict[str, float] = {}

    def given_up(self, waiting_models: Collection[str]) -> set[str]:
        """The models among `waiting_models` whose requests should not wait here any longer."""
        now_s = self._now_s()
        absent = {model for model in waiting_models if not self._is_here(model)}
        self._since_s = {model: self._since_s.get(model, now_s) for model in absent}
        return {m for m, since_s in self._since_s.items() if now_s - since_s >= self._grace_s(m)}

    def _is_here(self, model: str) -> bool:
        served = self._models.served.get(model)
        return served is not None and served.takes_requests

    def _grace_s(self, model: str) -> float:
        served = self._models.served.get(model)
        if served is None:
            return self._timing.absent_grace_s
        return 0.0 if served.state is ModelState.DRAINING else self._timing.failed_grace_s
