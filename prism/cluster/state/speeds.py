"""Speeds of models at each tensor-parallel degree, as policies see them."""

from __future__ import annotations

from collections.abc import Mapping
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
                known = self._measured.setdefault(model.model, {})
                times = model.step_s, model.request_s
                if not model.step_s and model.tp in known:  # it only prefills there
                    times = known[model.tp].step_s, known[model.tp].request_s
                known[model.tp] = DegreeSpeed(model.prefill_tokens_per_s, *times)

    def of(self, model: ModelSpec, tp: int) -> DegreeSpeed:
        """Returns the speed at a degree, an estimate if it was not measured there."""
        known = self._measured.get(model.name)
        if not known:
            return DegreeSpeed()
        near, *others = sorted(known, key=lambda each: abs(log2(tp / each)))
        if near == tp:
            return known[tp]
        doublings = log2(tp / near)
        gain = _gain(known, near, others[0]) if others else GAIN
        tokens_per_s, step_s, request_s = known[near]
        factor = gain**doublings
        return DegreeSpeed(tokens_per_s * factor, step_s / factor, request_s / factor)


def _gain(known: Mapping[int, DegreeSpeed], one: int, other: int) -> float:
    """Returns the smaller of the measured gains of prefills and of steps by a doubled degree, 1 to
    GAIN."""
    speeds = [known[one].prefill_tokens_per_s / known[other].prefill_tokens_per_s]
    if known[one].step_s and known[other].step_s:
        speeds.append(known[other].step_s / known[one].step_s)
    return min(GAIN, *(max(1.0, float(speed ** (1 / log2(one / other)))) for speed in speeds))
