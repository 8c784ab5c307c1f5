"""Speeds of models at each tensor-parallel degree, as policies see them."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from prism.messages.agent import AgentReport
from prism.messages.model_spec import ModelSpec

GAIN = 1.5
"""Estimated gain in speed by a doubled degree. The simulator's costs on H100s have 1.2 to 1.9 for
models of 8B to 70B."""


class DegreeSpeed(NamedTuple):
    """Fields of `Degree`; 0: not known."""

    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    request_s: float = 0.0


class DegreeSpeeds:
    """Last measured speed of each model at each degree, and estimates from it."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[int, DegreeSpeed]] = {}

    def observe(self, report: AgentReport) -> None:
        """Records the speeds of active models."""
        for model in report.models:
            if model.state == "active" and model.prefill_tokens_per_s > 0:
                speed = DegreeSpeed(model.prefill_tokens_per_s, model.step_s, model.request_s)
                self._measured.setdefault(model.model, {})[model.tp] = speed

    def of(self, model: ModelSpec, tp: int) -> DegreeSpeed:
        """Returns the speed at a degree, an estimate from the nearest one if that is not known."""
        known = self._measured.get(model.name)
        if not known:
            return DegreeSpeed()
        nearest = min(known, key=lambda each: abs(log2(tp / each)))
        gain = GAIN ** log2(tp / nearest)
        tokens_per_s, step_s, request_s = known[nearest]
        return DegreeSpeed(tokens_per_s * gain, step_s / gain, request_s / gain)
