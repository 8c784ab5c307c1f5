"""Speeds that engines measure while they serve: admission uses those of prefills, the scheduler's
policies both."""

from __future__ import annotations

from dataclasses import dataclass, field

# Speed of a model that has not computed a prompt on its device yet.
PRIOR_TOKENS_PER_S = 1000.0
_DECAY = 0.8
_STEP_DECAY = 0.995
_SPREAD_LEAST = 0.25  # variance of the number of requests from which the slope is known


@dataclass(slots=True)
class Speed:
    """Prefill speed of one model, computed from decayed sums of tokens and seconds, so that long
    prefills have more weight than short ones."""

    # Current speed; 0 before the first prefill.
    tokens_per_s: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Records a step that computed `tokens` of prompts, with or without decodes."""
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        if self._seconds > 0:
            self.tokens_per_s = self._tokens / self._seconds


@dataclass(slots=True)
class StepTimes:
    """Time of one model's decode steps as a line over their number of requests, by least squares
    with decayed weights. The slope is 0 until steps have had different numbers."""

    # A step of n requests takes step_s + n x request_s; both 0 before the first step.
    step_s: float = 0.0
    request_s: float = 0.0
    # Decayed sums of weights, requests, their squares, seconds, and requests x seconds.
    _sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, requests: int, seconds: float) -> None:
        """Records a step without prompts."""
        new = (1.0, requests, requests * requests, seconds, requests * seconds)
        self._sums = weight, n, nn, s, ns = tuple(
            old * _STEP_DECAY + value for old, value in zip(self._sums, new, strict=True)
        )
        mean, mean_s = n / weight, s / weight
        variance = nn / weight - mean * mean
        slope = (ns / weight - mean * mean_s) / variance if variance >= _SPREAD_LEAST else 0.0
        # Neither part is negative.
        self.request_s = min(max(0.0, slope), mean_s / mean)
        self.step_s = mean_s - self.request_s * mean


@dataclass(slots=True)
class Speeds:
    """Speeds of one model."""

    prefill: Speed = field(default_factory=Speed)
    steps: StepTimes = field(default_factory=StepTimes)

    def figures(self) -> dict[str, float]:
        """Returns the model's part of EngineStatus."""
        return {
            "prefill_tokens_per_s": self.prefill.tokens_per_s,
            "step_s": self.steps.step_s,
            "request_s": self.steps.request_s,
        }
