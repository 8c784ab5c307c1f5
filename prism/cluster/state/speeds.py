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

    def observe(self, report: AgentReport, *, only_decodes: bool = False) -> None:
        """Records the speeds of active models.

        Args:
            only_decodes: the device prefills only the last tokens of requests that come with KV.
        """
        for model in report.models:
            prefills = model.prefill_tokens_per_s > 0 and not only_decodes
            if model.state == "active" and (prefills or model.step_s):
                known = self._measured.setdefault(model.model, {})
                before = known.get(model.tp, DegreeSpeed())
                known[model.tp] = DegreeSpeed(
                    model.prefill_tokens_per_s if prefills else before.prefill_tokens_per_s,
                    *((model.step_s, model.request_s) if model.step_s else before[1:]),
                )

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
    pairs = [
        (known[one].prefill_tokens_per_s, known[other].prefill_tokens_per_s),
        (known[other].step_s, known[one].step_s),
    ]
    gains = (float((a / b) ** (1 / log2(one / other))) for a, b in pairs if a and b)
    return min([GAIN, *(max(1.0, gain) for gain in gains)])
